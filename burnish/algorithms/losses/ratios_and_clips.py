"""Slots `ratio` and `clip`: the importance ratio pi / pi_anchor, and what bounds it.

The anchor is the old policy unless the loss names another. With l = logp - anchor, a token's l is clamped to +-20 and a
sequence's to at most 10 before the exponential, so that one absurd token or sequence cannot overflow a batch. There is no
gradient where a clamp acts.

A ratio function takes a view and the anchor's log-probs [M]; it returns ratios [M] with gradient. A clip function takes a
view, the ratio [M], advantages [M], the anchor's log-probs [M] and the options of its record. For loss `surrogate` it
returns the loss of each token. For loss `sg_logprob` it returns the weight of each token's log-prob, without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.core.random_keys import uniforms
from burnish.core.segments import running_sum

MAX_TOKEN_LOG_RATIO = 20.0
MAX_SEQUENCE_LOG_RATIO = 10.0
MIN_LOG_WEIGHT = math.log(1e-8)
"""Lower bound of a sequence's log-ratio, and of the logarithm of a correction's weight, in `gamma_clip`."""
ROLLOUT_WEIGHT = "rollout_weight"
"""Token column: the weights of a rollout correction."""
SECOND_MOMENT_KEPT = "second_moment_kept"
"""Bool token column: tokens that `second_moment_mask` keeps."""
TIE_TOLERANCE = 1e-6
"""Covariances that differ by less than this, relative to 1 + their size, count as equal."""


# --- Ratios


def token_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] r_t = exp(l_t), one ratio per token. PPO (1707.06347)."""
    return clamp_token_log_ratio(log_ratio(view, anchor)).exp()


def sequence_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] s_i = exp(mean_t l_it) at each token of sequence i: the geometric mean of its token ratios. GSPO (2507.18071).

    The gradient goes through the mean, to every token of the sequence.
    """
    return view.spread(view.mean(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp())


def sequence_token_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] s_it = sg(s_i) exp(logp_it - sg(logp_it)): the value of `sequence_ratio`, the gradient of the token alone.

    With advantages that are constant in a sequence, loss and gradient are those of `sequence_ratio`. GSPO-token (2507.18071).
    """
    mean = view.spread(view.mean(log_ratio(view, anchor).detach()))
    return (mean + view.policy_logp - view.policy_logp.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()


def sequence_product_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] exp(sum_t l_it) at each token of sequence i: the ratio of whole sequences, without length normalisation."""
    return view.spread(view.sum(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp())


RATIOS: dict[str, Callable[[LossView, Tensor], Tensor] | None] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "seq_token": sequence_token_ratio,
    "seq_prod": sequence_product_ratio,
    "none": None,  # the loss uses log-probs directly
}
"""The function of each choice of `algorithm.ratio`."""


def log_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] l = logp - anchor, not clamped."""
    return view.policy_logp - anchor


def clamp_token_log_ratio(log_ratios: Tensor) -> Tensor:
    """[M] clip(l, -20, 20)."""
    return log_ratios.clamp(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO)


# --- Clips of the surrogate loss


def no_clip(view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor) -> TokenLoss:
    """[M] -A r."""
    return -advantages * ratio, {}


def ppo_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None,
    drift: float | None,
) -> TokenLoss:
    """[M] max(-A r, -A clip(r, 1-low, 1+high)). PPO (1707.06347).

    - `high` > `low` is clip-higher, DAPO (2503.14476).
    - `dual` bounds the loss of tokens with A < 0 by -A * dual. Dual clip (1912.09729); INTELLECT-2's two-sided clip is the same.
    - `drift` sets the loss to 0 for tokens with A < 0 in sequences with mean_t(anchor - logp) > drift. They stay in the
      denominators. It is the off-policy sequence mask of DeepSeek-V3.2 (2512.02556).
    """
    # Bounding the ratio on one side gives the larger of the two losses, with one clamp instead of two maxima.
    floor, ceiling = gradient_range(advantages, 1 - low, 1 + high, dual)
    loss = -advantages * torch.clamp(ratio, floor, ceiling)
    below, above = ratio.detach() < floor, ratio.detach() > ceiling
    metrics = {"pg_clipfrac": (above & (advantages > 0)).logical_or_(below & (advantages < 0))}
    if dual is not None:
        metrics["pg_clipfrac_lower"] = above & (advantages < 0)
    if drift is not None:
        drifted = view.mean(-log_ratio(view, anchor).detach()) > drift  # [S]
        metrics["drift_dropped"] = (advantages < 0) & view.spread(drifted)
        loss = torch.where(metrics["drift_dropped"], torch.zeros_like(loss), loss)
    return loss, metrics


