"""How well each prompt has been answered so far: what curricula choose by.

Only prompts that were drawn have an entry, so it stays as small as what the run has seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from burnish.core.trajectory import Trajectory, judged


@dataclass(frozen=True)
class PromptRecord:
    """What is known of one prompt."""

    success: float = 0.0
    """Moving average of the accuracy of its visits."""
    visits: int = 0
    right: float = 0.0
    """Right answers, in shares where an accuracy is one."""
    total: int = 0


UNSEEN = PromptRecord()


class PromptStatistics:
    """A record for each prompt seen, moved by every visit."""

    def __init__(self, ema: float = 0.5) -> None:
        self.ema = ema
        self.version = 0
        """Another number whenever anything has changed."""
        self._records: dict[str, PromptRecord] = {}

    def __getitem__(self, prompt_id: str) -> PromptRecord:
        return self._records.get(prompt_id, UNSEEN)

    def __len__(self) -> int:
        return len(self._records)

    def observe(self, prompt_id: str, right: float, total: int) -> None:
        """One visit: `right` of `total` judged answers; a visit that nobody judged says nothing."""
        if total == 0:
            return
        self.version += 1
        old = self[prompt_id]
        success = (1 - self.ema) * old.success + self.ema * right / total
        self._records[prompt_id] = PromptRecord(success, old.visits + 1, old.right + right, old.total + total)

    def state(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {name: [r.success, r.visits, r.right, r.total] for name, r in self._records.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to where `state()` was taken."""
        self._records = {name: PromptRecord(*values) for name, values in state.items()}
        self.version += 1


def visits(trajectories: Iterable[Trajectory]) -> list[tuple[str, float, int]]:
    """(prompt id, right, judged) of each visit among the trajectories, in the order they first appear."""
    found: dict[tuple[str, int], tuple[float, int]] = {}
    for t, accuracy in judged(trajectories):
        right, total = found.get((t.prompt_id, t.visit), (0.0, 0))
        found[t.prompt_id, t.visit] = right + accuracy, total + 1
    return [(prompt_id, right, total) for (prompt_id, _), (right, total) in found.items()]
