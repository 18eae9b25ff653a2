"""Run one stage in this process, and record its output and accuracy."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from burnish.cli.main import print_note
from burnish.cli.stage_plan import Plan, RunnableStage, output_path
from burnish.config.loading import Loaded, to_plain_values
from burnish.config.plugins import resolve_references
from burnish.config.requirements import pin_model_ids
from burnish.config.yaml_text import printable
from burnish.core.dispatch import WorkerLost
from burnish.run.checkpoint.checkpoints import Checkpoint, Checkpoints, read_manifest
from burnish.run.durable_files import atomic_directory, name_file_in_errors
from burnish.run.metrics import held_out_figures, read_metrics
from burnish.run.run_directory import RunDirectory
from burnish.run.stage_index import StageOutcome, product_checksums, write_outcome
from burnish.run.supervisor.exit_status import WORKER_LOST_STATUS
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, Heartbeat

LENGTH_KEYS = {
    "train": ("training", "steps"),
    "sft": ("sft", "updates"),
    "prefer": ("preference", "updates"),
    "reward-model": ("reward_model", "updates"),
}
"""The config key of each training command with its number of steps or updates."""


def run_stage(plan: Plan, runnable: RunnableStage, outputs: dict[str, str]) -> int:
    """Run a stage, or the rest of it, record its outcome in its folder, and return the exit status. `outputs` are paths by reference."""
    command, name = runnable.planned.command, runnable.planned.name
    if runnable.loaded is not None:
        record = RunDirectory(plan.folder / name).config
        loaded = pin_model_ids(_with_stage_outputs(runnable.loaded, outputs), record, print_note)
        try:
            _train(command, loaded, name)
        except WorkerLost as error:
            print(f"burnish: error: {printable(str(error))}")
            return WORKER_LOST_STATUS
        outcome = _trained_outcome(plan, runnable, loaded.config)
        if outcome is not None:
            write_outcome(plan.folder / name, outcome)
        return 0
    with _log_output(plan.folder / name):
        status = _make_base(plan) if command == "new" else _run_command(runnable, outputs)
    target = output_path(plan.folder, name, command)
    if status == 0:
        shown = _outcome_fields(command, target)
        path = str(target.relative_to(plan.folder))
        write_outcome(plan.folder / name, StageOutcome(path, product_checksums(target), **shown))
    return status


def _with_stage_outputs(loaded: Loaded[Any], outputs: dict[str, str]) -> Loaded[Any]:
    """The config with the outputs of other stages in place of references."""
    config = type(loaded.config).model_validate(resolve_references(loaded.resolved, outputs))
    return Loaded(config, to_plain_values(config), loaded.base)


# --- training stages -------------------------------------------------------------------------------------------------------


def _train(command: str, loaded: Loaded[Any], name: str) -> None:
    config, plain, base = loaded
    if command == "train":
        from burnish.cli.train import train_in_process

        train_in_process(argparse.Namespace(profile=None, controls=False), loaded, name)
    elif command == "sft":
        from burnish.trainers import sft

        sft.execute(config, plain, base, name)
    elif command == "prefer":
        from burnish.trainers import preference

        preference.execute(config, plain, base, name)
    else:
        from burnish.trainers import reward_model

        reward_model.execute(config, plain, base, name)


def _trained_outcome(plan: Plan, runnable: RunnableStage, config: Any) -> StageOutcome | None:
    """The outcome of a training stage; None if it was stopped before its end."""
    command, name = runnable.planned.command, runnable.planned.name
    run = RunDirectory.open(plan.folder / name)
    checkpoints = Checkpoints(run.checkpoints, keep_last=1)
    last = checkpoints.latest()
    section, key = LENGTH_KEYS[command]
    total = getattr(getattr(config, section), key)
    if last is None or last.step < total:
        return None
    best = checkpoints.best() if runnable.planned.asked["take"] == "best" else None
    chosen = best or last
    manifest = read_manifest(chosen.path)
    assert manifest is not None, "an undamaged checkpoint has a manifest"
    names = [file for file, entry in manifest["files"].items() if entry["of"] == "model"]
    rows = read_metrics(run.metrics)
    before, after = _accuracy_before_and_after(command, config, rows, chosen)
    loss = rows[-1].get(f"{section}/loss") if rows and rows[-1]["step"] == last.step else None
    note = f"{total:,} {key}" + (f", loss {loss:.3f}" if loss is not None else "")
    path = str(chosen.path.relative_to(plan.folder))
    return StageOutcome(path, product_checksums(chosen.path, names), note, before, after)


def _accuracy_before_and_after(
    command: str, config: Any, rows: list[dict[str, float]], chosen: Checkpoint
) -> tuple[float | None, float | None]:
    """Held-out accuracy, or the mean of graded rewards, before the first step and of the chosen checkpoint."""
    kinds = [next(iter(config.validation.modes))] if command == "train" else ["pairs", "answers", "steps"]
    measured = {name: figure for row in rows for name, figure in held_out_figures(row).items()}
    for kind in kinds:
        if kind in measured:
            name = f"validation/{kind}/{measured[kind]}"
            values = {row["step"]: row[name] for row in rows if name in row}
            return values.get(0), values.get(chosen.step, values[max(values)])
    return None, None


# --- other stages --------------------------------------------------------------------------------------------------------------


def _make_base(plan: Plan) -> int:
    """Make the new base model. Its tokenizer has the characters of all tasks."""
    from burnish.distributed.roles import build_policy

    target = output_path(plan.folder, "base", "new")
    if not target.exists():
        policy = build_policy(plan.config.model, plan.task_sources(), plan.config.seed, plan.base)
        with atomic_directory(target) as folder:
            policy.save(folder)
        print(f"base: {policy.note}")
    return 0


def _run_command(runnable: RunnableStage, outputs: dict[str, str]) -> int:
    """Run a command with its options. A command that writes a folder is done if the folder exists, because it appears complete."""
    assert runnable.command is not None
    assert runnable.args is not None
    args = argparse.Namespace(**{key: _resolve_value(value, outputs) for key, value in vars(runnable.args).items()})
    if runnable.planned.command in ("merge", "export") and args.out.exists():
        return 0
    if runnable.planned.command.startswith("data "):
        args.force = True  # a kill may have left the file without its manifest; the folder belongs to the stage
    return runnable.command.run(args)


def _resolve_value(value: Any, outputs: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_resolve_value(one, outputs) for one in value]
    if isinstance(value, Path):
        return Path(resolve_references(str(value), outputs))
    return resolve_references(value, outputs)


def _outcome_fields(command: str, target: Path) -> dict[str, Any]:
    """Note and accuracy of the output of a stage."""
    if command == "eval":
        result = json.loads(target.with_suffix(".json").read_text())
        length = result["length"]["mean"]
        note = f"{result['num_prompts']:,} prompts x {result['n']}, {length:.1f} tokens each"
        is_graded = result["accuracy"] is None and result["reward"] is not None
        return {"note": note, "after": result["reward"]["value"] if is_graded else result["accuracy"]}
    if command.startswith("data "):
        manifest = json.loads(target.with_name(target.name + ".manifest.json").read_text())
        return {"note": f"{manifest['output']['rows']:,} rows"}
    return {}


class _LoggedStream:
    """A stream that also writes to a log, and beats the heartbeat with every write."""

    def __init__(self, stream: TextIO, log: TextIO, heartbeat: Heartbeat) -> None:
        self._stream, self._log, self._heartbeat, self._count = stream, log, heartbeat, 0

    def write(self, text: str) -> int:
        self._count += 1
        self._heartbeat.beat(0, f"line {self._count}")
        if "\r" not in text:  # not for a line that is redrawn in a terminal
            with name_file_in_errors(Path(self._log.name)):
                self._log.write(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _log_output(folder: Path) -> Iterator[None]:
    """Copy printed output to the log of the stage, and beat its heartbeat for the supervisor."""
    import sys

    folder.mkdir(exist_ok=True)
    heartbeat = Heartbeat(folder / HEARTBEAT_FILE)
    with open(folder / "log.txt", "a", encoding="utf-8", errors="replace") as log:
        log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  begins\n")
        streams: list[Any] = [_LoggedStream(stream, log, heartbeat) for stream in (sys.stdout, sys.stderr)]
        try:
            with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
                yield
        finally:
            heartbeat.close()