def soft_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, tau_positive: float, tau_negative: float
) -> TokenLoss:
    """[M] -A sigmoid(tau (r-1)) 4/tau, with tau_positive if A > 0, else tau_negative. SAPO (2511.20347).

    It is a smooth gate instead of a hard clip. Its slope at r = 1 is 1, so on-policy the gradient is the plain policy gradient.
    """
    tau = torch.full_like(advantages, tau_negative).masked_fill_(advantages > 0, tau_positive)
    return (advantages / tau).mul_(-4) * (tau * (ratio - 1)).sigmoid(), {}


def log_geo_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, low: float, high: float
) -> TokenLoss:
    """[M] -a_i exp(mean_t x_it) at each token of sequence i, with a_i = mean_t A_it. GMPO (2507.20673).

    x = min(l, clip(l, -low, high)) if A > 0, else the max of the two. Only the side that could grow without bound is clipped,
    token by token before the mean, and a clipped token has no gradient. `ratio` is already averaged and is not used.
    """
    raw = log_ratio(view, anchor)
    x = torch.clamp(raw, *gradient_range(advantages, -low, high))
    loss = -view.mean(advantages) * view.mean(x).exp()  # [S]
    cut = x.detach() != raw.detach()
    metrics = {"pg_clipfrac": cut & (advantages > 0), "pg_clipfrac_lower": cut & (advantages < 0)}
    return view.spread(loss), metrics


def gradient_range(advantages: Tensor, low: float, high: float, highest: float | None = None) -> tuple[Tensor, Tensor]:
    """[M] the range of a ratio or log-ratio that keeps a gradient: (-inf, high] if A > 0, else [low, highest]."""
    is_positive = advantages > 0
    floor = torch.full_like(advantages, low).masked_fill_(is_positive, -torch.inf)
    return floor, torch.full_like(advantages, torch.inf if highest is None else highest).masked_fill_(is_positive, high)


# --- Clips of the importance weight, for loss `sg_logprob`


def is_weight_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, low: float | None, cap: float
) -> TokenLoss:
    """[M] w = sg(clip(r, 1-low, cap)); without `low` only the cap acts. CISPO, MiniMax-M1 (2506.13585).

    It bounds the weight and leaves every token its gradient.
    """
    r = ratio.detach()
    weight = r.clamp(min=None if low is None else 1 - low, max=cap)
    return weight, {"pg_clipfrac": weight != r}


def dppo_tv_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    *,
    low: float,
    high: float,
    cap: float,
    symmetric: bool,
) -> TokenLoss:
    """[M] w = sg(min(r, cap)) if p - p_old <= high (A > 0) or p - p_old >= -low (else), otherwise 0. DPPO (2602.04879).

    The trust region bounds the total variation |p - p_old| of the sampled token against all others. Rare tokens may move by
    large ratios, frequent ones may not. With `symmetric` both bounds hold for every token, as in prime-rl's `ipo`.
    """
    new, old = view.policy_logp.detach(), anchor
    rise = new.exp() - old.exp()
    kept = torch.where(advantages > 0, rise <= high, rise >= -low)
    return _truncated_weights(ratio, (rise <= high) & (rise >= -low) if symmetric else kept, cap)


def dppo_kl_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, low: float, high: float, cap: float
) -> TokenLoss:
    """[M] w = sg(min(r, cap)) if d <= high or p <= p_old (A > 0), d <= low or p >= p_old (else), otherwise 0. DPPO (2602.04879).

    d = KL(old || new) of the sampled token against all others:
    d = p_old (old - new) + (1-p_old) log((1-p_old+1e-8) / (1-p+1e-8)). A token that moves back is never dropped.
    """
    new, old = view.policy_logp.detach(), anchor
    # 1 - p by expm1, because subtracting two numbers near 1 loses most digits in float32.
    new_rest, old_rest = ((-x.expm1()).clamp(min=0) for x in (new, old))
    d = old.exp() * (old - new) + old_rest * ((old_rest + 1e-8) / (new_rest + 1e-8)).log()
    kept = torch.where(advantages > 0, (d <= high) | (new <= old), (d <= low) | (new >= old))
    return _truncated_weights(ratio, kept, cap)


