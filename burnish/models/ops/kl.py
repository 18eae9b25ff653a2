"""Log-probs, entropies and the exact KL to a reference from the hidden states of both, without ever holding [N, vocab].

As in `ops/logprob.py` both output heads run in chunks of rows and the backward recomputes each chunk; one pass gives all
three. KL(p || q) = sum_v p_v (log p_v - log q_v), the gradient in the policy's logits p (log p - log q - KL).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.ops.logprob import chunks, scaled_logits


class Distribution(NamedTuple):
    """What a model says at M places: softmax(hidden @ weight.T / temperature)."""

    hidden: Tensor  # [M, hidden]
    weight: Tensor  # [vocab, hidden]
    top: int | None = None
    """Whoever compares with it looks at so many tokens, its own likeliest, one by one, and at all others as one; None: at all."""


class _HeadKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, reference: Distribution, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.temperature, ctx.top = temperature, reference.top
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy, kl = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
        for i, j in chunks(hidden, weight):
            log_p, log_q = _both(hidden[i:j], weight, reference, i, j, temperature)
            p = log_p.exp()
            logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
            entropy[i:j] = -(p * log_p).sum(-1)
            kl[i:j] = p.mul_(_difference(log_p, log_q, reference.top)).sum(-1)
        ctx.save_for_backward(hidden, weight, targets, reference.hidden, reference.weight, entropy, kl)
        return logp, entropy, kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_logp, grad_entropy, grad_kl = grads
        hidden, weight, targets, ref_hidden, ref_weight, entropy, kl = ctx.saved_tensors
        reference = Distribution(ref_hidden, ref_weight)
        grad_hidden = torch.empty_like(hidden)
        # The chunks add up in float32: in a half type every one of them would be rounded into the sum.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in chunks(hidden, weight):
            log_p, log_q = _both(hidden[i:j], weight, reference, i, j, ctx.temperature)
            p = log_p.exp()
            slope = torch.zeros_like(p)
            if grad_logp is not None:
                slope.addcmul_(p, grad_logp[i:j, None], value=-1)
                slope.scatter_add_(1, targets[i:j, None], grad_logp[i:j, None])
            if grad_entropy is not None:
                slope -= grad_entropy[i:j, None] * p * (log_p + entropy[i:j, None])
            if grad_kl is not None:
                slope += grad_kl[i:j, None] * p * (_difference(log_p, log_q, ctx.top) - kl[i:j, None])
            slope = (slope if ctx.temperature == 1.0 else slope / ctx.temperature).to(hidden.dtype)
            grad_hidden[i:j] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ hidden[i:j]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _both(
    hidden: Tensor, weight: Tensor, reference: Distribution, i: int, j: int, temperature: float
) -> tuple[Tensor, Tensor]:
    log_p = scaled_logits(hidden, weight, temperature).log_softmax(-1)
    return log_p, scaled_logits(reference.hidden[i:j], reference.weight, temperature).log_softmax(-1)


def _difference(log_p: Tensor, log_q: Tensor, top: int | None) -> Tensor:
    """[rows, vocab] log p - log q; with `top` that of all tokens but the likeliest is the one of their sums.

    Then sum_v p_v d_v is the KL of what is left when those tokens are not told apart, which is at most that of all, and its
    gradient in the logits is p (d - KL) as before.
    """
    difference = log_p - log_q
    if top is None or top >= log_p.shape[-1]:
        return difference
    likely = torch.zeros_like(log_p, dtype=torch.bool).scatter_(-1, log_p.topk(top, -1).indices, True)
    others = [x.masked_fill(likely, -torch.inf).logsumexp(-1, keepdim=True) for x in (log_p, log_q)]
    return torch.where(likely, difference, others[0] - others[1])


def head_kl(
    hidden: Tensor, weight: Tensor, targets: Tensor, reference: Distribution, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy and KL(p || q), p of the policy and q of the reference; [M] each, gradient to the policy."""
    return _HeadKl.apply(hidden, weight, targets, reference, temperature)
