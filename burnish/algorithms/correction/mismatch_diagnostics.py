"""Metrics of the mismatch between engine and trainer: its size, and what tells its causes apart.

`divergence_metrics` and `chi_square_metrics` measure the size. `surprise_metrics` checks whether sampled tokens are as
surprising as the trainer's policy predicts. `symptom_metrics` are the inputs of the rules in `run/health` that name a cause.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import is_replayed, sampled_loss_mask
from burnish.algorithms.correction.rollout_mismatch import (
    LOG_RATIO_BOUND,
    MAX_ABS_LOGP,
    RolloutMismatch,
    batch_mismatch,
    quantiles,
    refuse_nan_logp,
    rollout_mismatch,
)
from burnish.algorithms.correction.weights_and_rejection import metrics_to_floats
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum


def divergence_metrics(mismatch: RolloutMismatch) -> dict[str, Tensor]:
    """KL estimates and perplexities.

    With t_i and q_i the mean log-prob of row i under trainer and engine, and D_i = q_i - t_i:

    - kl = mean(-l), an estimate of KL(engine || trainer) that can be negative;
    - k3_kl = mean(exp(l) - l - 1), which cannot (Schulman, 2020);
    - training_ppl, training_log_ppl, rollout_ppl, rollout_log_ppl: means over rows of exp(-t), -t, exp(-q), -q;
    - log_ppl_*: mean, mean of the absolute value, max and min of D; positive if the trainer is less sure;
    - ppl_ratio = mean_i exp(D_i).
    """
    drift = -mismatch.log_ratio_sum / mismatch.lengths
    trainer, engine = -mismatch.old_sum / mismatch.lengths, -mismatch.behaviour_sum / mismatch.lengths
    kl = -mismatch.log_ratio_sum.sum() / mismatch.num_tokens
    return {
        "kl": kl,
        "k3_kl": (_mean_ratio(mismatch) - 1 + kl).clamp(min=0),
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


def chi_square_metrics(mismatch: RolloutMismatch) -> dict[str, Tensor]:
    """chi2 = mean(W^2) - 1, the variance of unbounded weights, of tokens and of rows."""
    rows = (2 * mismatch.log_ratio_sum.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp()
    return {"chi2_token": mismatch.mean_square(mismatch.ratio) - 1, "chi2_seq": rows.mean() - 1}


def _mean_ratio(mismatch: RolloutMismatch) -> Tensor:
    """mean exp(l) without the clamp to +-20. Only tokens beyond the clamp are exponentiated again."""
    far = (mismatch.log_ratio.abs() > LOG_RATIO_BOUND).nonzero().squeeze(1)
    more = mismatch.log_ratio[far].clamp(max=2 * MAX_ABS_LOGP).exp() - mismatch.ratio[far]
    return mismatch.mean(mismatch.ratio) + more.sum() / mismatch.num_tokens


# --- Surprise
#
# Tokens drawn from pi have E[-log pi] = H, the entropy, at every position. So the sum of -log pi - H over sampled tokens
# fluctuates around 0 for any text. A sampler that leaves out the tail (top-p, top-k) or is colder stays below 0, a hotter
# one above, even if the log-probs it reports are those of pi and show no mismatch.
#
# A wrong temperature in the reported log-probs shows in the same quantity. For mu = pi^b / Z and small 1 - b,
# log pi - log mu = (1 - b)(log pi + H): l is proportional to log pi + H with one factor everywhere.

MAX_TOKENS = 1 << 20
"""At most this many tokens are used. The standard error of that many is a tenth of a percent."""


def surprise_metrics(batch: Batch, logp: Tensor, entropy: Tensor | None) -> dict[str, float]:
    """Whether sampled tokens are as surprising as the trainer's policy predicts, and whether the temperature is wrong.

    `logp` and `entropy` [N] are the trainer's. Of the first 2^20 tokens in the loss that were sampled for this step, with
    x = logp + entropy and l = logp - behaviour_logp:

    - `surprise_excess` = -sum x / sum H: the surprise above its expectation, as a share of it.
    - `surprise_error`: its standard error. x of a token is uncorrelated with x of earlier tokens, so squares add. Their sum
      is at least sum H (2 - log min(H, 1)), its approximate value for these entropies: otherwise a sample that happens to
      hold no rare token would seem to have no error.
    - `surprise_gap` = sum |l| / sum H, which explains an excess of about its size.
    - `heat` = sum lx / sum x^2, which is 1 - 1/f for an engine whose temperature is f times the trainer's.
    - `heat_fit` = sum lx / sqrt(sum l^2 sum x^2), which is then near 1, or near -1 for f below 1.

    Empty without entropies or tokens. Samples must be as they were drawn: a filter that reads rewards prefers likely or
    unlikely ones.
    """
    drawn_now = sampled_loss_mask(batch) & ~is_replayed(batch)[batch.sequence_ids]
    where = drawn_now.nonzero().squeeze(1)[:MAX_TOKENS]
    if entropy is None or not where.shape[0]:
        return {}
    old, behaviour, spread = (column[where] for column in (logp, batch.token["behaviour_logp"], entropy))
    log_ratio = rollout_mismatch(old, behaviour, torch.tensor([0, old.shape[0]], device=old.device)).log_ratio
    spread = spread.detach().double().clamp(min=0)
    x = old.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double() + spread
    xx, total = x.dot(x), spread.sum().clamp(min=1e-12)
    least = (spread * (2 - spread.clamp(1e-30, 1).log())).sum()
    return metrics_to_floats(
        "mismatch/",
        {
            "surprise_excess": -x.sum() / total,
            "surprise_error": torch.maximum(xx, least).sqrt() / total,
            "surprise_gap": log_ratio.abs().sum() / total,
            "heat": log_ratio.dot(x) / xx.clamp(min=1e-300),
            "heat_fit": log_ratio.dot(x) / (xx * log_ratio.dot(log_ratio)).sqrt().clamp(min=1e-300),
        },
    )


# --- Symptoms

FAR_LOG_RATIO = 3.0
"""If the two probabilities of a token differ by more than a factor of e^3 = 20, the trainer probably saw another token or prefix."""
CUT_QUANTILE = 0.95
"""Sizes of l are cut at this quantile, so that a few absurd tokens do not decide a metric about most tokens."""
SURE_LOGP = math.log(0.5)
"""A token with a log-prob above this is the likeliest at its position."""


def symptom_metrics(batch: Batch, version: int | None = None) -> dict[str, float]:
    """Metrics that tell the causes of a mismatch apart, from l = old_logp - behaviour_logp at `action_mask`.

    - `gap_median`: median of |l|. `far_share`: share of tokens with |l| > 3.
    - `balance` = sum(e^t - 1) / sum|e^t - 1|, with t = l cut to [-(95% quantile of |l|), 3]. Tokens sampled from mu have
      E[pi/mu] = 1 wherever mu covers pi. So it is near 0 for noise, staleness and temperature, and near -1 if mu leaves out
      a part of pi, as top-p and top-k do. The cut can only move it away from -1.
    - `sure_lean` = sum l / sum |l| over tokens to which both give more than 1/2. It is near 0 for noise. A temperature moves
      the likeliest token the same way everywhere: near 1 for a hotter engine, near -1 for a colder one.
    - `share`: median over rows of sum |l| / sum -(old + behaviour). `first_share` is that of first tokens, `late_share` of the
      second halves of rows. A changed prompt affects the tokens next to it most.
    - If any token has |l| > 3: `share_before` of the tokens before the first such token of their row, and `share_behind` of
      those after it. Log-probs that were paired with another text are wrong from that token on.
    - With a column `version`: `lag_mean`, the mean number of updates from a token's weights to `version` (None: the newest
      of the batch); `lag_slope` of |l|, cut at its 95% quantile, on that lag; `lag_corr`, their correlation.

    A share is 0 if the policies agree, and at most 1. Unlike a mean of |l|, it stays about the same for one fault while the
    policy's entropy changes. A correlation with a constant is 0, and so is a share without tokens.
    """
    tokens, mismatch = batch_mismatch(batch)
    old, behaviour = (tokens.gather(batch.token[name]) for name in ("old_logp", "behaviour_logp"))
    size = mismatch.log_ratio.abs()
    median, cut = quantiles(size, [0.5, CUT_QUANTILE]).clamp(max=LOG_RATIO_BOUND)
    away = mismatch.log_ratio.clamp(max=FAR_LOG_RATIO).maximum(-cut).expm1_()
    sure = mismatch.log_ratio[torch.minimum(old, behaviour) > SURE_LOGP]
    found = {
        "gap_median": median,
        "far_share": mismatch.mean(size > FAR_LOG_RATIO),
        "balance": _share(away.sum(), away.abs().sum()),
        "sure_lean": _share(sure.sum(), sure.abs().sum()),
    }
    surprise = mismatch.log_ratio - 2 * old.detach().clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double()  # -(old + behaviour)
    found |= _share_metrics(mismatch, size, torch.maximum(surprise, size))  # they differ only for log-probs above 0
    if "version" in batch.token:
        found |= _lag_metrics(
            mismatch, torch.minimum(size, cut), tokens.gather(batch.token["version"]).double(), version
        )
    return metrics_to_floats("mismatch/", found)


def _share_metrics(mismatch: RolloutMismatch, size: Tensor, surprise: Tensor) -> dict[str, Tensor]:
    """The shares of rows, of first tokens, of second halves, and before and after the first far token."""
    starts, ends = mismatch.offsets[:-1], mismatch.offsets[1:]
    # Runs end at the middle and at the end of each row, so every second run is a second half.
    halves = torch.cat([torch.stack([starts, (starts + ends + 1) // 2], 1).flatten(), ends[-1:]])
    sizes, surprises = contiguous_sum(size, halves).view(-1, 2), contiguous_sum(surprise, halves).view(-1, 2)
    found = {
        "share": quantiles(_share(sizes.sum(1), surprises.sum(1)), [0.5])[0],
        "first_share": _share(size[starts].sum(), surprise[starts].sum()),
        "late_share": _share(sizes[:, 1].sum(), surprises[:, 1].sum()),
    }
    where = (size > FAR_LOG_RATIO).nonzero().squeeze(1)
    if where.shape[0]:
        behind, first = _from_first(mismatch, where)
        before = (~behind).double()
        found["share_before"] = _share(before @ size, before @ surprise)
        behind[first] = False
        if bool(behind.any()):
            found["share_behind"] = _share(size[behind].sum(), surprise[behind].sum())
    return found


def _from_first(mismatch: RolloutMismatch, where: Tensor) -> tuple[Tensor, Tensor]:
    """[M] bool, the tokens of each row from the first of the places `where` on; and [K] those first places."""
    row = torch.searchsorted(mismatch.offsets, where, right=True) - 1
    is_first = torch.cat([torch.ones_like(row[:1], dtype=torch.bool), row.diff() > 0])
    first, end = where[is_first], mismatch.offsets[row[is_first] + 1]
    steps = torch.zeros(mismatch.num_tokens + 1, dtype=torch.int32, device=where.device)
    one = torch.ones_like(first, dtype=torch.int32)
    steps.index_add_(0, first, one).index_add_(0, end, -one)
    return steps[:-1].cumsum(0, dtype=torch.int32) > 0, first


def _share(amount: Tensor, whole: Tensor) -> Tensor:
    """amount / whole; 0 if both are 0."""
    return amount / whole.clamp(min=1e-300)


def _lag_metrics(mismatch: RolloutMismatch, size: Tensor, version: Tensor, newest: int | None) -> dict[str, Tensor]:
    lag = (version.max() if newest is None else newest) - version
    slope, correlation = _slope(size, lag)
    return {"lag_mean": mismatch.mean(lag), "lag_slope": slope, "lag_corr": correlation}


def _slope(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Least-squares slope and correlation of y on x; both 0 if either is constant."""
    x, y = x - x.mean(), y - y.mean()
    xx, yy, xy = x.dot(x), y.dot(y), x.dot(y)
    varies = torch.minimum(xx, yy) > 1e-20 * x.shape[0]  # rounding of a constant
    none = torch.zeros_like(xy)
    return torch.where(varies, xy / xx, none), torch.where(varies, xy / (xx * yy).sqrt(), none)


