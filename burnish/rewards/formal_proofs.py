"""Rewards of formal proofs: `proof`, checked by our own kernel (burnish.data.proofs.kernel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from burnish.data.tasks.proofs import checked_answer
from burnish.rewards.score_types import PartResult, require_answer


def proof(completion: str, answer: Any, extra: Mapping[str, Any]) -> PartResult:
    """1 if the completion proves the theorem that is the row's answer, such as `p & q |- q & p`. The details are the checker's message."""
    require_answer(answer)
    is_right, message = checked_answer(completion, str(answer))
    return PartResult(float(is_right), details=message)
