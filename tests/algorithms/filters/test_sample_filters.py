"""Sample filters: what stays in the loss after advantages (ALGORITHMS.md 4.15, 11.3, 11.4, 11.6), and users' filters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.filters.filter_functions import (
    loss_mask_from_plugin,
    overlong,
    positives_only,
    seq_error_metrics,
    sequence_errors,
    void_turns,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.correction.conftest import ROLLOUT
from tests.algorithms.functions_with_defaults import SAMPLE_FILTERS, balance, clip_b, cppo, prob_mask, seq_error


def samples(advantages: list[float], groups: list[int], lengths: list[int] | None = None) -> Batch:
    sizes = torch.tensor(lengths or [1] * len(groups))
    n = int(sizes.sum())
    return (
        Batch(torch.arange(n), offsets_from_lengths(sizes))
        .with_token(action_mask=torch.ones(n, dtype=torch.bool), loss_mask=torch.ones(n, dtype=torch.bool))
        .with_sequence(advantages=torch.tensor(advantages, dtype=torch.float64), group_ids=torch.tensor(groups))
    )


# --- engine and trainer, entropy, balance -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sampled(f1: Batch) -> Batch:
    rows = [x for row in ROLLOUT for x in [math.nan, *row]]
    return f1.with_token(behaviour_logp=torch.tensor(rows, dtype=torch.float64))


def test_seq_error_drops_rows_on_which_engine_and_trainer_disagree(sampled: Batch) -> None:
    expected = [1.051928, 1.052585, 1.685146, 1.052585]
    assert sequence_errors(sampled, torch.arange(4), 4).tolist() == pytest.approx(expected, abs=1e-5)
    assert torch.equal(seq_error(sampled), sampled.loss_mask)
    assert torch.equal(seq_error(sampled, threshold=1.5), sampled.loss_mask & (sampled.sequence_ids != 2))
    metrics = seq_error_metrics(sampled.with_sequence(accuracy=torch.tensor([1.0, 0, 1, 0])), 1.5)
    named = {"before_max": 1.685146, "before_mean": sum(expected) / 4, "before_min": 1.051928, "dropped": 1}
    named |= {"after_max": 1.052585, "after_mean": 1.052366, "after_min": 1.051928, "dropped_accuracy": 1}
    assert metrics == pytest.approx({f"seq_error/{k}": v for k, v in named.items()}, abs=1e-5)
    rest = sampled.with_token(loss_mask=sampled.loss_mask & (sampled.sequence_ids != 2))
    assert seq_error_metrics(rest, 1.5)["seq_error/before_max"] == pytest.approx(
        1.052585, abs=1e-5
    )  # no tokens, no part
    far = sampled.with_token(old_logp=sampled.token["old_logp"] - 1e6)
    assert not bool(seq_error(far).any())
    assert math.isfinite(seq_error_metrics(far, 2.0)["seq_error/before_mean"])


def test_clip_b_spares_unlikely_tokens_of_bad_answers(f1: Batch) -> None:
    ones = torch.ones(f1.num_tokens, dtype=torch.float64)
    batch = f1.with_token(behaviour_logp=f1.token["old_logp"], old_entropy=ones)
    logp = batch.token["behaviour_logp"][f1.loss_mask]
    scores = logp.exp() * (1 + logp)
    assert float(scores.mean()) == pytest.approx(0.101795, abs=1e-5)
    assert float(scores.std(correction=0)) == pytest.approx(0.266731, abs=1e-5)
    assert torch.equal(clip_b(batch), f1.loss_mask)
    dropped = (f1.loss_mask & ~clip_b(batch, mu=0.7)).nonzero().squeeze(1)
    assert (dropped - f1.offsets[2] - 1).tolist() == [0, 2]  # tokens 0 and 2 of row 2
    good = batch.with_sequence(advantages=batch.sequence["advantages"].abs())
    assert torch.equal(clip_b(good, mu=0.7), f1.loss_mask)
    level = batch.with_token(behaviour_logp=torch.full_like(ones, -1.0))
    assert torch.equal(clip_b(level, mu=0.0), f1.loss_mask)


def test_balance_leaves_as_many_bad_samples_as_good_ones() -> None:
    batch = samples([1, -1, -1, -1, 1, 1, -1, 0, -1, -1], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2], [2] * 10)
    seen = set()
    for key in range(20):
        kept = balance(batch.with_sequence(key=torch.arange(10) * 7919 + key))
        rows = kept.view(10, 2)
        assert torch.equal(rows[:, 0], rows[:, 1])
        assert rows[:, 0].tolist()[4:] == [True] * 4 + [False] * 2
        assert int(rows[1:4, 0].sum()) == 1
        assert bool(rows[0, 0])
        seen.add(int(rows[1:4, 0].int().argmax()))
    assert seen == {0, 1, 2}


# --- overlong and positives --------------------------------------------------------------------------------------------


def test_overlong_takes_truncated_sequences_out_of_the_loss_only(f1: Batch) -> None:
    kept = overlong(f1)
    assert torch.equal(kept, f1.action_mask & (f1.sequence_ids != 3))
    assert int(f1.loss_mask.sum()) == int(f1.action_mask.sum()) == 13


def test_overlong_gives_the_worked_loss_over_the_remaining_tokens(f1: Batch) -> None:
    ratio = torch.exp(f1.token["new"] - f1.token["old_logp"])
    advantage = f1.sequence["advantages"][f1.sequence_ids]
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))[overlong(f1)]
    assert loss.numel() == 9
    assert float(loss.mean()) == pytest.approx(0.358428, abs=1e-5)


def test_void_turns_take_their_trajectory_out_of_the_loss_only(f1: Batch) -> None:
    """The worked example's second sample has a void turn: the tokens of the other three stay."""
    assert torch.equal(void_turns(f1), f1.action_mask & (f1.sequence_ids != 1))
    assert int(void_turns(f1).sum()) == 11
    assert int(f1.loss_mask.sum()) == 13
    others = {name: column for name, column in f1.sequence.items() if name != "void_turns"}
    with pytest.raises(UserError, match="needs an environment that counts void turns"):
        void_turns(replace(f1, sequence=others))


