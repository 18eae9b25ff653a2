"""Advantages relative to a group: ALGORITHMS.md 4.2 to 4.4, 4.7 to 4.9, 4.17, 11.6, loops in float64, invariants of 18."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.group_relative import reinforce_rej
from burnish.algorithms.advantages.returns import raft
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import segment_sum
from tests.algorithms.functions_with_defaults import (
    ADVANTAGES,
    gpg,
    grpo,
    grpo_passk,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)

STDS: Any = ("group", "none", "batch")
RELATIVE: list[Callable[..., Tensor]] = [grpo, rloo, opo, gpg]
GROUP_NAMES = ("grpo", "rloo", "opo", "gpg", "reinforce_rej", "reinforce_plus_plus_baseline", "softmean", "win_rate")


def with_rewards(rewards: Tensor | list[float], groups: list[int], lengths: list[int] | None = None) -> Batch:
    """One prompt token and the written tokens of each sequence."""
    lengths = lengths or [1] * len(groups)
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    offsets = torch.tensor([0, *torch.tensor([n + 1 for n in lengths]).cumsum(0).tolist()])
    reward = rewards if isinstance(rewards, Tensor) else torch.tensor(rewards, dtype=torch.float64)
    return Batch(torch.arange(mask.numel()), offsets, token={"action_mask": mask, "loss_mask": mask}).with_sequence(
        reward=reward, group_ids=torch.tensor(groups)
    )


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


# --- worked numbers ----------------------------------------------------------------------------------------------------


def test_grpo_on_f2_with_the_population_deviation(f2: Batch) -> None:
    close(grpo(f2, ddof=0), [0.999998, -0.999998, -0.999998, 0.999998, -0.999997, 0.999997, 0.5])


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", [0.866024, -0.866024, -0.866024, 0.866024, -0.707105, 0.707105, 0.5]),
        ("batch", [1.127466, -1.127466, -1.127466, 1.127466, -0.67648, 0.67648, 1.127466]),
        ("none", [0.5, -0.5, -0.5, 0.5, -0.3, 0.3, 0.5]),
    ],
)
def test_grpo_on_f2(f2: Batch, std: Any, expected: list[float]) -> None:
    close(grpo(f2, std=std), expected)
    close(grpo(f2, std=std, singleton="zero"), [*expected[:-1], 0.0])


def test_grpo_uses_the_sample_deviation_plus_eps(f2: Batch) -> None:
    half = 0.5 / (3**-0.5 + 0.1)
    pair = 0.3 / (0.18**0.5 + 0.1)
    close(grpo(f2, eps=0.1), [half, -half, -half, half, -pair, pair, 0.5], atol=1e-12)


def test_defaults_of_grpo_are_group_deviation_1e_6_and_raw_singletons(f2: Batch) -> None:
    half, pair = 0.5 / (3**-0.5 + 1e-6), 0.3 / (0.18**0.5 + 1e-6)
    close(grpo(f2), [half, -half, -half, half, -pair, pair, 0.5], atol=1e-14)


def test_rloo_on_f2(f2: Batch) -> None:
    expected = [0.666667, -0.666667, -0.666667, 0.666667, -0.6, 0.6, 0.5]
    close(rloo(f2), expected)
    close(rloo(f2, singleton="zero"), [*expected[:-1], 0.0])


def test_opo_on_f2(f2: Batch) -> None:
    expected = [0.416667, -0.583333, -0.583333, 0.416667, -0.4, 0.2, 0.5]
    close(opo(f2), expected)
    close(opo(f2, singleton="zero"), [*expected[:-1], 0.0])


def test_gpg_scales_up_for_groups_without_signal() -> None:
    rewards = [1.0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0]
    batch = with_rewards(rewards, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4)
    close(gpg(batch), [1, -1, -1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1.5, -0.5, -0.5, -0.5])
    wide, narrow = 1 / (3**-0.5 + 0.1), 0.5 / (0.5 + 0.1)
    close(
        gpg(batch, normalise="std", eps=0.1),
        [wide, -wide, -wide, wide, 0, 0, 0, 0, 0, 0, 0, 0, 3 * narrow, -narrow, -narrow, -narrow],
    )


def test_gpg_without_any_signal_is_zero_and_not_a_division_by_zero() -> None:
    assert gpg(with_rewards([1.0, 1, 0, 0], [0, 0, 1, 1])).tolist() == [0, 0, 0, 0]


def test_gpg_counts_a_group_of_one_among_those_with_signal() -> None:
    close(gpg(with_rewards([0.5, 1, 1], [0, 1, 1])), [1.5, 0, 0])


def test_grpo_passk_on_f2(f2: Batch) -> None:
    pairs = f2.select(torch.arange(6))
    close(grpo_passk(pairs), [0, 0, 0, 0, 0, 1.41421], atol=1e-5)
    close(grpo_passk(pairs, std="none"), [0, 0, 0, 0, 0, 0.6])
    close(grpo_passk(pairs, eps=0.1), [0, 0, 0, 0, 0, 0.6 / (0.18**0.5 + 0.1)])


def test_grpo_passk_refuses_a_group_of_one(f2: Batch) -> None:
    with pytest.raises(UserError, match="a prompt has only one"):
        grpo_passk(f2)


def test_reinforce_plus_plus_baseline_on_f1(f1: Batch, f1_outcome: Batch) -> None:
    expected = [0.759555, -1.215287, -1.215287, 0.759555]
    close(reinforce_plus_plus_baseline(f1), expected)
    close(reinforce_plus_plus_baseline(f1_outcome), expected)
    more = (13 / 12) ** 0.5
    close(reinforce_plus_plus_baseline(f1, ddof=0), [x * more for x in expected])


def test_reinforce_plus_plus_baseline_whitens_what_a_group_of_one_has() -> None:
    batch = with_rewards([1.0, 0.0, 2.0], [0, 0, 1], [1, 1, 2])
    for singleton, alone in (("raw", 2.0), ("zero", 0.0)):
        tokens = torch.tensor([0.5, -0.5, alone, alone], dtype=torch.float64)
        expected = (tokens - tokens.mean()) / (tokens.var() + 1e-8).sqrt()
        got = reinforce_plus_plus_baseline(batch, singleton=singleton)
        close(got, expected[:3].tolist(), atol=1e-12)


def test_one_written_token_in_all_is_centred_but_not_scaled() -> None:
    assert reinforce_plus_plus_baseline(with_rewards([0.75], [0])).tolist() == [0.0]


def test_raft_and_reinforce_rej() -> None:
    batch = with_rewards([1.0, -1, -1, 1, 1, 1, 1, 1, -2], [0] * 4 + [1] * 4 + [2])
    assert reinforce_rej(batch).tolist() == [1, -1, -1, 1, 0, 0, 0, 0, -2]
    assert raft(batch).tolist() == [1, 0, 0, 1, 1, 1, 1, 1, 0]


# --- invariants --------------------------------------------------------------------------------------------------------


@settings(max_examples=24, deadline=None)
@given(st.floats(-1e3, 1e3, width=32), st.integers(2, 9))
def test_a_constant_group_has_exactly_no_advantage_in_float32(value: float, size: int) -> None:
    """The rounded mean of equal float32 rewards is not always that reward, and eps is as small as the difference."""
    rewards = torch.tensor([value] * size + [0.0, 1.0], dtype=torch.float32)
    lengths = [1 + k % 3 for k in range(size + 2)]
    batch = with_rewards(rewards, [5] * size + [2, 2], lengths)
    for name in ("grpo", "rloo", "opo", "gpg", "reinforce_rej", "softmean", "win_rate", "grpo_passk"):
        assert ADVANTAGES[name](batch)[:size].tolist() == [0.0] * size, name
    for std in STDS:
        advantages = grpo(batch, std=std)
        assert advantages[:size].tolist() == [0.0] * size, std
        assert advantages[-2:].abs().min() > 0


def test_a_constant_group_would_not_be_zero_by_arithmetic_alone() -> None:
    """The value that shows what the rule prevents: without it this group's advantage is far from 0."""
    rewards = torch.full((7,), 0.1, dtype=torch.float32)
    assert (rewards - segment_sum(rewards, torch.zeros(7, dtype=torch.int64), 1) / 7).abs().max() > 0
    assert grpo(with_rewards(rewards, [0] * 7)).tolist() == [0.0] * 7


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=12), st.sampled_from(STDS))
def test_grpo_equals_a_loop_and_sums_to_zero_in_each_group(pairs: list[tuple[int, float]], std: Any) -> None:
    groups, values = [g for g, _ in pairs], [r for _, r in pairs]
    got = grpo(with_rewards(values, groups), std=std)

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


