"""Sampling: one token per row with its log-prob, and the update of the row's state, in one pass over the logits.

The cumulative distribution is inverted in vocabulary order with one uniform number from (key, position), the same number
as `burnish.core.random_keys` gives. The first kernel sums exponentials over chunks of the vocabulary. The second finds the
chunk that the number falls into and reads this chunk again. So the logits are read once and never stored in float32. A
row's logit bias and its truncation (`truncation.py`) are applied when logits are loaded. The sums of the model's own
distribution, if requested, are computed in the same pass. So are those without the tokens that are never drawn (`never`), from
which a token is then chosen, while its log-prob is that of the whole distribution.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.core.random_keys import GOLDEN, MULTIPLIER_1, MULTIPLIER_2
from burnish.models.kernels.triton.truncation import Bias, load_logits, mask_below_cut, mask_tokens

CHUNK = 4096


@triton.jit
def _inverse_temperature(temperature):
    """1 / temperature with IEEE rounding, since the default division differs between kernels."""
    return tl.div_rn(1.0, tl.where(temperature == 0, 1.0, temperature))


@triton.jit
def _sum_chunks(
    logits_ptr,
    source_ptr,
    row_ptr,
    temperature_ptr,
    bias_token_ptr,
    bias_value_ptr,
    bias_count_ptr,
    cut_value_ptr,
    cut_last_ptr,
    best_ptr,
    total_ptr,
    raw_best_ptr,
    raw_total_ptr,
    open_best_ptr,
    open_total_ptr,
    never_ptr,
    vocab,
    chunks,
    CHUNK: tl.constexpr,
    BIASED: tl.constexpr,
    BIASES: tl.constexpr,
    TRUNCATED: tl.constexpr,
    RAW: tl.constexpr,
    NEVER: tl.constexpr,
):
    index = tl.program_id(0)
    chunk = chunks - 1 - tl.program_id(1)  # the chunks written last are still in the cache
    source = tl.load(source_ptr + index).to(tl.int64)
    row = tl.load(row_ptr + index)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    raw, x = load_logits(
        logits_ptr + source * vocab, chunk * CHUNK, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr,
        CHUNK, BIASED, BIASES,
    )  # fmt: skip
    if TRUNCATED:
        cut = tl.load(cut_value_ptr + index)
        x = mask_below_cut(x, chunk * CHUNK, cut, tl.load(cut_last_ptr + index), CHUNK)
        if NEVER > 0:  # a truncation keeps none of them; without one the row is the model's
            x = tl.where(cut > -float("inf"), mask_tokens(x, chunk * CHUNK, never_ptr, NEVER, CHUNK), x)
    x *= _inverse_temperature(temperature)
    best = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(best == -float("inf"), 0.0, best)), 0)
    tl.store(best_ptr + index * chunks + chunk, best)
    tl.store(total_ptr + index * chunks + chunk, total)
    if NEVER > 0:
        x = mask_tokens(x, chunk * CHUNK, never_ptr, NEVER, CHUNK)
        best = tl.max(x, 0)
        total = tl.sum(tl.exp(x - tl.where(best == -float("inf"), 0.0, best)), 0)
        tl.store(open_best_ptr + index * chunks + chunk, best)
        tl.store(open_total_ptr + index * chunks + chunk, total)
    if RAW:
        best = tl.max(raw, 0)
        total = tl.sum(tl.exp(raw - tl.where(best == -float("inf"), 0.0, best)), 0)
        tl.store(raw_best_ptr + index * chunks + chunk, best)
        tl.store(raw_total_ptr + index * chunks + chunk, total)


@triton.jit
def _combine_chunks(best_ptr, total_ptr, chunks, CHUNKS: tl.constexpr):
    """Combine a row's chunks: largest logit per chunk, mass per chunk relative to the overall largest, that largest, total mass."""
    part = tl.arange(0, CHUNKS)
    bests = tl.load(best_ptr + part, mask=part < chunks, other=-float("inf"))
    totals = tl.load(total_ptr + part, mask=part < chunks, other=0.0)
    best = tl.max(bests, 0)
    masses = totals.to(tl.float64) * tl.exp((bests - best).to(tl.float64))
    return bests, masses, best, tl.sum(masses, 0)


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
    bias_token_ptr,
    bias_value_ptr,
    bias_count_ptr,
    cut_value_ptr,
    cut_last_ptr,
    best_ptr,
    total_ptr,
    raw_best_ptr,
    raw_total_ptr,
    open_best_ptr,
    open_total_ptr,
    never_ptr,
    ints_ptr,
    stop_ptr,
    ring_token_ptr,
    ring_logp_ptr,
    ring_raw_ptr,
    vocab,
    chunks,
    ints_stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BIASED: tl.constexpr,
    BIASES: tl.constexpr,
    TRUNCATED: tl.constexpr,
    RAW: tl.constexpr,
    NEVER: tl.constexpr,
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
        bests, masses, best, total = _combine_chunks(
            open_best_ptr + index * chunks, open_total_ptr + index * chunks, chunks, CHUNKS
        )
        ends = tl.cumsum(masses, 0)

        drawn = tl.load(drawn_at)
        key = tl.load(key_at).to(tl.uint64, bitcast=True)
        bits = _mix(
            key + (drawn + 1).to(tl.uint64, bitcast=True) * tl.full([], GOLDEN, tl.uint64), MULTIPLIER_1, MULTIPLIER_2
        )
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
        # Compare with the last running sum, not the total: they may differ in the last bit, and the goal must be reached.
        goal = uniform * tl.max(ends, 0)
        here = tl.sum((ends < goal).to(tl.int32), 0)
        first_best = tl.min(tl.where(bests == best, part, CHUNKS), 0)
        here = tl.minimum(tl.where(greedy, first_best, here), chunks - 1)
        before = tl.sum(tl.where(part < here, masses, 0.0), 0)

        column = tl.arange(0, CHUNK)
        raw, x = load_logits(
            logits_ptr + source * vocab, here * CHUNK, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr,
            CHUNK, BIASED, BIASES,
        )  # fmt: skip
        if TRUNCATED:
            x = mask_below_cut(x, here * CHUNK, tl.load(cut_value_ptr + index), tl.load(cut_last_ptr + index), CHUNK)
        x *= _inverse_temperature(temperature)
        if NEVER > 0:
            x = mask_tokens(x, here * CHUNK, never_ptr, NEVER, CHUNK)
        running = before + tl.cumsum(tl.exp(x - best).to(tl.float64), 0)
        passed = tl.sum((running < goal).to(tl.int32), 0)
        # Rounding may leave the goal beyond the last sum: then take the last token with a finite logit.
        last = tl.max(tl.where(x > -float("inf"), column, 0), 0)
        found = tl.minimum(passed, last)
        found = tl.where(greedy, tl.min(tl.where(x == best, column, CHUNK - 1), 0), found)
        chosen = tl.sum(tl.where(column == found, x, 0.0), 0)
        token = (here * CHUNK + found).to(tl.int64)

        if NEVER > 0:
            _, _, best, total = _combine_chunks(best_ptr + index * chunks, total_ptr + index * chunks, chunks, CHUNKS)
        produced = tl.load(produced_at)
        slot = row * RING + produced % RING
        tl.store(ring_token_ptr + slot, token.to(tl.int32))
        tl.store(ring_logp_ptr + slot, chosen - best - tl.log(total).to(tl.float32))
        if RAW:
            _, _, raw_best, raw_total = _combine_chunks(
                raw_best_ptr + index * chunks, raw_total_ptr + index * chunks, chunks, CHUNKS
            )
            chosen = tl.sum(tl.where(column == found, raw, 0.0), 0)
            tl.store(ring_raw_ptr + slot, chosen - raw_best - tl.log(raw_total).to(tl.float32))
        stops = tl.load(stop_ptr + row * STOPS + tl.arange(0, STOPS))
        stopped = tl.sum((stops == token).to(tl.int32), 0) > 0
        goes_on = (stopped == 0) & (produced + 1 < tl.load(limit_at))
        tl.store(produced_at, produced + 1)
        tl.store(drawn_at, drawn + 1)
        tl.store(last_at, token)
        tl.store(position_at, tl.where(goes_on, tl.load(position_at) + 1, -1))
        tl.store(live_at, goes_on.to(tl.int64))


