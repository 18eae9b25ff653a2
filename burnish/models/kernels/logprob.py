"""Log-probs, entropies, sums of squared probabilities and KL of tokens from hidden states, without storing [N, vocab].

The output head and the log-softmax run in chunks of rows, and the backward recomputes each chunk's logits. Memory is one
chunk of logits for any N. Arithmetic is in float32 at least. With p the policy and q the reference,

    KL(p || q) = sum_v p_v (log p_v - log q_v),    dKL/dlogits = p (log p - log q - KL)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.models.kernels.cpu import cpu_ops
from burnish.models.kernels.cpu.c_library import STORED_TYPES, c_kernels
from burnish.models.kernels.device import use_triton
from burnish.models.kernels.half_products import add_product, widened

CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits of one chunk. On a CPU 32 MiB of float32, which fits in a cache; a GPU needs more rows to be busy."""
KERNEL_CHUNK_ELEMENTS = {"cpu": 1 << 25, "cuda": 1 << 28}
"""The same of the kernels, which hold one copy of the logits in the type of the product: 128 MiB of float32 and 512 MiB of bfloat16."""


def row_chunks(hidden: Tensor, weight: Tensor, elements: int | None = None) -> list[tuple[int, int]]:
    """(start, stop) rows of each chunk of at most so many logits."""
    elements = CHUNK_ELEMENTS[hidden.device.type] if elements is None else elements
    rows, size = hidden.shape[0], max(1, elements // weight.shape[0])
    return [(i, min(i + size, rows)) for i in range(0, rows, size)]


def softcapped(logits: Tensor, softcap: float) -> Tensor:
    """softcap * tanh(logits / softcap), computed in float32 at least (Gemma 2, 2408.00118)."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return ((logits.to(wide) / softcap).tanh() * softcap).to(logits.dtype)


def scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None = None) -> Tensor:
    """hidden @ weight.T, soft-capped if the model does so, / temperature, in float32 at least."""
    hidden, weight = widened(hidden, weight)
    logits = hidden @ weight.t()
    if softcap is not None:
        logits = softcapped(logits, softcap)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def product_gradient(grad: Tensor, scaled: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """The gradient of hidden @ weight.T, given the gradient of `scaled_logits` and their values."""
    grad = grad if temperature == 1.0 else grad / temperature
    return grad if softcap is None else grad * (1 - (scaled * (temperature / softcap)).square())


class RowKernels(NamedTuple):
    """Kernels that read rows of logits once: `logprob_rows`, and `logit_gradients_` in place."""

    logprob_rows: Callable[..., tuple[Tensor, Tensor, Tensor]]
    logit_gradients_: Callable[..., Tensor]


def row_kernels(hidden: Tensor, weight: Tensor) -> RowKernels | None:
    """Triton's kernels on a GPU and the C kernels on a CPU; None where torch computes."""
    if not hidden.shape[0]:
        return None
    if use_triton(hidden):
        from burnish.models.kernels.triton import logprob_head

        return RowKernels(logprob_head.logprob_rows, logprob_head.logit_gradients_)
    library = c_kernels(hidden, weight, stored_in=STORED_TYPES)
    if library is None:
        return None
    return RowKernels(partial(cpu_ops.logprob_rows, library), partial(cpu_ops.logit_gradients_, library))


class _HeadLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.softcap = temperature, softcap
        ctx.set_materialize_grads(False)  # an entropy without a gradient costs no backward
        ctx.kernels = row_kernels(hidden, weight)
        if ctx.kernels is not None:
            return _kernel_forward(ctx, hidden, weight, targets, with_entropy)
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        logp = hidden.new_empty(hidden.shape[0], dtype=dtype)
        entropy = hidden.new_zeros(hidden.shape[0] if with_entropy else 0, dtype=dtype)
        states, head = widened(hidden, weight)
        for i, j in row_chunks(hidden, weight):
            log_p = scaled_logits(states[i:j], head, temperature, softcap).log_softmax(-1)
            logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
            if with_entropy:
                entropy[i:j] = -(log_p.exp() * log_p).sum(-1)
        ctx.save_for_backward(hidden, weight, targets)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_logp, grad_entropy = grads
        if ctx.kernels is not None:
            return *_kernel_backward(ctx, grad_logp, grad_entropy), None, None, None, None
        hidden, weight, targets = ctx.saved_tensors
        dtype = hidden.dtype
        hidden, weight = widened(hidden, weight)
        grad_hidden = torch.empty_like(hidden)
        # Sum the chunks in float32: in a half type the sum would be rounded once per chunk.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in row_chunks(hidden, weight):
            logits = scaled_logits(hidden[i:j], weight, ctx.temperature, ctx.softcap)
            log_p = logits.log_softmax(-1)
            if ctx.softcap is None:
                logits = log_p  # frees the logits, which only the gradient of a soft cap reads
            p = log_p.exp()
            # d logp_target / d logits = onehot - p;  d H / d logits = -p (log p + H)
            if grad_logp is None:
                grad_logits = torch.zeros_like(p)
            else:
                grad_logits = -grad_logp[i:j, None] * p
                grad_logits.scatter_add_(1, targets[i:j, None], grad_logp[i:j, None])
            if grad_entropy is not None:
                entropy = -(p * log_p).sum(-1, keepdim=True)
                grad_logits -= grad_entropy[i:j, None] * p * (log_p + entropy)
            grad_logits = product_gradient(grad_logits, logits, ctx.temperature, ctx.softcap).to(hidden.dtype)
            grad_hidden[i:j] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[i:j])
        return grad_hidden.to(dtype), None if grad_weight is None else grad_weight.to(dtype), None, None, None, None