@settings(max_examples=24, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5), st.integers(1, 9)), min_size=1, max_size=12))
def test_rloo_is_dr_grpo_enlarged_and_opo_balances_tokens(rows: list[tuple[int, float, int]]) -> None:
    groups, values, lengths = (list(column) for column in zip(*rows, strict=True))
    batch = with_rewards(values, groups, lengths)
    size = torch.tensor([groups.count(g) for g in groups], dtype=torch.float64)
    enlarged = grpo(batch, std="none") * torch.where(size > 1, size / (size - 1).clamp(min=1), 1)
    torch.testing.assert_close(rloo(batch), enlarged, atol=1e-9, rtol=1e-9)
    weighted = opo(batch) * torch.tensor(lengths)
    for group in {g for g in groups if groups.count(g) > 1}:
        assert float(weighted[torch.tensor(groups) == group].sum()) == pytest.approx(0, abs=1e-9)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(7)))
def test_advantages_travel_with_their_sequences(f2: Batch, order: list[int]) -> None:
    index = torch.tensor(order)
    shuffled = f2.select(index)
    for name in GROUP_NAMES:
        torch.testing.assert_close(ADVANTAGES[name](shuffled), ADVANTAGES[name](f2)[index])
    for std in STDS:
        torch.testing.assert_close(grpo(shuffled, std=std), grpo(f2, std=std)[index])