def _chunk_sums(
    logits: Tensor,
    source: Tensor,
    row: Tensor,
    temperature: Tensor,
    cut: tuple[Tensor, Tensor] | None = None,
    bias: Bias | None = None,
    raw: bool = False,
    never: Tensor | None = None,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Kernel arguments of biases and cuts, and (largest logit, mass) per chunk of three distributions.

    They are the one that log-probs are of, the raw one, and the one that a token is chosen from, which has none of the tokens `never`.
    Last come these tokens.
    """
    count, vocab = source.shape[0], logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    options = (*(bias or (row, row, row)), *(cut or (row, row)))
    # Separate tensors: a tensor's alignment decides how a kernel reads it, and with it the order of its sums.
    whole, own, drawable = (
        [torch.empty(count, chunks, dtype=torch.float32, device=logits.device) for _ in range(2)] if is_used else []
        for is_used in (True, raw, never is not None)
    )
    sums = [*whole, *(own or whole), *(drawable or whole), row if never is None else never]
    _sum_chunks[(count, chunks)](
        logits,
        source,
        row,
        temperature,
        *options,
        *sums,
        vocab,
        chunks,
        CHUNK=CHUNK,
        BIASED=bias is not None,
        BIASES=bias[0].shape[1] if bias is not None else 1,
        TRUNCATED=cut is not None,
        RAW=raw,
        NEVER=0 if never is None else never.shape[0],
        num_warps=4,
        enable_fp_fusion=False,  # log-probs of sampling and of scoring must have the same bits
    )
    return options, sums


def draw(
    logits: Tensor,
    source: Tensor,
    row: Tensor,
    temperature: Tensor,
    ints: Tensor,
    stop: Tensor,
    ring_token: Tensor,
    ring_logp: Tensor,
    cut: tuple[Tensor, Tensor] | None = None,
    bias: Bias | None = None,
    ring_raw: Tensor | None = None,
    never: Tensor | None = None,
) -> None:
    """`burnish.inference.native.device_state.RowState.draw` as two kernels. `cut` has an entry per entry of `row`, `bias` one per row."""
    count, vocab = source.shape[0], logits.shape[1]
    chunks = triton.cdiv(vocab, CHUNK)
    options, sums = _chunk_sums(logits, source, row, temperature, cut, bias, ring_raw is not None, never)
    _draw[(count,)](
        logits,
        source,
        row,
        temperature,
        *options,
        *sums,
        ints,
        stop,
        ring_token,
        ring_logp,
        ring_logp if ring_raw is None else ring_raw,
        vocab,
        chunks,
        ints.stride(0),
        CHUNK=CHUNK,
        CHUNKS=triton.next_power_of_2(chunks),
        BIASED=bias is not None,
        BIASES=bias[0].shape[1] if bias is not None else 1,
        TRUNCATED=cut is not None,
        RAW=ring_raw is not None,
        NEVER=0 if never is None else never.shape[0],
        STOPS=stop.shape[1],
        RING=ring_token.shape[1],
        GOLDEN=GOLDEN,
        MULTIPLIER_1=MULTIPLIER_1,
        MULTIPLIER_2=MULTIPLIER_2,
        num_warps=8,
        enable_fp_fusion=False,
    )


@triton.jit
def _token_logprobs(logits_ptr, token_ptr, inverse, best_ptr, total_ptr, out_ptr, vocab, chunks, CHUNKS: tl.constexpr):
    index = tl.program_id(0)
    _, _, best, total = _combine_chunks(best_ptr + index * chunks, total_ptr + index * chunks, chunks, CHUNKS)
    chosen = tl.load(logits_ptr + index.to(tl.int64) * vocab + tl.load(token_ptr + index)).to(tl.float32)
    chosen *= inverse
    tl.store(out_ptr + index, chosen - best - tl.log(total).to(tl.float32))


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probs [N] of given tokens under logits [N, vocab], with the same sums in the same order as `draw`."""
    count, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    every = torch.arange(count, device=logits.device)
    heat = torch.full((1,), temperature, dtype=torch.float64, device=logits.device)
    _, (best, total, *_) = _chunk_sums(logits, every, torch.zeros_like(every), heat)
    out = torch.empty(count, dtype=torch.float32, device=logits.device)
    # The same number of warps as `_draw`: the order of a sum depends on how its terms are spread over warps.
    _token_logprobs[(count,)](
        logits,
        tokens,
        float(np.float32(1) / np.float32(temperature or 1.0)),  # rounded as `_inverse_temperature` does
        best,
        total,
        out,
        vocab,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        num_warps=8,
        enable_fp_fusion=False,
    )
    return out