# --- Profiles: where the mismatch is
#
# A wrong temperature is the same at all positions, and has opposite signs at likely and unlikely tokens. A prompt that was
# encoded differently is largest at the first tokens and fades. Other weights (stale, rounded, noisy) show at all
# probabilities, and less at the first token than later.

NUM_POSITION_DOUBLINGS = 24
"""Positions up to 2^24 have their own buckets; no completion is longer."""
NUM_PROBABILITY_DECADES = 6
"""Probabilities down to 1e-6 have their own buckets; all smaller ones share one."""


@dataclass(frozen=True)
class ComparedTokens:
    """M action tokens with a log-prob from both engine and trainer, in batch order."""

    batch: Batch
    token_indices: Tensor  # [M] indices in the batch
    trainer: Tensor  # [M] log-probs
    engine: Tensor  # [M] log-probs
    log_ratio: Tensor  # [M] l = trainer - engine, in float64

    @property
    def num_tokens(self) -> int:
        return self.token_indices.shape[0]

    @cached_property
    def offsets(self) -> Tensor:
        """[S+1] where the batch's sequences start among these tokens."""
        return torch.searchsorted(self.token_indices, self.batch.offsets)

    @cached_property
    def position(self) -> Tensor:
        """[M] the number of action tokens before this one in its sequence."""
        mask, starts = self.batch.action_mask, self.batch.offsets[:-1].clamp(max=max(0, self.batch.num_tokens - 1))
        num_so_far = mask.cumsum(0)  # [N] with the token itself
        before = num_so_far[starts] - mask[starts].long()  # [S]
        return num_so_far.index_select(0, self.token_indices) - 1 - torch.repeat_interleave(before, self.offsets.diff())

    def as_batch(self) -> Batch:
        """These tokens as a batch, with both log-probs and, if known, `version`."""
        columns = {"action_mask": torch.ones_like(self.token_indices, dtype=torch.bool)}
        columns |= {"old_logp": self.trainer, "behaviour_logp": self.engine}
        if "version" in self.batch.token:
            columns["version"] = self.batch.token["version"].index_select(0, self.token_indices)
        return Batch(self.batch.tokens.index_select(0, self.token_indices), self.offsets, columns)


