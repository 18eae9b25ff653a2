"""Top-k, top-p and min-p without sorting, by a search for each row's smallest kept logit.

A truncation keeps the first tokens in descending order of logits, equal logits by token id. Two numbers describe it: the
smallest kept logit, and the last kept token among those equal to it. The search narrows an interval of logits with three
pivots per pass over the row, summing the mass above each pivot. The interval's ends move to existing logits, so the search
is exact and takes about as many passes as the interval can be quartered. A program has one row.

`burnish.inference.native.sampler.truncate` is the equivalent torch function, which defines what is kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
Bias = tuple[Tensor, Tensor, Tensor]
"""Logit biases of every row: tokens [rows, most], biases [rows, most], number of biases [rows]."""


@triton.jit
def load_logits(
    line_ptr,
    start,
    vocab,
    row,
    bias_token_ptr,
    bias_value_ptr,
    bias_count_ptr,
    CHUNK: tl.constexpr,
    BIASED: tl.constexpr,
    BIASES: tl.constexpr,
):
    """The model's logits of CHUNK tokens from `start` on, and these plus the row's bias; float32, -inf past the vocabulary."""
    column = start + tl.arange(0, CHUNK)
    raw = tl.load(line_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    x = raw
    if BIASED:
        for k in range(tl.load(bias_count_ptr + row).to(tl.int32)):
            token = tl.load(bias_token_ptr + row * BIASES + k)
            if (token >= start) & (token < start + CHUNK):  # most biases belong to other chunks
                x += tl.where(column == token, tl.load(bias_value_ptr + row * BIASES + k).to(tl.float32), 0.0)
    return raw, x


@triton.jit
def mask_below_cut(x, start, value, last, CHUNK: tl.constexpr):
    """-inf for logits below `value`, or equal to it after the token `last`. NaN stays NaN."""
    column = start + tl.arange(0, CHUNK)
    return tl.where((x < value) | ((x == value) & (column > last)), -float("inf"), x)


@triton.jit
def mask_tokens(x, start, tokens_ptr, TOKENS: tl.constexpr, CHUNK: tl.constexpr):
    """-inf for the listed tokens among the logits of CHUNK tokens from `start` on."""
    column = start + tl.arange(0, CHUNK)
    for k in tl.static_range(TOKENS):
        x = tl.where(column == tl.load(tokens_ptr + k), -float("inf"), x)
    return x


@triton.jit
def _bounds(
    line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr,
    CHUNK: tl.constexpr, BIASED: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """The smallest logit above -inf, and the largest."""
    low = tl.full([CHUNK], float("inf"), tl.float32)
    high = tl.full([CHUNK], -float("inf"), tl.float32)
    for start in range(0, vocab, CHUNK):
        _, x = load_logits(
            line_ptr, start, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, CHUNK, BIASED, BIASES
        )
        low = tl.minimum(low, tl.where(x > -float("inf"), x, float("inf")))
        high = tl.maximum(high, x)
    return tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _token_weight(x, best, scale, MASS: tl.constexpr):
    """A token's weight in the search: its probability relative to the likeliest (top-p), or 1 (top-k)."""
    weight = tl.where(x > -float("inf"), 1.0, 0.0)
    if MASS:
        weight = tl.exp((x - best) / scale)
    return weight


@triton.jit
def _mass_above(
    line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, value, best, scale,
    CHUNK: tl.constexpr, BIASED: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab, CHUNK):
        _, x = load_logits(
            line_ptr, start, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, CHUNK, BIASED, BIASES
        )
        total += tl.where(x > value, _token_weight(x, best, scale, True), 0.0)
    return tl.sum(total.to(tl.float64), 0)


