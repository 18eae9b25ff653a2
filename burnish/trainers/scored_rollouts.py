"""scored.json: the rollouts that were scored last, for the live page of a run.

Tables of samples are written after some steps. This file shows rollouts while a step is being sampled. It holds at most
`MAX_ROLLOUTS`, and each text is cut. While rollouts come it is replaced every `MIN_INTERVAL_S`, and less often if writing it takes
long, so that it never takes more than a twentieth of the time. A file that cannot be written is reported once and then left alone.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.models.tokenizer import Tokenizer
from burnish.run.durable_files import replace_quickly
from burnish.trainers.episode_rows import opening_text, turns_json

MAX_ROLLOUTS = 64
MAX_CHARS = 8_000
MAX_TURNS_CHARS = 4 * MAX_CHARS
"""A longer episode is shown by its completion alone."""
MIN_INTERVAL_S = 1.0
MAX_SHARE = 0.05


class ScoredRollouts:
    """The writer of scored.json. `add` may be called from several threads."""

    def __init__(
        self,
        path: Path,
        tokenizer: Tokenizer,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.tokenizer, self.note, self.clock = path, tokenizer, note, clock
        self._latest: deque[tuple[Trajectory, PromptSample]] = deque(maxlen=MAX_ROLLOUTS)
        self._written = self._next = -math.inf  # when the file was written last, and when it may be written again
        self._has_new = False
        self._lock = threading.Lock()

    def add(self, trajectory: Trajectory, draw: PromptSample) -> None:
        """Take a rollout that has got its score. Greedy and continued answers, which are not trained on, are left out."""
        if trajectory.sample < 0:
            return
        with self._lock:
            self._latest.append((trajectory, draw))
            self._has_new = True
            if self.clock() >= self._written + MIN_INTERVAL_S:
                self._write()

    def flush(self) -> None:
        """Write the rollouts that came since the last write. Called when a step has all its rollouts."""
        with self._lock:
            if self._has_new:
                self._write()

    def _write(self) -> None:
        started = self.clock()
        if started < self._next:
            return
        try:
            replace_quickly(self.path, self._content())
        except OSError as error:
            self._next = math.inf
            self.note(
                f"cannot write {self.path} ({error.strerror}); the live page shows no rollouts as they are scored"
            )
            return
        self._has_new, self._written = False, started
        self._next = started + (self.clock() - started) / MAX_SHARE

    def _content(self) -> bytes:
        rows = [scored_row(trajectory, draw, self.tokenizer) for trajectory, draw in self._latest]
        return json.dumps({"rollouts": rows}).encode()


def scored_row(trajectory: Trajectory, draw: PromptSample, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what the live page shows of a rollout."""
    turns = turns_json(trajectory, tokenizer)
    return {
        "step": draw.step,
        "group": trajectory.group_id,
        "sample": trajectory.sample,
        "prompt": cut(opening_text(trajectory, draw.prompt, tokenizer)),
        "completion": cut(trajectory.completion),
        # A turn's reward may be NaN, for which browsers know no JSON.
        "turns": None if turns is None or len(turns) > MAX_TURNS_CHARS else json.loads(turns, parse_constant=_none),
        "reward": finite(trajectory.reward),
        "accuracy": finite(trajectory.accuracy),
        "finish": trajectory.finish,
        "length": trajectory.num_actions,
        "error": cut(trajectory.error) if trajectory.error is not None else None,
    }


def cut(text: str) -> str:
    """Return the text with its middle left out if it is too long."""
    half = MAX_CHARS // 2
    return (
        text
        if len(text) <= MAX_CHARS
        else f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
    )


def _none(constant: str) -> None:
    """What is read for NaN and the infinities."""


def finite(value: float | None) -> float | None:
    """Return the value; None for a NaN or an infinity, which JSON lacks."""
    return value if value is not None and math.isfinite(value) else None
