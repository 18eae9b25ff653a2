"""Filters: which groups and samples are used (ALGORITHMS.md 11.1 and 11.3), and what a user's filter may answer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.filters import loss_mask_from, overlong, zero_signal
from burnish.config.errors import UserError
from burnish.core.batch import Batch


def grouped(rewards: list[float], groups: list[int]) -> Batch:
    s = len(groups)
    return Batch(torch.arange(s), torch.arange(s + 1)).with_sequence(
        reward=torch.tensor(rewards, dtype=torch.float64), group_ids=torch.tensor(groups)
    )


def test_groups_whose_rewards_are_all_equal_are_dropped() -> None:
    rewards = [1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 1, 1, 0, 0, 0, 1]
    groups = [9] * 4 + [4] * 4 + [6] * 4 + [1] * 4
    assert zero_signal(grouped(rewards, groups)).tolist() == [False] * 8 + [True] * 8


def test_a_group_of_one_is_kept() -> None:
    assert zero_signal(grouped([0.5, 1, 1], [3, 2, 2])).tolist() == [True, False, False]


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=12))
def test_kept_groups_have_a_deviation_or_one_member_wherever_their_samples_stand(
    pairs: list[tuple[int, float]],
) -> None:
    keep = zero_signal(grouped([r for _, r in pairs], [g for g, _ in pairs])).tolist()
    for i, (group, _) in enumerate(pairs):
        own = [r for g, r in pairs if g == group]
        assert keep[i] == (len(set(own)) > 1 or len(own) == 1)


def test_overlong_takes_truncated_sequences_out_of_the_loss_only(f1: Batch) -> None:
    kept = overlong(f1)
    assert torch.equal(kept, f1.action_mask & (f1.sequence_ids != 3))
    assert int(f1.loss_mask.sum()) == int(f1.action_mask.sum()) == 13


def test_overlong_never_brings_a_token_back(f1: Batch) -> None:
    masked = f1.with_token(loss_mask=f1.loss_mask & (f1.sequence_ids != 0))
    assert torch.equal(overlong(masked), f1.action_mask & (f1.sequence_ids != 3) & (f1.sequence_ids != 0))


def test_a_users_filter_may_answer_for_sequences_or_for_tokens(f1: Batch) -> None:
    by_sequence = torch.tensor([True, False, True, False])
    assert torch.equal(loss_mask_from(by_sequence, f1, "f"), f1.loss_mask & (f1.sequence_ids % 2 == 0))
    by_token = torch.arange(f1.num_tokens) % 2 == 0
    assert torch.equal(loss_mask_from(by_token, f1, "f"), f1.loss_mask & by_token)


@pytest.mark.parametrize("result", [torch.ones(4), torch.ones(3, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)])
def test_a_filter_that_answers_something_else_is_named_with_what_was_expected(f1: Batch, result: Tensor) -> None:
    with pytest.raises(UserError, match=r"filter my\.py:f returned .*\[4\] or one a token \[17\]"):
        loss_mask_from(result, f1, "my.py:f")
