"""Divergences between a student's and a teacher's next-token distributions, without storing [N, vocab].

With S the student, Q the teacher and M = (1 - alpha) S + alpha Q:

    alpha 0: KL(Q || S)      alpha 1: KL(S || Q)      else: alpha KL(Q || M) + (1 - alpha) KL(S || M)

This is the generalised Jensen-Shannon divergence of GKD (2306.13649). The gradient flows through S, also through S in M. The sum
is over the vocabulary, or over the k likeliest tokens of one of the two. `rest` says what happens to the probability of all other
tokens:

- renormalise: both distributions are divided by their mass on the k tokens;
- tail: all other tokens are one further token with the mass that is left;
- raw: the other tokens are left out, and a negative sum counts as 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burnish.models.kernels.half_products import add_product
from burnish.models.kernels.logprob import (
    Distribution,
    Distributions,
    Divergence,
    head_kl,
    product_gradient,
    row_chunks,
    scaled_logits,
)

MAX_LOG_MASS = -1e-7
"""The log of the mass on the k tokens is at most this, so that the tail has a finite log-probability."""


def divergence(log_s: Tensor, log_q: Tensor, options: Divergence) -> Tensor:
    """[..., V] log-probs of student and teacher to [...]: their divergence, with gradient to the student."""
    if options.support == "full":
        return generalised_jsd(log_s, log_q, options.alpha)
    assert options.top is not None, "the config sets it"
    ranked = log_s.detach() if options.support == "student" else log_q
    index = ranked.topk(min(options.top, ranked.shape[-1]), -1).indices
    log_s, log_q = log_s.gather(-1, index), log_q.gather(-1, index)
    if options.rest == "raw":
        return generalised_jsd(log_s, log_q, options.alpha).clamp(min=0)
    if options.rest == "renormalise":
        return generalised_jsd(log_s.log_softmax(-1), log_q.log_softmax(-1), options.alpha)
    if options.rest == "tail":
        return generalised_jsd(_with_tail(log_s), _with_tail(log_q), options.alpha)
    raise ValueError(f"rest is {options.rest!r}; expected renormalise, tail or raw")


def generalised_jsd(log_s: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """[..., V] to [...]: the divergence of two sets of log-masses, which need not add up to 1."""
    if alpha == 0:
        return (log_q.exp() * (log_q - log_s)).sum(-1)
    if alpha == 1:
        return (log_s.exp() * (log_s - log_q)).sum(-1)
    weights = log_s.new_tensor([1 - alpha, alpha]).log()
    log_m = torch.logaddexp(log_s + weights[0], log_q + weights[1])
    to_teacher = (log_q.exp() * (log_q - log_m)).sum(-1)
    return alpha * to_teacher + (1 - alpha) * (log_s.exp() * (log_s - log_m)).sum(-1)


def _with_tail(log_mass: Tensor) -> Tensor:
    """[..., k] to [..., k + 1]: log-masses, and the log of the mass that is left."""
    taken = log_mass.logsumexp(-1, keepdim=True).clamp(max=MAX_LOG_MASS)
    return torch.cat([log_mass, torch.log1p(-taken.exp())], -1)


class _HeadDivergence(torch.autograd.Function):
    """The output head in chunks of rows. The backward computes each chunk's logits again and differentiates them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        teacher: Distribution,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.options = teacher.divergence, teacher.softcap
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, targets, teacher.hidden, teacher.weight)
        parts = [
            _outputs(
                scaled_logits(hidden[i:j], weight, temperature, softcap),
                targets[i:j],
                teacher._replace(hidden=teacher.hidden[i:j]),
                temperature,
            )
            for i, j in row_chunks(hidden, weight)
        ]
        if not parts:
            empty = hidden.new_zeros(0, dtype=torch.promote_types(hidden.dtype, torch.float32))
            return empty, empty.clone(), empty.clone()
        logp, entropy, found = (torch.cat(columns) for columns in zip(*parts, strict=True))
        return logp, entropy, found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        hidden, weight, targets, teacher_hidden, teacher_weight = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        # Sum the chunks in float32: in a half type the sum would be rounded once per chunk.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in row_chunks(hidden, weight):
            logits = scaled_logits(hidden[i:j], weight, ctx.temperature, ctx.softcap).requires_grad_()
            teacher = Distribution(teacher_hidden[i:j], teacher_weight, None, *ctx.options)
            with torch.enable_grad():
                outputs = _outputs(logits, targets[i:j], teacher, ctx.temperature)
                used = [(out, grad[i:j]) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
                total = torch.stack([(out * grad).sum() for out, grad in used]).sum()
            (grad_logits,) = torch.autograd.grad(total, logits)
            grad_logits = product_gradient(grad_logits, logits.detach(), ctx.temperature, ctx.softcap).to(hidden.dtype)
            grad_hidden[i:j] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[i:j])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _outputs(
    logits: Tensor, targets: Tensor, teacher: Distribution, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), entropy and divergence of rows of logits; [M] each."""
    log_s = logits.log_softmax(-1)
    with torch.no_grad():
        log_q = scaled_logits(teacher.hidden, teacher.weight, temperature, teacher.softcap).log_softmax(-1)
    entropy = -(log_s.exp() * log_s).sum(-1)
    assert teacher.divergence is not None
    return log_s.gather(1, targets[:, None])[:, 0], entropy, divergence(log_s, log_q, teacher.divergence)


def head_divergence(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    teacher: Distribution,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy, and `teacher.divergence` between the student and the teacher; [M] each."""
    assert teacher.divergence is not None
    found: tuple[Tensor, Tensor, Tensor] = _HeadDivergence.apply(hidden, weight, targets, teacher, temperature, softcap)
    return found


def head_comparison(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reference: Distribution | Distributions,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy, and the KL or divergence to the reference of each position; [M] each.

    `softcap` is that of the policy; a reference has its own.
    """
    if isinstance(reference, Distribution):
        compare = head_kl if reference.divergence is None else head_divergence
        return compare(hidden, weight, targets, reference, temperature, softcap)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logp, entropy, found = (hidden.new_zeros(hidden.shape[0], dtype=dtype) for _ in range(3))
    for rows, part in reference.parts:
        columns = head_comparison(hidden[rows], weight, targets[rows], part, temperature, softcap)
        logp, entropy, found = (
            whole.index_copy(0, rows, column) for whole, column in zip((logp, entropy, found), columns, strict=True)
        )
    return logp, entropy, found
