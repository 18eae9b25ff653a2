"""Log-prob, normaliser and entropy of each row of logits in one pass; the gradient of the logits in another, in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _logprob_rows(
    logits_ptr,
    target_ptr,
    logp_ptr,
    total_ptr,
    entropy_ptr,
    temperature,
    vocab,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    line = logits_ptr + row * vocab
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    moment = tl.zeros([], tl.float32)  # sum of exp(x - best) * x
    for start in range(0, vocab, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < vocab
        x = tl.load(line + column, mask=inside, other=-float("inf")).to(tl.float32) / temperature
        top = tl.maximum(best, tl.max(x, 0))
        shrink = tl.exp(best - top)
        mass = tl.exp(x - top)
        total = total * shrink + tl.sum(mass, 0)
        if ENTROPY:
            moment = moment * shrink + tl.sum(tl.where(mass > 0, mass * x, 0.0), 0)
        best = top
    log_total = best + tl.log(total)
    chosen = tl.load(line + tl.load(target_ptr + row)).to(tl.float32) / temperature
    tl.store(logp_ptr + row, chosen - log_total)
    tl.store(total_ptr + row, log_total)
    if ENTROPY:
        tl.store(entropy_ptr + row, log_total - moment / total)


@triton.jit
def _logit_gradients(
    logits_ptr,
    target_ptr,
    total_ptr,
    entropy_ptr,
    grad_logp_ptr,
    grad_entropy_ptr,
    temperature,
    vocab,
    LOGP: tl.constexpr,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    at = logits_ptr + row * vocab + column
    logits = tl.load(at, mask=inside, other=-float("inf"))
    logp = logits.to(tl.float32) / temperature - tl.load(total_ptr + row)
    p = tl.exp(logp)
    slope = tl.zeros([BLOCK], tl.float32)
    if LOGP:  # d logp of the target / d logits = onehot - p
        hit = (column == tl.load(target_ptr + row)).to(tl.float32)
        slope += tl.load(grad_logp_ptr + row) * (hit - p)
    if ENTROPY:  # d H / d logits = -p (log p + H)
        surprise = tl.where(p > 0, logp + tl.load(entropy_ptr + row), 0.0)
        slope -= tl.load(grad_entropy_ptr + row) * p * surprise
    tl.store(at, (slope / temperature).to(logits.dtype), mask=inside)


def logprob_rows(
    logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of the targets, log of the normaliser, and entropies (empty unless requested) of logits [N, vocab]; float32."""
    rows, vocab = logits.shape
    logp, total = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropy = torch.empty(rows if with_entropy else 0, dtype=torch.float32, device=logits.device)
    _logprob_rows[(rows,)](
        logits, targets, logp, total, entropy, temperature, vocab, ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=8
    )
    return logp, total, entropy


def logit_gradients_(
    logits: Tensor,
    targets: Tensor,
    total: Tensor,
    entropy: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Overwrite the logits with their gradient; a gradient of None counts as 0."""
    rows, vocab = logits.shape
    _logit_gradients[(rows, triton.cdiv(vocab, BLOCK))](
        logits,
        targets,
        total,
        entropy,
        total if grad_logp is None else grad_logp,
        total if grad_entropy is None else grad_entropy,
        temperature,
        vocab,
        LOGP=grad_logp is not None,
        ENTROPY=grad_entropy is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return logits
