"""How far apart engine and trainer are, whatever is done about it: KL, chi-square and perplexities."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import is_replayed, sampled_loss_mask
from burnish.algorithms.correction.mismatch_profiles import quantiles
from burnish.algorithms.correction.rollout_mismatch import (
    LOG_RATIO_BOUND,
    MAX_ABS_LOGP,
    RolloutMismatch,
    rollout_mismatch,
    written_of,
)
from burnish.algorithms.correction.weights_and_rejection import metrics_to_floats
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


def divergence_metrics(gap: RolloutMismatch) -> dict[str, Tensor]:
    """With t_i and q_i a row's mean log-prob under trainer and engine, and D_i = q_i - t_i = -mean_t l:

    kl = mean(-l), a direct estimate of KL(engine || trainer) that may be negative; k3_kl = mean(exp(l) - l - 1), which may
    not (Schulman, 2020); the mean over rows of exp(-t), -t, exp(-q), -q; mean, mean size, max and min of D (positive:
    the trainer is less sure); ppl_ratio = mean_i exp(D_i), each row's ratio first.
    """
    drift = -gap.log_ratio_sum / gap.lengths
    trainer, engine = -gap.old_sum / gap.lengths, -gap.behaviour_sum / gap.lengths
    kl = -gap.log_ratio_sum.sum() / gap.num_tokens
    return {
        "kl": kl,
        "k3_kl": (_mean_ratio(gap) - 1 + kl).clamp(min=0),
        "training_ppl": trainer.exp().mean(),
        "training_log_ppl": trainer.mean(),
        "rollout_ppl": engine.exp().mean(),
        "rollout_log_ppl": engine.mean(),
        "log_ppl_diff": drift.mean(),
        "log_ppl_abs_diff": drift.abs().mean(),
        "log_ppl_diff_max": drift.max(),
        "log_ppl_diff_min": drift.min(),
        "ppl_ratio": drift.exp().mean(),
    }


def chi_square_metrics(gap: RolloutMismatch) -> dict[str, Tensor]:
    """chi2 = mean(W^2) - 1, the variance of unbounded weights, of tokens and of rows."""
    rows = (2 * gap.log_ratio_sum.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp()
    return {"chi2_token": gap.mean_square(gap.ratio) - 1, "chi2_seq": rows.mean() - 1}


def _mean_ratio(gap: RolloutMismatch) -> Tensor:
    """mean exp(l) without the clamp: only the few tokens beyond it have their exponential taken again."""
    far = (gap.log_ratio.abs() > LOG_RATIO_BOUND).nonzero().squeeze(1)
    more = gap.log_ratio[far].clamp(max=2 * MAX_ABS_LOGP).exp() - gap.ratio[far]
    return gap.mean(gap.ratio) + more.sum() / gap.num_tokens


# --- Whether sampled tokens are as surprising as the policy that is trained says they should be.
#
# Tokens drawn from pi have E[-log pi] = H, the entropy, place by place, so the sum of -log pi - H over any number of them
# swings around 0, whatever the texts. A sampler that leaves out the tail (top-p, top-k) or draws colder stays below, one that
# draws hotter above, also where the log-probs it reports are those of pi and show no gap at all.
#
# A wrong temperature in the log-probs themselves shows in the same quantity. For mu = pi^b / Z and a small 1 - b,
# log pi - log mu = (1 - b)(log pi + H): the gap is proportional to log pi + H, with one factor everywhere.

MAX_TOKENS = 1 << 20
"""Tokens that are looked at: the error of that many is a tenth of a percent."""


def surprise_metrics(batch: Batch, logp: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """Of the trainer's log-probs and entropies [N] at the first million tokens of `loss_mask` that were sampled for this step, with
    x = logp + entropy and l = logp - behaviour_logp:

    - `surprise_excess` = -sum x / sum H, the surprise above what it should be as a part of it, and `surprise_error`, its
      standard error: x of one token is uncorrelated with that of any before it, so that squares add. Their sum is taken no
      lower than sum H (2 - log min(H, 1)), about what it is for places of these entropies: a sample without a rare token
      must not pass for one without an error;
    - `surprise_gap` = sum |l| / sum H, which explains an excess of about its size;
    - `heat` = sum lx / sum x^2, which is 1 - 1 / f for an engine whose temperature is f times the trainer's, and `heat_fit`
      = sum lx / sqrt(sum l^2 sum x^2), which is then near 1, or -1 for f below 1.

    {} where there are no entropies or no tokens. It must see samples as they were drawn: a filter that looks at rewards
    prefers the likely or the unlikely.
    """
    drawn_now = sampled_loss_mask(batch) & ~is_replayed(batch)[batch.sequence_ids]
    where = drawn_now.nonzero().squeeze(1)[:MAX_TOKENS]
    if entropy is None or not where.shape[0]:
        return {}
    old, behaviour, spread = (column[where] for column in (logp, batch.token["behaviour_logp"], entropy))
    gap = rollout_mismatch(old, behaviour, torch.tensor([0, old.shape[0]], device=old.device)).log_ratio
    spread = spread.detach().double().clamp(min=0)
    x = old.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double() + spread
    xx, total = x.dot(x), spread.sum().clamp(min=1e-12)
    least = (spread * (2 - spread.clamp(1e-30, 1).log())).sum()
    return metrics_to_floats(
        "mismatch/",
        {
            "surprise_excess": -x.sum() / total,
            "surprise_error": torch.maximum(xx, least).sqrt() / total,
            "surprise_gap": gap.abs().sum() / total,
            "heat": gap.dot(x) / xx.clamp(min=1e-300),
            "heat_fit": gap.dot(x) / (xx * gap.dot(gap)).sqrt().clamp(min=1e-300),
        },
    )


# --- What tells one cause of a gap between engine and trainer from another, beyond how large it is.
#
# Most symptoms are a share: sum |l| over what both policies find surprising, sum -(old + behaviour). It is 0 where they
# agree, at most 1, and for one fault about the same while a policy grows sure or unsure, as a mean of |l| is not.

FAR_LOG_RATIO = 3.0
"""A token whose two probabilities differ by more than e^3 = 20 times is another token, or has another past."""
CUT_QUANTILE = 0.95
"""What is said of most tokens is not decided by a few absurd ones: gaps are cut at this quantile of their size."""
SURE_LOGP = math.log(0.5)
"""Above this log-prob a token is the likeliest of its place, whatever the others are."""


def symptom_metrics(batch: Batch, version: int | None = None) -> dict[str, float]:
    """Of l = old_logp - behaviour_logp at `action_mask`:

    - `gap_median` of |l|, and `far_share`, the share of |l| > 3;
    - `balance` = sum(e^t - 1) / sum|e^t - 1|, t being l but no lower than minus the 95% quantile of |l| and no higher than 3.
      Tokens sampled from mu have E[pi/mu] = 1 wherever mu covers pi, so this is near 0 for noise, staleness and temperature,
      and -1 where mu leaves out a part of pi, as top-p and top-k do. What is cut can only move it away from -1;
    - `sure_lean` = sum l / sum |l| of the tokens to which both give more than 1/2: near 0 for noise. A temperature moves the
      likeliest token the same way everywhere: 1 for a hotter engine, -1 for a colder one;
    - `share`, the median of those of rows; `first_share` of first tokens and `late_share` of the second halves of rows: a
      changed prompt is felt most by what stands next to it;
    - where a token is far off: `share_before` of the tokens before the first such one of their row, and `share_behind` of
      those behind it, if any: log-probs that were paired with another text are wrong from there on;
    - where there is a column `version`: `lag_mean` of the updates since a token's weights, to `version` (None: the newest of
      the batch); `lag_slope` of |l|, cut at its 95% quantile, on that lag, and their correlation `lag_corr`.

    A correlation with something constant is 0, and so is a share of nothing.
    """
    written = written_of(batch)
    old, behaviour = written.column("old_logp"), written.column("behaviour_logp")
    gap = rollout_mismatch(old, behaviour, written.offsets)
    size = gap.log_ratio.abs()
    median, cut = quantiles(size, [0.5, CUT_QUANTILE]).clamp(max=LOG_RATIO_BOUND)
    away = gap.log_ratio.clamp(max=FAR_LOG_RATIO).maximum(-cut).expm1_()
    sure = gap.log_ratio[torch.minimum(old, behaviour) > SURE_LOGP]
    found = {
        "gap_median": median,
        "far_share": gap.mean(size > FAR_LOG_RATIO),
        "balance": _share(away.sum(), away.abs().sum()),
        "sure_lean": _share(sure.sum(), sure.abs().sum()),
    }
    surprise = gap.log_ratio - 2 * old.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double()  # -(old + behaviour)
    found |= _share_metrics(
        gap, size, torch.maximum(surprise, size)
    )  # the same but for log-probs above 0, which are absurd
    if "version" in batch.token:
        found |= _lag_metrics(gap, torch.minimum(size, cut), written.column("version").double(), version)
    return metrics_to_floats("mismatch/", found)


def _share_metrics(gap: RolloutMismatch, size: Tensor, surprise: Tensor) -> dict[str, Tensor]:
    """The shares of rows, and of tokens by where they stand in theirs."""
    starts, ends = gap.offsets[:-1], gap.offsets[1:]
    # Runs that end at the middle of a row and at its end, so that every second one is a second half.
    halves = torch.cat([torch.stack([starts, (starts + ends + 1) // 2], 1).flatten(), ends[-1:]])
    sizes, surprises = contiguous_sum(size, halves).view(-1, 2), contiguous_sum(surprise, halves).view(-1, 2)
    found = {
        "share": quantiles(_share(sizes.sum(1), surprises.sum(1)), [0.5])[0],
        "first_share": _share(size[starts].sum(), surprise[starts].sum()),
        "late_share": _share(sizes[:, 1].sum(), surprises[:, 1].sum()),
    }
    where = (size > FAR_LOG_RATIO).nonzero().squeeze(1)
    if where.shape[0]:
        behind, first = _from_first(gap, where)
        before = (~behind).double()
        found["share_before"] = _share(before @ size, before @ surprise)
        behind[first] = False
        if bool(behind.any()):
            found["share_behind"] = _share(size[behind].sum(), surprise[behind].sum())
    return found


def _from_first(gap: RolloutMismatch, where: Tensor) -> tuple[Tensor, Tensor]:
    """[M] bool, the tokens of each row from the first of the places `where` on, and [K] those first places."""
    row = torch.searchsorted(gap.offsets, where, right=True) - 1
    is_first = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row.diff() > 0])
    first, end = where[is_first], gap.offsets[row[is_first] + 1]
    steps = torch.zeros(gap.num_tokens + 1, dtype=torch.int32, device=where.device)
    one = torch.ones_like(first, dtype=torch.int32)
    steps.index_add_(0, first, one).index_add_(0, end, -one)
    return steps[:-1].cumsum(0, dtype=torch.int32) > 0, first


def _share(amount: Tensor, whole: Tensor) -> Tensor:
    """amount / whole; 0 where there is nothing of either."""
    return amount / whole.clamp(min=1e-300)


def _lag_metrics(gap: RolloutMismatch, size: Tensor, version: Tensor, newest: int | None) -> dict[str, Tensor]:
    lag = (version.max() if newest is None else newest) - version
    slope, correlation = _slope(size, lag)
    return {"lag_mean": gap.mean(lag), "lag_slope": slope, "lag_corr": correlation}


def _slope(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """(least-squares slope, correlation) of y on x; both 0 where either is constant."""
    x, y = x - x.mean(), y - y.mean()
    xx, yy, xy = x.dot(x), y.dot(y), x.dot(y)
    varies = torch.minimum(xx, yy) > 1e-20 * x.shape[0]  # what is left of a constant is rounding
    none = torch.zeros_like(xy)
    return torch.where(varies, xy / xx, none), torch.where(varies, xy / (xx * yy).sqrt(), none)
