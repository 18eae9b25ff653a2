"""How far apart engine and trainer are, whatever is done about it: KL, chi-square and perplexities."""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.correction.gap import BOUND, LARGEST, Gap


def divergence_metrics(gap: Gap) -> dict[str, Tensor]:
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


def chi_square_metrics(gap: Gap) -> dict[str, Tensor]:
    """chi2 = mean(W^2) - 1, the variance of unbounded weights, of tokens and of rows."""
    rows = (2 * gap.log_ratio_sum.clamp(-BOUND, BOUND)).exp()
    return {"chi2_token": gap.mean_square(gap.ratio) - 1, "chi2_seq": rows.mean() - 1}


def _mean_ratio(gap: Gap) -> Tensor:
    """mean exp(l) without the clamp: only the few tokens beyond it have their exponential taken again."""
    far = (gap.log_ratio.abs() > BOUND).nonzero().squeeze(1)
    more = gap.log_ratio[far].clamp(max=2 * LARGEST).exp() - gap.ratio[far]
    return gap.mean(gap.ratio) + more.sum() / gap.num_tokens
