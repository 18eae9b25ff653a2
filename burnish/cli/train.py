"""`burnish train recipe.yaml [key=value ...]`: RL from a config, continued where it was if the run exists.

The process that is started is a supervisor (`burnish.run.supervisor.supervisor`); a fork of it makes the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.config.loading import ConfigType, Loaded, dump, load, load_shrunk
from burnish.config.schema import TrainConfig
from burnish.config.yaml_text import parse_yaml, printable
from burnish.core.dispatch import WorkerLost
from burnish.run.durable_files import FolderId, folder_id
from burnish.run.run_directory import run_name
from burnish.run.supervisor.exit_status import WORKER_LOST_STATUS
from burnish.run.supervisor.supervisor import is_supported, supervise

if TYPE_CHECKING:
    from burnish.run.run import Run

DRY_RUN_FAILED = 2
"""Exit status of a dry run that found a problem: that of the run itself."""
MAX_RESTARTS = 3
DEADLINE_S = 1800.0
SUPERVISOR_MARGIN_S = 60.0
"""How much longer than its driver the supervisor waits for a worker."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; the keys of the config are explained by --help, from the schema."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, such as rollout.n=16")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument(
        "--shrink", action="store_true", help="the same algorithm in a few steps of a tiny model on a built-in task"
    )
    parser.add_argument(
        "--controls", action="store_true", help="afterwards train two supervised controls on the same task and compare"
    )
    add_fresh_option(parser)
    add_profile_option(parser, "step")
    add_supervisor_options(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(TrainConfig)


def add_fresh_option(parser: argparse.ArgumentParser) -> None:
    """The option `--fresh`."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="begin the run anew; an old one of its name is moved to NAME.1 or so when the new one has passed its checks",
    )


def replaced_folder(args: argparse.Namespace, folder: Path) -> FolderId | None:
    """With `--fresh` the folder that is there now: the new run moves it to another name once its checks have passed."""
    return folder_id(folder) if args.fresh else None


def add_supervisor_options(parser: argparse.ArgumentParser) -> None:
    """The options of the supervisor."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"a run that dies goes on by itself so many times at most (default {MAX_RESTARTS}); 0: no process above it",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help=f"without a sign of life for so long a run counts as dead; its stacks are kept (default {DEADLINE_S:g})",
    )


def add_profile_option(parser: argparse.ArgumentParser, what: str) -> None:
    """The option `--profile [STEP]`."""
    parser.add_argument(
        "--profile",
        nargs="?",
        const=0,
        type=_step_number,
        metavar="STEP",
        help=f"record one {what} (the second from here if no number is given): trace.json.gz and profile.txt in the run",
    )


