"""Runs that make their own tasks: killed by SIGKILL or by an error, they end as if they had never stopped, and no task is lost or doubled.

Programs run beside the engine, so which rows are decoded together depends on when they end. `rollout.exact` makes log-probs independent of it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.run.metrics import read_metrics
from burnish.run.task_journal import TaskJournal
from burnish.trainers import rl
from tests.trainers import test_resume_everything as everything
from tests.trainers.test_resume_everything import Moment, dies, killing
from tests.trainers.tiny import run_of

STEPS = 5
TOY = f"""
model: {{new: {{hidden_size: 32, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 96}}}}
data:
  train: {{task: absolute_zero, options: {{references: 2, inputs: 2, format: expression}}}}
  max_prompt_tokens: 64
environment: {{name: absolute_zero, max_turns: 3, options: {{attempts: 2}}}}
warm_start:
  data: {{task: absolute_zero, options: {{references: 2, inputs: 2, format: expression, num: 200}}}}
  updates: 60
  batch_size: 32
  max_tokens: 64
  optimizer: {{lr: 1.0e-2}}
rollout: {{prompts: 6, n: 1, max_tokens: 10, exact: true}}
algorithm: trr_plus_plus
training: {{steps: {STEPS}, optimizer: {{lr: 1.0e-3}}}}
run: {{samples_every: 2, save_every: 2, threads: 1}}
"""
KILLED = """
import os, signal, sys
from pathlib import Path
from burnish.run.task_journal import TaskJournal
from tests.trainers.test_self_made_task_runs import TOY
from tests.trainers.tiny import run_of

append = TaskJournal.append

def dying(journal, step, tasks):
    append(journal, step, tasks)
    if step == 3:
        os.kill(os.getpid(), signal.SIGKILL)

TaskJournal.append = dying
run_of(Path(sys.argv[1]), TOY, sys.argv[2:])
"""


def tasks_of(folder: Path) -> list[Any]:
    """The valid tasks of a run."""
    return TaskJournal(folder / "tasks.jsonl", STEPS).tasks


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that begin with a model that proposes and solves badly."""
    warm = run_of(tmp_path_factory.mktemp("warm") / "run", TOY, ["training.steps=1"]) / "warm_start"
    return ["model.new=null", f"model.path={warm}", "warm_start=null"]


@pytest.fixture(scope="module")
def unbroken(start: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("unbroken") / "run", TOY, start)


def test_a_killed_run_ends_as_one_that_never_was(start: list[str], unbroken: Path, tmp_path: Path) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(everything, "STEPS", STEPS)
    folder = tmp_path / "run"
    died = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), *start],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert died.returncode == -signal.SIGKILL, died.stderr[-3000:]
    assert {made.step for made in tasks_of(folder / "it")} == {1, 2, 3}
    for moment in (
        Moment(TaskJournal, "append", lambda journal, step, tasks: step == 4),
        Moment(
            rl, "advance", lambda state, *rest: state.step == 4
        ),  # the tasks of step 5 are on disk, nothing else of it
    ):
        with killing(moment):
            assert dies(lambda: run_of(folder, TOY, start))
    found, expected = everything.result(run_of(folder, TOY, start)), everything.result(unbroken)
    patch.undo()
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []
    assert tasks_of(folder / "it") == tasks_of(unbroken)
    events = [json.loads(line)["event"] for line in (folder / "it" / "tasks.jsonl").read_text().splitlines()]
    assert events.count("resumed") == 3  # each death left tasks of a later step than that of the checkpoint


def test_the_buffer_grows_and_the_metrics_say_how(unbroken: Path) -> None:
    rows = read_metrics(unbroken / "metrics.jsonl")
    sizes = [sum(row[f"tasks/{kind}/size"] for kind in ("deduction", "abduction", "induction")) for row in rows]
    made = tasks_of(unbroken)
    assert sizes == [2 + sum(one.step <= row["step"] for one in made) for row in rows]
    assert sizes[-1] > sizes[0]
    assert all(0 <= row["tasks/deduction/valid"] <= 1 for row in rows)
    assert max(row["actor/grad_norm"] for row in rows) > 1e-3
    assert {"reward/role=deduction_propose", "reward/role=induction_solve", "tasks/distinct_programs"} <= rows[0].keys()


def test_a_resumed_run_refuses_a_file_that_lost_tasks(start: list[str], tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", TOY, [*start, "training.steps=2"])
    lines = (folder / "tasks.jsonl").read_text().splitlines(keepends=True)
    (folder / "tasks.jsonl").write_text("".join(lines[:1]))
    with pytest.raises(UserError, match="tasks when it was saved, and 1 are in"):
        run_of(tmp_path / "run", TOY, [*start, "training.steps=3"])


def test_an_advantage_of_roles_needs_roles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="environment single_turn has no roles"):
        run_of(tmp_path / "run", TOY, ["data.train=[{task: sort_digits}]", "environment={name: single_turn, max_turns: 1, options: {}}",
                                       "warm_start=null"])  # fmt: skip
