"""Log-probs, entropies and squared probabilities of tokens from hidden states, without ever holding [N, vocab].

The output head and the log-softmax run in chunks of rows; the backward recomputes each chunk's logits. Memory is
one chunk of logits, whatever N is. Arithmetic is in float32 at least.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 1 << 23  # logits held at once: 32 MiB in float32


def _chunks(rows: int, vocab: int) -> list[tuple[int, int]]:
    size = max(1, CHUNK_ELEMENTS // vocab)
    return [(i, min(i + size, rows)) for i in range(0, rows, size)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = hidden.new_empty(hidden.shape[0], dtype=dtype)
        entropy = hidden.new_zeros(hidden.shape[0] if with_entropy else 0, dtype=dtype)
        for i, j in _chunks(*_sizes(hidden, weight)):
            log_p = _logits(hidden[i:j], weight, temperature).log_softmax(-1)
            logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
            if with_entropy:
                entropy[i:j] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_logp, grad_entropy = grads
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # The chunks add up in float32: in a half type every one of them would be rounded into the sum.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in _chunks(*_sizes(hidden, weight)):
            log_p = _logits(hidden[i:j], weight, ctx.temperature).log_softmax(-1)
            p = log_p.exp()
            # d logp_target / d logits = onehot - p;  d H / d logits = -p (log p + H)
            if grad_logp is None:
                slope = torch.zeros_like(p)
            else:
                slope = -grad_logp[i:j, None] * p
                slope.scatter_add_(1, targets[i:j, None], grad_logp[i:j, None])
            if grad_entropy is not None:
                entropy = -(p * log_p).sum(-1, keepdim=True)
                slope -= grad_entropy[i:j, None] * p * (log_p + entropy)
            slope = (slope if ctx.temperature == 1.0 else slope / ctx.temperature).to(hidden.dtype)
            grad_hidden[i:j] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ hidden[i:j]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _sizes(hidden: Tensor, weight: Tensor) -> tuple[int, int]:
    return hidden.shape[0], weight.shape[0]


def head_logprob(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if asked, the full-vocabulary entropy, of softmax(hidden @ weight.T / temperature); [M] each."""
    logp, entropy = _HeadLogprob.apply(hidden, weight, targets, temperature, with_entropy)
    return logp, entropy if with_entropy else None


@torch.no_grad()
def head_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy and sum_v p_v^2 of softmax(hidden @ weight.T / temperature); [M] each, no gradient."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logp, entropy, sum_p2 = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
    for i, j in _chunks(*_sizes(hidden, weight)):
        log_p = _logits(hidden[i:j], weight, temperature).log_softmax(-1)
        p = log_p.exp()
        logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
        entropy[i:j] = -(p * log_p).sum(-1)
        sum_p2[i:j] = p.square().sum(-1)
    return logp, entropy, sum_p2
