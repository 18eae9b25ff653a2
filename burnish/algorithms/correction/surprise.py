"""Whether sampled tokens are as surprising as the policy that is trained says they should be.

Tokens drawn from pi have E[-log pi] = H, the entropy, place by place, so the sum of -log pi - H over any number of them
swings around 0, whatever the texts. A sampler that leaves out the tail (top-p, top-k) or draws colder stays below, one that
draws hotter above, also where the log-probs it reports are those of pi and show no gap at all.

A wrong temperature in the log-probs themselves shows in the same quantity. For mu = pi^b / Z and a small 1 - b,
log pi - log mu = (1 - b)(log pi + H): the gap is proportional to log pi + H, with one factor everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.correction.gap import LARGEST, gap_of
from burnish.algorithms.correction.weights import as_floats
from burnish.algorithms.demonstrations import sampled_in_loss
from burnish.algorithms.replay import is_replayed
from burnish.core.batch import Batch

ENOUGH = 1 << 20
"""Tokens that are looked at: the error of that many is a tenth of a percent."""


def surprise(batch: Batch, logp: Tensor, entropy: Tensor | None) -> dict[str, float]:
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
    drawn_now = sampled_in_loss(batch) & ~is_replayed(batch)[batch.sequence_ids]
    where = drawn_now.nonzero().squeeze(1)[:ENOUGH]
    if entropy is None or not where.shape[0]:
        return {}
    old, behaviour, spread = (column[where] for column in (logp, batch.token["behaviour_logp"], entropy))
    gap = gap_of(old, behaviour, torch.tensor([0, old.shape[0]], device=old.device)).log_ratio
    spread = spread.detach().double().clamp(min=0)
    x = old.detach().clamp(-LARGEST, LARGEST).double() + spread
    xx, total = x.dot(x), spread.sum().clamp(min=1e-12)
    least = (spread * (2 - spread.clamp(1e-30, 1).log())).sum()
    return as_floats(
        "mismatch/",
        {
            "surprise_excess": -x.sum() / total,
            "surprise_error": torch.maximum(xx, least).sqrt() / total,
            "surprise_gap": gap.abs().sum() / total,
            "heat": gap.dot(x) / xx.clamp(min=1e-300),
            "heat_fit": gap.dot(x) / (xx * gap.dot(gap)).sqrt().clamp(min=1e-300),
        },
    )
