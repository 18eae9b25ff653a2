"""torch's flash attention on packed sequences of any lengths, for half types on a GPU."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor


def has_varlen(q: Tensor) -> bool:
    """Whether torch's kernel runs on these queries."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


@cache
def _options() -> dict[str, Any]:
    from torch.nn.attention.varlen import varlen_attn

    # From torch 2.12 on sharing keys between query heads must be asked for; before, it was simply done.
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int], window: int | None
) -> Tensor:
    """Causal attention of packed queries [N, heads, D] over packed keys [M, kv_heads, D], aligned at each sequence's end.

    `bounds` are the int32 offsets of the sequences among the queries and among the keys, `longest` their greatest lengths.
    """
    reach = (-1 if window is None else window - 1, 0)
    if not torch.is_grad_enabled():
        # The operation itself: torch's module around it, which adds the gradient, takes a second or two to import.
        operation = torch.ops.aten._flash_attention_forward
        options = {"window_size_left": reach[0], "window_size_right": reach[1]}
        return cast(Tensor, operation(q, k, v, *bounds, *longest, 0.0, window is None, False, **options)[0])
    from torch.nn.attention.varlen import varlen_attn

    return cast(Tensor, varlen_attn(q, k, v, *bounds, *longest, window_size=reach, **_options()))
