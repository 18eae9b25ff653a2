"""`burnish stages`: several commands in a row that are killed, changed and started again."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.cli import stage_commands
from burnish.config.errors import UserError
from burnish.data.curation import output_files
from burnish.evaluation.completions import PartialCompletions as EvalJournal
from burnish.run.run import Run
from burnish.run.stage_index import StageIndex, StageOutcome, read_outcome, write_outcome
from burnish.run.supervisor.processes import descendants, send_signal
from burnish.run.supervisor.supervisor import is_supported
from burnish.trainers.stages import PlannedStage, Stages
from tests.cli.stage_recipe import CLEAN, recipe, refused, remains, sft, short, stages


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- all of them -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The end of a life; nothing catches it."""


@dataclass(frozen=True)
class Moment:
    """Where the stages die: before or after a call whose arguments fit."""

    owner: Any
    name: str
    fits: Callable[..., bool] = lambda *rest, **options: True
    after: bool = False


def of(stage: str) -> Callable[..., bool]:
    return lambda index, name, *rest: name == stage


def in_folder(stage: str) -> Callable[..., bool]:
    return lambda folder, *rest: folder.name == stage


def step(wanted: int, stage: str) -> Callable[..., bool]:
    return lambda run, step, *rest, **options: step == wanted and run.directory.name == stage


MOMENTS = {
    "before the base is written down": Moment(StageIndex, "begin", of("base")),
    "the base made, and nobody knows": Moment(stage_commands, "write_outcome", in_folder("base")),
    "the base done, not written down": Moment(StageIndex, "end", of("base")),
    "the first stage written down, not begun": Moment(StageIndex, "begin", of("cold"), after=True),
    "in the first stage": Moment(Run, "commit", step(7, "cold")),
    "the first stage trained, and nobody knows": Moment(stage_commands, "write_outcome", in_folder("cold")),
    "in RL": Moment(Run, "commit", step(3, "reasoning")),
    "RL says it is done, not written down": Moment(stage_commands, "write_outcome", in_folder("reasoning"), after=True),
    "samples half drawn": Moment(EvalJournal, "add", after=True),
    "samples there, and nobody knows": Moment(stage_commands, "write_outcome", in_folder("samples")),
    "rows written, their manifest not": Moment(output_files, "manifest_path", lambda out: out.exists()),
    "in the second supervised stage": Moment(Run, "commit", step(3, "again"), after=True),
    "in the reward model": Moment(Run, "commit", step(1, "scorer")),
    "in the preferences": Moment(Run, "commit", step(2, "preferred")),
    "merged, and nobody knows": Moment(stage_commands, "write_outcome", in_folder("merged")),
    "in the last stage": Moment(Run, "commit", step(2, "last"), after=True),
    "all done, the last not written down": Moment(StageIndex, "end", of("last")),
}