def test_positives_only_keeps_rewards_above_zero(f1: Batch) -> None:
    batch = f1.with_sequence(reward=torch.tensor([1.0, -1.0, 0.0, 1.0], dtype=torch.float64))
    assert torch.equal(positives_only(batch), f1.loss_mask & ((f1.sequence_ids == 0) | (f1.sequence_ids == 3)))


# --- cppo --------------------------------------------------------------------------------------------------------------

ORACLE = [1.2, -0.3, 0.1, -1.0, 0.3, -1.4, 0.05, 1.05]


def test_cppo_keeps_the_largest_advantages_of_the_worked_group() -> None:
    assert cppo(samples(ORACLE, [4] * 8), prune=0.5).nonzero().squeeze(1).tolist() == [0, 3, 5, 7]


def test_cppo_is_per_group_wherever_the_samples_stand() -> None:
    batch = samples([0.1, 9.0, 0.2, 8.0, 0.3, 7.0], [5, -1, 5, -1, 5, -1])
    assert cppo(batch, prune=0.6).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize(("prune", "kept"), [(0.0, 20), (0.05, 19), (0.9, 2), (0.95, 1), (0.99, 1)])
def test_cppo_keeps_floor_of_the_rest_and_at_least_one(prune: float, kept: int) -> None:
    batch = samples([float(i) for i in range(20)], [0] * 20)
    assert cppo(batch, prune=prune).nonzero().squeeze(1).tolist() == list(range(20 - kept, 20))


def test_of_equal_advantages_the_earlier_sample_stays() -> None:
    assert cppo(samples([1.0, -1.0, 1.0, -1.0], [0] * 4)).tolist() == [True, True, False, False]
    late_id_first = samples([1.0, -1.0], [0, 0]).with_sequence(trajectory_ids=torch.tensor([9, 3]))
    assert cppo(late_id_first).tolist() == [True, False]


def test_a_group_of_one_and_a_constant_group_keep_a_sample() -> None:
    assert cppo(samples([0.0, 0.0, 0.0], [1, 2, 2]), prune=0.9).tolist() == [True, True, False]


