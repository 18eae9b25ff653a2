"""With slow rewards, a step validates and makes the passes of its preparation while the rewards are computed. No number changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from burnish.core.batch import Batch
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import RoundBuilder
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run import Run
from burnish.trainers.while_scoring import EarlyPasses
from burnish.training.learner import Learner
from tests.trainers.test_stopped_runs import result as result_of_last_step
from tests.trainers.test_stopped_runs import stopped_run
from tests.trainers.tiny import TINY, run_of

REWARD = """
import time
from pathlib import Path

GATE = Path(__file__).with_name("gate")

def gated(data_source, solution_str, ground_truth, extra_info):
    if solution_str.startswith("{failing}"):
        raise ValueError("this answer has no score")
    while not GATE.exists():
        time.sleep(0.005)
    return sum(map(ord, solution_str)) / 100 - len(solution_str)
"""
PATIENCE_S = 30.0
STEPS = 4
KINDS = {
    "log-probs": ["algorithm.kl={loss: {coef: 0.1}, reference: frozen}", "training.mini_batches=2"],
    "critic": ["algorithm=ppo", "training.mini_batches=2"],
}


def overrides(folder: Path, failing: str = "no answer begins like this") -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "slow.py").write_text(REWARD.replace("{failing}", failing))
    (folder / "gate").touch()
    return [
        f"reward.parts=[{{name: '{folder / 'slow.py'}:gated'}}]",
        f"reward.timeout_s={PATIENCE_S}",
        "model.device=cpu",
        f"training.steps={STEPS}",
        "data.validation={task: sort_digits, options: {min_digits: 2, max_digits: 3}}",
        "validation={every: 2, limit: 6}",
        "run.save_every=1",
        "run.keep_last=9",
    ]


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """Metrics, and the weights and optimizer of every checkpoint."""
    rows = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    files = sorted((run / "checkpoints").rglob("*.safetensors"))
    tensors = {f"{f.parent.name} {f.name} {n}": t.tobytes() for f in files for n, t in load_file(f).items()}
    return rows, tensors


def without_overlap(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rewards, "may_be_slow", property(lambda self: False))


def close_the_gate_until_work_is_done(patch: pytest.MonkeyPatch, gate: Path, opens_after: str) -> list[str]:
    """Rewards of a step wait from its first sample until the event `opens_after`. Returns the events, in order."""
    events: list[str] = []

    def happened(event: str) -> None:
        events.append(event)
        if event == opens_after:
            gate.touch()

    sample, collect, run, outputs = RolloutRunner.run, RoundBuilder.collect, EarlyPasses.run, Learner.outputs

    def sampled(self: RolloutRunner, draws: Any, n: int, sampling: Any, stream: str, **rest: Any) -> Iterator[Any]:
        if stream == "train":
            gate.unlink()
        yield from sample(self, draws, n, sampling, stream, **rest)
        happened(f"sampled {stream}")

    def collected(self: RoundBuilder, trajectories: Any) -> None:
        happened("waits for scores")
        if not opens_after:
            gate.touch()
        collect(self, trajectories)

    def passed(self: EarlyPasses, *args: Any) -> None:
        run(self, *args)
        happened("passes are made")

    def computed(self: Learner, batch: Batch, *args: Any) -> Any:
        happened("pass")
        return outputs(self, batch, *args)

    patch.setattr(RolloutRunner, "run", sampled)
    patch.setattr(RoundBuilder, "collect", collected)
    patch.setattr(EarlyPasses, "run", passed)
    patch.setattr(Learner, "outputs", computed)
    return events


@pytest.fixture(scope="module", params=KINDS, ids=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that does everything in its usual place."""
    folder = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        without_overlap(patch)
        return run_of(folder, TINY, [*overrides(folder), *KINDS[kind]])


