"""Reward parts, process rewards, preferences: ALGORITHMS.md 4.13, 6.1, 6.2, 16."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.group_relative import win_rate
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import gdpo, prime_rloo, softmean


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, doubles(expected), atol=atol, rtol=0)


def one_token_each(**columns: Tensor) -> Batch:
    s = next(iter(columns.values())).numel()
    ones = torch.ones(s, dtype=torch.bool)
    return Batch(torch.arange(s), torch.arange(s + 1), {"action_mask": ones, "loss_mask": ones}, columns)


# --- gdpo --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def parts(f1_outcome: Batch) -> Batch:
    columns = {"part/right": doubles([1, 0, 0, 1]), "part/short": doubles([0.1, 0.3, 0.2, 0.4])}
    return f1_outcome.with_sequence(group_ids=torch.zeros(4, dtype=torch.int64), **columns)


def whitened(values: list[float], ddof: int = 1) -> list[float]:
    tokens = doubles([x for x, n in zip(values, [4, 2, 3, 4], strict=True) for _ in range(n)])
    return ((doubles(values) - tokens.mean()) / (tokens.var(correction=ddof) + 1e-8).sqrt()).tolist()


def test_gdpo_on_the_worked_example(parts: Batch) -> None:
    total = [-0.295862, -0.478729, -1.253319, 2.02791]
    close(gdpo(parts), [-0.347321, -0.483638, -1.061056, 1.384932], atol=1e-5)
    close(gdpo(parts), whitened(total), atol=1e-5)
    close(gdpo(parts, ddof=0), whitened(total, 0), atol=1e-5)


def test_gdpo_options_act_on_each_part(parts: Batch) -> None:
    close(gdpo(parts, std="none"), whitened([0.35, -0.45, -0.55, 0.65]))
    close(gdpo(parts, std="none", weights={"short": 2.0}), whitened([0.2, -0.4, -0.6, 0.8]))
    half, unit = 0.5 / (3**-0.5 + 0.1), 1 / ((0.05 / 3) ** 0.5 + 0.1)
    close(
        gdpo(parts, eps=0.1),
        whitened([half - 0.15 * unit, -half + 0.05 * unit, -half - 0.05 * unit, half + 0.15 * unit]),
    )


def test_a_sample_without_a_part_adds_nothing_and_stays_out_of_its_statistics(parts: Batch) -> None:
    some = parts.with_sequence(**{"part/short": doubles([0.1, 0.3, float("nan"), 0.5])})
    close(gdpo(some, std="none"), whitened([0.5 - 0.2, -0.5, -0.5, 0.5 + 0.2]))


def test_gdpo_names_a_weight_without_a_part_and_a_batch_without_parts(parts: Batch, f1_outcome: Batch) -> None:
    with pytest.raises(UserError, match="'shrt', which is no reward part; did you mean 'short'"):
        gdpo(parts, weights={"shrt": 1.0})
    with pytest.raises(UserError, match="no reward of this batch has parts"):
        gdpo(f1_outcome)


def test_a_trajectory_of_two_sequences_counts_once_in_every_part(parts: Batch) -> None:
    once = parts.with_sequence(
        trajectory_ids=torch.tensor([0, 0, 1, 2]),
        **{"part/right": doubles([1, 1, 0, 0.5]), "part/short": doubles([0] * 4)},
    )
    close(gdpo(once, std="none"), whitened([0.5, 0.5, -0.5, 0]))


# --- prime -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def prime(f1_outcome: Batch) -> Batch:
    q = doubles([0.4, -0.2, 0.6, 0.2, -0.3, 0.1, 0.2, 0.5, -0.4, -0.6, 0.1, 0.2, 0.3])
    process = torch.full((f1_outcome.num_tokens,), torch.nan, dtype=torch.float64)
    process[f1_outcome.action_mask] = 0.05 * q
    return f1_outcome.with_token(process_rewards=process).with_sequence(group_ids=torch.zeros(4, dtype=torch.int64))


PLAIN = [0.716667, 0.696667, 0.706667, 0.676667, -0.688333, -0.6675]
PLAIN += [-0.659167, -0.666667, -0.689167, 0.65, 0.684167, 0.683333, 0.6775]


def test_prime_on_the_worked_example(prime: Batch) -> None:
    mask = prime.action_mask
    plain = prime_rloo(prime, process_coef=1.0, outcome_coef=1.0, norm="none", whiten=False)
    close(plain[mask], PLAIN)
    assert plain[~mask].tolist() == [0.0] * 4
    white = prime_rloo(prime, process_coef=1.0, outcome_coef=1.0, norm="none")
    close(white[mask][:4], [0.803139, 0.77412, 0.788629, 0.745101])
    population = prime_rloo(prime, process_coef=1.0, outcome_coef=1.0, norm="none", ddof=0)
    torch.testing.assert_close(population, white * (13 / 12) ** 0.5)


def test_prime_weighs_its_two_parts_and_normalises_the_dense_one(prime: Batch) -> None:
    mask, outcome = prime.action_mask, doubles([2 / 3] * 4 + [-2 / 3] * 5 + [2 / 3] * 4)
    dense = doubles(PLAIN) - outcome
    got = prime_rloo(prime, process_coef=2.0, outcome_coef=3.0, norm="none", whiten=False)[mask]
    close(got, (2 * dense + 3 * outcome).tolist(), atol=1e-5)
    got = prime_rloo(prime, whiten=False)[mask]  # the largest return of the dense part is 0.05
    close(got, (5 * dense / (0.05 + 1e-6) + 5 * outcome).tolist(), atol=1e-3)


def test_prime_has_no_baseline_for_one_sample(prime: Batch) -> None:
    alone = prime.select(torch.tensor([1]))
    got = prime_rloo(alone, process_coef=1.0, outcome_coef=1.0, norm="none", whiten=False)
    close(got, [0, -0.01, 0.005])


# --- preferences -------------------------------------------------------------------------------------------------------


def test_softmean_is_the_baseline_of_kimi_and_of_sppo() -> None:
    batch = one_token_each(reward=doubles([1, 0, 0, 1, 9]), group_ids=torch.tensor([0, 0, 0, 0, 5]))
    close(softmean(batch), [1 - 0.620115, -0.620115, -0.620115, 1 - 0.620115, 0])
    close(softmean(batch, beta=2.0), [1 - 0.71689, -0.71689, -0.71689, 1 - 0.71689, 0])


def test_softmean_of_large_rewards_does_not_overflow() -> None:
    batch = one_token_each(reward=doubles([1e4, 1e4 - 1]), group_ids=torch.tensor([0, 0]))
    close(softmean(batch, beta=1.0), [0.379885, -0.620115])


def test_win_rate_counts_ties_as_half() -> None:
    batch = one_token_each(reward=doubles([1, 0, 0, 2, 7]), group_ids=torch.tensor([4, 4, 4, 4, 1]))
    close(win_rate(batch), [2 / 3 - 0.5, 1 / 6 - 0.5, 1 / 6 - 0.5, 0.5, 0])


def test_a_given_win_probability_is_used_as_it_is() -> None:
    batch = one_token_each(reward=doubles([1, 0]), group_ids=torch.tensor([0, 0]))
    close(win_rate(batch.with_sequence(win_probability=doubles([0.9, 0.2]))), [0.4, -0.3])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 3)), min_size=1, max_size=12))
def test_win_rate_equals_a_loop_over_pairs(rows: list[tuple[int, int]]) -> None:
    batch = one_token_each(reward=doubles([float(r) for _, r in rows]), group_ids=torch.tensor([g for g, _ in rows]))
    expected = []
    for i, (group, reward) in enumerate(rows):
        wins = [
            1.0 if reward > r else 0.5 if reward == r else 0.0 for j, (g, r) in enumerate(rows) if g == group and j != i
        ]
        expected.append(sum(wins) / len(wins) - 0.5 if wins else 0.0)
    close(win_rate(batch), expected, atol=1e-12)