def test_cppo_takes_the_mean_size_of_advantages_per_token() -> None:
    batch = samples([0.0, 0.0], [0, 0], lengths=[2, 3])
    per_token = torch.tensor([1.0, -1.0, 0.9, 0.9, 0.9], dtype=torch.float64)
    assert cppo(batch.with_token(advantages=per_token)).tolist() == [True, True, False, False, False]
    masked = torch.tensor([True, True, True, False, True])
    per_token = torch.tensor([1.0, -1.0, 0.9, 5.0, 0.9], dtype=torch.float64)
    assert cppo(batch.with_token(advantages=per_token, loss_mask=masked)).tolist() == [True, True, False, False, False]


def test_a_sample_already_out_of_the_loss_takes_no_place() -> None:
    batch = samples([3.0, 2.0, 1.0, 0.5], [0] * 4)
    batch = batch.with_token(loss_mask=torch.tensor([False, True, True, True]))
    assert cppo(batch).tolist() == [False, True, True, False]


def test_the_sequences_of_a_trajectory_stay_or_go_together() -> None:
    batch = samples([1.0, 1.0, 5.0, 2.0], [0] * 4).with_sequence(trajectory_ids=torch.tensor([0, 0, 1, 2]))
    assert cppo(batch, prune=0.5).tolist() == [False, False, True, False]
    assert cppo(batch, prune=0.3).tolist() == [False, False, True, True]


# --- probability mask --------------------------------------------------------------------------------------------------


def test_the_probability_mask_keeps_tokens_with_a_choice() -> None:
    probabilities = torch.tensor([0.95, 0.5, 0.99, 0.6, 0.97, 0.3], dtype=torch.float64)
    advantages = torch.tensor([0, 0.25, 0.25, -0.5, -0.5, 0.75], dtype=torch.float64)
    batch = samples([0.0], [0], lengths=[6]).with_token(old_logp=probabilities.log())
    mask = prob_mask(batch)
    assert mask.tolist() == [False, True, False, True, False, True]
    assert float(-advantages[mask].mean()) == pytest.approx(-0.166667, abs=1e-6)


def test_a_token_of_exactly_the_bound_leaves(f1: Batch) -> None:
    batch = samples([0.0], [0], lengths=[2]).with_token(old_logp=torch.tensor([math.log(0.9), math.log(0.8)]))
    assert prob_mask(batch).tolist() == [False, True]
    assert prob_mask(batch, below=0.75).tolist() == [False, False]
    assert torch.equal(prob_mask(f1, below=1.0), f1.loss_mask)  # NaN stands at the prompts


# --- all of them -------------------------------------------------------------------------------------------------------


@given(st.lists(st.booleans(), min_size=17, max_size=17), st.permutations(range(4)))
def test_no_filter_brings_a_token_back_or_depends_on_the_order_of_rows(
    sampled: Batch, mask: list[bool], order: list[int]
) -> None:
    entropy = torch.linspace(0, 2, 17, dtype=torch.float64)
    batch = sampled.with_token(loss_mask=sampled.loss_mask & torch.tensor(mask), old_entropy=entropy)
    advantages = torch.tensor([1.0, -0.9, -0.8, 0.6])  # no ties, which go to the earlier
    batch = batch.with_sequence(advantages=advantages, key=torch.tensor([5, 6, 7, 9]))
    index = torch.tensor(order)
    for name, function in SAMPLE_FILTERS.items():
        if name == "tree_edges":
            continue  # it reads the paths of trees: tests/rollout/test_tree_rollouts.py
        kept = function(batch)
        assert not bool((kept & ~batch.loss_mask).any())
        moved = batch.with_token(kept=kept).select(index)
        assert torch.equal(function(batch.select(index)), moved.token["kept"])


def test_a_users_filter_may_answer_for_sequences_or_for_tokens(f1: Batch) -> None:
    by_sequence = torch.tensor([True, False, True, False])
    assert torch.equal(loss_mask_from_plugin(by_sequence, f1, "f"), f1.loss_mask & (f1.sequence_ids % 2 == 0))
    by_token = torch.arange(f1.num_tokens) % 2 == 0
    assert torch.equal(loss_mask_from_plugin(by_token, f1, "f"), f1.loss_mask & by_token)


@pytest.mark.parametrize("result", [torch.ones(4), torch.ones(3, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)])
def test_a_filter_that_answers_something_else_is_named_with_what_was_expected(f1: Batch, result: Tensor) -> None:
    with pytest.raises(UserError, match=r"filter my\.py:f returned .*\[4\] or one per token \[17\]"):
        loss_mask_from_plugin(result, f1, "my.py:f")
