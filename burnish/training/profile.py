"""One step under torch's profiler: a trace for a viewer (Perfetto, chrome://tracing) and a page in words."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from burnish.config.errors import UserError
from burnish.run.files import atomic_write
from burnish.training.trace import summarise, text

TRACE, PAGE = "trace.json.gz", "profile.txt"
NEXT = 0
"""Instead of a step's number: the second one from here, since the first pays for what is made once."""


def step_to_profile(asked: int | None, done: int, total: int) -> int | None:
    """The number of the step to record, of a run that has made `done` of `total` steps; None where none was asked for."""
    if asked is None:
        return None
    if asked == NEXT:
        return min(done + 2, total)
    if asked > total:
        raise UserError(f"--profile {asked}, but the run has only {total} steps")
    if asked <= done:
        raise UserError(f"--profile {asked}, but the run has made {done} steps already: choose a later one")
    return asked


@contextmanager
def profiled(folder: Path, title: str, note: Callable[[str], None]) -> Iterator[None]:
    """What runs inside is recorded; `trace.json.gz` and `profile.txt` are written to the folder afterwards."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, profile_memory=True) as recorded:
        yield
        if on_gpu:
            torch.cuda.synchronize()  # what was asked for inside belongs to it
    recorded.export_chrome_trace(str(folder / TRACE))
    atomic_write(folder / PAGE, text(summarise(read_trace(folder / TRACE)), title))
    note(f"{title} was profiled: {folder / PAGE}; open {folder / TRACE} in ui.perfetto.dev")


def read_trace(path: Path) -> list[dict[str, object]]:
    """The events of a stored trace."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        events: list[dict[str, object]] = json.load(file)["traceEvents"]
    return events
