"""Reading logits as a row draws from them: with its bias, and without what its truncation cuts off."""

from __future__ import annotations

import triton
import triton.language as tl


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
    """The model's logits of CHUNK tokens from `start` on, and the same with the row's bias; float32, -inf past the last."""
    column = start + tl.arange(0, CHUNK)
    raw = tl.load(line_ptr + column, mask=column < vocab, other=-float("inf")).to(tl.float32)
    x = raw
    if BIASED:
        for k in range(tl.load(bias_count_ptr + row).to(tl.int32)):
            token = tl.load(bias_token_ptr + row * BIASES + k)
            if (token >= start) & (token < start + CHUNK):  # most pairs are of other chunks
                x += tl.where(column == token, tl.load(bias_value_ptr + row * BIASES + k).to(tl.float32), 0.0)
    return raw, x


@triton.jit
def cut_off(x, start, value, last, CHUNK: tl.constexpr):
    """-inf where a logit is below `value`, or equal to it behind the token `last`. What is no number stays none."""
    column = start + tl.arange(0, CHUNK)
    return tl.where((x < value) | ((x == value) & (column > last)), -float("inf"), x)
