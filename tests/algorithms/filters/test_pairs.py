"""Pairs from groups: which two samples, which groups give none, and the worked numbers of DPO and SPPO through the pipeline."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.filters.filter_functions import pair_counts, pairs
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext


def batch_of(groups: list[int], rewards: list[float], answers: list[list[int]] | None = None) -> Batch:
    """One prompt token before each answer; answers differ unless they are given."""
    answers = answers if answers is not None else [[9, k] for k in range(len(groups))]
    mask = torch.tensor([k > 0 for answer in answers for k in range(len(answer) + 1)], dtype=torch.bool)
    size, number = mask.numel(), torch.arange(len(groups))
    return Batch(
        tokens=torch.tensor([token for answer in answers for token in [1, *answer]]),
        offsets=offsets_from_lengths(torch.tensor([len(answer) + 1 for answer in answers])),
        token={"action_mask": mask, "loss_mask": mask.clone(), "behaviour_logp": torch.zeros(size)},
        sequence={
            "group_ids": torch.tensor(groups),
            "trajectory_ids": number,
            "key": number,
            "reward": torch.tensor(rewards, dtype=torch.float64),
            "truncated": torch.zeros(len(groups), dtype=torch.bool),
        },
    )


def test_the_best_and_the_worst_of_each_group_the_first_of_those_that_tie() -> None:
    batch = batch_of([5, 5, 5, 5, 2, 2, 2], [0.5, 1, 0, 1, 0.2, 0.8, 0.2])
    assert pairs(batch).tolist() == [5, 4, 1, 2]
    pipeline = AlgorithmPipeline(Algorithm.model_validate(ONLINE), num_updates=1)
    trimmed = pipeline.trim(batch, StepContext(cast(Any, None)))
    chosen = dict(zip(trimmed.sequence["trajectory_ids"].tolist(), trimmed.sequence["chosen"].tolist(), strict=True))
    assert chosen == {1: True, 2: False, 5: True, 4: False}


ONLINE = {"advantage": "none", "ratio": "none", "clip": "none", "loss": "simpo", "filters": ["pairs"]}


def test_a_group_without_a_preference_gives_no_pair_and_is_counted() -> None:
    """One whose rewards are equal, one of a single sample, one whose best and worst are the same text."""
    answers = [[3], [4], [5], [6, 7], [6, 7], [6, 8], [3]]
    batch = batch_of([0, 0, 1, 2, 2, 3, 3], [1, 1, 1, 0, 1, 0, 1], answers)
    assert pairs(batch).tolist() == [6, 5]
    assert pair_counts(batch) == {"pairs/made": 1, "pairs/ties": 2, "pairs/identical": 1}


def test_the_same_tokens_written_by_others_are_another_answer() -> None:
    batch = batch_of([0, 0], [0, 1], [[6, 7], [6, 7]])
    mask = batch.action_mask.clone()
    mask[1] = False
    assert pairs(batch).numel() == 0
    assert pairs(batch.with_token(action_mask=mask, loss_mask=mask)).tolist() == [1, 0]


def test_a_sample_out_of_the_loss_is_in_no_pair() -> None:
    batch = batch_of([0, 0, 0], [0, 0.5, 1])
    mask = batch.loss_mask.clone()
    mask[:3] = False
    assert pairs(batch.with_token(loss_mask=mask)).tolist() == [2, 1]


def test_an_answer_of_several_sequences_is_refused() -> None:
    batch = batch_of([0, 0, 0], [0, 0, 1]).with_sequence(trajectory_ids=torch.tensor([0, 0, 1]))
    with pytest.raises(UserError, match="compares whole answers"):
        pairs(batch)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.25, 1.0])), min_size=1, max_size=14))
def test_pairs_are_those_of_a_loop_over_groups(rows: list[tuple[int, float]]) -> None:
    groups, rewards = [g for g, _ in rows], [r for _, r in rows]
    expected = []
    for group in dict.fromkeys(groups):
        members = [k for k, g in enumerate(groups) if g == group]
        best, worst = max(members, key=lambda k: rewards[k]), min(members, key=lambda k: rewards[k])
        expected += [(best, worst)] if rewards[best] > rewards[worst] else []
    found = pairs(batch_of(groups, rewards)).reshape(-1, 2).tolist()
    assert sorted(map(tuple, found)) == sorted(expected)


# --- worked numbers through the pipeline -------------------------------------------------------------------------------------


class Table:
    """In place of the reference: log-probs by token."""

    is_policy = False

    def __init__(self, logp: dict[int, float]) -> None:
        self.logp = logp

    def logprobs(self, batch: Batch) -> torch.Tensor:
        values = [self.logp.get(token, 0.0) for token in batch.tokens.tolist()]
        return torch.tensor(values, dtype=torch.float64)


def loss_of(pipeline: AlgorithmPipeline, batch: Batch, now: Table, reference: Table) -> tuple[float, dict[str, float]]:
    """The loss of one update, through preparation, filters and mini-batches."""
    context = StepContext(now, reference)  # type: ignore[arg-type]
    prepared = pipeline.prepare(batch, context)
    (mini,) = mini_batches(pipeline.trim(prepared, context), pipeline.algorithm, 1, 1, 8)
    logp = now.logprobs(mini)[mini.loss_mask].requires_grad_()
    loss, sums = pipeline.loss(loss_view(mini, logp, torch.zeros_like(logp)))
    return float(loss.detach()), context.metrics | {name: float(total) for name, total in sums.items()}


@pytest.mark.parametrize(("smoothing", "expected"), [(0.0, 0.575939), (0.1, 0.600939)])
def test_online_dpo_has_the_worked_loss_of_a_pair(smoothing: float, expected: float) -> None:
    """logp_c=-10, logp_r=-14, ref_c=-11, ref_r=-12.5; a sample in the middle and a group of ties beside it change nothing."""
    algorithm = algorithm_from_preset("online_dpo")
    tree: dict[str, Any] = algorithm.model_dump() | {"loss": {"name": "dpo", "beta": 0.1, "smoothing": smoothing}}
    pipeline = AlgorithmPipeline(Algorithm.model_validate(tree), num_updates=1)
    answers = [[10, 11], [20, 21, 22], [30], [40], [41]]
    batch = batch_of([0, 0, 0, 1, 1], [1, 0, 0.5, 1, 1], answers)
    now = Table({10: -4, 11: -6, 20: -7, 21: -5, 22: -2, 30: -1, 40: -1, 41: -1})
    ref = Table({10: -5, 11: -6, 20: -6, 21: -4.5, 22: -2, 30: -3, 40: -2, 41: -2})
    loss, stats = loss_of(pipeline, batch, now, ref)
    assert loss == pytest.approx(expected, abs=1e-6)
    assert (stats["pairs/made"], stats["pairs/ties"]) == (1, 1)
    assert stats["pref_accuracy"] / 5 == pytest.approx(1)  # of the 5 tokens in the loss
    assert stats["pref_margin"] / 5 == pytest.approx(0.1 * 2.5)


def test_pairs_are_counted_among_the_samples_that_filters_before_left() -> None:
    tree = algorithm_from_preset("online_dpo").model_dump() | {"filters": ["overlong", "pairs"]}
    pipeline = AlgorithmPipeline(Algorithm.model_validate(tree), num_updates=1)
    batch = batch_of([0, 0, 0, 1, 1, 2, 2], [1, 1, 0, 1, 0, 1, 0], [[k] for k in range(10, 17)])
    batch = batch.with_sequence(truncated=torch.tensor([False, False, True, False, False, True, True]))
    context = StepContext(cast(Any, None))
    trimmed = pipeline.trim(batch, context)
    assert context.metrics == {
        "pairs/made": 1,
        "pairs/ties": 1,
        "pairs/identical": 0,
    }  # the last group has nothing left
    assert trimmed.num_sequences == 2 * context.metrics["pairs/made"]


def test_sppo_has_the_worked_loss_of_win_probabilities_and_of_rewards() -> None:
    """P=[.9,.2,.4,.7], eta=1, z=[0.3,0.4,0.1,1] of section 6.1: 0.295; reward form with the soft mean: 0.487531."""
    tree = algorithm_from_preset("sppo").model_dump() | {"loss": {"name": "sppo_sq", "eta": 1.0}}
    tree["kl"] = {"reference": "frozen"}
    batch = batch_of([0] * 4, [1, 0, 0, 1], [[10], [11], [12], [13]])
    now = Table({10: -0.7, 11: -0.6, 12: -0.9, 13: 0.0})
    ref = Table(dict.fromkeys(range(10, 14), -1.0))
    judged = batch.with_sequence(win_probability=torch.tensor([0.9, 0.2, 0.4, 0.7], dtype=torch.float64))
    loss, _ = loss_of(AlgorithmPipeline(Algorithm.model_validate(tree), num_updates=1), judged, now, ref)
    assert loss == pytest.approx(0.295, abs=1e-6)
    by_reward = Algorithm.model_validate(tree | {"advantage": "softmean"})
    loss, _ = loss_of(AlgorithmPipeline(by_reward, num_updates=1), batch, now, ref)
    assert loss == pytest.approx(0.487531, abs=1e-6)
