"""Drawing tokens by a C kernel: what `rollout/native/sampler.py` does where nothing is truncated."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from burnish.models.ops.cpu.build import address, num_threads

PER_THREAD = 1 << 14
"""Logits worth waking a thread for."""


def draw(library: ctypes.CDLL, logits: Tensor, uniform: Tensor, temperature: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their log-probs [n] from logits [n, V], one uniform number a row; a temperature of None is 1."""
    rows, vocab = logits.shape
    logits, tokens, logp = logits.contiguous(), uniform.new_empty(rows, dtype=torch.long), logits.new_empty(rows)
    threads = min(num_threads(), -(-logits.numel() // PER_THREAD))
    library.draw(
        address(logits), address(uniform), address(temperature), ctypes.c_long(rows), ctypes.c_long(vocab),
        address(tokens), address(logp), ctypes.c_long(threads),
    )  # fmt: skip
    return tokens, logp
