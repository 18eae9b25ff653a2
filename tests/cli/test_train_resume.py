"""`burnish train` on a run that exists: complete, stopped, failed or changed runs."""

from __future__ import annotations

import json
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.train_recipes import metrics, train, weights

pytestmark = pytest.mark.usefixtures("here")


def test_the_same_command_on_a_complete_run_says_so_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml") == 0
    before = metrics()
    capsys.readouterr()
    assert train("new.yaml") == 0
    assert "is complete: all 2 steps are done" in "".join(capsys.readouterr())
    assert metrics() == before
    Path("runs/r/metrics.jsonl").unlink()
    assert train("new.yaml") == 0
    said = "".join(capsys.readouterr())
    assert "metrics.jsonl has no line of steps 1 to 2 (2 in all)" in said
    assert "goes on" not in said
    assert "report: not written, runs/r/metrics.jsonl has no lines; restore it" in said
    assert "model:  runs/r/checkpoints/step-000002" in said
    assert said.splitlines()[-1] == "held-out figures: not known"


def test_a_finished_run_goes_on_to_more_steps_as_if_it_had_been_asked_for_them_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("new.yaml", "training.steps=4", "run.name=whole") == 0
    assert train("new.yaml") == 0
    config = Path("runs/r/config.yaml")
    lines = [line for line in config.read_text().splitlines() if not re.match(" *(best_by|deterministic):", line)]
    config.write_text("\n".join(lines) + "\n")  # as a version wrote it that did not have these keys yet
    capsys.readouterr()
    assert train("new.yaml", "training.steps=4", "run.save_every=1") == 0
    said = "".join(capsys.readouterr())
    assert "training.steps: 2 before, 4 from here on" in said
    assert "the config from before is runs/r/config.1.yaml" in said
    assert (
        "learning rate of the next update: 0.001, that of update 3 on the constant schedule of a run of 4 updates"
        in said
    )
    assert weights("runs/r") == weights("runs/whole")
    assert [row["step"] for row in metrics()] == [1, 2, 3, 4]
    changes = {"run.save_every": ["25", "1"], "training.steps": ["2", "4"]}
    events = [json.loads(line) for line in Path("runs/r/journal/events.jsonl").read_text().splitlines()]
    assert [event["changes"] for event in events if event["event"] == "config"] == [changes]
    assert train("new.yaml", "training.steps=3") == 2
    assert "training.steps=3, but run runs/r has made 4" in capsys.readouterr().err


def test_another_learning_rate_counts_from_the_last_checkpoint_on(capsys: pytest.CaptureFixture[str]) -> None:
    """What the journal has of later steps was sampled by a policy that the old learning rate had made."""
    linear = "training.optimizer={lr: 0.001, schedule: linear}"
    with pytest.raises(RuntimeError, match="killed"), killed_in(step=4):
        train("new.yaml", "training.steps=4", "run.save_every=2")
    capsys.readouterr()
    assert train("new.yaml", "training.steps=4", "run.save_every=2", "training.optimizer.lr=0.1") == 0
    assert "training.optimizer.lr: 0.001 before, 0.1 from here on" in "".join(capsys.readouterr())
    rows = metrics()
    assert [row["actor/lr"] for row in rows] == [0.001, 0.001, 0.1, 0.1]
    assert all(row["mismatch/max"] < 1e-3 for row in rows)
    assert train("new.yaml", "training.steps=8", linear) == 0
    assert [row["actor/lr"] for row in metrics()[4:]] == pytest.approx([0.001 * (7 - k) / 7 for k in range(4, 8)])


@contextmanager
def killed_in(step: int) -> Iterator[None]:
    """The run dies after the updates of a step, before it is committed."""
    from burnish.trainers import rl

    after_step = rl.after_step

    def dying(job: Any, number: int, *args: Any) -> Any:
        if number == step:
            raise RuntimeError("killed")
        return after_step(job, number, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl, "after_step", dying)
        yield


