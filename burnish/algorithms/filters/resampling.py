"""Resamplers, after advantages: `[S'] int64`, the sequences to train on, in order; repeats are allowed.

A batch of them is `batch.select(index)`: what was computed for a sample (advantages, old log-probs) goes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.algorithms.filters.columns import first_index, lexsort
from burnish.algorithms.filters.pairs import pairs
from burnish.core.batch import Batch
from burnish.core.noise import uniforms
from burnish.core.segments import (
    compact_ids,
    offsets_from_lengths,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
)

Mode = Literal["power", "best_worst", "best_random", "best"]
STREAM = 0x5046_5050_4F  # "PFPPO": other picks by the same key, such as Clip-Cov's, have noise of their own


def pf_ppo(batch: Batch, mode: Mode = "power", power: float = 2.0) -> Tensor:
    """[S'] sequences: from each group as many draws as it has samples, with replacement, favouring the extremes.

    Learned scores are reliable only there. Draw d of a group is a function of the identity of its first sequence and
    of d. Policy filtration, PF-PPO (2409.06957), per prompt as in the paper.
    """
    owner, groups = trajectory_groups(batch)
    of_sequence, num = compact_ids(batch.sequence["group_ids"])
    rewards = segment_mean(batch.sequence["reward"], owner, groups.numel())  # [T]
    order = lexsort(first_index(owner, groups.numel()), groups)  # [T] trajectories, group after group
    starts = offsets_from_lengths(segment_count(groups, num))
    group = groups[order]
    draw = torch.arange(order.numel(), device=order.device) - starts[group]
    keys = batch.sequence["key"][first_index(of_sequence, num)] ^ STREAM
    # The probabilities of a group sum to 1, so those of group g fill the interval from g to g + 1.
    cumulative = pf_probabilities(rewards, groups, num, mode, power)[order].cumsum(0)
    picked = torch.searchsorted(cumulative, group + uniforms(keys[group], draw))
    picked = picked.clamp(starts[group], starts[group + 1] - 1)  # rounding must not hand a draw to the next group
    return _sequences_of(order[picked], owner, groups.numel())


def pf_probabilities(scores: Tensor, groups: Tensor, num: int, mode: Mode, power: float) -> Tensor:
    """[T] the chance of each sample in one draw from its group, proportional to weight + 1e-8.

    power: |s|^power. best_worst: 1 for the best and the worst, else 0. best_random: best 0.4, others 0.1. best: the
    best only. All samples that tie for an extreme get its weight.
    """
    best = scores == segment_max(scores, groups, num)[groups]
    worst = scores == segment_min(scores, groups, num)[groups]
    if mode == "power":
        weights = scores.abs() ** power
    elif mode == "best_worst":
        weights = (best | worst).to(scores.dtype)
    elif mode == "best_random":
        weights = torch.full_like(scores, 0.1).masked_fill(best, 0.4)
    else:
        weights = best.to(scores.dtype)
    weights = weights + 1e-8
    return weights / segment_sum(weights, groups, num)[groups]


def _sequences_of(trajectories: Tensor, owner: Tensor, num: int) -> Tensor:
    """The sequences of each trajectory of a list, in order."""
    by_owner = owner.argsort(stable=True)
    counts = segment_count(owner, num)
    lengths = counts[trajectories]
    offsets = offsets_from_lengths(lengths)
    shift = torch.repeat_interleave(offsets_from_lengths(counts)[trajectories] - offsets[:-1], lengths)
    return by_owner[torch.arange(int(offsets[-1]), device=owner.device) + shift]


RESAMPLERS: dict[str, Callable[..., Tensor]] = {"pf_ppo": pf_ppo, "pairs": pairs}
