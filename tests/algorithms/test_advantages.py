"""Advantages: the worked numbers of ALGORITHMS.md 4.1 to 4.3, loops in float64, and the invariants of 18."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages import grpo, place_rewards, reinforce, sequence_rewards
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths, segment_sum

STDS: Any = ("group", "none", "batch")


def placed(batch: Batch) -> Batch:
    return batch.with_token(token_rewards=place_rewards(batch))


def with_rewards(rewards: Tensor, groups: list[int]) -> Batch:
    """One prompt token and one written token a sequence."""
    s = len(groups)
    mask = torch.tensor([False, True] * s)
    return placed(
        Batch(
            torch.arange(2 * s), torch.arange(s + 1) * 2, token={"action_mask": mask, "loss_mask": mask}
        ).with_sequence(reward=rewards, group_ids=torch.tensor(groups))
    )


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


# --- grpo ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", [0.866024, -0.866024, -0.866024, 0.866024, -0.707105, 0.707105, 0.5]),
        ("batch", [1.127466, -1.127466, -1.127466, 1.127466, -0.67648, 0.67648, 1.127466]),
        ("none", [0.5, -0.5, -0.5, 0.5, -0.3, 0.3, 0.5]),
    ],
)
def test_grpo_on_f2(f2: Batch, std: Any, expected: list[float]) -> None:
    close(grpo(placed(f2), std=std), expected)
    close(grpo(placed(f2), std=std, singleton="zero"), [*expected[:-1], 0.0])


def test_grpo_uses_the_sample_deviation_plus_eps(f2: Batch) -> None:
    half = 0.5 / (3**-0.5 + 0.1)
    pair = 0.3 / (0.18**0.5 + 0.1)
    close(grpo(placed(f2), eps=0.1), [half, -half, -half, half, -pair, pair, 0.5], atol=1e-12)


def test_defaults_of_grpo_are_group_deviation_1e_6_and_raw_singletons(f2: Batch) -> None:
    half, pair = 0.5 / (3**-0.5 + 1e-6), 0.3 / (0.18**0.5 + 1e-6)
    close(grpo(placed(f2)), [half, -half, -half, half, -pair, pair, 0.5], atol=1e-14)


@settings(max_examples=100, deadline=None)
@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 9))
def test_a_constant_group_has_exactly_no_advantage_in_float32(value: float, size: int) -> None:
    """The rounded mean of equal float32 rewards is not always that reward, and eps is as small as the difference."""
    rewards = torch.tensor([value] * size + [0.0, 1.0], dtype=torch.float32)
    batch = with_rewards(rewards, [5] * size + [2, 2])
    for std in STDS:
        advantages = grpo(batch, std=std)
        assert advantages[:size].tolist() == [0.0] * size, std
        assert advantages[-2:].abs().min() > 0


def test_a_constant_group_would_not_be_zero_by_arithmetic_alone() -> None:
    """The value that shows what the rule prevents: without it this group's advantage is far from 0."""
    rewards = torch.full((7,), 0.1, dtype=torch.float32)
    assert (rewards - segment_sum(rewards, torch.zeros(7, dtype=torch.int64), 1) / 7).abs().max() > 0
    assert grpo(with_rewards(rewards, [0] * 7)).tolist() == [0.0] * 7


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12), st.sampled_from(STDS))
def test_grpo_equals_a_loop_and_sums_to_zero_in_each_group(pairs: list[tuple[int, float]], std: Any) -> None:
    groups, values = [g for g, _ in pairs], [r for _, r in pairs]
    rewards = torch.tensor(values, dtype=torch.float64)
    got = grpo(with_rewards(rewards, groups), std=std)

    def deviation(xs: list[float]) -> float:
        mean = sum(xs) / len(xs)
        return float((sum((x - mean) ** 2 for x in xs) / max(len(xs) - 1, 1)) ** 0.5)

    for i, (group, reward) in enumerate(pairs):
        own = [r for g, r in pairs if g == group]
        baseline = sum(own) / len(own) if len(own) > 1 else 0.0
        divisor = 1.0
        if std == "batch" and max(values) > min(values):
            divisor = deviation(values) + 1e-6
        elif std == "group" and len(own) > 1:
            divisor = deviation(own) + 1e-6
        expected = 0.0 if len(own) > 1 and max(own) == min(own) else (reward - baseline) / divisor
        assert float(got[i]) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    for group in set(groups):
        if groups.count(group) > 1:
            total = sum(float(got[i]) for i in range(len(groups)) if groups[i] == group)
            assert total == pytest.approx(0, abs=1e-6 * max(1.0, float(got.abs().max())))


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(7)), st.sampled_from(STDS))
def test_advantages_travel_with_their_sequences(f2: Batch, order: list[int], std: Any) -> None:
    index = torch.tensor(order)
    shuffled = placed(f2.select(index))
    torch.testing.assert_close(grpo(shuffled, std=std), grpo(placed(f2), std=std)[index])
    per_token = placed(f2).with_token(advantages=reinforce(placed(f2), gamma=0.9)).select(index)
    torch.testing.assert_close(reinforce(shuffled, gamma=0.9), per_token.token["advantages"])


