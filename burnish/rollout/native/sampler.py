"""Drawing tokens: one uniform number a row, by inversion of the cumulative distribution.

The log-prob returned is of the drawn token under the very distribution it was drawn from, after temperature, top-k,
top-p and min-p. Greedy rows (temperature 0) take the most likely token and report its untempered log-prob.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their log-probs [n] from logits [n, V]; options are [n] tensors, None where no row uses one."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    greedy = temperature == 0
    scale = torch.where(greedy, torch.ones_like(temperature), temperature).to(logits.dtype)
    logp = (logits / scale[:, None]).log_softmax(-1)
    if not (top_k is None and top_p is None and min_p is None):
        logp = truncate(logp, top_k, top_p, min_p)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    # The total may miss 1 by rounding; scaling by it keeps every draw inside the support.
    tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None]).squeeze(1)
    tokens = tokens.clamp_(
        max=logits.shape[1] - 1
    )  # NaN logits find no place: the log-prob says so, not an index error
    if bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logp.gather(1, tokens[:, None]).squeeze(1)


def truncate(logp: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None = None) -> Tensor:
    """Log-probs renormalised over each row's top-k tokens, then over the smallest set of them with mass top-p, then over
    those at least `min_p` times as likely as the likeliest."""
    ordered, order = logp.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logp.shape[1], device=logp.device)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        p = torch.where(keep, ordered, -torch.inf).softmax(-1)
        before = p.cumsum(-1, dtype=torch.float64) - p
        # The first token is always kept: nothing stands before it. A row without top-p keeps all, whatever the sum rounds to.
        keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1)
    if min_p is not None:
        keep &= (ordered >= ordered[:, :1] + min_p[:, None].log()) | (min_p[:, None] == 0)
    kept = torch.zeros_like(keep).scatter(1, order, keep)
    return torch.where(kept, logp, -torch.inf).log_softmax(-1)