@triton.jit
def _search(
    line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, floor, best, scale, goal,
    MASS: tl.constexpr, CHUNK: tl.constexpr, BIASED: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """The smallest logit of at least `floor` with less than `goal` weight above it, and that weight."""
    high = best
    above = goal * 0.0
    # Infinite logits have no distribution, and the search would not end.
    while (floor < high) & (high - floor < float("inf")):
        step = (high - floor) * 0.25
        # Between neighbouring floats a pivot may round to the upper end; at the lower end it still narrows the interval.
        pivot_1 = tl.where(floor + step < high, floor + step, floor)
        pivot_2 = tl.where(floor + 2 * step < high, floor + 2 * step, pivot_1)
        pivot_3 = tl.where(floor + 3 * step < high, floor + 3 * step, pivot_2)
        sum_1 = tl.zeros([CHUNK], tl.float32)
        sum_2 = tl.zeros([CHUNK], tl.float32)
        sum_3 = tl.zeros([CHUNK], tl.float32)
        up_1 = tl.full([CHUNK], float("inf"), tl.float32)
        up_2 = tl.full([CHUNK], float("inf"), tl.float32)
        up_3 = tl.full([CHUNK], float("inf"), tl.float32)
        down_1 = tl.full([CHUNK], -float("inf"), tl.float32)
        down_2 = tl.full([CHUNK], -float("inf"), tl.float32)
        down_3 = tl.full([CHUNK], -float("inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            _, x = load_logits(
                line_ptr, start, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, CHUNK, BIASED, BIASES
            )
            weight = _token_weight(x, best, scale, MASS)
            sum_1 += tl.where(x > pivot_1, weight, 0.0)
            sum_2 += tl.where(x > pivot_2, weight, 0.0)
            sum_3 += tl.where(x > pivot_3, weight, 0.0)
            up_1 = tl.minimum(up_1, tl.where(x > pivot_1, x, float("inf")))
            up_2 = tl.minimum(up_2, tl.where(x > pivot_2, x, float("inf")))
            up_3 = tl.minimum(up_3, tl.where(x > pivot_3, x, float("inf")))
            down_1 = tl.maximum(down_1, tl.where(x > pivot_1, -float("inf"), x))
            down_2 = tl.maximum(down_2, tl.where(x > pivot_2, -float("inf"), x))
            down_3 = tl.maximum(down_3, tl.where(x > pivot_3, -float("inf"), x))
        above_1 = tl.sum(sum_1.to(tl.float64), 0)
        above_2 = tl.sum(sum_2.to(tl.float64), 0)
        above_3 = tl.sum(sum_3.to(tl.float64), 0)
        # New upper end: the logit at or next below the lowest pivot with less than the goal above it.
        # New lower end: the logit next above the highest pivot with the goal or more above it.
        if above_3 < goal:
            high = tl.max(down_3, 0)
            above = above_3
        else:
            floor = tl.min(up_3, 0)
        if above_2 < goal:
            high = tl.max(down_2, 0)
            above = above_2
        else:
            floor = tl.maximum(floor, tl.min(up_2, 0))
        if above_1 < goal:
            high = tl.max(down_1, 0)
            above = above_1
        else:
            floor = tl.maximum(floor, tl.min(up_1, 0))
    return high, above


@triton.jit
def _find_equal(
    line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, value, wanted,
    CHUNK: tl.constexpr, BIASED: tl.constexpr, BIASES: tl.constexpr,
):  # fmt: skip
    """The `wanted`-th token with logit `value` (`vocab` if there are fewer), and the number of such tokens."""
    found = vocab
    passed = 0
    for start in range(0, vocab, CHUNK):
        _, x = load_logits(
            line_ptr, start, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, CHUNK, BIASED, BIASES
        )
        is_equal = (x == value).to(tl.int32)
        here = tl.sum(is_equal, 0)
        if (passed < wanted) & (passed + here >= wanted):
            number = passed + tl.cumsum(is_equal, 0)
            column = start + tl.arange(0, CHUNK)
            found = tl.min(tl.where((number == wanted) & (is_equal > 0), column, vocab), 0)
        passed += here
    return found, passed


@triton.jit
def _find_cut(
    logits_ptr,
    source_ptr,
    row_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    bias_token_ptr,
    bias_value_ptr,
    bias_count_ptr,
    value_ptr,
    last_ptr,
    vocab,
    CHUNK: tl.constexpr,
    BIASED: tl.constexpr,
    BIASES: tl.constexpr,
):
    index = tl.program_id(0)
    row = tl.load(row_ptr + index)
    top_k = tl.load(top_k_ptr + row).to(tl.float64)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    value = -float("inf")
    last = vocab
    if (top_k > 0) | (top_p < 1) | (min_p > 0):
        line_ptr = logits_ptr + tl.load(source_ptr + index).to(tl.int64) * vocab
        scale = tl.load(temperature_ptr + row)
        scale = tl.where(scale == 0, 1.0, scale)
        narrow = scale.to(tl.float32)
        floor, best = _bounds(
            line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, CHUNK, BIASED, BIASES
        )
        mass = top_k * 0.0
        if top_k > 0:
            value, above = _search(
                line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, floor, best, narrow, top_k,
                False, CHUNK, BIASED, BIASES,
            )  # fmt: skip
            wanted = tl.minimum(top_k - above, vocab * 1.0)
            last, equal = _find_equal(
                line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, value, wanted.to(tl.int32),
                CHUNK, BIASED, BIASES,
            )  # fmt: skip
            floor = value
            mass = tl.minimum(wanted, equal.to(tl.float64)) * tl.exp((value - best) / narrow).to(tl.float64)
        if top_p < 1:
            mass += _mass_above(
                line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, value, best, narrow,
                CHUNK, BIASED, BIASES,
            )  # fmt: skip
            goal = top_p * mass
            value, above = _search(
                line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, floor, best, narrow, goal,
                True, CHUNK, BIASED, BIASES,
            )  # fmt: skip
            each = tl.exp((value - best) / narrow).to(tl.float64)
            wanted = tl.minimum(tl.ceil((goal - above) / each), vocab * 1.0)
            last, equal = _find_equal(
                line_ptr, vocab, row, bias_token_ptr, bias_value_ptr, bias_count_ptr, value, wanted.to(tl.int32),
                CHUNK, BIASED, BIASES,
            )  # fmt: skip
        if min_p > 0:
            least = best.to(tl.float64) + scale * tl.log(min_p)
            near = least.to(tl.float32)
            # If the bound was rounded down, logits equal to the rounded number are below the bound.
            behind = tl.where(near.to(tl.float64) < least, -1, vocab)
            stricter = (near > value) | ((near == value) & (behind < last))
            value = tl.where(stricter, near, value)
            last = tl.where(stricter, behind, last)
    tl.store(value_ptr + index, value)
    tl.store(last_ptr + index, last)


def find_cut(
    logits: Tensor,
    source: Tensor,
    row: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    bias: Bias | None = None,
) -> tuple[Tensor, Tensor]:
    """Smallest kept logit, and last kept token among those equal to it, of each row of `row` [n].

    Row `row[i]` samples from `logits[source[i]]`. Options have one entry per row; a row without truncation keeps all tokens.
    """
    count, vocab = source.shape[0], logits.shape[1]
    value = torch.empty(count, dtype=torch.float32, device=logits.device)
    last = torch.empty(count, dtype=torch.int32, device=logits.device)
    token, added, number = bias if bias is not None else (row, row, row)
    _find_cut[(count,)](
        logits,
        source,
        row,
        temperature,
        top_k,
        top_p,
        min_p,
        token,
        added,
        number,
        value,
        last,
        vocab,
        CHUNK=CHUNK,
        BIASED=bias is not None,
        BIASES=token.shape[1] if bias is not None else 1,
        num_warps=16,
    )
    return value, last
