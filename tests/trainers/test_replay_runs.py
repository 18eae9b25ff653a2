"""Runs with replay: what the loss sees of replayed groups, how often they are used, and resuming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from burnish.algorithms.batch_columns import replay_drift, without_replayed
from burnish.algorithms.correction.budget import BudgetState
from burnish.algorithms.correction.mismatch_diagnostics import surprise_metrics
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.spec import Algorithm
from burnish.core.batch import Batch
from burnish.rollout.replay import REPLAY_FILE, ReplayStore
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.trainers import rl
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.trainers.state import initial_state
from tests.trainers import test_overlapping_sources
from tests.trainers.test_overlapping_sources import STEPS, TOY, live, numbers, weights
from tests.trainers.test_pipeline import NO_MODELS, Scorer, make_batch, prepared
from tests.trainers.tiny import run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

REPLAY = "algorithm.replay={share: 0.75, uses: 3, max_age: 3}"
BEHAVIOUR = -0.125


def with_replay(**slots: Any) -> AlgorithmPipeline:
    return AlgorithmPipeline(Algorithm.model_validate({"replay": {}, **slots}), num_updates=1)


def batch_of_two() -> Batch:
    """A new group and one that comes back, of two samples each; the sampler's log-probs are the same everywhere."""
    batch = make_batch([2, 1, 2, 1], [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0])
    behaviour = torch.where(batch.action_mask, BEHAVIOUR, 0.0)
    return batch.with_token(behaviour_logp=behaviour).with_sequence(
        use=torch.tensor([0.0, 0.0, 1.0, 1.0]), key=torch.arange(4), trajectory_ids=torch.arange(4)
    )


def test_the_ratio_of_what_comes_back_is_to_the_policy_that_wrote_it() -> None:
    batch, _ = prepared(with_replay(), batch_of_two())
    written = batch.action_mask
    now = -0.5 * batch.positions.double()
    fresh = (batch.sequence["use"] == 0)[batch.sequence_ids]
    assert torch.equal(batch.token["old_logp"][written & fresh], now[written & fresh])
    assert batch.token["old_logp"][written & ~fresh].tolist() == [BEHAVIOUR] * 3


class Peaked(Scorer):
    """A policy that gives each token p, and one other all the rest."""

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        found = super().outputs(batch, needs)
        p = found["logp"].exp()
        return {name: p**2 + (1 - p) ** 2 if name == "sum_p2" else column for name, column in found.items()}


@pytest.mark.parametrize("correction", ["none", "bypass_ppo_clip"])
def test_the_optimal_token_baseline_weighs_with_one_policy_the_one_of_now(correction: str) -> None:
    """w = 2 (1 - p)^2 of the current policy, for new and replayed tokens; b_1 is then the first sample's share of the weights."""
    pipeline, batch = with_replay(advantage="otb", correction=correction), batch_of_two()
    batch = batch.with_token(behaviour_logp=torch.where(batch.action_mask, -1.0 * batch.sequence_ids, 0.0))
    batch = pipeline.prepare(batch, StepContext(cast(Any, Peaked(0.5))))
    assert batch.token["old_logp"][-1] == pytest.approx(-3.0), "the ratio is to the policy that wrote it"
    advantages = batch.token["advantages"][batch.action_mask].tolist()
    assert advantages == pytest.approx([0.5, 1.0, -0.5, 0.5, 1.0, -0.5])


def test_how_far_the_policy_has_moved_is_told_of_the_tokens_in_the_loss_that_come_back() -> None:
    batch, now = batch_of_two(), -0.5 * batch_of_two().positions.double()
    batch = batch.with_token(loss_mask=batch.action_mask & (batch.positions == 1))
    assert replay_drift(batch, now) == {"replay/kl": BEHAVIOUR + 0.5}
    assert replay_drift(without_replayed(batch), without_replayed(batch).positions.double()) == {}


def test_where_a_correction_weighs_every_token_the_ratio_is_to_the_policy_of_now() -> None:
    batch, _ = prepared(with_replay(correction="decoupled_token_is"), batch_of_two())
    written = batch.action_mask
    now = -0.5 * batch.positions.double()
    assert torch.equal(batch.token["old_logp"][written], now[written])
    torch.testing.assert_close(
        batch.token["rollout_weight"][written].double(), (now[written] - BEHAVIOUR).exp().clamp(max=2.0)
    )


def test_with_bypass_every_ratio_is_to_the_sampler() -> None:
    batch, _ = prepared(with_replay(correction="bypass_ppo_clip"), batch_of_two())
    assert batch.token["old_logp"][batch.action_mask].tolist() == [BEHAVIOUR] * 6


