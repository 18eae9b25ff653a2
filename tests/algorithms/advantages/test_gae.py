"""GAE and its variants: ALGORITHMS.md 4.10 to 4.12, a loop in float64, the invariants of 18."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.returns import action_returns, length_adaptive_lambda
from burnish.algorithms.batch_columns import action_tokens
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import gae

NAN = float("nan")


def batch_of(
    rows: list[list[tuple[bool, float, float]]], outcome: list[float] | None = None, dtype: torch.dtype = torch.float64
) -> Batch:
    """Rows of (written, reward, value); `values` is NaN outside `action_mask`."""
    flat = [cell for row in rows for cell in row]
    token = {
        "action_mask": torch.tensor([m for m, _, _ in flat], dtype=torch.bool),
        "values": torch.tensor([v if m else NAN for m, _, v in flat], dtype=dtype),
    }
    if outcome is None:
        token["token_rewards"] = torch.tensor([r if m else 0.0 for m, r, _ in flat], dtype=torch.float64)
    batch = Batch(torch.arange(len(flat)), offsets_from_lengths(torch.tensor([len(row) for row in rows])), token)
    return batch.with_sequence(reward=torch.tensor(outcome or [0.0] * len(rows), dtype=torch.float64))


def example(mask: tuple[int, ...] = (1, 1, 1, 1), outcome: bool = False, dtype: torch.dtype = torch.float64) -> Batch:
    """The data of 4.10 behind two prompt tokens."""
    cells = zip(mask, (0.0, 0, 0, 1), (0.5, 0.6, 0.4, 0.8), strict=True)
    row = [(False, 0.0, 0.0)] * 2 + [(bool(m), r, v) for m, r, v in cells]
    return batch_of([row], [1.0] if outcome else None, dtype)


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=got.dtype), atol=atol, rtol=0)


@pytest.mark.parametrize("outcome", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gae_on_the_worked_example(outcome: bool, dtype: torch.dtype) -> None:
    batch = example(outcome=outcome, dtype=dtype)
    got = gae(batch, lam=0.95, whiten=False)
    assert got.advantages.dtype == dtype
    close(got.advantages, [0, 0, 0.442475, 0.3605, 0.59, 0.2])
    close(got.returns, [0, 0, 0.942475, 0.9605, 0.99, 1])
    got = gae(batch, whiten=False)
    close(got.advantages, [0, 0, 0.5, 0.4, 0.6, 0.2])
    close(got.returns, [0, 0, 1, 1, 1, 1])


def test_whitening_is_on_unless_told_and_leaves_the_returns() -> None:
    got = gae(example(), lam=0.95)
    close(got.advantages, [0, 0, 0.271792, -0.231928, 1.178305, -1.218169])
    close(got.returns, [0, 0, 0.942475, 0.9605, 0.99, 1])
    more = (4 / 3) ** 0.5
    close(gae(example(), lam=0.95, ddof=0).advantages, [x * more for x in got.advantages.tolist()])


def test_the_next_value_is_that_of_the_next_written_token() -> None:
    got = gae(example((1, 0, 1, 1)), lam=0.95, whiten=False)
    close(got.advantages, [0, 0, 0.4605, 0, 0.59, 0.2])
    close(got.returns, [0, 0, 0.9605, 0, 0.99, 1])


def test_the_critic_may_have_its_own_lambda() -> None:
    got = gae(example(), lam=0.95, lam_critic=1.0, whiten=False)
    close(got.advantages, [0, 0, 0.442475, 0.3605, 0.59, 0.2])
    close(got.returns, [0, 0, 1, 1, 1, 1])
    got = gae(example(), lam=1.0, lam_critic=0.95, whiten=False)
    close(got.advantages, [0, 0, 0.5, 0.4, 0.6, 0.2])
    close(got.returns, [0, 0, 0.942475, 0.9605, 0.99, 1])


def test_lambda_adapts_to_the_length_of_the_answer() -> None:
    lengths = torch.tensor([10, 20, 40, 100, 1000, 20000, 0])
    close(length_adaptive_lambda(lengths, 0.05), [0, 0, 0.5, 0.8, 0.98, 0.999, 0])
    close(gae(example(), length_adaptive=0.5, whiten=False).advantages, [0, 0, 0.125, 0.05, 0.5, 0.2])
    vapo = gae(example(), length_adaptive=0.5, lam_critic=1.0, whiten=False)
    close(vapo.returns, [0, 0, 1, 1, 1, 1])
    same = gae(example(), length_adaptive=0.5, whiten=False)
    close(same.returns, [0, 0, 0.625, 0.65, 0.9, 1])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 30000), min_size=2, max_size=8), st.floats(0.01, 1))
def test_adaptive_lambda_grows_with_length_and_stays_below_one(lengths: list[int], alpha: float) -> None:
    got = length_adaptive_lambda(torch.tensor(sorted(lengths)), alpha)
    assert (got.diff() >= 0).all()
    assert (got >= 0).all()
    assert (got < 1).all()


ROWS = st.lists(
    st.lists(st.tuples(st.booleans(), st.floats(-3, 3), st.floats(-3, 3)), max_size=9), min_size=1, max_size=4
)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.floats(0, 1), st.floats(0, 1), st.sampled_from([None, 0.1, 0.5]))
def test_gae_equals_the_recursion_over_tokens(
    rows: list[list[tuple[bool, float, float]]], gamma: float, lam: float, alpha: float | None
) -> None:
    advantages: list[float] = []
    returns: list[float] = []
    for row in rows:
        length = sum(m for m, _, _ in row)
        own = lam if alpha is None else max(0.0, 1 - 1 / (alpha * length)) if length else 0.0
        running, ahead, backwards = 0.0, 0.0, []
        for m, reward, value in reversed(row):
            if m:
                running = reward + gamma * ahead - value + gamma * own * running
                ahead = value
            backwards.append((running, running + value) if m else (0.0, 0.0))
        advantages += [a for a, _ in reversed(backwards)]
        returns += [r for _, r in reversed(backwards)]
    got = gae(batch_of(rows), gamma=gamma, lam=lam, length_adaptive=alpha, whiten=False)
    close(got.advantages, advantages, atol=1e-9)
    close(got.returns, returns, atol=1e-9)


@settings(max_examples=20, deadline=None)
@given(ROWS)
def test_with_lambda_and_gamma_1_the_targets_are_the_returns(rows: list[list[tuple[bool, float, float]]]) -> None:
    batch = batch_of(rows)
    tokens = action_tokens(batch)
    expected = tokens.scatter(action_returns(batch, tokens, gamma=1.0))
    torch.testing.assert_close(gae(batch).returns, expected, atol=1e-9, rtol=1e-9)


def test_one_written_token_and_none_at_all() -> None:
    one = gae(batch_of([[(False, 0, 0), (True, 1.0, 0.25)]]))
    assert one.advantages.tolist() == [0, 0]  # centred, not scaled
    assert one.returns.tolist() == [0, 1]
    nothing = gae(batch_of([[(False, 0, 0)]]))
    assert nothing.advantages.tolist() == [0]


def test_an_outcome_needs_a_written_token() -> None:
    with pytest.raises(ValueError, match="sequence 1 has no token the model wrote"):
        gae(batch_of([[(True, 0, 0.5)], [(False, 0, 0)]], [1.0, 1.0]))
