"""What holds for every loss of the slot: gradients by differences, any order, tokens that are not the model's, any split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.spec import LOSS_RECORDS
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import LOSSES

OF_RATIO_AND_CLIP = ("surrogate", "sg_logprob")
FUNCTIONS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    name: function for name, function in LOSSES.items() if function is not None
}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in FUNCTIONS if name not in ("divergence", "gold")),  # gold is in the kernel
    ("divergence", {"support": "sampled", "cap": 2.0}),
    ("divergence", {"support": "sampled", "weight": 0.5}),
    ("bce", {"normalise": "grpo"}),
    ("bce", {"normalise": "naive", "per_token": True, "class_weights": False}),
    ("mixed_offpolicy", {"weight": "author"}),
    ("mixed_offpolicy", {"weight": "mixture", "clip": 0.2}),
    ("dpo", {"smoothing": 0.2}),
    ("ipo", {"average": False}),
]
STOPPED = ("divergence", "teacher_surrogate")
"""Losses with a stopped gradient, which finite differences do not give; exact numbers are in `test_distillation_losses.py`."""
RECORDS = {record.model_fields["name"].default: record for record in LOSS_RECORDS}
LENGTHS = [3, 4, 2, 5, 1, 2, 4, 3]


def make_batch(seed: int = 0) -> Batch:
    """Four groups of two, every column any loss reads; a prompt token in front of each and tool tokens inside some.

    The columns that workers of a cluster do not get, such as `behaviour_logp`, are not among them (`DRIVER_ONLY_PREFIXES`).
    """
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([i > 0 and not (n > 3 and i == 2) for n in LENGTHS for i in range(n + 1)])

    def column(scale: float) -> Tensor:
        noise = torch.randn(mask.numel(), generator=generator, dtype=torch.float64)
        return torch.where(mask, -1.5 + scale * noise, torch.nan)

    return Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(torch.tensor(LENGTHS) + 1),
        token={"action_mask": mask, "loss_mask": mask.clone()}
        | {name: column(0.3) for name in ("new", "old_logp", "ref_logp", "author_logp")},
        sequence={
            "group_ids": torch.tensor([0, 0, 5, 5, 2, 2, 9, 9]),
            "advantages": torch.randn(8, generator=generator, dtype=torch.float64),
            "accuracy": torch.tensor([1, 0, 0, 0, 1, 1, 0, 1], dtype=torch.float64),
            "chosen": torch.tensor([True, False, False, True, True, False, False, True]),
            "desirable": torch.tensor([True, False, False, True, True, False, False, True]),
            "mismatched": torch.tensor([False, False, True, False, False, True, False, False]),
            "demonstration": torch.tensor([False, True, False, False, False, True, False, False]),
        },
    )


def weighted(batch: Batch) -> Batch:
    return batch.with_token(weight=aggregation_weights(batch, "seq-mean-token-mean"))


def total(name: str, options: dict[str, Any], batch: Batch, logp: Tensor) -> Tensor:
    view = loss_view(batch, logp)
    per_token, _ = FUNCTIONS[name](view, view.column("old_logp"), view.column("advantages"), **options)
    return (view.column("weight") * per_token).sum()


def value_and_gradient(name: str, options: dict[str, Any], batch: Batch) -> tuple[float, Tensor]:
    logp = batch.token["new"][batch.loss_mask].clone().requires_grad_()
    value = total(name, options, batch, logp)
    gradient = torch.zeros(batch.num_tokens, dtype=torch.float64)
    gradient[batch.loss_mask] = torch.autograd.grad(value, logp)[0]
    return float(value.detach()), gradient


def test_every_record_is_tried() -> None:
    assert set(RECORDS) == {*FUNCTIONS, *OF_RATIO_AND_CLIP}


@pytest.mark.parametrize(("name", "options"), [c for c in CASES if c[0] not in STOPPED], ids=str)
def test_gradients_are_those_of_finite_differences(name: str, options: dict[str, Any]) -> None:
    batch = weighted(make_batch())
    values = batch.token["new"][batch.loss_mask]
    free = ~batch.sequence["mismatched"][batch.sequence_ids[batch.loss_mask]]
    free |= torch.tensor(name != "kto")  # KTO's reference point is a constant to the gradient

    def of(x: Tensor) -> Tensor:
        return total(name, options, batch, values.masked_scatter(free, x))

    assert torch.autograd.gradcheck(of, (values[free].clone().requires_grad_(),), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_the_order_of_sequences_does_not_matter(name: str, options: dict[str, Any]) -> None:
    batch = weighted(make_batch())
    order = torch.tensor([6, 1, 5, 0, 7, 3, 2, 4])
    value, gradient = value_and_gradient(name, options, batch)
    moved, moved_gradient = value_and_gradient(name, options, batch.select(order))
    assert moved == pytest.approx(value, abs=1e-12)
    expected = batch.with_token(gradient=gradient).select(order).token["gradient"]
    torch.testing.assert_close(moved_gradient, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_tokens_the_model_did_not_write_are_as_if_they_were_not_there(name: str, options: dict[str, Any]) -> None:
    batch = make_batch()
    mask = batch.loss_mask
    lengths = torch.zeros(8, dtype=torch.int64).index_add(0, batch.sequence_ids, mask.long())
    bare = Batch(
        batch.tokens[mask],
        offsets_from_lengths(lengths),
        {name: column[mask] for name, column in batch.token.items()},
        batch.sequence,
    )
    value, gradient = value_and_gradient(name, options, weighted(batch))
    bare_value, bare_gradient = value_and_gradient(name, options, weighted(bare))
    assert value == pytest.approx(bare_value, abs=1e-12)
    torch.testing.assert_close(gradient[mask], bare_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_parts_add_up_where_the_scope_allows_them(name: str, options: dict[str, Any]) -> None:
    batch = weighted(make_batch())
    parts = {
        "token": [[1, 6], [0], [7, 2, 3], [5, 4]],
        "sequence": [[1, 6], [0], [7, 2, 3], [5, 4]],
        "group": [[0, 1, 6, 7], [5, 4], [2, 3]],
        "batch": [list(range(8))],
    }[RECORDS[name].scope]
    value, gradient = value_and_gradient(name, options, batch)
    split = [(torch.tensor(p), batch.select(torch.tensor(p))) for p in parts]
    assert sum(value_and_gradient(name, options, part)[0] for _, part in split) == pytest.approx(value, abs=1e-12)
    whole = batch.with_token(gradient=gradient)
    for index, part in split:
        expected = whole.select(index).token["gradient"]
        torch.testing.assert_close(value_and_gradient(name, options, part)[1], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("name", "options"), [c for c in CASES if c[0] not in ("dpo", "ipo", "simpo", "orpo")], ids=str
)
def test_a_sequence_out_of_the_loss_counts_nowhere(name: str, options: dict[str, Any]) -> None:
    batch = make_batch()
    out = batch.with_token(loss_mask=batch.loss_mask & (batch.sequence_ids != 3))
    left = batch.select(torch.tensor([0, 1, 2, 4, 5, 6, 7]))
    value, gradient = value_and_gradient(name, options, weighted(out))
    expected, expected_gradient = value_and_gradient(name, options, weighted(left))
    assert value == pytest.approx(expected, abs=1e-12)
    torch.testing.assert_close(gradient[batch.sequence_ids != 3], expected_gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_loss_of_the_sequence_level_is_one_number_a_sequence(name: str, options: dict[str, Any]) -> None:
    batch = make_batch()
    view = loss_view(batch, batch.token["new"][batch.loss_mask])
    per_token, marks = FUNCTIONS[name](view, view.column("old_logp"), view.column("advantages"), **options)
    assert per_token.shape == (view.num_tokens,)
    assert all(mark.shape == (view.num_tokens,) for mark in marks.values())
    is_constant = bool((per_token == view.spread(per_token[view.offsets[:-1]])).all())
    assert is_constant == (RECORDS[name].level == "sequence")