def test_a_disk_that_refuses_is_one_line_with_the_file_and_the_run_goes_on_when_there_is_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train("new.yaml", "run.name=whole") == 0
    named = set()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Bytes of a file: as a full disk, it stops each of them somewhere.
    for limit in (100, 2_000, 5_000, 12_000):
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            status = train("new.yaml")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        said = capsys.readouterr().err
        assert status == 2
        found = re.fullmatch(r"burnish: error: cannot write .*?(\S+): File too large; .*\n", said)
        assert found is not None, said
        named.add(Path(found[1]).name)
    assert len(named) >= 3, named
    assert train("new.yaml") == 0
    assert weights("runs/r") == weights("runs/whole")


def test_fresh_begins_anew_and_moves_the_old_run_aside(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("new.yaml", "--fresh") == 0  # nothing is there yet
    held_out = "data.validation={task: sort_digits, limit: 4}"
    assert train("new.yaml", held_out, "validation.by=nothing", "--fresh") == 2
    assert "validation.by=nothing: no held-out row has that column" in capsys.readouterr().err
    assert [folder.name for folder in Path("runs").iterdir()] == ["r"]  # the old run stays where it is
    assert train("new.yaml") == 0
    assert "the old run is now" not in capsys.readouterr().out
    assert train("new.yaml", "rollout.n=5", "--fresh") == 0
    assert "the old run is now runs/r.1" in capsys.readouterr().out
    assert "n: 5" in Path("runs/r/config.yaml").read_text()
    assert "n: 4" in Path("runs/r.1/config.yaml").read_text()
    assert [row["step"] for row in metrics()] == [1, 2]


def test_a_run_whose_samples_are_never_scored_ends_and_goes_on_when_the_reward_is_mended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ("new.yaml", "reward.parts=plug.py:breaks", "training.steps=6", "run.save_every=1")
    Path("broken").touch()
    assert train(*command) == 2
    assert [row["step"] for row in metrics()] == [1, 2, 3, 4]
    said = "".join(capsys.readouterr())
    assert (
        "step 5: not one sample could be scored in 3 steps in a row, so the run stops here; fix the reward and run the same"
        in said
    )
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert "reward 0." in next(line for line in steps if line.startswith("step 2/6"))
    assert "reward" not in next(line for line in steps if line.startswith("step 4/6"))  # a number of an earlier step
    Path("broken").unlink()
    assert train(*command) == 0
    rows = metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["reward/failed"] for row in rows] == [
        0
    ] * 6  # no step without a score was saved, so all are made up for


def test_a_last_step_without_a_score_is_an_error_and_what_came_before_it_is_saved() -> None:
    command = ("new.yaml", "reward.parts=plug.py:breaks", "training.steps=3")
    Path("broken").touch()
    assert train(*command) == 2
    assert [row["step"] for row in metrics()] == [1, 2]
    assert [path.name for path in Path("runs/r/checkpoints").glob("step-*")] == ["step-000002"]
    Path("broken").unlink()
    assert train(*command) == 0
    assert [row["step"] for row in metrics()] == [1, 2, 3]


def test_a_mended_reward_goes_on_under_the_same_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info):\n    return 1 / 0\n")
    assert train("new.yaml", "reward.parts=mine.py:judge") == 2
    assert "fix the reward and run the same command again. First: " in capsys.readouterr().err
    Path("mine.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n")
    assert train("new.yaml", "reward.parts=mine.py:judge") == 0
    assert "ZeroDivisionError" not in "".join(capsys.readouterr())
    assert [row["reward/mean"] for row in metrics()] == [0.5, 0.5]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_the_same_command_goes_on(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    command = ("new.yaml", "algorithm.advantage=plug.py:signalled", "training.steps=3")
    Path("flag").write_text(str(int(number)))
    assert train(*command) == 0
    assert "stopped; the same command goes on from here" in capsys.readouterr().out
    assert [row["step"] for row in metrics()] == [1]
    assert [p.name for p in Path("runs/r/checkpoints").glob("step-*")] == ["step-000001"]
    assert train(*command) == 0
    assert [row["step"] for row in metrics()] == [1, 2, 3]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_a_warm_start_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    stage = "warm_start={data: {task: sort_digits, options: {num: 20}}, updates: 2, batch_size: 4}"
    assert train("new.yaml", stage) == 0
    assert "warm start on 20 demonstrations" in "".join(capsys.readouterr())
    assert len(Path("runs/r/demonstrations-0.jsonl").read_text().splitlines()) == 20
    assert train("new.yaml", stage) == 0
    assert "warm start" not in "".join(capsys.readouterr())
