"""Bypass: two policies. The engine's log-probs are the anchor, and the trainer's before the update are never computed.

The gap from engine to current policy exists only once the current policy's log-probs do, so weights and rejection are
made inside the loss, of the tokens in the loss and without gradient. The denominators (column `weight`) were fixed before
that and count rejected tokens, so that the gradient does not depend on how a mini-batch is split.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from burnish.algorithms.correction.decoupled import PREFIX
from burnish.algorithms.correction.gap import Gap, gap_of
from burnish.algorithms.correction.rejection import Bounds, kept
from burnish.algorithms.correction.weights import bounded, edges, normalised, raw_weights
from burnish.algorithms.view import View


def bypass_correction(
    view: View,
    anchor: Tensor,
    advantages: Tensor,
    surrogate: Tensor | None,
    loss: str = "ppo_clip",
    weights: str | None = None,
    threshold: Bounds = 2.0,
    batch_normalise: bool = False,
    reject: Mapping[str, Bounds] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] the loss of each token, 0 where it is rejected, and marks to log; `anchor` is the engine's log-probs.

    ppo_clip: `surrogate`, the loss of the slots ratio and clip to that anchor, whose ratio is the correction already; its
    weights are only logged. reinforce: -sg(w) A logp, with w = exp(clip(u, -20, 20)) bounded by `threshold`, u = l of the
    token or its sum over the row, l = sg(logp) - anchor; w is 1 without `weights`, and `surrogate` is not read. Mean
    weights (`batch_normalise`) are those of the view, which then holds the whole mini-batch.
    """
    assert view.logp is not None, "a policy's view has log-probs"
    if view.num_tokens == 0:
        return view.logp * 0, {}
    gap = gap_of(view.logp, anchor, view.offsets)
    level = weights or "token"
    _, raw = raw_weights(gap, level)
    applied = bounded(raw, threshold)
    marks = _marks(gap, level, raw, applied, threshold)
    if loss == "reinforce":
        if batch_normalise and weights is not None:
            applied, _ = normalised(gap, applied, weights)
        factor = gap.spread(applied).to(view.logp.dtype) if weights is not None else 1.0
        per_token = -factor * advantages * view.logp
    else:
        assert surrogate is not None, "ppo_clip is the loss of the slots ratio and clip"
        per_token = surrogate
    if reject:
        keep = kept(gap, reject)
        per_token = per_token.masked_fill(~keep, 0.0)
        marks[f"{PREFIX}rollout_rs_masked_fraction"] = ~keep
    return per_token, marks


def _marks(gap: Gap, level: str, raw: Tensor, applied: Tensor, threshold: Bounds) -> dict[str, Tensor]:
    """Columns [M] whose means over all tokens of a mini-batch are the metrics of that name.

    What is no mean over tokens (std, extremes, rows) would depend on the split, and is not among them. k3 is clamped here,
    for these columns may be summed in float32.
    """
    low, high = edges(threshold)
    found = {
        "kl": -gap.log_ratio,
        "k3_kl": gap.k3,
        "chi2_token": gap.ratio**2 - 1,
        "rollout_is_mean": gap.spread(applied),
    }
    if level == "token":
        found |= {"rollout_is_ratio_fraction_high": raw > high, "rollout_is_ratio_fraction_low": raw < low}
    return {PREFIX + name: column for name, column in found.items()}
