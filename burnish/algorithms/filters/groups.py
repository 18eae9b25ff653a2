"""Group filters, before advantages: `[S] bool`, the same for all samples of a prompt. True is kept.

They read rewards and accuracies alone, so they run before any forward pass is spent on what they drop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.algorithms.filters.columns import judged_accuracy
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_mean, segment_min


def zero_signal(batch: Batch, metric: Literal["reward", "accuracy"] = "reward") -> Tensor:
    """[S] bool: keep groups whose metric differs between samples, and groups of one.

    The others have no gradient under a group baseline. DAPO's dynamic sampling (2503.14476), which adds the refill.
    """
    groups, num = compact_ids(batch.sequence["group_ids"])
    values = batch.sequence["reward"] if metric == "reward" else judged_accuracy(batch, "filter zero_signal")
    keep = segment_max(values, groups, num) > segment_min(values, groups, num)
    _, group_of_trajectory = trajectory_groups(batch)
    return (keep | (segment_count(group_of_trajectory, num) == 1))[groups]


def difficulty_band(batch: Batch, low: float = 0.2, high: float = 0.8) -> Tensor:
    """[S] bool: keep groups with low <= mean accuracy <= high; every trajectory counts once.

    The expected improvement is bounded by the variance p(1-p), largest at one half. Bae et al. (2504.03380); PRIME
    (2502.01456).
    """
    accuracy = judged_accuracy(batch, "filter difficulty_band")
    owner, group_of_trajectory = trajectory_groups(batch)
    groups, num = compact_ids(batch.sequence["group_ids"])
    by_trajectory = segment_mean(accuracy, owner, group_of_trajectory.numel())
    mean = segment_mean(by_trajectory, group_of_trajectory, num)
    return ((low <= mean) & (mean <= high))[groups]


def truncation(batch: Batch) -> Tensor:
    """[S] bool: keep groups none of whose samples was truncated (PRIME, 2502.01456)."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    return (segment_max(batch.sequence["truncated"].double(), groups, num) == 0)[groups]


GROUP_FILTERS: dict[str, Callable[..., Tensor]] = {
    "zero_signal": zero_signal,
    "difficulty_band": difficulty_band,
    "truncation": truncation,
}