def _step_number(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(
            f"{word!r} is no step: give a number from 1 on, or put --profile last to record the second step"
        )
    return int(word)


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the held-out accuracy, or the mean of graded rewards, before and after RL."""
    loaded, name = load_recipe(TrainConfig, args)
    if args.dry_run:
        check_controls(args, loaded.config)
        return print_dry_run(loaded, name, args.fresh)
    restarts = num_restarts(args)
    folder = run_folder(loaded.config, name)
    replaced = replaced_folder(args, folder)  # once: a driver that is started again goes on with the new run
    if restarts:
        status = supervise(folder, restarts, heartbeat_timeout_s(args, loaded.config), replaced)
        if status is not None:
            return status
    try:
        return train_in_process(args, loaded, name, replaced)
    except WorkerLost as error:
        print(f"burnish: error: {printable(str(error))}", file=sys.stderr)
        return WORKER_LOST_STATUS


def print_dry_run(loaded: Loaded[TrainConfig], name: str, is_fresh: bool) -> int:
    """The resolved config, the plan, and what the run would stop at; the exit status. With `is_fresh` an old run is no obstacle."""
    from burnish.config.explain import config_notes, plan_text
    from burnish.distributed.placement import check_placement
    from burnish.trainers.rl_run import check_directory

    print(dump(loaded.config))
    print(plan_text(loaded.config))
    for remark in config_notes(loaded.config):
        print(f"note: {remark}")
    checks = [lambda: check_placement(loaded.config.placement), lambda: print_rows(loaded, name)]
    if not is_fresh:
        checks.append(lambda: check_directory(loaded.config, name))
    if loaded.config.placement.name == "local":
        checks.append(lambda: print_memory(loaded))
    return print_problems(loaded, checks)


def check_controls(args: argparse.Namespace, config: TrainConfig) -> None:
    """Refuse `--controls` where there is nothing to compare with."""
    if args.controls:
        from burnish.trainers import rl_run

        rl_run.check_controls(config)


def num_restarts(args: argparse.Namespace) -> int:
    """How often the run may be taken up again: not where another program called, which a fork would double."""
    given: int | None = args.max_restarts
    if given is not None and given < 0:
        raise UserError(f"--max-restarts {given}: give 0 or more")
    if not args.deadline > 0:
        raise UserError(f"--deadline {args.deadline:g}: give seconds, more than 0")
    can = args.is_command and is_supported()
    if given and not can:
        raise UserError(
            f"--max-restarts {given} needs the command `burnish train` on Linux: leave it out or set it to 0"
        )
    return given if given is not None else MAX_RESTARTS if can else 0


def run_folder(config: TrainConfig, name: str) -> Path:
    """The run's folder."""
    return Path(config.run.directory) / run_name(config.run.name, name, config.seed)


def heartbeat_timeout_s(args: argparse.Namespace, config: TrainConfig) -> float:
    """How long the driver may be silent: longer than it waits for any worker or server, which it gives up by itself."""
    others = [config.placement] if config.placement.name == "ray" else []
    waits_s = [other.timeout_s for other in (*others, config.rollout.vllm, config.rollout.sglang) if other is not None]
    waits_s += [config.rollout.source.deadline_s] if config.rollout.source.name == "async" else []
    return max(float(args.deadline), *(wait_s + SUPERVISOR_MARGIN_S for wait_s in waits_s), 0.0)


def train_in_process(
    args: argparse.Namespace, loaded: Loaded[TrainConfig], name: str, replaced: FolderId | None = None
) -> int:
    """Make the run, in this process."""
    from burnish.trainers.rl_run import checked_run, execute
    from burnish.training.parallel.ranks import require_single_process

    require_single_process("train")
    check_controls(args, loaded.config)
    with checked_run(loaded.config, loaded.resolved, loaded.base, name, replaced) as (parts, run):
        if not execute(parts, run, args.profile):
            run.display.stop()
            run.end(run.last_step, is_complete=False)
            print(f"stopped; the same command goes on from here: {run.directory.path}")
            return 0
        run.display.stop()
        if args.controls:
            from burnish.trainers.rl_run import run_controls

            run_controls(loaded.config, loaded.base, run)
        print_results(run)
        run.end(run.last_step, is_complete=True)
    return 0


def print_memory(loaded: Loaded[Any]) -> None:
    """The memory plan; the error for one that cannot fit the device that is here."""
    from burnish.memory_plan.from_config import plan_run

    memory = plan_run(loaded.config, loaded.base)
    print(memory.text)
    warnings = memory.check()
    print("\n".join(f"note: {warning}" for warning in warnings) or memory.verdict)


def print_rows(loaded: Loaded[TrainConfig], name: str | None = None) -> None:
    """How often each row is drawn; the error for a row that cannot be used. What is not there is told elsewhere.

    With the recipe's `name` also the error for whatever does not fit the policy's tokenizer and architecture: its model must be there.
    """
    from burnish.config.requirements import missing_extras, missing_inputs, missing_models
    from burnish.rewards.scoring import Rewards
    from burnish.trainers.input_checks import read_checked_rows, row_repeats_text
    from burnish.trainers.rl_run import check_without_weights

    if any(missing_inputs(loaded)) or any(missing_extras(loaded.config)):
        return
    with Rewards(loaded.config.reward, loaded.base, is_remote=True) as rewards:
        rows = read_checked_rows(loaded.config, loaded.base, rewards)
        for line in row_repeats_text(loaded.config, rows.sizes):
            print(line)
        if name is not None and not any(missing_models(loaded)):
            check_without_weights(loaded.config, loaded.base, name, rewards, rows.take)


def print_problems(loaded: Loaded[Any], checks: list[Callable[[], None]]) -> int:
    """All that the run would stop at: what is not there, and what each check finds. The exit status of the dry run."""
    from burnish.config.requirements import missing_extras, missing_files

    problems = [*missing_files(loaded), *missing_extras(loaded.config)]
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    for problem in problems:
        print(f"this run would not start: {problem}")
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"dry run: {number}, the run would not start" if problems else "dry run: the run would start")
    return DRY_RUN_FAILED if problems else 0