def compare_tokens(batch: Batch, trainer: Tensor, known: Tensor) -> ComparedTokens:
    """The tokens of `known` [N], with `trainer` [N] as the trainer's log-probs; raises if any log-prob is nan."""
    token_indices = known.nonzero().squeeze(1)
    old, behaviour = (x.detach().index_select(0, token_indices) for x in (trainer, batch.token["behaviour_logp"]))
    log_ratio = old.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP).double().sub_(behaviour.clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP))
    if bool(log_ratio.isnan().any()):
        refuse_nan_logp(old, behaviour)
    return ComparedTokens(batch, token_indices, old, behaviour, log_ratio)


def mismatch_profiles(seen: ComparedTokens) -> dict[str, float]:
    """Mean |l| (`abs`), mean l (`signed`) and number of tokens of each non-empty bucket, by position and by probability.

    Names are such as `mismatch/by_position/3/abs` and `mismatch/by_probability/1e-2/tokens`. A bucket is named by its lower
    end and reaches to the next bucket: from position k to 2k, or to ten times the engine's probability. Bucket `0` holds all
    probabilities up to 1e-6.
    """
    if seen.num_tokens == 0:
        return {}
    table = _table(seen)
    positions = [str(2**k - 1) for k in range(NUM_POSITION_DOUBLINGS + 1)]
    probabilities = ["0", *(f"1e-{k}" for k in range(NUM_PROBABILITY_DECADES, 0, -1))]
    values: dict[str, float] = {}
    for kind, names, sums in (("position", positions, table.sum(2)), ("probability", probabilities, table.sum(1))):
        for name, size, signed, count in zip(names, *sums.tolist(), strict=True):
            if count:
                stem = f"mismatch/by_{kind}/{name}/"
                values |= {stem + "abs": size / count, stem + "signed": signed / count, stem + "tokens": count}
    return values


