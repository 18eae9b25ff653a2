"""Everything that has a state, at once, in a run that dies again and again: it ends as one that never died, bit for bit.

A run dies by an exception at a chosen line rather than by a signal at a chosen time (which is `test_resume.py`), so that
the moments that matter are met for certain; one that is not met fails the test. Each life goes on from the last
checkpoint to the next moment, in the order of `MOMENTS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from burnish.rollout.sync_source import SyncSource
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.tensor_file import TensorFile
from burnish.run.journal import Journal
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run import Run
from burnish.trainers import rl
from burnish.training.learner import Learner
from tests.trainers.tiny import TINY, run_of

STEPS = 8
COMMON = [
    f"training.steps={STEPS}",
    "training.mini_batches=2",
    "training.optimizer.schedule=linear",
    "run.save_every=3",
    "reward.workers=1",
    "algorithm.filters=[{name: difficulty_band, low: 0.2, high: 0.8}]",
    "algorithm.refill={rounds: 3}",
    "rollout.stages=[{start: 4, max_tokens: 5, n: 6, prompts: 3}, {start: 7, n: 4}]",
]
RUNS: dict[str, list[str]] = {
    "critic": [
        "algorithm=ppo",
        "algorithm.critic={warmup_steps: 2, updates: 2, optimizer: {lr: 0.01, offload: true, schedule: wsd}}",
        "algorithm.kl={reward: {coef: 0.1}, adaptive: {target: 0.001, horizon: 10}, reference: {name: ema, eta: 0.2}}",
        "algorithm.entropy={coef: 0.01, adaptive: {target: 0.6}}",
        "algorithm.curriculum={name: prioritised, warmup_steps: 1}",
        "algorithm.auxiliary.sft=0.1",
        "algorithm.replay={share: 0.7, uses: 3, max_age: 3, capacity: 5, pick: random}",
        "data.demonstrations={task: sort_digits, options: {num: 64, clean: true, min_digits: 2, max_digits: 3}}",
        "data.demonstrations_per_update=4",
    ],
    "greedy": [
        "algorithm=remax",
        "algorithm.kl={reward: {coef: 0.1}, reference: {name: hard_sync, every: 5}}",
        "algorithm.curriculum={name: hard_only, start: 5, below: 0.5, steps: 3}",
        "rollout.mismatch={name: noise, scale: 0.2}",
        "algorithm.correction={budget: {k3_kl: 0.1, ess: 0.5}}",
        "training.optimizer={name: muon, warmup: 0.1, groups: [{match: embed, lr_scale: 0.5}]}",
    ],
    "iterate": [
        "algorithm=long2short",
        "algorithm.kl.reference.every=5",
        "algorithm.curriculum={name: easy_to_hard, column: length, buckets: 2, steps: 6}",
        "rollout.mismatch={name: stale, steps: 2}",
        "algorithm.correction=decoupled_seq_is_rs",
        "model.dtype=bfloat16",
        "training.optimizer.precision=stochastic",
    ],
    "process": [
        "algorithm=prime",
        "algorithm.kl={loss: {coef: 0.1}, reference: {name: ema, eta: 0.2}}",
        "algorithm.refill={oversample: 1, short: partial}",
        "algorithm.process={mini_batches: 2, optimizer: {lr: 0.01, schedule: linear}}",
        "data.validation={task: sort_digits, options: {min_digits: 2, max_digits: 3}}",
        "validation={limit: 8, every: 2}",
    ],
}
"""Between them: a critic with its warm-up, each reference that moves (with and without a reset of the optimizer), both
controllers, a process reward model, refills, groups that come back, every curriculum, stages of the rollout, greedy baselines, demonstrations, a stale sampler corrected,
optimizers with state in host memory, with momentum alone, with weights rounded at random.
"""


class Killed(BaseException):
    """The end of a life; nothing catches it."""


@dataclass(frozen=True)
class Moment:
    """Where a run dies: before or after a call whose arguments fit."""

    owner: Any
    method: str
    fits: Callable[..., bool]
    after: bool = False


def at_step(wanted: int) -> Callable[..., bool]:
    return lambda owner, step, *rest: step == wanted


def second_round(wanted: int) -> Callable[..., bool]:
    return lambda owner, step, plan, progress, round: step >= wanted and round == 1


def event(name: str, wanted: int, round: int) -> Callable[..., bool]:
    return lambda owner, kind, step=0, **rest: kind == name and step >= wanted and rest.get("round") == round


def is_optimizer_of(step: int) -> Callable[..., bool]:
    return lambda file, folder: file.name == "optimizer.safetensors" and f"step-{step:06d}" in folder.name


def updates(wanted: int) -> Callable[..., bool]:
    """The learner of the policy has made this many updates."""
    return lambda learner, *rest, **options: hasattr(learner.model, "head_weight") and learner.updates == wanted


MOMENTS: dict[str, Moment] = {
    "before the first step": Moment(SyncSource, "next", at_step(1)),
    "answers written, not scored": Moment(Journal, "append", event("scored", 2, 0)),
    "between two rounds": Moment(SyncSource, "next", second_round(2)),
    "between two mini-batches": Moment(Learner, "update", updates(1)),
    "step done, not committed": Moment(Run, "commit", at_step(3)),
    "a checkpoint half written": Moment(TensorFile, "write", is_optimizer_of(3), after=True),
    "a checkpoint the journal has not heard of": Moment(Checkpoints, "write", at_step(3), after=True),
    "a step after a checkpoint": Moment(Run, "commit", at_step(4), after=True),
    "answers of a second round written, not kept": Moment(Journal, "append", event("completed", 4, 1)),
    "a second round scored": Moment(Journal, "append", event("scored", 4, 1), after=True),
    "reference moved, state not": Moment(rl, "advance", lambda state, *rest: state.step == 5),
    "right after a checkpoint": Moment(Run, "checkpoint", at_step(6), after=True),
    "the last step committed, not saved": Moment(Run, "checkpoint", at_step(STEPS)),
}


@contextmanager
def killing(moment: Moment) -> Iterator[None]:
    function = getattr(moment.owner, moment.method)

    def call(*args: Any, **options: Any) -> Any:
        dying = moment.fits(*args, **options)
        if dying and not moment.after:
            raise Killed
        result = function(*args, **options)
        if dying:
            raise Killed
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moment.owner, moment.method, call)
        yield


def dies(run: Callable[[], Any]) -> bool:
    try:
        run()
    except Killed:
        return True
    return False


def result(folder: Path) -> dict[str, Any]:
    """What a run leaves behind: metrics without times, which samples it used, its tables, every file of its last checkpoint."""
    rows = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    events = [json.loads(line) for line in (folder / "journal" / "events.jsonl").read_text().splitlines()]
    used = {e["step"]: e["ids"] for e in events if e["event"] == "used"}
    files = {str(f.relative_to(last)): f.read_bytes() for f in sorted(last.rglob("*")) if f.is_file()}
    tables = {f"samples/{f.name}": f.read_bytes() for f in sorted((folder / "samples").iterdir())}
    return {"metrics": rows, "used": used, **tables, **files}


@pytest.fixture(scope="module", params=RUNS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def overrides(kind: str, warm: Path) -> list[str]:
    return ["model.new=null", f"model.path={warm}", *RUNS[kind], *COMMON]


@pytest.fixture(scope="module")
def unbroken(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_of(tmp_path_factory.mktemp("unbroken") / "run", TINY, overrides)


ELSEWHERE = (
    "between two rounds",
    "between two mini-batches",
    "a second round scored",
    "reference moved, state not",
    "right after a checkpoint",
)
"""The moments at which the other runs die; they share the rest with the first."""


def test_a_run_that_dies_at_every_moment_ends_as_one_that_never_did(
    kind: str, overrides: list[str], unbroken: Path, tmp_path: Path
) -> None:
    expected = result(unbroken)
    for name in MOMENTS if kind == "critic" else ELSEWHERE:
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", TINY, overrides)), f"the run never came to: {name}"
    found = result(run_of(tmp_path / "run", TINY, overrides))
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []


def test_everything_that_has_a_state_is_in_use(kind: str, unbroken: Path) -> None:
    """The runs above are worth comparing."""
    folder = unbroken / "checkpoints" / f"step-{STEPS:06d}"
    state, rows = json.loads((folder / "trainer.json").read_text()), read_metrics(unbroken / "metrics.jsonl")
    (source,) = state["stream"]["sources"].values()
    curriculum, statistics = source["curriculum"], state["stream"]["statistics"]
    assert '"round":1' in (unbroken / "journal" / "events.jsonl").read_text()
    assert load_file(folder / "reference.safetensors")
    made = {
        int(count) for name, count in load_file(folder / "optimizer.safetensors").items() if name.startswith("step/")
    }
    if kind == "critic":
        assert [row["actor/updates"] > 0 for row in rows] == [False, False, *[True] * (STEPS - 2)]
        assert all("actor/second_loss" in row for row in rows[2:])
        assert load_file(folder / "critic" / "model.safetensors")["head"].any()
        assert state["kl_coef"] != pytest.approx(0.1)
        assert len(load_file(folder / "replay.safetensors")["entries"]) > 1
        assert max(row.get("replay/age_max", 0) for row in rows) > 1
        assert state["entropy_coef"] != pytest.approx(0.01)
        assert curriculum["num_draws"] > 0
        assert len({success for success, *_ in statistics.values()}) > 3
    if kind == "greedy":
        assert 0 < len(curriculum["hard"]) < 12
        assert curriculum["position"] > 0
        assert all("reward/greedy" in row for row in rows)
    if kind == "process":
        made = {p.name for p in (folder / "process").iterdir()}
        assert made == {"model.safetensors", "optimizer.safetensors", "optimizer.json"}
        assert json.loads((folder / "process" / "optimizer.json").read_text())["updates"] > STEPS
        assert all(0 <= row["process/accuracy"] <= 1 for row in rows[1:])
        assert "validation/greedy/process_accuracy" in rows[-1]
        return
    if kind == "iterate":
        assert min(curriculum["positions"]) > 0
        assert made == {sum(row["actor/updates"] for row in rows[5:])}, (
            "the updates since the reset after the fifth step"
        )
        assert made != {0}