class Asked(Scorer):
    """Keeps how many sequences each question was of."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.asked: list[int] = []

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, Tensor]:
        self.asked.append(batch.num_sequences)
        return super().outputs(batch, needs)


@pytest.mark.parametrize(
    ("slots", "num_asked"),
    [({}, 2), ({"correction": "decoupled_token_is"}, 4), ({"correction": "decoupled_k3_rs"}, 4), ({"advantage": "otb"}, 4)],
)  # fmt: skip
def test_the_learner_is_asked_for_old_log_probs_of_what_comes_back_only_where_something_reads_them(
    slots: dict[str, Any], num_asked: int
) -> None:
    learner = Asked()
    with_replay(**slots).prepare(batch_of_two(), StepContext(cast(Any, learner)))
    assert learner.asked == [num_asked]


def test_a_reference_that_is_the_policy_is_asked_of_all_in_the_same_pass() -> None:
    learner, reference = Asked(), Scorer(0.25)
    reference.is_policy = True
    pipeline = with_replay(kl={"loss": {"coef": 0.1}, "reference": "iterate"})
    batch = pipeline.prepare(batch_of_two(), StepContext(cast(Any, learner), cast(Any, reference)))
    assert (learner.asked, reference.calls) == ([4], 0)
    assert torch.equal(batch.token["ref_logp"], learner.logprobs(batch))


def test_only_trees_have_parts_for_other_times() -> None:
    context = StepContext(cast(Any, None))
    with_replay().trim(batch_of_two(), context)
    assert context.unfinished is None


def test_a_batch_of_a_run_without_replay_is_not_copied_to_find_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch([2, 1], [0, 0], [1.0, 0.0])
    monkeypatch.setattr(Batch, "select", lambda self, index: pytest.fail("on a GPU this copies every column"))
    assert without_replayed(batch) is batch


def test_a_batch_of_nothing_new_is_not_asked_for_at_all() -> None:
    learner, back = Asked(), batch_of_two().select(torch.tensor([2, 3]))
    batch = with_replay().prepare(back, StepContext(cast(Any, learner)))
    assert learner.asked == []
    assert batch.token["old_logp"][batch.action_mask].tolist() == [BEHAVIOUR] * 3


CORRECTIONS = ["decoupled_seq_is_rs", {"name": "seed", "threshold": 1.5}, {"name": "budget", "k3_kl": 0.05}]


def moved_on() -> Batch:
    """The policy has moved far from what comes back, and little from what is new."""
    batch = batch_of_two()
    now, back = -0.5 * batch.positions.double(), (batch.sequence["use"] > 0)[batch.sequence_ids]
    behaviour = torch.where(back, now - 2, now - 0.4 * batch.positions)
    return batch.with_token(behaviour_logp=torch.where(batch.action_mask, behaviour, 0.0))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_is_of_all_samples_and_its_report_of_new_ones(correction: Any) -> None:
    pipeline, batch = with_replay(correction=correction), moved_on()
    context, context_alone = StepContext(cast(Any, Scorer(0.5))), StepContext(cast(Any, Scorer(0.5)))
    found, alone = pipeline.prepare(batch, context), pipeline.prepare(without_replayed(batch), context_alone)
    assert context.metrics == context_alone.metrics
    assert (context.budget, context.notes) == (context_alone.budget, context_alone.notes)
    if isinstance(correction, dict) and correction["name"] == "budget":
        assert context.budget is not None
        assert context.budget.rung > 0
    weights = found.token["rollout_weight"]
    assert torch.equal(weights[: alone.num_tokens], alone.token["rollout_weight"])
    changed = ~found.loss_mask | (weights != 1)
    assert changed[batch.action_mask].all(), "what comes back is corrected too"


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_where_nothing_is_new_there_is_no_report_and_a_budget_stays_where_it_was(correction: Any) -> None:
    back, state = moved_on().select(torch.tensor([2, 3])), initial_state(Algorithm())
    state = replace(state, budget=BudgetState(rung=2))
    context = StepContext(cast(Any, Scorer(0.5)), state=state)
    found = with_replay(correction=correction).prepare(back, context)
    assert context.metrics == {}
    assert found.token["rollout_weight"][back.action_mask].max() <= 3
    is_budget = isinstance(correction, dict) and correction["name"] == "budget"
    assert (context.budget == state.budget) or not is_budget


def test_surprise_is_of_new_samples() -> None:
    batch = moved_on()
    logp, entropy = batch.positions.double() * -0.5, batch.positions.double() * 0.3
    new = without_replayed(batch)
    count = new.num_tokens
    assert surprise_metrics(batch, logp, entropy) == surprise_metrics(new, logp[:count], entropy[:count]) != {}


def test_the_loss_of_a_sample_that_comes_back_is_bounded_by_its_ratio_to_the_policy_that_wrote_it() -> None:
    """One update: the ratio of a new token is 1 and its surrogate -A; that of an old one is exp(now - behaviour), clipped."""
    pipeline = with_replay(advantage={"name": "grpo", "std": "none"}, aggregation="token-mean")
    batch, _ = prepared(pipeline, batch_of_two())
    mini = batch.with_sequence(weight=torch.ones(4, dtype=torch.float64))
    mask = batch.loss_mask
    logp = (-0.5 * batch.positions.double())[mask]
    loss, _ = pipeline.loss(loss_view(mini, logp, torch.zeros_like(logp)))
    fresh = -(0.5 + 0.5 - 0.5)
    ratios = [torch.tensor(-0.5 * k - BEHAVIOUR).exp().item() for k in (1, 2, 1)]
    back = -sum(min(r * a, min(max(r, 0.8), 1.2) * a) for r, a in zip(ratios, (0.5, 0.5, -0.5), strict=True))
    assert float(loss) == pytest.approx(fresh + back, rel=1e-6)


def test_groups_that_come_back_are_beside_the_limit_of_new_ones() -> None:
    pipeline = AlgorithmPipeline(Algorithm.model_validate({"replay": {}, "filters": ["zero_signal"]}), num_updates=1)
    batch = make_batch([1] * 8, [0, 0, 1, 1, 2, 2, 3, 3], [1, 0, 1, 0, 1, 0, 1, 1])
    batch = batch.with_sequence(use=torch.tensor([0.0, 0, 1, 1, 0, 0, 2, 2]))
    assert pipeline.select(batch, 1).sequence["group_ids"].tolist() == [0, 0, 1, 1]
    assert pipeline.num_kept_groups(batch) == 2


def test_policy_filtration_draws_the_same_samples_from_a_group_that_comes_back() -> None:
    """What the paper's buffer holds, the filtered samples, is what a whole group gives again."""
    pipeline = AlgorithmPipeline(Algorithm.model_validate({"replay": {}, "filters": ["pf_ppo"]}), num_updates=1)
    batch = make_batch([1] * 4, [0] * 4, [1.0, -0.5, 0.0, 2.0])
    batch = batch.with_sequence(key=torch.tensor([11, 12, 13, 14]), trajectory_ids=torch.arange(4))
    once = pipeline.trim(batch.with_sequence(use=torch.zeros(4)), NO_MODELS).sequence["key"].tolist()
    again = pipeline.trim(batch.with_sequence(use=torch.ones(4)), NO_MODELS).sequence["key"].tolist()
    assert once == again
    assert len(once) == 4
    assert 13 not in once  # of reward 0


