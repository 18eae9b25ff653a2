"""Attention of a picture's tokens to each other in both directions (Gemma 3, 2503.19786), on top of any causal attention.

A token of a picture attends to all tokens of its picture and, as every token, to those before it, within the window of the layer. The
rows of pictures are computed here and replace those of the causal attention, so that text rows keep their kernels. transformers masks
in the same way: window and (causal or same picture).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.architecture import Windows
from burnish.models.kernels.attention import MAX_LENGTH_RATIO, window_of
from burnish.models.kernels.device import to_device
from burnish.models.kernels.shared_prefix import Attend, ComputedRows

if TYPE_CHECKING:
    from burnish.models.vision.pieces import Piece


class PictureBlock(NamedTuple):
    """The computed tokens of one picture. They are the last of their keys."""

    queries: np.ndarray  # [c] rows among the queries
    keys: np.ndarray  # [m] rows among the keys: the sequence up to the picture's last token


class PictureAttention:
    """Attention of the tokens of pictures, planned once for a forward pass."""

    def __init__(self, blocks: Sequence[PictureBlock], device: torch.device) -> None:
        self.stacks = [_Stack(stack, device) for stack in _similar(blocks)]

    def __call__(self, out: Tensor, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """Replace the pictures' rows of a causal attention's output [N, heads, D], given its queries [N, ...] and keys [M, ...]."""
        for stack in self.stacks:
            out = out.index_copy(0, stack.queries.flatten(), stack.attention(q, k, v, window).flatten(0, 1))
        return out


class _Stack:
    """Blocks with an equal number of queries and about as many keys, padded to the longest."""

    def __init__(self, blocks: Sequence[PictureBlock], device: torch.device) -> None:
        longest = max(len(block.keys) for block in blocks)
        keys = np.stack([np.pad(block.keys, (0, longest - len(block.keys)), mode="edge") for block in blocks])
        self.queries = to_device(np.stack([block.queries for block in blocks]), device)  # [b, c]
        self.keys = to_device(keys, device)  # [b, longest]
        self.lengths = to_device(np.array([len(block.keys) for block in blocks]), device)
        self._masks: dict[int | None, Tensor] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """[b, c, heads, D]"""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        queries, keys, values = q[self.queries], k[self.keys], v[self.keys]
        queries, keys, values = (x.transpose(1, 2) for x in (queries, keys, values))
        gqa = queries.shape[1] != keys.shape[1]
        mask = self._masks[window]
        return functional.scaled_dot_product_attention(queries, keys, values, mask, enable_gqa=gqa).transpose(1, 2)

    def _mask(self, window: int | None) -> Tensor:
        """Which keys each query sees, [b, 1, c, longest]."""
        column = torch.arange(self.keys.shape[1], device=self.keys.device)
        count = self.queries.shape[1]
        position = self.lengths[:, None] - count + torch.arange(count, device=self.keys.device)  # [b, c]
        seen = (column < self.lengths[:, None])[:, None].expand(-1, count, -1)
        if window is not None:
            seen = seen & (column > position[:, :, None] - window)
        return seen[:, None]


def _similar(blocks: Sequence[PictureBlock]) -> list[list[PictureBlock]]:
    """Blocks by their number of queries, with similar numbers of keys."""
    stacks: list[list[PictureBlock]] = []
    for block in sorted(blocks, key=lambda block: (len(block.queries), len(block.keys))):
        first = stacks[-1][0] if stacks else None
        if (
            first is not None
            and len(first.queries) == len(block.queries)
            and len(block.keys) <= MAX_LENGTH_RATIO * len(first.keys)
        ):
            stacks[-1].append(block)
        else:
            stacks.append([block])
    return stacks


def picture_runs(index: np.ndarray) -> list[tuple[int, int]]:
    """Start and end of each picture among tokens, given the index of every token in the features; -1 is text.

    Tokens of one picture follow each other, and so do their features. Text stands between two pictures.
    """
    is_picture = index >= 0
    begins = is_picture & np.concatenate([[True], (index[1:] != index[:-1] + 1) | ~is_picture[:-1]])
    ends = is_picture & np.concatenate([begins[1:] | ~is_picture[1:], [True]])
    return list(zip(np.flatnonzero(begins).tolist(), (np.flatnonzero(ends) + 1).tolist(), strict=True))


def packed_blocks(index: np.ndarray, offsets: np.ndarray, rows: ComputedRows | None) -> list[PictureBlock]:
    """The blocks of packed sequences. A picture in a shared prefix is computed once, in the first sequence that has it."""
    row_of = np.arange(len(index)) if rows is None else rows.row_of.cpu().numpy()
    is_own = np.ones(len(index), dtype=bool)
    if rows is not None:
        is_own[rows.borrowed.cpu().numpy()] = False
    blocks = []
    for start, end in picture_runs(index):
        if is_own[start]:
            first = offsets[np.searchsorted(offsets, start, side="right") - 1]
            blocks.append(PictureBlock(row_of[start:end], row_of[first:end]))
        elif is_own[end - 1]:
            raise ValueError(f"the picture at token {start} is shared with another sequence only in part")
    return blocks


def piece_blocks(pieces: Sequence[Piece]) -> list[PictureBlock]:
    """The blocks of a pass over pieces of sequences, whose keys are all tokens of each sequence up to the piece's end.

    A piece may begin within a picture, the start of which is in the cache. It must not end within one.
    """
    blocks, num_queries, num_keys = [], 0, 0
    for piece in pieces:
        for span in piece.spans:
            begin = max(span.start, piece.start)
            if begin < min(span.end, piece.stop):
                if span.end > piece.stop:
                    raise ValueError(
                        f"a prefill ends at token {piece.stop}, within a picture of the tokens {span.start} to {span.end - 1} that "
                        "attend to each other: prefill more tokens at once"
                    )
                queries = num_queries + np.arange(begin - piece.start, span.end - piece.start)
                blocks.append(PictureBlock(queries, num_keys + np.arange(span.end)))
        num_queries, num_keys = num_queries + piece.stop - piece.start, num_keys + piece.stop
    return blocks


def tokens_ahead(blocks: Sequence[PictureBlock], num_queries: int) -> np.ndarray:
    """[num_queries] how many of the tokens after it each query sees: those of its picture."""
    ahead = np.zeros(num_queries, dtype=np.int64)
    for block in blocks:
        ahead[block.queries] = np.arange(len(block.queries))[::-1]
    return ahead


def both_ways(attend: Attend, blocks: Sequence[PictureBlock], windows: Windows, device: torch.device) -> Attend:
    """An `attend` in which the tokens of pictures see each other."""
    pictures = PictureAttention(blocks, device)

    def attend_both_ways(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pictures(attend(layer, q, k, v), q, k, v, window_of(windows, layer))

    return attend_both_ways
