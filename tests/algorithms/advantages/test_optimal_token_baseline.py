"""The optimal token baseline: ALGORITHMS.md 16, and the same numbers around tool tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import otb

NAN = float("nan")
PI = [[0.5, 0.8, 0.9], [0.4, 0.6]]
SUM_P2 = [[0.4, 0.7, 0.82], [0.35, 0.5]]
RHO = [[1.0, 2.0, 1.0], [1.0, 0.5]]
EXPECTED = [0.578947, 0.62963, 1, -0.421053, -0.37037]


def column(rows: list[list[float]], gap: int | None) -> Tensor:
    """Behind a prompt token; `gap` puts a tool token after that many tokens of the second row. NaN in both."""
    filled = [[NAN, *row] for row in rows]
    if gap is not None:
        filled[1].insert(gap + 1, NAN)
    return torch.tensor([x for row in filled for x in row], dtype=torch.float64)


def make(gap: int | None = None, rho: bool = False) -> Batch:
    pi = column(PI, gap)
    token = {"action_mask": ~pi.isnan(), "old_logp": pi.log(), "sum_p2": column(SUM_P2, gap)}
    if rho:
        token["rollout_weight"] = column(RHO, gap)
    offsets = offsets_from_lengths(torch.tensor([4, pi.numel() - 4]))
    return Batch(torch.arange(pi.numel()), offsets, token).with_sequence(
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64), group_ids=torch.tensor([3, 3])
    )


def written(batch: Batch, got: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got[batch.action_mask], torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)
    assert (got[~batch.action_mask] == 0).all()


@pytest.mark.parametrize("gap", [None, 0, 1, 2])
def test_otb_on_the_worked_example_with_and_without_a_tool_token(gap: int | None) -> None:
    batch = make(gap)
    written(batch, otb(batch), EXPECTED)


def test_rollout_weights_enter_squared() -> None:
    batch = make(rho=True)
    written(batch, otb(batch), [0.578947, 0.438596, 1, -0.421053, -0.561404])


def test_beyond_all_other_answers_of_the_group_tail_decides() -> None:
    batch = make()
    written(batch, otb(batch, tail="zero"), [0.578947, 0.62963, 0, -0.421053, -0.37037])


@pytest.mark.parametrize("tail", ["raw", "zero"])
def test_one_answer_alone_has_no_baseline(tail: str) -> None:
    batch = make().with_sequence(group_ids=torch.tensor([3, 8]))
    written(batch, otb(batch, tail=tail), [1, 1, 1, 0, 0])


def test_groups_do_not_meet() -> None:
    batch = Batch.merge([make(), make().with_sequence(group_ids=torch.tensor([-1, -1]))])
    order = torch.tensor([2, 0, 3, 1])
    shuffled = batch.with_token(expected=otb(batch)).select(order)
    written(batch, otb(batch), EXPECTED * 2)
    torch.testing.assert_close(otb(shuffled), shuffled.token["expected"])