@contextmanager
def dying(moment: Moment) -> Iterator[list[int]]:
    """Die at a moment; the list says whether it came."""
    real, came = getattr(moment.owner, moment.name), list[int]()

    def call(*args: Any, **options: Any) -> Any:
        fits = not came and moment.fits(*args, **options)
        result = real(*args, **options) if moment.after or not fits else None
        if fits:
            came.append(1)
            raise Killed
        return result

    setattr(moment.owner, moment.name, call)
    try:
        yield came
    finally:
        setattr(moment.owner, moment.name, real)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What an undisturbed run left, and its last lines."""
    import contextlib
    import io

    folder, there, out = tmp_path_factory.mktemp("unbroken"), Path.cwd(), io.StringIO()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out):
            assert stages(recipe()) == 0
    finally:
        os.chdir(there)
    return remains(folder / "runs/all"), out.getvalue()


def test_every_kind_of_stage_runs_from_what_others_made_and_the_table_tells(
    unbroken: tuple[dict[str, Any], str],
) -> None:
    found, out = unbroken
    names = ["base", *recipe()["stages"]]
    assert list(found["products"]) == names
    lines = out.splitlines()
    assert [f"stage {i + 1} of 11: {name} (" in out for i, name in enumerate(names)] == [True] * 11
    at = next(i for i, line in enumerate(lines) if line.split()[:3] == ["stage", "command", "start"])
    assert [line.split()[0] for line in lines[at + 1 : at + 13]] == [*names, "all"]
    assert "  again      sft           base " in out
    assert lines[-1] == "model: runs/all/last/checkpoints/step-000003"


def test_dying_at_every_moment_changes_nothing(unbroken: tuple[dict[str, Any], str]) -> None:
    for moment in MOMENTS.values():
        with dying(moment) as came, pytest.raises(Killed):
            stages(recipe())
        assert came, moment
    assert stages(recipe()) == 0
    found = remains(Path("runs/all"))
    assert found.keys() == unbroken[0].keys()
    assert [name for name in found if found[name] != unbroken[0][name]] == []


def test_what_is_done_is_not_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold")
    assert stages(tree) == 0
    before = Path("runs/all/stages.json").read_bytes()
    log = Path("runs/all/cold/log.txt").read_bytes()
    (kept,) = Path("runs/all/cold/checkpoints").glob("step-*/*.safetensors")
    assert kept.name == "model.safetensors"  # and no optimizer's state
    capsys.readouterr()
    assert stages(tree) == 0
    out = capsys.readouterr().out
    assert "stage 1 of" not in out
    assert "cold" in out
    assert Path("runs/all/stages.json").read_bytes() == before
    assert Path("runs/all/cold/log.txt").read_bytes() == log


# --- a recipe that changes -------------------------------------------------------------------------------------------------


def test_a_changed_stage_is_refused_until_it_is_begun_again_with_all_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = short("cold", "scorer")
    assert stages(tree) == 0
    old = Path("runs/all/cold/checkpoints/step-000020/model.safetensors").read_bytes()
    tree["stages"]["cold"]["config"] = sft(CLEAN, 12)
    capsys.readouterr()
    assert stages(tree, "--dry-run") == 0
    assert "done with other settings" in capsys.readouterr().out
    message = refused(capsys, tree)
    assert "stage cold of runs/all has begun with other settings" in message
    assert "sft.updates: 20 there, 12 now" in message
    assert "--from cold" in message
    assert Path("runs/all/cold/checkpoints/step-000020/model.safetensors").read_bytes() == old
    assert stages(tree, "--from", "cold") == 0
    assert not Path("runs/all/cold/checkpoints/step-000020").exists()
    assert StageIndex.read(Path("runs/all")).entries["scorer"].outcome is not None


def test_stages_that_have_not_begun_may_change_and_new_ones_may_follow() -> None:
    assert stages(short("cold")) == 0
    first = Path("runs/all/stages.json").read_text()
    tree = short("cold", "scorer")
    tree["stages"]["scorer"]["config"]["reward_model"]["updates"] = 1
    assert stages(tree) == 0
    assert json.loads(first)["stages"]["cold"] == json.loads(Path("runs/all/stages.json").read_text())["stages"]["cold"]


def test_a_new_stage_that_a_done_one_needs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages(short("cold", "scorer")) == 0
    tree = short("cold", "preferred", "scorer")
    message = refused(capsys, tree)
    assert "stage scorer of runs/all has begun with other settings" in message
    assert "model.path: 'stage:cold' there, 'stage:preferred' now" in message
    assert "--from scorer" in message


def test_a_base_from_nothing_is_of_the_tasks_of_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages(short("cold")) == 0
    tree = short("cold")
    tree["stages"]["sums"] = {"command": "eval", "options": {"data": "task:addition", "limit": 4, "max_tokens": 2}}
    message = refused(capsys, tree)
    assert "tasks: ['sort_digits'] there, ['sort_digits', 'addition'] now" in message
    assert "--from base" in message
    assert stages(tree, "--from", "base") == 0


def test_from_needs_the_stages_before_it_and_a_name_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold", "scorer")
    assert "--from scorer: stage base before it is not done" in refused(capsys, tree, "--from", "scorer")
    assert "did you mean 'scorer'" in refused(capsys, tree, "--from", "scorrer")


def test_a_stage_left_out_while_from_begins_again_before_it_is_begun_again_itself(tmp_path: Path) -> None:
    a, b, c = (PlannedStage(name, "sft", None, (), {"of": name}) for name in "abc")

    def make(*plan: PlannedStage, start_from: str | None = None) -> None:
        with Stages.open(tmp_path / "all", plan, "", start_from) as opened:
            for stage in opened.left():
                opened.begin(stage)
                (tmp_path / "all" / stage.name).mkdir()
                write_outcome(tmp_path / "all" / stage.name, StageOutcome(stage.name, {}))
                assert opened.end(stage)

    make(a, b, c)
    make(a, c, start_from="a")
    assert not (tmp_path / "all" / "b").exists()
    with pytest.raises(UserError, match="--from c: stage b before it is not done"):
        make(a, b, c, start_from="c")


def test_a_kill_while_from_deletes_leaves_nothing_old_to_be_taken_for_new(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = short("cold")
    assert stages(tree) == 0
    with dying(Moment(sys.modules["burnish.trainers.stages"], "remove")), pytest.raises(Killed):
        stages(tree, "--from", "cold")
    assert read_outcome(Path("runs/all/cold")) is not None  # the old one, which the index has forgotten
    with dying(Moment(Run, "commit", step(1, "cold"))) as came, pytest.raises(Killed):
        stages(tree)
    assert came
    assert stages(tree) == 0


def test_a_product_that_is_gone_or_changed_is_named_before_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold", "samples", "right")
    assert stages(tree) == 0
    tree["stages"]["again"] = recipe()["stages"]["again"]
    rows = Path("runs/all/right/right.jsonl")
    rows.write_text(rows.read_text() + "\n")
    message = refused(capsys, tree)
    assert "stage again needs what stage right made" in message
    assert "right.jsonl is not what the stage wrote: make it again with --from right" in message
    rows.unlink()
    assert "right.jsonl is gone" in refused(capsys, tree)
    assert stages(tree, "--from", "right") == 0


def test_a_damaged_index_is_not_believed(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold")
    assert stages(tree) == 0
    index = Path("runs/all/stages.json")
    index.write_text(index.read_text().replace('"seconds"', '"secunds"', 1))
    assert "stages.json is damaged" in refused(capsys, tree)


def test_two_at_once_and_folders_of_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from burnish.run.run_directory import RunDirectory

    Path("runs/all").mkdir(parents=True)
    lock = RunDirectory(Path("runs/all"))
    lock.lock()
    assert "is being written by another process" in refused(capsys, short("cold"))
    lock.close()
    Path("runs/other").mkdir()
    Path("runs/other/thesis.txt").write_text("mine")
    assert "holds no stages (but thesis.txt)" in refused(capsys, short("cold"), name="other")


# --- processes -------------------------------------------------------------------------------------------------------------


def test_the_process_above_the_stages_stays_light() -> None:
    Path("heavy.py").write_text("import numpy\n\ndef f(completions):\n    return [0.0] * len(completions)\n")
    tree = recipe()
    tree["stages"]["last"]["config"]["reward"]["parts"].append("heavy.py:f")
    Path("all.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    code = (
        "import sys; from burnish.config.loading import load; from burnish.config.stages import StagesConfig; from pathlib import Path;"
        "import burnish.cli.stages as s; from burnish.cli.stage_plan import make_plan;"
        "make_plan(load(StagesConfig, Path('all.yaml')), Path('all.yaml'), 'all');"
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_stop_in_the_last_step_of_a_stage_is_one_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = Run.commit

    def interrupted(run: Run, number: int, *rest: Any) -> None:
        commit(run, number, *rest)
        if (run.directory.name, number) == ("cold", 20):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Run, "commit", interrupted)
    tree = short("cold", "scorer")
    assert stages(tree) == 0
    assert "stopped after stage cold; the same command goes on from here: runs/all" in capsys.readouterr().out
    assert list(StageIndex.read(Path("runs/all")).entries) == ["base", "cold"]
    assert stages(tree) == 0
    assert StageIndex.read(Path("runs/all")).is_done("scorer")


STUB = """
import os, signal, sys, time
from burnish.cli import main, stage_commands
from burnish.run.stage_index import StageOutcome, write_outcome

