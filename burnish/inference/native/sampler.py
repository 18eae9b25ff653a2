"""Token sampling by inversion of the cumulative distribution, with one uniform number for each row.

The returned log-prob of a token is that under the distribution it was drawn from: after bias, temperature, top-k, top-p and
min-p. Greedy rows (temperature 0) take the most likely token and report its untempered log-prob.

A list `never` has tokens that are not drawn, such as the placeholders of pictures. They count in the log-probs of a row without
truncation, which stay those of the model, so that the learner computes the same. A truncation keeps none of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Bias = Sequence[tuple[int, float]]
"""(token, value added to its logit) pairs of one row."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    never: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens [n] with their log-probs [n] from logits [n, V].

    Options are [n] tensors, or None where no row uses them. Temperature None is 1. `never` are tokens that are not drawn.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    greedy = None if temperature is None else temperature == 0
    scale = None if temperature is None else temperature.masked_fill(temperature == 0, 1.0)
    if not (top_k is None and top_p is None and min_p is None):
        one = torch.ones(logits.shape[0], dtype=torch.float64, device=logits.device)
        whole, logits = logits, logits if never is None else logits.index_fill(1, never, -torch.inf)
        logits = truncate(logits, one if scale is None else scale, top_k, top_p, min_p)
        if never is not None:
            logits = torch.where(_is_truncated(one, top_k, top_p, min_p)[:, None], logits, whole)
    logp = (logits if scale is None else logits / scale.to(logits.dtype)[:, None]).log_softmax(-1)
    weight = logp.exp() if never is None else logp.exp().index_fill_(1, never, 0.0)
    cumulative = weight.cumsum(-1, dtype=torch.float64)
    # The total may miss 1 by rounding; scaling by it keeps every draw inside the support.
    tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None]).squeeze(1)
    # NaN logits give an index past the end. The clamp makes them show as a NaN log-prob, not as an index error.
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    if greedy is not None and bool(greedy.any()):
        possible = logits if never is None else logits.index_fill(1, never, -torch.inf)
        tokens = torch.where(greedy, possible.argmax(-1), tokens)
    return tokens, logp.gather(1, tokens[:, None]).squeeze(1)


def _is_truncated(one: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Whether each row [n] has a truncation."""
    found = torch.zeros_like(one, dtype=torch.bool)
    if top_k is not None:
        found |= top_k > 0
    if top_p is not None:
        found |= top_p < 1
    return found if min_p is None else found | (min_p > 0)


def truncate(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None = None
) -> Tensor:
    """Set logits [n, V] to -inf outside of each row's support.

    The support is the top-k tokens, then the smallest set of these with mass top-p, then those at least `min_p` times as likely
    as the likeliest. Probabilities are those at `temperature` [n]. Among equal logits the first count as larger, so exactly k
    tokens are kept. `burnish.models.kernels.triton.truncation` keeps the same tokens without sorting.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    best, scale = ordered[:, :1], temperature[:, None]
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(logits.shape[1], device=logits.device)
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        weight = ((ordered - best) / scale.to(logits.dtype)).exp().masked_fill(~keep, 0.0).double()
        mass = weight.cumsum(-1)
        # The first token is always kept: no mass stands before it. A row with top_p=1 keeps all, whatever the sum rounds to.
        keep &= (mass - weight < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)
    if min_p is not None:
        least = best.double() + scale * min_p[:, None].log()
        keep &= (ordered.double() >= least) | (min_p[:, None] == 0)
    kept = torch.zeros_like(keep).scatter(1, order, keep)
    return torch.where(kept, logits, -torch.inf)


def add_bias(logits: Tensor, biases: Sequence[Bias]) -> Tensor:
    """Return a copy of logits [n, V], in float32 at least, with each row's bias added."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    entries = [(row, token, value) for row, pairs in enumerate(biases) for token, value in pairs]
    rows, tokens, values = zip(*entries, strict=True)
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return wide.index_put_(where, torch.tensor(values, dtype=wide.dtype, device=logits.device), accumulate=True)