def _truncated_weights(ratio: Tensor, kept: Tensor, cap: float) -> TokenLoss:
    """[M] sg(min(r, cap)) for kept tokens, else 0; and the fractions of dropped and of capped tokens."""
    r = ratio.detach()
    metrics = {"pg_clipfrac": ~kept, "pg_clipfrac_lower": kept & (r > cap)}
    return torch.where(kept, r.clamp(max=cap), torch.zeros_like(r)), metrics


# --- Clips for samples of an older policy


def gamma_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    *,
    k_positive: float,
    lam_positive: float,
    k_negative: float,
    lam_negative: float,
) -> TokenLoss:
    """[M] phi_i = sg(exp(lam + k log W_i - lam W_i)) at each token of sequence i. VESPO (2602.10693).

    log W_i = clip(sum_t clip(l_t, -20, 20), log 1e-8, 20) is the log-ratio of the whole sequence, not divided by its length. phi is 1
    at W = 1 and largest at W = k / lam, with k and lam of the sign of the sequence's advantage. The weights of a rollout correction
    (column `rollout_weight`) are part of W; a weight of 0 takes the sequence out.
    """
    logs = clamp_token_log_ratio(log_ratio(view, anchor).detach())
    if view.has(ROLLOUT_WEIGHT):
        logs = logs + view.column(ROLLOUT_WEIGHT).log().clamp(MIN_LOG_WEIGHT, MAX_TOKEN_LOG_RATIO)
    log_w = view.sum(logs).clamp(MIN_LOG_WEIGHT, MAX_TOKEN_LOG_RATIO)  # [S]
    is_positive = view.mean(advantages) >= 0
    k = torch.full_like(log_w, k_negative).masked_fill_(is_positive, k_positive)
    lam = torch.full_like(log_w, lam_negative).masked_fill_(is_positive, lam_positive)
    phi = view.spread((lam + k * log_w - lam * log_w.exp()).exp().nan_to_num(0.0, 0.0, 0.0))
    return phi, {"sequence_weight": phi}


def taper_clip(view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, threshold: float) -> TokenLoss:
    """[M] w = 1 if A > threshold, else sg(min(r, 1)). TOPR (2503.14286).

    Good answers can be imitated however old they are. Bad ones are pushed down only as far as they are still likely.
    """
    r = ratio.detach()
    tapered = (advantages <= threshold) & (r < 1)
    return torch.where(tapered, r, torch.ones_like(r)), {"pg_clipfrac": tapered}


def second_moment_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    *,
    tau: float,
    denominator: Literal["all", "kept"],
    low: float | None,
    high: float | None,
) -> TokenLoss:
    """[M] -A r, with PPO's clip if `low` and `high` are given, and 0 at the tokens that `second_moment_mask` drops. M2PO (2510.01161).

    The mask depends on the whole mini-batch, so it is made before the mini-batch is split (column `second_moment_kept`, which
    `trainers/minibatches.py` adds). With `denominator` kept, dropped tokens are not in the loss at all.
    """
    metrics: dict[str, Tensor] = {}
    if low is None or high is None:
        loss = -advantages * ratio
    else:
        loss, metrics = ppo_clip(view, ratio, advantages, anchor, low=low, high=high, dual=None, drift=None)
    dropped = ~view.column(SECOND_MOMENT_KEPT)
    return loss.masked_fill(dropped, 0), metrics | {"second_moment_dropped": dropped}


def second_moment_mask(squares: Tensor, tau: float) -> Tensor:
    """[M] bool: all but the k largest, with the smallest k for which the mean of the others is below tau; at least one is kept.

    Of equal squares the later ones are kept.
    """
    if squares.numel() == 0:
        return torch.zeros_like(squares, dtype=torch.bool)
    ordered, order = squares.double().sort(descending=True, stable=True)
    sums = running_sum(ordered.flip(0)).flip(0)  # [M] sum of the squares from each rank on
    means = sums / torch.arange(ordered.numel(), 0, -1, device=ordered.device)
    fits = (means < tau).nonzero()
    num_dropped = int(fits[0]) if fits.numel() else ordered.numel() - 1
    return torch.ones_like(order, dtype=torch.bool).index_fill_(0, order[:num_dropped], False)


