"""Attention of a picture's tokens in both directions, against a full mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.picture_attention import both_ways, packed_blocks, picture_runs
from burnish.models.kernels.shared_prefix import computed_rows

HEADS, KV_HEADS, DIM = 4, 2, 8


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Attention of all tokens with an explicit mask, [N, heads, D]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * DIM**-0.5
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def full_mask(lengths: list[int], index: np.ndarray, window: int | None) -> Tensor:
    """window and (causal or same picture), within each sequence."""
    count = sum(lengths)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    picture = torch.full((count,), -1)
    for number, (start, end) in enumerate(picture_runs(index)):
        picture[start:end] = number
    i, j = torch.arange(count)[:, None], torch.arange(count)
    seen = (i >= j) | ((picture[:, None] == picture) & (picture >= 0))
    if window is not None:
        seen &= j > i - window
    return seen & (sequence[:, None] == sequence)


def features(*pieces: int) -> np.ndarray:
    """The index of tokens in features; a negative piece is text of that length."""
    found, number = [], 0
    for piece in pieces:
        found += [-1] * -piece if piece < 0 else list(range(number, number + piece))
        number += max(piece, 0)
    return np.array(found)


@pytest.mark.parametrize("window", [None, 3, 7])
def test_packed_sequences_equal_a_full_mask(window: int | None) -> None:
    index = features(-2, 6, -1, 6, -3, -5, -30, 4, -2)
    lengths = [18, 5, 36]
    offsets = torch.tensor([0, 18, 23, 59])
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(59, n, DIM, generator=generator).double() for n in (HEADS, KV_HEADS, KV_HEADS))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    attend = PackedAttention(offsets, window)
    blocks = packed_blocks(index, offsets.numpy(), None)
    found = both_ways(attend, blocks, window, torch.device("cpu"))(0, *leaves)
    expected = masked_attention(*leaves, full_mask(lengths, index, window))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    weights = torch.randn(found.shape, generator=generator).double()
    for ours, theirs in zip(
        torch.autograd.grad((found * weights).sum(), leaves),
        torch.autograd.grad((expected * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("window", [None, 4])
def test_a_shared_picture_is_computed_once(window: int | None) -> None:
    """The second sequence shares text and picture with the first and has a picture of its own."""
    prefix, first, second = features(-3, 5, -2), features(-4), features(-2, 5, -1)
    index = np.concatenate([prefix, first, prefix, np.where(second >= 0, second + 5, -1)])
    offsets = torch.tensor([0, 14, 32])
    rows = computed_rows(offsets, torch.tensor([0, 10]))
    blocks = packed_blocks(index, offsets.numpy(), rows)
    assert [len(block.queries) for block in blocks] == [5, 5]
    generator = torch.Generator().manual_seed(1)
    own = [torch.randn(rows.num_rows, n, DIM, generator=generator).double() for n in (HEADS, KV_HEADS, KV_HEADS)]
    attend = PackedAttention(offsets, window, rows)
    found = both_ways(attend, blocks, window, torch.device("cpu"))(0, *own)
    expected = masked_attention(*(x[rows.row_of] for x in own), full_mask([14, 18], index, window))
    torch.testing.assert_close(found, expected[rows.own], rtol=1e-9, atol=1e-9)


def test_a_picture_that_is_shared_in_part_is_an_error() -> None:
    index = np.concatenate([features(-2, 5, -1)] * 2)
    offsets = torch.tensor([0, 8, 16])
    with pytest.raises(ValueError, match="only in part"):
        packed_blocks(index, offsets.numpy(), computed_rows(offsets, torch.tensor([0, 4])))


def test_pictures_next_to_text_and_to_the_ends() -> None:
    assert picture_runs(features(3, -1, 2)) == [(0, 3), (4, 6)]
    assert picture_runs(features(-2)) == []
    same = np.array([-1, 0, 1, -1, 0, 1])  # one picture twice
    assert picture_runs(same) == [(1, 3), (4, 6)]
