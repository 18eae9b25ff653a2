"""Log-probs, entropies and squared probabilities of tokens from hidden states, without ever holding [N, vocab].

The output head and the log-softmax run in chunks of rows; the backward recomputes each chunk's logits. Memory is
one chunk of logits, whatever N is. Arithmetic is in float32 at least.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.kernels.device import use_triton

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits held at once: 32 MiB in float32, small enough for a cache; a GPU needs more rows to be busy (a quarter of a GiB in bfloat16)."""


def row_chunks(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    """First and last row of each chunk."""
    rows, size = hidden.shape[0], max(1, CHUNK_ELEMENTS[hidden.device.type] // weight.shape[0])
    return [(i, min(i + size, rows)) for i in range(0, rows, size)]


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """hidden @ weight.T / temperature, in float32 at least."""
    logits = hidden @ weight.t()
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # an entropy that is only looked at costs no backward
        if use_triton(hidden):
            return _kernel_forward(ctx, hidden, weight, targets, with_entropy)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = hidden.new_empty(hidden.shape[0], dtype=dtype)
        entropy = hidden.new_zeros(hidden.shape[0] if with_entropy else 0, dtype=dtype)
        for i, j in row_chunks(hidden, weight):
            log_p = scaled_logits(hidden[i:j], weight, temperature).log_softmax(-1)
            logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
            if with_entropy:
                entropy[i:j] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_logp, grad_entropy = grads
        if len(ctx.saved_tensors) > 3:
            return *_kernel_backward(ctx, grad_logp, grad_entropy), None, None, None
        hidden, weight, targets = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # The chunks add up in float32: in a half type every one of them would be rounded into the sum.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in row_chunks(hidden, weight):
            log_p = scaled_logits(hidden[i:j], weight, ctx.temperature).log_softmax(-1)
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


def _kernel_forward(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The same by Triton kernels: the logits stay in the model's type and are read once."""
    from burnish.models.kernels.triton import logprob_head

    parts = [
        logprob_head.logprob_rows(hidden[i:j] @ weight.t(), targets[i:j], ctx.temperature, with_entropy)
        for i, j in row_chunks(hidden, weight)
    ]
    logp, total, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    ctx.save_for_backward(hidden, weight, targets, total, entropy)
    return logp, entropy


def _kernel_backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    from burnish.models.kernels.triton import logprob_head

    hidden, weight, targets, total, entropy = ctx.saved_tensors
    if grad_entropy is not None and not entropy.numel():
        grad_entropy = None
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
    for i, j in row_chunks(hidden, weight):
        of_logp, of_entropy = (None if grad is None else grad[i:j].contiguous() for grad in (grad_logp, grad_entropy))
        logits = hidden[i:j] @ weight.t()
        slope = logprob_head.logit_gradients_(
            logits, targets[i:j], total[i:j], entropy[i:j], of_logp, of_entropy, ctx.temperature
        )
        torch.mm(slope, weight, out=grad_hidden[i:j])
        if grad_weight is not None:
            grad_weight += slope.t() @ hidden[i:j]
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


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
    for i, j in row_chunks(hidden, weight):
        log_p = scaled_logits(hidden[i:j], weight, temperature).log_softmax(-1)
        p = log_p.exp()
        logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
        entropy[i:j] = -(p * log_p).sum(-1)
        sum_p2[i:j] = p.square().sum(-1)
    return logp, entropy, sum_p2


# --- Log-probs, entropies and the exact KL to a reference from the hidden states of both, without ever holding [N, vocab].
#
# As in `ops/logprob.py` both output heads run in chunks of rows and the backward recomputes each chunk; one pass gives all
# three. KL(p || q) = sum_v p_v (log p_v - log q_v), the gradient in the policy's logits p (log p - log q - KL).


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
        for i, j in row_chunks(hidden, weight):
            log_p, log_q = _both_log_softmax(hidden[i:j], weight, reference, i, j, temperature)
            p = log_p.exp()
            logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
            entropy[i:j] = -(p * log_p).sum(-1)
            kl[i:j] = p.mul_(_log_ratio(log_p, log_q, reference.top)).sum(-1)
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
        for i, j in row_chunks(hidden, weight):
            log_p, log_q = _both_log_softmax(hidden[i:j], weight, reference, i, j, ctx.temperature)
            p = log_p.exp()
            slope = torch.zeros_like(p)
            if grad_logp is not None:
                slope.addcmul_(p, grad_logp[i:j, None], value=-1)
                slope.scatter_add_(1, targets[i:j, None], grad_logp[i:j, None])
            if grad_entropy is not None:
                slope -= grad_entropy[i:j, None] * p * (log_p + entropy[i:j, None])
            if grad_kl is not None:
                slope += grad_kl[i:j, None] * p * (_log_ratio(log_p, log_q, ctx.top) - kl[i:j, None])
            slope = (slope if ctx.temperature == 1.0 else slope / ctx.temperature).to(hidden.dtype)
            grad_hidden[i:j] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ hidden[i:j]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _both_log_softmax(
    hidden: Tensor, weight: Tensor, reference: Distribution, i: int, j: int, temperature: float
) -> tuple[Tensor, Tensor]:
    log_p = scaled_logits(hidden, weight, temperature).log_softmax(-1)
    return log_p, scaled_logits(reference.hidden[i:j], reference.weight, temperature).log_softmax(-1)


def _log_ratio(log_p: Tensor, log_q: Tensor, top: int | None) -> Tensor:
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