# --- Clip-Cov and KL-Cov: the entropy mechanism (2505.22617)
#
# Entropy collapse comes from the few tokens with a high covariance of log-prob and advantage. Both clips use
# cov_t = (A_t - mean A)(logp_t - mean logp), with means over all tokens of the view, which is the whole mini-batch.


def covariance_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    *,
    share: float,
    low_cov: float,
    high_cov: float,
    low: float,
    high: float,
) -> TokenLoss:
    """[M] `ppo_clip`, and 0 at max(1, int(share * M)) tokens drawn from those with low_cov < cov < high_cov. Clip-Cov (2505.22617).

    Tokens that PPO clips are not drawn; drawn tokens stay in the denominators. The draw depends only on the sequence's `key`
    and the token's position, not on the order of the batch.
    """
    cov = covariances(view, advantages)
    loss, metrics = ppo_clip(view, ratio, advantages, anchor, low=low, high=high, dual=None, drift=None)
    eligible = (cov > low_cov).logical_and_(cov < high_cov).logical_and_(~metrics["pg_clipfrac"])
    drawn = _draw_tokens(view, eligible, _num_selected(share, view))
    return loss.masked_fill(drawn, 0), {"pg_clipfrac": drawn, **_covariance_metrics(cov)}


def covariance_kl(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, *, share: float, coef: float
) -> TokenLoss:
    """[M] -A r, plus coef |l| at the max(1, int(share * M)) tokens of largest cov. KL-Cov (2505.22617).

    Equal covariances are common: certain tokens have logp 0, and samples of a prompt start with the same tokens. Their rounding
    depends on the rest of the batch, so among nearly equal ones tokens are drawn by key and position.
    """
    cov = covariances(view, advantages)
    num = _num_selected(share, view)
    smallest = float(cov.topk(num).values.min()) if num else 0.0
    tolerance = TIE_TOLERANCE * (1 + abs(smallest))
    above, tied = cov > smallest + tolerance, (cov - smallest).abs() <= tolerance
    penalised = above.logical_or_(_draw_tokens(view, tied, num - int(above.count_nonzero()))).nonzero().squeeze(1)
    log_ratios = log_ratio(view, anchor).index_select(0, penalised)
    return (-advantages * ratio).index_add(
        0, penalised, coef * clamp_token_log_ratio(log_ratios).abs()
    ), _covariance_metrics(cov)


def covariances(view: LossView, advantages: Tensor) -> Tensor:
    """[M] each token's term of the covariance of advantage and log-prob, without gradient."""
    logp = view.policy_logp.detach()
    return (advantages - advantages.mean()).mul_(logp - logp.mean())


def _covariance_metrics(cov: Tensor) -> dict[str, Tensor]:
    """Token metrics: the covariance, and the mean covariance of the top 2e-4 of the tokens."""
    largest = cov.topk(max(1, int(2e-4 * cov.numel()))).values.mean() if cov.numel() else cov.sum()
    return {"cov_mean": cov, "cov_top": largest.expand_as(cov)}


def _num_selected(share: float, view: LossView) -> int:
    """int(share * tokens), at least one and at most all of the view's tokens."""
    return min(max(int(share * view.num_tokens), 1), view.num_tokens)


def _draw_tokens(view: LossView, among: Tensor, num: int) -> Tensor:
    """[M] bool: `num` of the tokens `among` [M], or all if there are fewer, drawn by key and position."""
    index = among.nonzero().squeeze(1)
    keys = view.sequence["key"][view.sequence_ids[index]]
    noise = uniforms(keys, view.column("position")[index])
    taken = index[noise.topk(min(num, index.numel()), largest=False, sorted=False).indices]
    return torch.zeros_like(among).index_fill_(0, taken, True)


CLIPS: dict[str, Callable[..., TokenLoss]] = {
    "none": no_clip,
    "ppo": ppo_clip,
    "log_geo": log_geo_clip,
    "is_weight": is_weight_clip,
    "soft": soft_clip,
    "clip_cov": covariance_clip,
    "kl_cov": covariance_kl,
    "dppo_tv": dppo_tv_clip,
    "dppo_kl": dppo_kl_clip,
    "gamma": gamma_clip,
    "taper": taper_clip,
    "second_moment": second_moment_clip,
}
"""The function of each choice of `algorithm.clip`."""