# --- runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, ...], Path] = {}

    def get(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = run_of(tmp_path_factory.mktemp("replay") / "run", TOY, [REPLAY, *overrides])
        return made[overrides]

    return get


def check_uses(folder: Path) -> None:
    """Every sample drawn is used, none more often than was said; the metrics tell the same."""
    used, drawn = Counter(live(folder, "used")), live(folder, "drawn")
    assert set(used) == {f"{group}.{sample}" for group in drawn for sample in range(4)}
    assert max(used.values()) == 3
    rows = read_metrics(folder / "metrics.jsonl")[1:]
    assert sum(row["replay/groups"] * 4 for row in rows) == used.total() - len(used)
    assert max(row.get("replay/age_max", 0.0) for row in rows) <= 3
    assert [row["replay/groups"] for row in rows] == [0.0, *[3.0] * (STEPS - 1)]
    assert rows[1]["replay/fraction"] == pytest.approx(12 / 28)
    assert all("mismatch/mean" in row for row in rows)
    assert ["replay/kl" in row for row in rows] == [False, *[True] * (STEPS - 1)]


@pytest.mark.parametrize("source", ["sync", "ahead", "{name: async, max_staleness: 1}"])
def test_nothing_is_used_more_often_than_was_said_whatever_the_source(runs: Callable[..., Path], source: str) -> None:
    check_uses(runs(f"rollout.source={source}"))


def test_a_run_with_replay_is_another_run(runs: Callable[..., Path], tmp_path: Path) -> None:
    plain = run_of(tmp_path / "run", TOY, [])
    assert weights(plain) != weights(runs("rollout.source=sync"))
    assert numbers(plain)[1]["reward/mean"] == numbers(runs("rollout.source=sync"))[1]["reward/mean"]


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "groups back, nothing learnt": (rl, "learn", lambda context, step, batch: step == 3),
    "learnt, uses not counted": (ReplayStore, "after_step", lambda store, step, *rest: step == 4),
    "uses counted, not committed": (Run, "commit", lambda run, step, *rest: step == 4),
    "committed, not saved": (Run, "commit", lambda run, step, *rest: step == 5),
}


@pytest.mark.parametrize("source", ["sync", "ahead"])
def test_a_run_that_dies_uses_every_group_as_often_as_one_that_never_did(
    source: str, runs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_overlapping_sources, "MOMENTS", MOMENTS)
    chosen = (REPLAY, f"rollout.source={source}")
    for moment in MOMENTS:
        assert test_overlapping_sources.dies(tmp_path / "run", moment, *chosen), moment
    found, never = run_of(tmp_path / "run", TOY, list(chosen)), runs(f"rollout.source={source}")
    assert numbers(found) == numbers(never)
    assert weights(found) == weights(never)
    assert sorted(live(found, "used")) == sorted(live(never, "used"))
    check_uses(found)
    one, other = (folder / "checkpoints" / f"step-{STEPS:06d}" / REPLAY_FILE for folder in (found, never))
    assert one.read_bytes() == other.read_bytes()


def test_the_run_asks_the_learner_for_old_log_probs_though_it_makes_one_update() -> None:
    learner = Scorer(0.5)
    with_replay().prepare(batch_of_two(), StepContext(cast(Any, learner)))
    assert learner.calls == 1