def test_passes_are_made_before_any_score_is_there(
    plain: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = overrides(tmp_path)
    events = close_the_gate_until_work_is_done(monkeypatch, tmp_path / "gate", "passes are made")
    run = run_of(tmp_path, TINY, [*more, "validation.every=0", *KINDS[kind]])
    per_step = ["sampled train", "pass", *(["pass"] if kind == "critic" else []), "passes are made", "waits for scores"]
    validation = ["sampled eval", "waits for scores"]
    assert events == [*validation, *per_step * STEPS, *validation]
    rows, tensors = result(run)
    expected_rows, expected = result(plain)
    assert tensors == expected
    assert rows[-1] == expected_rows[-1]
    assert all("time/while_scoring_s" in row for row in read_metrics(run / "metrics.jsonl")[1:])


def test_a_step_validates_while_the_rewards_of_the_next_are_computed(
    plain: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = overrides(tmp_path)
    commit, committed = Run.commit, list[int]()
    events = close_the_gate_until_work_is_done(monkeypatch, tmp_path / "gate", "sampled eval")
    gate = tmp_path / "gate"

    def opened(self: EarlyPasses, *args: Any) -> None:  # in steps after which nothing was put off
        gate.touch()

    def recorded(self: Run, step: int, *args: Any) -> None:
        events.append(f"commit {step}")
        committed.append(step)
        commit(self, step, *args)

    monkeypatch.setattr(EarlyPasses, "run", opened)
    monkeypatch.setattr(Run, "commit", recorded)
    run = run_of(tmp_path, TINY, [*more, *KINDS[kind]])
    third = events[events.index("commit 1") :]
    start = third.index("sampled train", third.index("sampled train") + 1)  # the samples of step 3
    assert third[start : start + 4] == ["sampled train", "sampled eval", "waits for scores", "commit 2"]
    assert committed == list(range(STEPS + 1))
    assert result(run) == result(plain)


def test_passes_over_samples_that_get_no_score_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = KINDS["log-probs"]
    with pytest.MonkeyPatch.context() as patch:
        without_overlap(patch)
        expected = result(run_of(tmp_path / "plain", TINY, [*overrides(tmp_path / "plain", failing="2"), *options]))
    more = overrides(tmp_path / "overlapped", failing="2")
    events = close_the_gate_until_work_is_done(monkeypatch, tmp_path / "overlapped" / "gate", "passes are made")
    run = run_of(tmp_path / "overlapped", TINY, [*more, "validation.every=0", *options])
    assert events.count("pass") > events.count("passes are made") == STEPS
    assert result(run)[1] == expected[1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_killed_at_a_commit_that_was_put_off_ends_like_one_that_was_not(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*overrides(tmp_path), *KINDS["log-probs"]]
    expected = result(run_of(tmp_path / "whole", TINY, options))
    commit = Run.commit

    def killed(self: Run, step: int, *args: Any) -> None:
        if step == 2 and moment == "before":
            raise KeyboardInterrupt
        commit(self, step, *args)
        if step == 2:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "commit", killed)
        with pytest.raises(KeyboardInterrupt):
            run_of(tmp_path / "killed", TINY, options)
    assert result(run_of(tmp_path / "killed", TINY, options)) == expected


def test_a_run_stopped_while_a_commit_is_put_off_makes_it_at_once_without_the_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*overrides(tmp_path), "rollout.prompts=6", "run.save_every=50", "run.keep_best=false"]
    expected = result_of_last_step(run_of(tmp_path / "whole", TINY, options))
    # Calls of `run`: validation, steps 1 to 3. The validation of step 2 would come after the samples of step 3.
    run = stopped_run(tmp_path / "stopped", options, monkeypatch, 4, 4)
    rows = read_metrics(run / "metrics.jsonl")
    assert rows[-1]["step"] == 2
    assert "validation/greedy/reward_mean" not in rows[-1]
    assert [folder.name for folder in (run / "checkpoints").glob("step-*")] == ["step-000002"]
    rows, *others = result_of_last_step(run_of(tmp_path / "stopped", TINY, options))
    wanted, *other_wanted = expected
    wanted[2] = {key: value for key, value in wanted[2].items() if not key.startswith("validation/")}
    assert rows == wanted
    assert others == other_wanted
