"""The trackers of a run, each in a process of its own behind a bounded queue, so that none can end or slow the run.

metrics.jsonl is the record, and a tracker is a convenience. A step costs the run one entry in a queue. If a tracker falls `QUEUE_SIZE` entries
behind, new entries are dropped and counted. A call that fails is counted and the first failure is reported; the process
(`tracker_worker.py`) goes on and gives up after several failures in a row. At the end of a run the trackers have `FLUSH_S` seconds together to
send what is left, then they are killed, and every tracker gets a line that says what it has.

RUN/trackers has two files a tracker: NAME.json keeps its id, so that a resumed run continues the same tracker run, and NAME.log has what the
package printed.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.config.trackers import TrackerSlot
from burnish.run.metrics import MetricValue

BACKENDS = "burnish.run.trackers.backends"
QUEUE_SIZE = 1000
"""Entries that a tracker may be behind."""
FLUSH_S = 30.0
"""How long the end of a run waits for all trackers together."""
QUIET_S = 2.0
"""How long it waits without saying so."""

Message = dict[str, Any]


def check_trackers(trackers: Sequence[TrackerSlot]) -> None:
    """Raise a `UserError` for a tracker that is not installed or named twice. Called before the run directory is created."""
    for tracker in trackers:
        if not _is_installed(tracker.module):
            raise UserError(
                f"run.trackers names {tracker.name}, which is not installed: {install_hint(tracker.name)}, or leave it out"
            )
    names = [tracker.name for tracker in trackers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"run.trackers names {twice[0]} twice")


def _is_installed(module: str) -> bool:
    try:
        spec = find_spec(module)
    except ValueError:  # blocked: sys.modules[name] is None
        return False
    return spec is not None and spec.origin is not None  # a folder `wandb` of files beside a script is no package


class Trackers:
    """All trackers of a run. `report` receives their notes, on the caller's thread."""

    def __init__(
        self, trackers: Sequence[TrackerSlot], run: Path, config: dict[str, Any], report: Callable[[str], None]
    ) -> None:
        check_trackers(trackers)
        self.report = report
        self.processes = [TrackerProcess(tracker, run, config) for tracker in trackers]

    def log(self, step: int, values: dict[str, MetricValue]) -> None:
        """Hand one step's metrics to all trackers, and report what they had to say since the last call."""
        self._send({"op": "log", "step": step, "values": values})

    def samples(self, step: int, kind: str, path: Path) -> None:
        """Hand a table of samples, which is a parquet file, to all trackers."""
        self._send({"op": "samples", "step": step, "kind": kind, "path": str(path.resolve())})

    def attach_report(self, path: Path) -> None:
        """Hand the HTML report to all trackers."""
        self._send({"op": "report", "path": str(path.resolve())})

    def _send(self, message: Message) -> None:
        for process in self.processes:
            process.send(message)
            for note in process.take_notes():
                self.report(note)

    def close(self, is_failed: bool) -> None:
        """Wait for the trackers, `FLUSH_S` seconds at most, and report what each of them has. Later calls do nothing.

        `is_failed`: the run ends without being complete or stopped by its user.
        """
        processes, self.processes = self.processes, []
        for process in processes:
            process.finish(is_failed)
        try:
            self._wait(processes)
        finally:
            for process in processes:
                process.end()
        for process in processes:
            for note in process.take_notes():
                self.report(note)
            self.report(process.summary())

    def _wait(self, processes: list[TrackerProcess]) -> None:
        begun = time.monotonic()
        slow = [process.name for process in processes if not process.has_ended(begun + min(QUIET_S, FLUSH_S))]
        if slow:
            self.report(f"waiting up to {FLUSH_S:.0f} s for {', '.join(slow)} to send what is left")
        for process in processes:
            process.has_ended(begun + FLUSH_S)