@pytest.mark.parametrize("name", [name for name in GROUP_NAMES if name != "reinforce_plus_plus_baseline"])
def test_group_statistics_do_not_depend_on_the_loss_mask(f2: Batch, name: str) -> None:
    emptied = f2.with_token(loss_mask=f2.loss_mask & (f2.sequence_ids != 0))
    assert torch.equal(ADVANTAGES[name](emptied), ADVANTAGES[name](f2))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_rejection_comes_before_whitening_and_after_the_group_baseline(f2: Batch, name: str) -> None:
    """Rejected tokens keep their place in the group's mean, but not in the mean and deviation of the tokens left."""
    gone = f2.sequence_ids == 0
    emptied = f2.with_token(loss_mask=f2.loss_mask & ~gone)
    values = f2.sequence["reward"]
    if name == "reinforce_plus_plus_baseline":
        groups = f2.sequence["group_ids"]
        alike = groups[:, None] == groups
        several = alike.sum(1) > 1
        values = torch.where(several, values - (values * alike).sum(1) / alike.sum(1), values)
    left = values[f2.sequence_ids][emptied.loss_mask]
    expected = (values - left.mean()) / (left.var() + 1e-8).sqrt()
    torch.testing.assert_close(ADVANTAGES[name](emptied), expected)


def test_rejected_tokens_do_not_count_where_values_differ_from_token_to_token(f2: Batch) -> None:
    random = torch.rand(f2.num_tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = f2.with_token(token_rewards=torch.where(f2.action_mask, random, 0.0))
    emptied = batch.with_token(loss_mask=batch.loss_mask & (random > 0.3))
    raw = torch.stack([batch.token["token_rewards"][i : int(stop)].sum() for i, stop in enumerate(ends(batch))])
    left = raw[emptied.loss_mask]
    expected = torch.where(f2.action_mask, (raw - left.mean()) / (left.var() + 1e-8).sqrt(), 0.0)
    torch.testing.assert_close(ADVANTAGES["reinforce_plus_plus"](emptied), expected)


def ends(batch: Batch) -> list[int]:
    """Where the sequence of each token ends."""
    return batch.offsets[1:][batch.sequence_ids].tolist()


def test_one_sequence_alone_has_its_raw_reward_whatever_the_deviation() -> None:
    batch = with_rewards([0.25], [3])
    for std in STDS:
        assert grpo(batch, std=std).tolist() == [0.25]
    for function in RELATIVE:
        assert function(batch).tolist() == [0.25]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [1, 1, -0.5, -0.5]),
        ("opo", [0.5, 0.5, -0.5, -0.5]),
        ("gpg", [2 / 3, 2 / 3, -1 / 3, -1 / 3]),
        ("win_rate", [0.5, 0.5, -0.25, -0.25]),
        ("grpo_passk", [3**0.5, 3**0.5, 0, 0]),
    ],
)
def test_a_trajectory_of_two_sequences_counts_once_in_its_group(name: str, expected: list[float]) -> None:
    batch = with_rewards([1.0, 1, 0, 0], [0] * 4, [1, 2, 1, 2])
    batch = batch.with_sequence(trajectory_ids=torch.tensor([9, 9, 4, 5]))
    close(ADVANTAGES[name](batch), expected, atol=1e-5)
    close(grpo(batch, std="none"), [2 / 3, 2 / 3, -1 / 3, -1 / 3])


def test_rewards_on_tokens_are_added_up_first(f1_kl: Batch) -> None:
    """The KL of section 3.2 is in them: totals 0.99, 0.01, 0.03, 1.02."""
    close(grpo(f1_kl, std="none"), [0.49, -0.49, -0.495, 0.495])
    close(raft(f1_kl.with_token(token_rewards=-f1_kl.token["token_rewards"])), [0, 0, 0, 0])
