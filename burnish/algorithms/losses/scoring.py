"""The loss of a reward model: which of two answers is the better one, as a difference of scores (Bradley and Terry, 1952)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from burnish.algorithms.losses.preference import bradley_terry, chosen_minus_rejected, pairs_of
from burnish.algorithms.view import View
from burnish.core.segments import segment_sum


@dataclass(frozen=True)
class ScorerLoss:
    """Mean over pairs of -log sigmoid(r_c - r_r - m) + centre (r_c + r_r)^2, with m the pair's margin plus a constant.

    Only differences matter to the first term; the second keeps scores around 0 (Eisenstein et al., 2312.09244). Each
    sequence has one token in the loss, the one its score is read at. Columns it reads, [S] each: `group_ids` (the pair),
    `chosen`, `margin`, `weight` (1 / the pairs of the whole mini-batch).
    """

    margin: float = 0.0
    """By how much every chosen answer must be ahead, besides the margin of its pair."""
    centre: float = 0.0
    """Coefficient of the second term."""

    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    scope: ClassVar[str] = "group"

    def __call__(self, view: View) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.value is not None, "the learner gives what `needs` names"
        pairs, num = pairs_of(view)
        scores = view.sum(view.value)  # [S]
        ahead = chosen_minus_rejected(view, scores, pairs, num)  # [P]
        both = segment_sum(scores, pairs, num)
        # Both members of a pair have its margin and its weight.
        margin = segment_sum(view.sequence["margin"], pairs, num) / 2 + self.margin
        weight = segment_sum(view.sequence["weight"], pairs, num) / 2
        loss = bradley_terry(ahead, ahead.new_zeros(()), margin) + self.centre * both.square()
        told = ahead.detach()
        # Metrics are divided by the tokens in the loss, of which a pair has two.
        sums = {"accuracy": 2 * (told > 0).to(told.dtype).sum(), "margin": 2 * told.sum(), "score": both.detach().sum()}
        return (weight * loss).sum(), sums