class TrackerProcess:
    """One tracker: its process, the queue to it, and what it has reported."""

    def __init__(self, tracker: TrackerSlot, run: Path, config: dict[str, Any]) -> None:
        self.name = tracker.name
        self.num_dropped = self.num_failed = 0
        self.steps_sent: set[int] = set()
        self.where = self.first_failure = ""
        self.is_done = self.was_killed = False
        folder = run.resolve() / "trackers"
        folder.mkdir(exist_ok=True)
        self.log_file = folder / f"{self.name}.log"
        self._notes: deque[str] = deque()
        self._queue: queue.Queue[Message | None] = queue.Queue(QUEUE_SIZE)
        begin = {
            "backend": f"{BACKENDS}:{type(tracker).__name__}",
            "options": tracker.model_dump(),
            "run": str(run.resolve()),
        }
        self._process, commands, replies = _start_worker(self.log_file)
        self._queue.put({"op": "begin", **begin, "config": config, "state": str(folder / f"{self.name}.json")})
        self._writer = threading.Thread(target=self._write, args=(commands,), name=f"tracker {self.name}", daemon=True)
        self._reader = threading.Thread(target=self._read, args=(replies,), name=f"replies of {self.name}", daemon=True)
        self._writer.start()
        self._reader.start()

    def send(self, message: Message) -> None:
        """Put a message into the queue; drop and count it if the queue is full."""
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self.num_dropped += 1

    def finish(self, is_failed: bool) -> None:
        """Let the tracker end. If the queue is full, older messages are dropped for that."""
        for message in ({"op": "finish", "is_failed": is_failed}, None):
            while True:
                try:
                    self._queue.put_nowait(message)
                    break
                except queue.Full:
                    with contextlib.suppress(queue.Empty):  # the writer may have taken one meanwhile
                        self._queue.get_nowait()
                        self.num_dropped += 1

    def _write(self, commands: int) -> None:
        """Write the queue to the process until there is a None. Once the process has ended, messages are taken and forgotten."""
        has_reader = True
        while (message := self._queue.get()) is not None:
            try:
                left = memoryview((json.dumps(message) + "\n").encode() if has_reader else b"")
                while left:
                    left = left[os.write(commands, left) :]
            except BrokenPipeError:  # `summary` says how the process ended
                has_reader = False
        os.close(commands)

    def _read(self, replies: int) -> None:
        with open(replies, encoding="utf-8") as stream:
            for line in stream:
                self._take_reply(json.loads(line))

    def _take_reply(self, reply: Message) -> None:
        if reply["kind"] == "sent":
            self.steps_sent.add(reply["step"])
        elif reply["kind"] == "note":
            self._notes.append(f"{self.name}: {reply['text']}")
        elif reply["kind"] == "where":
            self.where = reply["text"]
        elif reply["kind"] == "done":
            self.is_done = True
        else:
            self.num_failed += 1
            if not self.first_failure:
                self.first_failure = reply["text"]
                self._notes.append(
                    f"tracker {self.name} failed ({reply['text']}); the run goes on, metrics.jsonl has every value, and {self.log_file} "
                    "has the traceback"
                )

    def take_notes(self) -> list[str]:
        """What the tracker has reported since the last call."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def has_ended(self, deadline: float) -> bool:
        """Wait until the process has ended or the deadline has passed. Returns whether it has ended."""
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(QUIET_S)
        return True

    def end(self) -> None:
        """Kill the process, with all processes that the package has started, if it has not ended."""
        self.was_killed = self._process.poll() is None
        if self.was_killed:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._reader.join(QUIET_S)
        self._writer.join(QUIET_S)

    def summary(self) -> str:
        """One line: how many steps arrived, where they are, and what went wrong."""
        problems = []
        if self.num_failed:
            problems.append(f"{self.num_failed} calls failed, first: {self.first_failure}")
        if self.num_dropped:
            problems.append(f"{self.num_dropped} entries dropped, because it was {QUEUE_SIZE} behind")
        if self.was_killed:
            problems.append(
                f"it did not finish within {FLUSH_S:.0f} s and was killed, so the last entries may be missing"
            )
        elif not self.is_done:
            problems.append(f"its process ended with status {self._process.returncode}")
        steps = f"{len(self.steps_sent)} {'step' if len(self.steps_sent) == 1 else 'steps'}"
        told = f"tracker {self.name}: {steps}{f', {self.where}' if self.where else ''}"
        return f"{told}; {'; '.join(problems)} (see {self.log_file})" if problems else told


def _start_worker(log: Path) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start a process; returns it with the descriptors to write commands to and to read replies from."""
    child_reads, commands = os.pipe()
    replies, child_writes = os.pipe()
    # -P: a folder `wandb` in the working directory must not be taken for the package.
    words = [sys.executable, "-P", "-m", "burnish.run.trackers.tracker_worker", str(child_reads), str(child_writes)]
    with open(log, "ab") as output:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(child_reads, child_writes),
            start_new_session=True,  # Ctrl-C in the terminal is for the run, which then tells the tracker to finish
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    os.close(child_reads)
    os.close(child_writes)
    return process, commands, replies
