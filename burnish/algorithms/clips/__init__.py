"""Slot `clip`: what bounds the ratio.

A clip takes a view, the ratio [M] with gradient, advantages [M], the anchor's log-probs [M] and its options. It gives
what its loss is made of, and marks: columns [M] whose mean over tokens is the metric of that name. For loss
`surrogate` the first is the loss of each token; for `sg_logprob` it is the weight of each token's log-prob, which
carries no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.clips.covariance import clip_cov, kl_cov
from burnish.algorithms.clips.geometric import log_geo
from burnish.algorithms.clips.importance import dppo_kl, dppo_tv, is_weight
from burnish.algorithms.clips.ppo import no_clip, ppo
from burnish.algorithms.clips.soft import soft

__all__ = ["CLIPS"]

CLIPS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "none": no_clip,
    "ppo": ppo,
    "log_geo": log_geo,
    "is_weight": is_weight,
    "soft": soft,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