def worst_tokens(seen: ComparedTokens, num: int) -> Tensor:
    """[K] indices of the tokens with the largest |l|, the worst first; ties in batch order; none with l = 0."""
    size = seen.log_ratio.abs()
    if seen.num_tokens == 0:
        return seen.token_indices
    least = size.topk(min(num, seen.num_tokens)).values[-1]
    # topk chooses among ties in any order, but a resumed run must report the same tokens.
    candidates = ((size >= least) & (size > 0)).nonzero().squeeze(1)
    return candidates[size[candidates].argsort(descending=True, stable=True)[:num]]


def _table(seen: ComparedTokens) -> Tensor:
    """[3, doublings + 1, decades + 1] sum of |l|, sum of l and number of tokens, by position and probability."""
    engine = seen.engine
    doublings = 2 ** torch.arange(1, NUM_POSITION_DOUBLINGS + 1, device=engine.device) - 1
    decades = (
        torch.arange(-NUM_PROBABILITY_DECADES, 0, device=engine.device, dtype=torch.float64)
        .mul_(math.log(10))
        .to(engine.dtype)
    )
    position = torch.bucketize(seen.position, doublings, right=True)
    bucket = position.mul_(NUM_PROBABILITY_DECADES + 1).add_(torch.bucketize(engine, decades))
    num = (NUM_POSITION_DOUBLINGS + 1) * (NUM_PROBABILITY_DECADES + 1)
    add = _sums if engine.device.type == "cpu" else _sums_in_order
    return add(seen.log_ratio, bucket, num).view(3, NUM_POSITION_DOUBLINGS + 1, NUM_PROBABILITY_DECADES + 1)


def _sums(log_ratio: Tensor, bucket: Tensor, num: int) -> Tensor:
    """[3, num] sum of |l|, sum of l and number of tokens of each bucket."""
    count = torch.bincount(bucket, minlength=num).double()
    return torch.stack(
        [torch.bincount(bucket, weights=w, minlength=num) for w in (log_ratio.abs(), log_ratio)] + [count]
    )


def _sums_in_order(log_ratio: Tensor, bucket: Tensor, num: int) -> Tensor:
    """`_sums` in a fixed order: on a GPU, `bincount` adds in any order, and sums would differ from run to run."""
    bucket, order = bucket.sort(stable=True)
    log_ratio = log_ratio[order]
    offsets = torch.searchsorted(bucket, torch.arange(num + 1, device=bucket.device))
    sums = [contiguous_sum(values, offsets) for values in (log_ratio.abs(), log_ratio)]
    return torch.stack([*sums, offsets.diff().double()])
