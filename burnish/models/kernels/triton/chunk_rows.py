"""State of the rows of a verification step (`burnish.inference.native.speculation`), in one kernel before it and one after it.

In torch these are some sixty operations on a few hundred numbers, which take a tenth of a decode step of few rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy(into_ptr, from_ptr, chunk_row, row, columns, into_stride, from_stride, BLOCK: tl.constexpr):
    """Copy a line of a table."""
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(from_ptr + row * from_stride + column, mask=column < columns)
        tl.store(into_ptr + chunk_row * into_stride + column, value, mask=column < columns)


@triton.jit
def _expand(
    ints_ptr, ints_stride, chunk_ints_ptr, chunk_ints_stride, draft_ptr, is_fed_ptr,
    temperature_ptr, chunk_temperature_ptr, counts_ptr, counts_stride, chunk_counts_ptr, chunk_counts_stride,
    thresholds_ptr, thresholds_stride, chunk_thresholds_ptr, chunk_thresholds_stride,
    stop_ptr, chunk_stop_ptr, stops, table_ptr, table_stride, chunk_table_ptr, chunk_table_stride, pages,
    bias_token_ptr, chunk_bias_token_ptr, bias_value_ptr, chunk_bias_value_ptr, biases,
    delta_ptr, chunk_delta_ptr,
    WIDTH: tl.constexpr, BIASED: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    chunk_row = tl.program_id(0).to(tl.int64)
    row, offset = chunk_row // WIDTH, chunk_row % WIDTH
    at, to = ints_ptr + row, chunk_ints_ptr + chunk_row
    live, produced, last = tl.load(at), tl.load(at + ints_stride), tl.load(at + 2 * ints_stride)
    position, limit = tl.load(at + 3 * ints_stride), tl.load(at + 4 * ints_stride)
    token = last
    is_fed = (live != 0) & (produced + offset < limit)
    if offset > 0:
        token = tl.load(draft_ptr + row * (WIDTH - 1) + offset - 1)
        is_fed = is_fed & (token >= 0)
    tl.store(is_fed_ptr + chunk_row, is_fed)
    tl.store(to, is_fed.to(tl.int64))
    tl.store(to + chunk_ints_stride, produced + offset)
    tl.store(to + 2 * chunk_ints_stride, tl.maximum(token, 0))
    tl.store(to + 3 * chunk_ints_stride, tl.where(is_fed, position + offset, -1))
    tl.store(to + 4 * chunk_ints_stride, limit)
    tl.store(to + 5 * chunk_ints_stride, tl.load(at + 5 * ints_stride))
    tl.store(to + 6 * chunk_ints_stride, tl.load(at + 6 * ints_stride) + offset)
    tl.store(chunk_temperature_ptr + chunk_row, tl.load(temperature_ptr + row))
    for line in tl.static_range(2):
        tl.store(
            chunk_counts_ptr + line * chunk_counts_stride + chunk_row, tl.load(counts_ptr + line * counts_stride + row)
        )
        value = tl.load(thresholds_ptr + line * thresholds_stride + row)
        tl.store(chunk_thresholds_ptr + line * chunk_thresholds_stride + chunk_row, value)
    if TURNED:
        tl.store(chunk_delta_ptr + chunk_row, tl.load(delta_ptr + row))
    _copy(chunk_stop_ptr, stop_ptr, chunk_row, row, stops, stops, stops, 8)
    _copy(chunk_table_ptr, table_ptr, chunk_row, row, pages, chunk_table_stride, table_stride, 256)
    if BIASED:
        _copy(chunk_bias_token_ptr, bias_token_ptr, chunk_row, row, biases, biases, biases, 256)
        _copy(chunk_bias_value_ptr, bias_value_ptr, chunk_row, row, biases, biases, biases, 256)


@triton.jit
def _accept(
    ints_ptr, ints_stride, chunk_ints_ptr, chunk_ints_stride, draft_ptr, is_fed_ptr, texts_ptr, texts_stride, start, counts_ptr,
    token_ptr, chunk_token_ptr, logp_ptr, chunk_logp_ptr, raw_ptr, chunk_raw_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, BLOCK)
    inside = offset < WIDTH
    chunk_row = row * WIDTH + offset
    is_fed = tl.load(is_fed_ptr + chunk_row, mask=inside, other=0).to(tl.int32)
    goes_on = tl.load(chunk_ints_ptr + chunk_row, mask=inside, other=0) != 0
    drawn = tl.load(chunk_ints_ptr + 2 * chunk_ints_stride + chunk_row, mask=inside, other=0)
    # The draft behind each token; there is none behind the last.
    has_draft = offset < WIDTH - 1
    draft = tl.load(draft_ptr + row * (WIDTH - 1) + offset, mask=has_draft, other=-1)
    next_fed = tl.load(is_fed_ptr + chunk_row + 1, mask=has_draft, other=0) != 0
    agrees = goes_on & next_fed & (drawn == draft)
    accepted = tl.min(tl.where(agrees, BLOCK, offset), 0)  # the first that does not agree is the last that is kept
    kept = (is_fed != 0) & (offset <= accepted)
    produced = tl.load(ints_ptr + ints_stride + row)
    position = tl.load(ints_ptr + 3 * ints_stride + row)
    slot = (produced + offset) % RING
    to, at = row * RING + slot, chunk_row * RING + slot
    tl.store(token_ptr + to, tl.load(chunk_token_ptr + at, mask=kept), mask=kept)
    tl.store(logp_ptr + to, tl.load(chunk_logp_ptr + at, mask=kept), mask=kept)
    if RAW:
        tl.store(raw_ptr + to, tl.load(chunk_raw_ptr + at, mask=kept), mask=kept)
    column = start + 1 + tl.maximum(position, 0) + offset
    tl.store(texts_ptr + row * texts_stride + column, drawn.to(tl.int32), mask=kept)
    tl.atomic_add(counts_ptr, tl.sum(tl.where(offset > 0, is_fed, 0), 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, accepted.to(tl.int64))
    tl.debug_barrier()  # all threads have read the row's state
    for line in tl.static_range(7):
        value = tl.load(chunk_ints_ptr + line * chunk_ints_stride + row * WIDTH + accepted)
        tl.store(ints_ptr + line * ints_stride + row, value)


def expand(
    ints: Tensor,
    chunk_ints: Tensor,
    draft: Tensor,
    temperature: tuple[Tensor, Tensor],
    counts: tuple[Tensor, Tensor],
    thresholds: tuple[Tensor, Tensor],
    stop: tuple[Tensor, Tensor],
    table: tuple[Tensor, Tensor],
    biases: Sequence[tuple[Tensor, Tensor]],
    delta: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """`ChunkRows.expand`: each pair has the state of the rows and that of the chunks' rows. Returns which are computed, int8 [rows, width]."""
    rows, width = draft.shape[0], draft.shape[1] + 1
    is_fed = torch.empty(rows, width, dtype=torch.int8, device=draft.device)
    tokens, values = biases or (stop, stop)
    turns = delta or stop
    _expand[(rows * width,)](
        ints, ints.stride(0), chunk_ints, chunk_ints.stride(0), draft, is_fed,
        *temperature, counts[0], counts[0].stride(0), counts[1], counts[1].stride(0),
        thresholds[0], thresholds[0].stride(0), thresholds[1], thresholds[1].stride(0),
        *stop, stop[0].shape[1], table[0], table[0].stride(0), table[1], table[1].stride(0), table[0].shape[1],
        *tokens, *values, tokens[0].shape[1], *turns,
        WIDTH=width, BIASED=bool(biases), TURNED=delta is not None, num_warps=1,
    )  # fmt: skip
    return is_fed


def accept(
    ints: Tensor,
    chunk_ints: Tensor,
    draft: Tensor,
    is_fed: Tensor,
    texts: Tensor,
    start: int,
    counts: Tensor,
    tokens: tuple[Tensor, Tensor],
    logp: tuple[Tensor, Tensor],
    raw: tuple[Tensor, Tensor] | None,
) -> None:
    """`ChunkRows.accept`: each pair has the rings of the rows and those of the chunks' rows."""
    rows, width = is_fed.shape
    _accept[(rows,)](
        ints, ints.stride(0), chunk_ints, chunk_ints.stride(0), draft, is_fed, texts, texts.stride(0), start, counts,
        *tokens, *logp, *(raw or logp),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), RING=tokens[0].shape[1], RAW=raw is not None, num_warps=1,
    )  # fmt: skip
