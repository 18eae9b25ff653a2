"""Slot `ratio`: how much likelier the policy makes a token than the anchor (the old policy) did.

Functions of a view and the anchor's log-probs [M], giving ratios [M] with gradient. With l = logp - anchor, a token's l
is clamped to +-20 and a sequence's to at most 10 before the exponential, with no gradient where that acts, so that one
absurd token or sequence cannot overflow a batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.core.random_keys import uniforms

MAX_TOKEN_LOG_RATIO = 20.0
MAX_SEQUENCE_LOG_RATIO = 10.0


def log_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] l = logp - anchor, as it is."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp - anchor


def clamp_token_log_ratio(log_ratios: Tensor) -> Tensor:
    """[M] l as every loss with a token ratio sees it."""
    return log_ratios.clamp(-MAX_TOKEN_LOG_RATIO, MAX_TOKEN_LOG_RATIO)


def token_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] r_t = exp(l_t): PPO's ratio, one for each token."""
    return clamp_token_log_ratio(log_ratio(view, anchor)).exp()


def sequence_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] s_i = exp(mean_t l_it) at each token of sequence i: the geometric mean of its ratios.

    The gradient goes through the mean, to every token of the sequence. GSPO (2507.18071).
    """
    return view.spread(view.mean(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp())


def sequence_token_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] s_it = sg(s_i) exp(logp_it - sg(logp_it)): the value of `sequence`, the gradient of each token alone.

    With advantages that are constant in a sequence it has the loss and gradient of `sequence`; with others each token
    keeps its own. GSPO-token (2507.18071).
    """
    assert view.logp is not None, "a policy's view has log-probs"
    mean = view.spread(view.mean(log_ratio(view, anchor).detach()))
    return (mean + view.logp - view.logp.detach()).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()


def sequence_product_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[M] exp(sum_t l_it) at each token of sequence i: the ratio of whole sequences, whatever their length."""
    return view.spread(view.sum(log_ratio(view, anchor)).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp())


RATIOS: dict[str, Callable[[LossView, Tensor], Tensor] | None] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "seq_token": sequence_token_ratio,
    "seq_prod": sequence_product_ratio,
    "none": None,  # the loss uses log-probs directly
}


# --- PPO's pessimistic clip with its variations, and no clip at all.


def no_clip(view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r."""
    return -advantages * ratio, {}


