"""The present state of a run in a few numbers, for the list of runs: read from the ends of its files, so that it costs little."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from burnish.run.display import headline_numbers
from burnish.run.journal import decode_record
from burnish.run.metrics import parse_line
from burnish.run.run_directory import RunDirectory
from burnish.run.supervisor.liveness import HEARTBEAT_FILE

TAIL_BYTES = 65_536
FRESH_S = 60.0
"""A heartbeat younger than this means that the run trains, even if its process is on another machine."""
END_STATES = {"complete": "finished", "stopped": "stopped"}


def run_status(run: RunDirectory) -> dict[str, Any]:
    """Return the state of a run, its step of how many, its phase, its main numbers, and when it was last heard of.

    The state is `running`, `finished`, `stopped` (by its user), `ended early` (its process is gone), or `new`.
    """
    beat, row = _heartbeat(run.path / HEARTBEAT_FILE), _last_metrics(run.metrics)
    numbers, total = headline_numbers(row), _total_steps(run.log)
    step = row.get("step", 0)
    state = _state(run, beat)
    seconds = numbers.get("s/step")
    is_running = state == "running"
    return {
        "state": state,
        "step": step,
        "total": total,
        "phase": beat.get("phase") or "" if is_running else "",
        "phase_step": beat.get("step", 0) if is_running else 0,
        "silent_s": max(0.0, time.time() - beat["time"]) if beat else None,
        "left_s": seconds * (total - step) if is_running and seconds is not None and total is not None else None,
        "numbers": {name: value for name, value in numbers.items() if abs(value) < float("inf")},
    }


def file_stamp(path: Path) -> str:
    """Return a text that changes when a file or folder changes; empty if there is none."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return ""
    return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _state(run: RunDirectory, beat: dict[str, Any]) -> str:
    record = _last_record(run.journal / "events.jsonl")
    if record.get("event") in END_STATES:
        return END_STATES[record["event"]]
    if not beat:
        return "new" if not run.metrics.exists() else "ended early"
    if _is_alive(beat["pid"]) or time.time() - beat["time"] < FRESH_S:
        return "running"
    return "ended early"


def _heartbeat(path: Path) -> dict[str, Any]:
    """Return the driver's last record; empty if there is none, or if it is being written."""
    try:
        beat = json.loads(path.read_bytes())
        return beat if isinstance(beat, dict) and {"step", "phase", "pid", "time"} <= beat.keys() else {}
    except (OSError, ValueError):
        return {}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _tail_lines(path: Path) -> list[bytes]:
    """Return the complete lines in the last bytes of a file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - TAIL_BYTES)
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        return []
    lines = content.split(b"\n")[:-1]
    return lines[1:] if start else lines


def _last_metrics(path: Path) -> dict[str, Any]:
    for line in reversed(_tail_lines(path)):
        try:
            return parse_line(line.decode("utf-8", "replace"))
        except ValueError:
            continue
    return {}


def _last_record(path: Path) -> dict[str, Any]:
    lines = _tail_lines(path)
    return (decode_record(lines[-1]) or {}) if lines else {}


def _total_steps(log: Path) -> int | None:
    """Return the number of steps that the run will make, as its log says; None if it has not said so yet."""
    for line in reversed(_tail_lines(log)):
        if match := re.search(rb"(?:step \d+/|going on after step \d+ of )(\d+)", line):
            return int(match[1])
    return None