def _kernel_logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = hidden @ weight.t()
    if softcap is None:
        return logits
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.div_(softcap).tanh_().mul_(softcap).to(logits.dtype)  # `softcapped` in place


def _kernel_chunks(hidden: Tensor, weight: Tensor) -> list[tuple[int, int]]:
    return row_chunks(hidden, weight, KERNEL_CHUNK_ELEMENTS[hidden.device.type])


def _kernel_forward(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """The forward by kernels: the logits stay in the type of their product and are read once."""
    states, head = widened(hidden, weight)
    parts = [
        ctx.kernels.logprob_rows(
            _kernel_logits(states[i:j], head, ctx.softcap), targets[i:j].contiguous(), ctx.temperature, with_entropy
        )
        for i, j in _kernel_chunks(hidden, weight)
    ]
    logp, log_normaliser, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
    ctx.save_for_backward(hidden, weight, targets, log_normaliser, entropy)
    return logp, entropy


def _kernel_backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, Tensor | None]:
    hidden, weight, targets, log_normaliser, entropy = ctx.saved_tensors
    if grad_entropy is not None and not entropy.numel():
        grad_entropy = None
    dtype = hidden.dtype
    hidden, weight = widened(hidden, weight)
    wide = torch.promote_types(weight.dtype, torch.float32)
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
    for i, j in _kernel_chunks(hidden, weight):
        chunk_grad_logp, chunk_grad_entropy = (
            None if grad is None else grad[i:j].contiguous() for grad in (grad_logp, grad_entropy)
        )
        logits = _kernel_logits(hidden[i:j], weight, ctx.softcap)
        slope = None if ctx.softcap is None else (logits.to(wide) / ctx.softcap).square_().neg_().add_(1)
        grad_logits = ctx.kernels.logit_gradients_(
            logits,
            targets[i:j].contiguous(),
            log_normaliser[i:j],
            entropy[i:j],
            chunk_grad_logp,
            chunk_grad_entropy,
            ctx.temperature,
        )
        if slope is not None:  # the kernel has overwritten the logits
            grad_logits *= slope
        torch.mm(grad_logits, weight, out=grad_hidden[i:j])
        if grad_weight is not None:
            add_product(grad_weight, grad_logits.t(), hidden[i:j])
        del logits, grad_logits  # before those of the next chunk are made
    return grad_hidden.to(dtype), None if grad_weight is None else grad_weight.to(dtype)


def head_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """log p(target) and, if requested, the entropy of p = softmax(`scaled_logits`); [M] each."""
    logp, entropy = _HeadLogprob.apply(hidden, weight, targets, temperature, with_entropy, softcap)
    return logp, entropy if with_entropy else None


