"""What a run's journal knows of its prompts: how every visit of each was rewarded, whether its samples were kept or not.

The record of a step has a short list for each prompt it drew, so the whole history of a long run stays readable when the
samples themselves are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.directory import RunDirectory
from burnish.run.journal import decode

FIELD = "prompts"


@dataclass(frozen=True)
class Visit:
    """One visit of a prompt: how many of its samples were scored and judged, and how well."""

    prompt_id: str
    visit: int
    scored: int
    reward: float
    """The sum of the rewards of those that were scored."""
    judged: int
    right: float
    """Right answers among those that were judged, in shares where an accuracy is one."""

    def values(self) -> list[Any]:
        """As the journal holds it."""
        return [self.prompt_id, self.visit, self.scored, self.reward, self.judged, self.right]


def read_visits(run: Path) -> list[Visit]:
    """Every visit that still counts, in the order of the steps; a run may be read while it trains."""
    directory = RunDirectory.open(run)
    steps: list[tuple[int, list[list[Any]]]] = []
    for event in _events(directory.journal / "events.jsonl"):
        if event["event"] == "resumed":
            steps = [(step, found) for step, found in steps if step <= event["step"]]
        elif event["event"] == "step" and event.get(FIELD):
            steps.append((event["step"], event[FIELD]))
    if not steps:
        raise UserError(
            f"the journal of {run} has no rewards of prompts: it must be a run of `burnish train` with a finished step"
        )
    return [Visit(*values) for _, found in steps for values in found]


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The intact records up to the first that is not: a run that is being written may have a torn last line."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            record = decode(line) if line.endswith(b"\n") else None
            if record is None:
                return
            yield record