def ppo_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    drift: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] max(-A r, -A clip(r, 1-low, 1+high)), for A < 0 at most -A*dual; 0 where the sequence has drifted.

    A token of negative advantage whose sequence has mean_t(anchor - logp) > drift leaves the loss but not its
    denominators. PPO (1707.06347), dual clip (1912.09729; INTELLECT-2's two-sided clip is the same function), high > low
    is clip-higher (DAPO, 2503.14476), drift is the off-policy sequence mask of DeepSeek-V3.2 (2512.02556).
    """
    # The larger of the two costs is that of the ratio bounded on one side, and one clamp is half the work of two maxima.
    floor, ceiling = gradient_range(advantages, 1 - low, 1 + high, dual)
    loss = -advantages * torch.clamp(ratio, floor, ceiling)
    below, above = ratio.detach() < floor, ratio.detach() > ceiling
    marks = {"pg_clipfrac": (above & (advantages > 0)).logical_or_(below & (advantages < 0))}
    if dual is not None:
        marks["pg_clipfrac_lower"] = above & (advantages < 0)
    if drift is not None:
        drifted = view.mean(-log_ratio(view, anchor).detach()) > drift  # [S]
        marks["drift_dropped"] = (advantages < 0) & view.spread(drifted)
        loss = torch.where(marks["drift_dropped"], torch.zeros_like(loss), loss)
    return loss, marks


def gradient_range(advantages: Tensor, low: float, high: float, highest: float | None = None) -> tuple[Tensor, Tensor]:
    """[M] the range of a ratio or its logarithm that keeps a gradient: up to `high` where A > 0, else from `low` on.

    `highest` bounds the second from above.
    """
    gain = advantages > 0
    floor = torch.full_like(advantages, low).masked_fill_(gain, -torch.inf)
    return floor, torch.full_like(advantages, torch.inf if highest is None else highest).masked_fill_(gain, high)


# --- SAPO's gate: the further a token is from the anchor the less it counts, without an edge.


def soft_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A sigmoid(tau (r-1)) 4/tau, with tau_positive where A > 0, else tau_negative.

    The gate's slope at r = 1 is 1, so on-policy the gradient is that of plain policy gradient. SAPO (2511.20347).
    """
    tau = torch.full_like(advantages, tau_negative).masked_fill_(advantages > 0, tau_positive)
    return (advantages / tau).mul_(-4) * (tau * (ratio - 1)).sigmoid(), {}


# --- GMPO's clip: log-ratios are clipped token by token before they are averaged over the sequence.


def log_geo_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, low: float = 0.4, high: float = 0.4
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -a_i exp(mean_t x_it) at each token of sequence i, with a_i = mean_t A_it.

    x = min(l, clip(l, -low, high)) where A > 0, else max of the two: only the side that could run away is cut, and a cut
    token has no gradient. The ratio that is handed in, already averaged, comes too late and is not used.
    GMPO (2507.20673).
    """
    raw = log_ratio(view, anchor)
    x = torch.clamp(raw, *gradient_range(advantages, -low, high))
    loss = -view.mean(advantages) * view.mean(x).exp()  # [S]
    cut = x.detach() != raw.detach()
    marks = {"pg_clipfrac": cut & (advantages > 0), "pg_clipfrac_lower": cut & (advantages < 0)}
    return view.spread(loss), marks


# --- Clips that bound the importance weight and leave every kept token its gradient: weights for loss `sg_logprob`.


def is_weight_clip(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, low: float | None = None, cap: float = 1.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] sg(clip(r, 1-low, cap)); without `low` only the cap acts. CISPO, MiniMax-M1 (2506.13585)."""
    r = ratio.detach()
    weight = r.clamp(min=None if low is None else 1 - low, max=cap)
    return weight, {"pg_clipfrac": weight != r}


def dppo_tv_clip(
    view: LossView,
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
    new, old = _policy_and_anchor_logp(view, anchor)
    rise = new.exp() - old.exp()
    return _truncated_weights(ratio, torch.where(advantages > 0, rise <= high, rise >= -low), cap)


def dppo_kl_clip(
    view: LossView,
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
    new, old = _policy_and_anchor_logp(view, anchor)
    # 1 - p by expm1: the difference of two numbers near 1 loses most of a float32's digits.
    new_rest, old_rest = ((-x.expm1()).clamp(min=0) for x in (new, old))
    d = old.exp() * (old - new) + old_rest * ((old_rest + 1e-8) / (new_rest + 1e-8)).log()
    kept = torch.where(advantages > 0, (d <= high) | (new <= old), (d <= low) | (new >= old))
    return _truncated_weights(ratio, kept, cap)


def _policy_and_anchor_logp(view: LossView, anchor: Tensor) -> tuple[Tensor, Tensor]:
    """[M] log-probs of the policy and of the anchor, without gradient."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp.detach(), anchor


def _truncated_weights(ratio: Tensor, kept: Tensor, cap: float) -> tuple[Tensor, dict[str, Tensor]]:
    r = ratio.detach()
    marks = {"pg_clipfrac": ~kept, "pg_clipfrac_lower": kept & (r > cap)}
    return torch.where(kept, r.clamp(max=cap), torch.zeros_like(r)), marks


# --- Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage move together most are what makes entropy collapse.
#
# Both work on cov_t = (A_t - mean A)(logp_t - mean logp), the means over all tokens of the view, which is the whole
# mini-batch. The entropy mechanism (2505.22617).

TIE_TOLERANCE = 1e-6  # numbers this close, in parts of one, count as equal


def covariance_clip(
    view: LossView,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    share: float = 2e-4,
    low_cov: float = 1.0,
    high_cov: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] PPO's clip, and 0 at max(1, int(share*M)) tokens drawn from those with low_cov < cov < high_cov.

    Tokens that PPO has clipped are not drawn; drawn ones stay in the denominators. What is drawn depends on the `key`
    of its sequence and its position alone, not on the order of the batch.
    """
    cov = covariances(view, advantages)
    loss, marks = ppo_clip(view, ratio, advantages, anchor, low, high)
    eligible = (cov > low_cov).logical_and_(cov < high_cov).logical_and_(~marks["pg_clipfrac"])
    drawn = _draw_tokens(view, eligible, _num_selected(share, view))
    return loss.masked_fill(drawn, 0), {"pg_clipfrac": drawn, **_covariance_metrics(cov)}


def covariance_kl(
    view: LossView, ratio: Tensor, advantages: Tensor, anchor: Tensor, share: float = 2e-3, coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r, plus coef |l| with gradient at the max(1, int(share*M)) tokens of largest cov.

    Equal covariances are common (every token the policy is certain of has logp 0, samples of a prompt start alike), and
    how they round depends on what they were computed beside; so identity decides between those that are nearly equal.
    """
    cov = covariances(view, advantages)
    num = _num_selected(share, view)
    least = float(cov.topk(num).values.min()) if num else 0.0
    near = TIE_TOLERANCE * (1 + abs(least))
    above, level = cov > least + near, (cov - least).abs() <= near
    penalised = above.logical_or_(_draw_tokens(view, level, num - int(above.count_nonzero()))).nonzero().squeeze(1)
    drift = log_ratio(view, anchor).index_select(0, penalised)
    return (-advantages * ratio).index_add(
        0, penalised, coef * clamp_token_log_ratio(drift).abs()
    ), _covariance_metrics(cov)


def covariances(view: LossView, advantages: Tensor) -> Tensor:
    """[M] each token's term of the covariance of advantage and log-prob, without gradient."""
    assert view.logp is not None, "a policy's view has log-probs"
    logp = view.logp.detach()
    return (advantages - advantages.mean()).mul_(logp - logp.mean())


def _covariance_metrics(cov: Tensor) -> dict[str, Tensor]:
    """The mean covariance, and that of the largest 2e-4 of the tokens, the same at every token."""
    largest = cov.topk(max(1, int(2e-4 * cov.numel()))).values.mean() if cov.numel() else cov.sum()
    return {"cov_mean": cov, "cov_top": largest.expand_as(cov)}


def _num_selected(share: float, view: LossView) -> int:
    """How many of the view's tokens a share is: at least one, unless there is none."""
    return min(max(int(share * view.num_tokens), 1), view.num_tokens)


def _draw_tokens(view: LossView, among: Tensor, num: int) -> Tensor:
    """[M] bool, `num` of the tokens `among` [M], or all where there are fewer; what is drawn follows from identity alone."""
    index = among.nonzero().squeeze(1)
    keys = view.sequence["key"][view.ids[index]]
    noise = uniforms(keys, view.column("position")[index])
    taken = index[noise.topk(min(num, index.numel()), largest=False, sorted=False).indices]
    return torch.zeros_like(among).index_fill_(0, taken, True)


# --- Slot `clip`: what bounds the ratio.
#
# A clip takes a view, the ratio [M] with gradient, advantages [M], the anchor's log-probs [M] and its options. It gives
# what its loss is made of, and marks: columns [M] whose mean over tokens is the metric of that name. For loss
# `surrogate` the first is the loss of each token; for `sg_logprob` it is the weight of each token's log-prob, which
# carries no gradient.

CLIPS: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
    "none": no_clip,
    "ppo": ppo_clip,
    "log_geo": log_geo_clip,
    "is_weight": is_weight_clip,
    "soft": soft_clip,
    "clip_cov": covariance_clip,
    "kl_cov": covariance_kl,
    "dppo_tv": dppo_tv_clip,
    "dppo_kl": dppo_kl_clip,
}
