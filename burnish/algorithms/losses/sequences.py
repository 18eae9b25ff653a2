"""What losses of whole sequences share: the log-ratio of a sequence, and metrics that are means over sequences."""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.ratios import log_ratio
from burnish.algorithms.view import View


def logp_of(view: View) -> Tensor:
    """[M] the policy's log-probs, which every loss here has."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp


def sequence_log_ratio(view: View, anchor: Tensor) -> Tensor:
    """[S] z_i = sum_t (logp - anchor), with gradient: a sum, not a mean; 0 for a sequence that has no token."""
    return view.sum(log_ratio(view, anchor))


def over_sequences(view: View, values: Tensor) -> Tensor:
    """[S] to [M]: a mark whose mean over tokens is the mean of `values` over the sequences that have a token.

    Only for a view of the whole mini-batch (scope group or batch): elsewhere neither count is known.
    """
    scale = view.num_tokens / (view.lengths > 0).sum().clamp(min=1)
    return view.spread(values / view.lengths.clamp(min=1)) * scale
