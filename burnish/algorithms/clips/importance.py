"""Clips that bound the importance weight and leave every kept token its gradient: weights for loss `sg_logprob`."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.view import View


def is_weight(
    view: View, ratio: Tensor, advantages: Tensor, anchor: Tensor, low: float | None = None, cap: float = 1.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] sg(clip(r, 1-low, cap)); without `low` only the cap acts. CISPO, MiniMax-M1 (2506.13585)."""
    r = ratio.detach()
    weight = r.clamp(min=None if low is None else 1 - low, max=cap)
    return weight, {"pg_clipfrac": weight != r}


def dppo_tv(
    view: View,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] sg(min(r, cap)) where the token is kept, else 0: kept is p - p_old <= high for A > 0, else >= -low.

    The trust region is a bound on the total variation |p - p_old| of sampled token against all others, so rare tokens
    may move by large ratios and frequent ones may not. DPPO (2602.04879).
    """
    new, old = _log_probs(view, anchor)
    rise = new.exp() - old.exp()
    return _weights(ratio, torch.where(advantages > 0, rise <= high, rise >= -low), cap)


def dppo_kl(
    view: View,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    low: float = 0.05,
    high: float = 0.05,
    cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] as `dppo_tv`, with d = KL(old || new) of sampled token against all others as the bound.

    d = p_old (old - new) + (1-p_old) log((1-p_old+1e-8) / (1-p+1e-8)); kept is d <= high or p <= p_old for A > 0, else
    d <= low or p >= p_old: a token on its way back is never dropped. DPPO (2602.04879).
    """
    new, old = _log_probs(view, anchor)
    # 1 - p by expm1: the difference of two numbers near 1 loses most of a float32's digits.
    new_rest, old_rest = ((-x.expm1()).clamp(min=0) for x in (new, old))
    d = old.exp() * (old - new) + old_rest * ((old_rest + 1e-8) / (new_rest + 1e-8)).log()
    kept = torch.where(advantages > 0, (d <= high) | (new <= old), (d <= low) | (new >= old))
    return _weights(ratio, kept, cap)


def _log_probs(view: View, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """[M] log-probs of the policy and of the anchor, without gradient."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp.detach(), anchor


def _weights(ratio: Tensor, kept: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    r = ratio.detach()
    marks = {"pg_clipfrac": ~kept, "pg_clipfrac_lower": kept & (r > cap)}
    return torch.where(kept, r.clamp(max=cap), torch.zeros_like(r)), marks