def run_stage(plan, ready, made):
    name, heard = ready.planned.name, []
    if name == "cold":
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        os.kill(os.getppid(), signal.SIGTERM)
        while not heard:  # passed on by the process above
            time.sleep(0.01)
    (plan.folder / name).mkdir()
    write_outcome(plan.folder / name, StageOutcome(name, {}))
    return 0

stage_commands.run_stage = run_stage
sys.exit(main.main())
"""


@pytest.mark.skipif(not is_supported(), reason="the supervisor needs Linux")
def test_a_stop_that_the_driver_of_a_stage_finishes_with_stops_the_process_above_it() -> None:
    Path("all.yaml").write_text(yaml.safe_dump(short("cold", "scorer"), sort_keys=False))
    command = [sys.executable, "-c", STUB, "stages", "all.yaml", "run.name=all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "stopped after stage cold" in done.stdout
    assert list(StageIndex.read(Path("runs/all")).entries) == ["base", "cold"]


def size(folder: Path) -> int:
    """Changes whenever something below a folder is written or deleted."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # deleted since it was listed
                total += 1 + os.stat(os.path.join(place, name)).st_size
    return total


@pytest.mark.slow  # three minutes on two quiet cores: every life of a stage loads torch again
@pytest.mark.parametrize("seed", [0, 1])
def test_killed_at_random_moments_again_and_again_it_ends_as_one_that_was_not(
    seed: int, unbroken: tuple[dict[str, Any], str]
) -> None:
    """Moments are counted in changes on the disk, so that a busy machine has them too."""
    Path("all.yaml").write_text(yaml.safe_dump(recipe(), sort_keys=False))
    command = [sys.executable, "-m", "burnish.cli.main", "stages", "all.yaml", "run.name=all", "--max-restarts", "20"]
    dice, kills = random.Random(seed), 0
    while kills < 100:
        process = subprocess.Popen(
            command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        left, seen = int(math.exp(dice.uniform(0.0, 4.5))), size(Path("runs"))
        while process.poll() is None and left:
            time.sleep(0.005)
            left, seen = left - (size(Path("runs")) != seen), size(Path("runs"))
        if process.poll() is not None:
            break
        kills += 1
        drivers = descendants(process.pid)
        if dice.random() < 0.3 and drivers:  # the driver first: the process above starts another
            send_signal(drivers[0], signal.SIGKILL)
            time.sleep(dice.uniform(0.0, 1.0))
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0
    assert kills > 2
    found = remains(Path("runs/all"))
    assert found.keys() == unbroken[0].keys()
    assert [name for name in found if found[name] != unbroken[0][name]] == []
    print(f"{kills} kills")