def load_recipe(kind: type[ConfigType], args: argparse.Namespace) -> tuple[Loaded[ConfigType], str]:
    """The configuration a command line asks for and what to call its run; what `--shrink` changed is printed."""
    if not args.shrink:
        return load(kind, args.recipe, args.overrides), args.recipe.stem
    loaded, changes = load_shrunk(kind, args.recipe, args.overrides)
    print("\n".join(f"shrunk: {change}" for change in changes))
    return loaded, f"{args.recipe.stem}-shrunk"


def print_results(run: Run) -> None:
    """Write the report, then print the best checkpoint and the held-out figures; those of the first mode come last."""
    from burnish.report.html_report import write_report
    from burnish.run.metrics import HELD_OUT_FIGURES, held_out_figures, read_metrics

    rows = read_metrics(run.directory.metrics)
    if rows:
        print(f"report: {write_report(run.directory.path)}")
    else:
        print(f"report: not written, {run.directory.metrics} has no lines; restore it and run the same command again")
    best = run.checkpoints.best()
    model = best or run.checkpoints.latest()
    if model is not None:
        why = "the last, none has a score" if best is None else f"step {best.step} is the best: {best.score_text}"
        print(f"model:  {model.path}\n        {why}")
    if not rows:
        print("held-out figures: not known")
    measured = [row for row in rows if any(k.startswith("validation/") for k in row)]
    if not measured:
        return
    before, after = measured[0], measured[-1]
    figures = held_out_figures(after)
    if not figures:
        print("held-out accuracy: none, not one held-out sample could be scored")
        return
    modes = parse_yaml(run.directory.config.read_text(), str(run.directory.config))["validation"][
        "modes"
    ]  # in their order
    # A finished run whose modes were renamed has only been measured in the old ones.
    there = [mode for mode in modes if mode in figures] or list(figures)
    for mode in there:
        _print_table(mode, figures[mode], before, after)
    mode, figure = there[0], figures[there[0]]
    name = f"validation/{mode}/{figure}"
    if before["step"] == 0:
        print(f"{HELD_OUT_FIGURES[figure]} before RL: {before.get(name, float('nan')):.3f}")
    print(f"{HELD_OUT_FIGURES[figure]} after RL: {after[name]:.3f}")


def _print_table(mode: str, figure: str, before: dict[str, float], after: dict[str, float]) -> None:
    """The first and the last value of a mode's figure, of all rows and by column."""
    from burnish.run.metrics import HELD_OUT_FIGURES

    prefix = f"validation/{mode}/{figure}"
    print(f"  {HELD_OUT_FIGURES[figure] + ', ' + mode:<32} step {before['step']} -> step {after['step']}")
    for key in [k for k in after if k == prefix or k.startswith(prefix + "/")]:
        label = printable(key.removeprefix(prefix).lstrip("/") or "all")
        print(f"    {label:<30} {before.get(key, float('nan')):.3f} -> {after[key]:.3f}")
