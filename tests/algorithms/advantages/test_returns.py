"""Advantages from a sample's own rewards: ALGORITHMS.md 4.1, 4.5, 4.6, and where rewards are placed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.returns import discounted_returns, remax, zero_advantages
from burnish.algorithms.batch_columns import place_rewards, sequence_rewards
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import ADVANTAGES, reinforce, reinforce_plus_plus

RETURNS_KL = [0.99, 1, 1.01, 0.99, 0.01, 0.02, 0.03, 0, 0.01, 1.02, 1, 1.01, 1.01]


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def written(batch: Batch, got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    """The values at written tokens, and 0 at all others."""
    close(got[batch.action_mask], expected, atol)
    assert (got[~batch.action_mask] == 0).all()


# --- reinforce ---------------------------------------------------------------------------------------------------------


def test_reinforce_on_f1(f1: Batch, f1_outcome: Batch) -> None:
    expected = [0.729, 0.81, 0.9, 1, 0, 0, 0, 0, 0, 0.729, 0.81, 0.9, 1]
    written(f1, reinforce(f1, gamma=0.9), expected)
    written(f1, reinforce(f1_outcome, gamma=0.9), expected)


def test_reinforce_without_options_is_the_whole_later_reward(f1: Batch, f1_outcome: Batch) -> None:
    written(f1, reinforce(f1), [1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1], atol=0)
    assert reinforce(f1_outcome).tolist() == [1, 0, 0, 1]


def test_the_baseline_is_taken_off_written_tokens_only(f1: Batch, f1_outcome: Batch) -> None:
    got = reinforce(f1, gamma=0.9, baseline=0.25)
    close(got[f1.action_mask][:6], [0.479, 0.56, 0.65, 0.75, -0.25, -0.25])
    assert got[~f1.action_mask].tolist() == [0.0] * 4
    assert reinforce(f1_outcome, baseline=0.25).tolist() == [0.75, -0.25, -0.25, 0.75]


def test_observation_tokens_take_no_discount_step() -> None:
    """prompt, w, tool, tool, w, w with the reward at the end: the same returns as w, w, w."""
    mask = torch.tensor([False, True, False, False, True, True])
    rewards = torch.tensor([0, 0, 0, 0, 0, 1.0], dtype=torch.float64)
    batch = Batch(torch.arange(6), torch.tensor([0, 6]), token={"action_mask": mask, "token_rewards": rewards})
    close(reinforce(batch, gamma=0.9), [0, 0.81, 0, 0, 0.9, 1])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.floats(-3, 3)), max_size=9), min_size=1, max_size=4),
    st.floats(0, 1),
)
def test_returns_equal_the_recursion_over_tokens(rows: list[list[tuple[bool, float]]], gamma: float) -> None:
    rows = [[(m, r if m else 0.0) for m, r in row] for row in rows]
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
        for is_written, reward in reversed(row):
            running = reward + gamma * running if is_written else running
            backwards.append(running if is_written else 0.0)
        expected += reversed(backwards)
    close(reinforce(batch, gamma=gamma), expected, atol=1e-9)
    dirty = torch.where(batch.action_mask, batch.token["token_rewards"], torch.nan)
    close(discounted_returns(dirty, batch.action_mask, batch.offsets, gamma), expected, atol=1e-9)


# --- remax, reinforce++ ------------------------------------------------------------------------------------------------


def test_remax_on_f1(f1_kl: Batch, f1_outcome: Batch) -> None:
    greedy = torch.tensor([1.0, 1, 0, 0], dtype=torch.float64)
    expected = [-0.01, 0, 0.01, -0.01, -0.99, -0.98, 0.03, 0, 0.01, 1.02, 1, 1.01, 1.01]
    written(f1_kl, remax(f1_kl.with_sequence(greedy_reward=greedy)), expected)
    assert remax(f1_outcome.with_sequence(greedy_reward=greedy)).tolist() == [0, -1, 0, 1]


def test_reinforce_plus_plus_on_f1(f1_kl: Batch) -> None:
    expected = [0.73196, 0.751909, 0.771858, 0.73196, -1.223003, -1.203055]
    expected += [-1.183106, -1.242952, -1.223003, 0.791806, 0.751909, 0.771858, 0.771858]
    written(f1_kl, reinforce(f1_kl), RETURNS_KL)
    written(f1_kl, reinforce_plus_plus(f1_kl), expected)
    population = reinforce_plus_plus(f1_kl, ddof=0)[f1_kl.action_mask]
    close(population[:4], [0.761849, 0.782612, 0.803375, 0.761849])
    assert float(population.mean()) == pytest.approx(0, abs=1e-12)
    assert float(population.var(correction=0)) == pytest.approx(1, abs=1e-6)


def test_reinforce_plus_plus_on_outcomes_is_the_same_a_sequence(f1: Batch, f1_outcome: Batch) -> None:
    for ddof in (0, 1):
        per_token = reinforce_plus_plus(f1, ddof=ddof)
        per_sequence = reinforce_plus_plus(f1_outcome, ddof=ddof)
        assert per_sequence.shape == (4,)
        torch.testing.assert_close(per_sequence[f1.sequence_ids][f1.action_mask], per_token[f1.action_mask])
    discounted = reinforce_plus_plus(f1_outcome, gamma=0.9)
    torch.testing.assert_close(discounted, reinforce_plus_plus(f1, gamma=0.9))
    assert len({round(float(x), 9) for x in discounted}) > 4


def test_no_advantage_is_zero_a_sequence(f1: Batch) -> None:
    assert zero_advantages(f1).tolist() == [0, 0, 0, 0]


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)))
def test_returns_travel_with_their_sequences(f1_kl: Batch, order: list[int]) -> None:
    index = torch.tensor(order)
    batch = f1_kl.with_sequence(greedy_reward=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))
    for name in ("reinforce", "remax", "reinforce_plus_plus"):
        moved = batch.with_token(advantages=ADVANTAGES[name](batch)).select(index)
        torch.testing.assert_close(ADVANTAGES[name](batch.select(index)), moved.token["advantages"])


# --- where rewards are placed -----------------------------------------------------------------------------------------------


def test_an_outcome_reward_stands_on_the_last_token_the_model_wrote() -> None:
    mask = torch.tensor([False, True, True, False, False, True, False, False])
    batch = Batch(torch.arange(8), torch.tensor([0, 4, 8]), token={"action_mask": mask}).with_sequence(
        reward=torch.tensor([0.5, -2.0], dtype=torch.float64)
    )
    assert place_rewards(batch).tolist() == [0, 0, 0.5, 0, 0, -2.0, 0, 0]
    assert sequence_rewards(batch.with_token(token_rewards=place_rewards(batch))).tolist() == [0.5, -2.0]
    all_written = batch.with_token(action_mask=torch.ones(8, dtype=torch.bool))
    assert place_rewards(all_written).tolist() == [0, 0, 0, 0.5, 0, 0, 0, -2.0]


def test_without_token_rewards_the_outcome_is_the_reward_itself(f1_outcome: Batch) -> None:
    assert sequence_rewards(f1_outcome) is f1_outcome.sequence["reward"]


@pytest.mark.parametrize("offsets", [[0, 2, 4], [0, 4, 4]])
def test_a_sequence_the_model_wrote_nothing_in_has_no_place_for_a_reward(offsets: list[int]) -> None:
    mask = torch.tensor([False, True, False, False])
    batch = Batch(torch.arange(4), torch.tensor(offsets), token={"action_mask": mask}).with_sequence(
        reward=torch.ones(2)
    )
    with pytest.raises(ValueError, match="sequence 1 has no token the model wrote"):
        place_rewards(batch)
    with pytest.raises(ValueError, match="sequence 1 has no token the model wrote"):
        reinforce(batch, gamma=0.9)


@pytest.mark.parametrize("value", [0.5, float("nan")])
@pytest.mark.parametrize("name", ["grpo", "reinforce", "reinforce_plus_plus", "gae"])
def test_a_reward_on_a_token_the_model_did_not_write_is_refused(f1: Batch, name: str, value: float) -> None:
    rewards = f1.token["token_rewards"].clone()
    rewards[8] = value  # the prompt token of the third sequence
    batch = f1.with_token(token_rewards=rewards, values=torch.zeros(f1.num_tokens))
    with pytest.raises(ValueError, match="token 0 of sequence 2 has a reward of"):
        ADVANTAGES[name](batch)
