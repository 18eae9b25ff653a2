"""Slot `filters`: which groups are used, which samples stay in the loss, and which are taken again."""

from burnish.algorithms.filters.edges import edges_left, tree_edges
from burnish.algorithms.filters.groups import GROUP_FILTERS, difficulty_band, truncation, zero_signal
from burnish.algorithms.filters.pairs import pairs
from burnish.algorithms.filters.resampling import RESAMPLERS, pf_ppo
from burnish.algorithms.filters.samples import (
    SAMPLE_FILTERS,
    cppo,
    loss_mask_from,
    overlong,
    positives_only,
    prob_mask,
)

__all__ = [
    "GROUP_FILTERS",
    "RESAMPLERS",
    "SAMPLE_FILTERS",
    "cppo",
    "difficulty_band",
    "edges_left",
    "loss_mask_from",
    "overlong",
    "pairs",
    "pf_ppo",
    "positives_only",
    "prob_mask",
    "tree_edges",
    "truncation",
    "zero_signal",
]