@torch.no_grad()
def head_statistics(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy and sum_v p_v^2 of p = softmax(`scaled_logits`); [M] each, no gradient."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    logp, entropy, sum_p2 = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
    hidden, weight = widened(hidden, weight)
    for i, j in row_chunks(hidden, weight):
        log_p = scaled_logits(hidden[i:j], weight, temperature, softcap).log_softmax(-1)
        p = log_p.exp()
        logp[i:j] = log_p.gather(1, targets[i:j, None])[:, 0]
        entropy[i:j] = -(p * log_p).sum(-1)
        sum_p2[i:j] = p.square().sum(-1)
    return logp, entropy, sum_p2


class Divergence(NamedTuple):
    """Which divergence is computed, and on which tokens."""

    alpha: float = 1.0
    support: str = "full"
    """full, or whose k likeliest tokens are compared: student or teacher."""
    top: int | None = None
    """k; None with support full."""
    rest: str = "renormalise"
    """What becomes of all other tokens: renormalise, tail or raw."""


class Distribution(NamedTuple):
    """Next-token distributions at M positions: softmax(`scaled_logits`)."""

    hidden: Tensor  # [M, hidden]
    weight: Tensor  # [vocab, hidden]
    top: int | None = None
    """The KL compares this many of the policy's likeliest tokens one by one and all others as one event; None compares all."""
    divergence: Divergence | None = None
    """The divergence to compute in place of the KL (`kernels/divergence.py`)."""
    softcap: float | None = None
    """The soft cap of the logits; None for a model without one."""


class Distributions(NamedTuple):
    """Next-token distributions of several teachers: for each, the indices of its positions among the M, and the distributions there."""

    parts: tuple[tuple[Tensor, Distribution], ...]


class _HeadKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        reference: Distribution,
        temperature: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.temperature, ctx.top, ctx.softcaps = temperature, reference.top, (softcap, reference.softcap)
        ctx.set_materialize_grads(False)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logp, entropy, kl = (hidden.new_empty(hidden.shape[0], dtype=dtype) for _ in range(3))
        for i, j in row_chunks(hidden, weight):
            log_p = scaled_logits(hidden[i:j], weight, temperature, softcap).log_softmax(-1)
            log_q = _reference_log_softmax(reference, i, j, temperature)
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
        softcap, ref_softcap = ctx.softcaps
        reference = Distribution(ref_hidden, ref_weight, softcap=ref_softcap)
        grad_hidden = torch.empty_like(hidden)
        # Sum the chunks in float32: in a half type the sum would be rounded once per chunk.
        wide = torch.promote_types(weight.dtype, torch.float32)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        for i, j in row_chunks(hidden, weight):
            logits = scaled_logits(hidden[i:j], weight, ctx.temperature, softcap)
            log_p = logits.log_softmax(-1)
            if softcap is None:
                logits = log_p
            log_q = _reference_log_softmax(reference, i, j, ctx.temperature)
            p = log_p.exp()
            grad_logits = torch.zeros_like(p)
            if grad_logp is not None:
                grad_logits.addcmul_(p, grad_logp[i:j, None], value=-1)
                grad_logits.scatter_add_(1, targets[i:j, None], grad_logp[i:j, None])
            if grad_entropy is not None:
                grad_logits -= grad_entropy[i:j, None] * p * (log_p + entropy[i:j, None])
            if grad_kl is not None:
                grad_logits += grad_kl[i:j, None] * p * (_log_ratio(log_p, log_q, ctx.top) - kl[i:j, None])
            grad_logits = product_gradient(grad_logits, logits, ctx.temperature, softcap).to(hidden.dtype)
            grad_hidden[i:j] = grad_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_logits.t(), hidden[i:j])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _reference_log_softmax(reference: Distribution, i: int, j: int, temperature: float) -> Tensor:
    return scaled_logits(reference.hidden[i:j], reference.weight, temperature, reference.softcap).log_softmax(-1)


def _log_ratio(log_p: Tensor, log_q: Tensor, top: int | None) -> Tensor:
    """d = log p - log q, [rows, vocab]. With `top` all tokens but the likeliest get the log-ratio of their summed mass.

    sum_v p_v d_v is then the KL with those tokens merged into one event, a lower bound of the full KL. Its gradient in
    the logits is still p (d - KL).
    """
    difference = log_p - log_q
    if top is None or top >= log_p.shape[-1]:
        return difference
    likely = torch.zeros_like(log_p, dtype=torch.bool).scatter_(-1, log_p.topk(top, -1).indices, True)
    others = [x.masked_fill(likely, -torch.inf).logsumexp(-1, keepdim=True) for x in (log_p, log_q)]
    return torch.where(likely, difference, others[0] - others[1])


def head_kl(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    reference: Distribution,
    temperature: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """log p(target), the entropy and KL(p || q) of policy p and reference q; [M] each. The gradient flows to the policy."""
    return _HeadKl.apply(hidden, weight, targets, reference, temperature, softcap)
