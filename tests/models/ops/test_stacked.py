"""Attention on stacks against a softmax written out, with shared beginnings; the plan against what a packing is."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.segments import offsets_from_lengths
from burnish.models.ops import stacked
from burnish.models.ops.stacked import Stacks, stacked_attention, stacked_sequences
from burnish.models.ops.trunks import Trunks, rows_of

DIM, HEADS, KV_HEADS = 6, 4, 2


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """softmax(QK^T) V of each sequence and head by itself."""
    out, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads = []
        for head in range(HEADS):
            scores = q[part, head] @ k[part, head * KV_HEADS // HEADS].t() / DIM**0.5
            heads.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[part, head * KV_HEADS // HEADS])
        out.append(torch.stack(heads, 1))
        start += length
    return torch.cat(out)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=4
    ),
    scores=st.sampled_from([1, 60, 1 << 17]),
    is_wide=st.booleans(),
)
def test_shared_beginnings_give_the_output_and_gradients_of_whole_sequences(
    groups: list[tuple[int, list[int]]], scores: int, is_wide: bool
) -> None:
    """Rows of their own for each sequence as the oracle; heads of one projection, or tensors by themselves."""
    lengths, owner, shared = [], [], []
    for trunk, own in groups:
        first = len(lengths)
        for extra in own:
            lengths.append(trunk + extra)
            owner.append(first)
            shared.append(trunk)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    rows = rows_of(offsets, Trunks(torch.tensor(owner), torch.tensor(shared)))
    generator = torch.Generator().manual_seed(sum(lengths))
    width = HEADS + 2 * KV_HEADS
    qkv = torch.randn(rows.num_rows, width, DIM, dtype=torch.float64, generator=generator).requires_grad_()
    slope = torch.randn(rows.num_rows, HEADS, DIM, dtype=torch.float64, generator=generator)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    expected = naive(*(x[rows.row_of] for x in (q, k, v)), lengths)[rows.own]
    before, stacked.SCORES = stacked.SCORES, scores
    try:
        stacks = Stacks(lengths, offsets, rows)
    finally:
        stacked.SCORES = before
    given = (q, k, v) if is_wide else (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    got = stacked_attention(*given, stacks, None)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(out, qkv, slope, retain_graph=True)[0] for out in (got, expected)]
    assert torch.allclose(*gradients, rtol=0, atol=1e-11)


@given(lengths=st.lists(st.integers(0, 200), min_size=1, max_size=30))
def test_every_sequence_that_is_not_empty_stands_in_one_stack_of_its_like(lengths: list[int]) -> None:
    stacks = stacked_sequences(lengths)
    assert sorted(i for stack in stacks for i in stack) == [i for i, length in enumerate(lengths) if length]
    for stack in stacks:
        shortest, longest = lengths[stack[0]], lengths[stack[-1]]
        assert longest <= max(1.25 * shortest, shortest + 4)
        assert len(stack) == 1 or len(stack) * longest**2 <= stacked.SCORES