def test_group_statistics_do_not_depend_on_the_loss_mask(f2: Batch) -> None:
    emptied = f2.loss_mask & (f2.sequence_ids != 0)
    assert torch.equal(grpo(placed(f2.with_token(loss_mask=emptied))), grpo(placed(f2)))


def test_one_sequence_alone_has_its_raw_reward_whatever_the_deviation() -> None:
    batch = with_rewards(torch.tensor([0.25], dtype=torch.float64), [3])
    for std in STDS:
        assert grpo(batch, std=std).tolist() == [0.25]


def test_a_trajectory_of_two_sequences_counts_once_in_its_group() -> None:
    batch = with_rewards(torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64), [0, 0, 0])
    batch = batch.with_sequence(trajectory_ids=torch.tensor([0, 0, 1]))
    close(grpo(batch, std="none"), [0.5, 0.5, -0.5])


# --- reinforce ---------------------------------------------------------------------------------------------------------


def test_reinforce_on_f1(f1: Batch) -> None:
    got = reinforce(f1, gamma=0.9)
    close(got[f1.action_mask], [0.729, 0.81, 0.9, 1, 0, 0, 0, 0, 0, 0.729, 0.81, 0.9, 1])
    assert got[~f1.action_mask].tolist() == [0.0] * 4


def test_reinforce_without_options_is_the_whole_later_reward(f1: Batch) -> None:
    close(reinforce(f1)[f1.action_mask], [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1], atol=0)


def test_the_baseline_is_taken_off_written_tokens_only(f1: Batch) -> None:
    got = reinforce(f1, gamma=0.9, baseline=0.25)
    close(got[f1.action_mask][:6], [0.479, 0.56, 0.65, 0.75, -0.25, -0.25])
    assert got[~f1.action_mask].tolist() == [0.0] * 4


def test_observation_tokens_take_no_discount_step(f1: Batch) -> None:
    """prompt, w, tool, tool, w, w with the reward at the end: the same returns as w, w, w."""
    mask = torch.tensor([False, True, False, False, True, True])
    rewards = torch.tensor([0, 0, 0, 0, 0, 1.0], dtype=torch.float64)
    batch = Batch(torch.arange(6), torch.tensor([0, 6]), token={"action_mask": mask, "token_rewards": rewards})
    close(reinforce(batch, gamma=0.9), [0, 0.81, 0, 0, 0.9, 1])


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(-3, 3)), max_size=9), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_returns_equal_the_recursion_over_tokens(rows: list[list[tuple[bool, float]]], gamma: float) -> None:
    flat = [pair for row in rows for pair in row]
    batch = Batch(
        torch.arange(len(flat)),
        offsets_from_lengths(torch.tensor([len(row) for row in rows])),
        token={
            "action_mask": torch.tensor([m for m, _ in flat], dtype=torch.bool),
            "token_rewards": torch.tensor([r for _, r in flat], dtype=torch.float64),
        },
    )
    expected: list[float] = []
    for row in rows:
        running, backwards = 0.0, []
        for written, reward in reversed(row):
            running = reward + gamma * running if written else running
            backwards.append(running if written else 0.0)
        expected += reversed(backwards)
    close(reinforce(batch, gamma=gamma), expected, atol=1e-9)


# --- where rewards stand -----------------------------------------------------------------------------------------------


def test_an_outcome_reward_stands_on_the_last_token_the_model_wrote() -> None:
    mask = torch.tensor([False, True, True, False, False, True, False, False])
    batch = Batch(torch.arange(8), torch.tensor([0, 4, 8]), token={"action_mask": mask}).with_sequence(
        reward=torch.tensor([0.5, -2.0], dtype=torch.float64)
    )
    assert place_rewards(batch).tolist() == [0, 0, 0.5, 0, 0, -2.0, 0, 0]
    assert sequence_rewards(placed(batch)).tolist() == [0.5, -2.0]


@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 4, 4]])
def test_a_sequence_the_model_wrote_nothing_in_has_no_place_for_a_reward(offsets: list[int]) -> None:
    mask = torch.tensor([False, True, False, False])
    batch = Batch(torch.arange(4), torch.tensor(offsets), token={"action_mask": mask}).with_sequence(
        reward=torch.ones(2)
    )
    with pytest.raises(ValueError, match="sequence 1 has no token the model wrote"):
        place_rewards(batch)
