"""`rm_r1`: the reward of a judge that says which of two answers is better (RM-R1, 2505.02387)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.data.pair_questions import VERDICT_TAGS, verdict_of
from burnish.rewards.score_types import PartResult, require_answer


def check_verdict(answer: Any) -> None:
    """Raise ValueError for an expected verdict that is neither A nor B."""
    if answer not in VERDICT_TAGS:
        raise ValueError(f"the expected verdict {answer!r} is neither A nor B")


def rm_r1(completion: str, answer: Any, extra: Mapping[str, Any]) -> PartResult:
    """+1 if the tag of the better answer, and not that of the other, is in the last 80 characters; otherwise -1. The form earns nothing.

    The row's answer is A or B, and the tag is `<answer>[[A]]</answer>`. `burnish data questions` writes such rows.
    """
    require_answer(answer)
    check_verdict(answer)
    verdict = verdict_of(completion)
    is_right = verdict == answer
    return PartResult(1.0 if is_right else -1.0, float(is_right), {"unread": float(verdict is None)})
