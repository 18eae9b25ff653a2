"""Drawing a token for each row, its log-prob and the bookkeeping of the row, in one pass over the logits.

By inversion of the cumulative distribution in vocabulary order with one uniform number from (key, position): the first
kernel sums exponentials over chunks of the vocabulary, the second finds the chunk the number falls into and reads that
chunk again, so the logits are read once and never widened in memory. `burnish.core.noise` gives the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.core.keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2

CHUNK = 4096


@triton.jit
def _sum_chunks(
    logits_ptr,
    source_ptr,
    row_ptr,
    temperature_ptr,
    best_ptr,
    total_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
):
    index, chunk = tl.program_id(0), tl.program_id(1)
    source = tl.load(source_ptr + index).to(tl.int64)
    temperature = tl.load(temperature_ptr + tl.load(row_ptr + index)).to(tl.float32)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + source * vocab + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    x = x / tl.where(temperature == 0, 1.0, temperature)
    best = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(best == -float("inf"), 0.0, best)), 0)
    tl.store(best_ptr + index * chunks + chunk, best)
    tl.store(total_ptr + index * chunks + chunk, total)


@triton.jit
def _mix(x, MULTIPLIER_1: tl.constexpr, MULTIPLIER_2: tl.constexpr):
    x = (x ^ (x >> 30)) * tl.full([], MULTIPLIER_1, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full([], MULTIPLIER_2, tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _draw(
    logits_ptr,
    source_ptr,
    row_ptr,
    temperature_ptr,
    best_ptr,
    total_ptr,
    ints_ptr,
    stop_ptr,
    ring_token_ptr,
    ring_logp_ptr,
    vocab,
    chunks,
    ints_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    STOPS: tl.constexpr,
    RING: tl.constexpr,
    GOLDEN: tl.constexpr,
    MULTIPLIER_1: tl.constexpr,
    MULTIPLIER_2: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(row_ptr + index)
    live_at = ints_ptr + row
    produced_at = live_at + ints_stride
    last_at = produced_at + ints_stride
    position_at = last_at + ints_stride
    limit_at = position_at + ints_stride
    key_at = limit_at + ints_stride
    drawn_at = key_at + ints_stride
    if tl.load(live_at) != 0:
        source = tl.load(source_ptr + index).to(tl.int64)
        temperature = tl.load(temperature_ptr + row).to(tl.float32)
        greedy = temperature == 0
        part = tl.arange(0, CHUNKS)
        bests = tl.load(best_ptr + index * chunks + part, mask=part < chunks, other=-float("inf"))
        totals = tl.load(total_ptr + index * chunks + part, mask=part < chunks, other=0.0)
        best = tl.max(bests, 0)
        masses = totals.to(tl.float64) * tl.exp((bests - best).to(tl.float64))
        total = tl.sum(masses, 0)
        ends = tl.cumsum(masses, 0)

        drawn = tl.load(drawn_at)
        key = tl.load(key_at).to(tl.uint64, bitcast=True)
        bits = _mix(
            key + (drawn + 1).to(tl.uint64, bitcast=True) * tl.full([], GOLDEN, tl.uint64), MULTIPLIER_1, MULTIPLIER_2
        )
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        # Against the last running sum, not the sum: they may differ in the last bit, and a draw must fall inside.
        goal = uniform * tl.max(ends, 0)
        here = tl.sum((ends < goal).to(tl.int32), 0)
        first_best = tl.min(tl.where(bests == best, part, CHUNKS), 0)
        here = tl.minimum(tl.where(greedy, first_best, here), chunks - 1)
        before = tl.sum(tl.where(part < here, masses, 0.0), 0)

        column = tl.arange(0, CHUNK)
        inside = here * CHUNK + column < vocab
        x = tl.load(logits_ptr + source * vocab + here * CHUNK + column, mask=inside, other=-float("inf"))
        x = x.to(tl.float32) / tl.where(greedy, 1.0, temperature)
        running = before + tl.cumsum(tl.exp((x - best).to(tl.float64)), 0)
        passed = tl.sum((running < goal).to(tl.int32), 0)
        # Rounding may leave the goal beyond the last sum: then the last token that can be drawn is it.
        last = tl.max(tl.where(x > -float("inf"), column, 0), 0)
        found = tl.minimum(passed, last)
        found = tl.where(greedy, tl.min(tl.where(x == best, column, CHUNK - 1), 0), found)
        chosen = tl.sum(tl.where(column == found, x, 0.0), 0)
        token = (here * CHUNK + found).to(tl.int64)

        produced = tl.load(produced_at)
        slot = row * RING + produced % RING
        tl.store(ring_token_ptr + slot, token.to(tl.int32))
        tl.store(ring_logp_ptr + slot, chosen - best - tl.log(total).to(tl.float32))
        stops = tl.load(stop_ptr + row * STOPS + tl.arange(0, STOPS))
        stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
        goes_on = (stopped == 0) & (produced + 1 < tl.load(limit_at))
        tl.store(produced_at, produced + 1)
        tl.store(drawn_at, drawn + 1)
        tl.store(last_at, token)
        tl.store(position_at, tl.where(goes_on, tl.load(position_at) + 1, -1))
        tl.store(live_at, goes_on.to(tl.int64))


def draw(
    logits: Tensor,
    source: Tensor,
    row: Tensor,
    temperature: Tensor,
    ints: Tensor,
    stop: Tensor,
    ring_token: Tensor,
    ring_logp: Tensor,
) -> None:
    """`burnish.rollout.native.state.RowState.draw` as two kernels; see there."""
    count, vocab = source.shape[0], logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(best)
    _sum_chunks[(count, chunks)](logits, source, row, temperature, best, total, vocab, chunks, CHUNK=CHUNK, num_warps=4)
    _draw[(count,)](
        logits,
        source,
        row,
        temperature,
        best,
        total,
        ints,
        stop,
        ring_token,
        ring_logp,
        vocab,
        chunks,
        ints.stride(0),
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        STOPS=stop.shape[1],
        RING=ring_token.shape[1],
        GOLDEN=GOLDEN,
        MULTIPLIER_1=MULTIPLIER_1,
        MULTIPLIER_2=MULTIPLIER_2,
        num_warps=8,
    )


@triton.jit
def _score(logits_ptr, token_ptr, temperature, best_ptr, total_ptr, out_ptr, vocab, chunks, CHUNKS: tl.constexpr):
    index = tl.program_id(0)
    part = tl.arange(0, CHUNKS)
    bests = tl.load(best_ptr + index * chunks + part, mask=part < chunks, other=-float("inf"))
    totals = tl.load(total_ptr + index * chunks + part, mask=part < chunks, other=0.0)
    best = tl.max(bests, 0)
    total = tl.sum(totals.to(tl.float64) * tl.exp((bests - best).to(tl.float64)), 0)
    chosen = tl.load(logits_ptr + index.to(tl.int64) * vocab + tl.load(token_ptr + index)).to(tl.float32) / temperature
    tl.store(out_ptr + index, chosen - best - tl.log(total).to(tl.float32))


def score(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs [N] of given tokens under logits [N, vocab], by the same sums in the same order as `draw` reports them."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(count, chunks, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(best)
    every = torch.arange(count, device=logits.device)
    heat = torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    _sum_chunks[(count, chunks)](
        logits, every, torch.zeros_like(every), heat, best, total, vocab, chunks, CHUNK=CHUNK, num_warps=4
    )
    out = torch.empty(count, dtype=torch.float32, device=logits.device)
    # As many warps as `_draw` has: a sum's order follows from how its terms lie in them.
    _score[(count,)](
        logits,
        tokens,
        temperature,
        best,
        total,
        out,
        vocab,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
    )
    return out
