"""Scoring processes that serve the runs of several tests, one after another, instead of one start for each run.

A process waits here after its run if it only holds built-in verifiers, is ready and owes no answer. The next run with equal parts, limits,
working directory and environment takes it. How processes start, fail and end is tested in `tests/rewards`, with processes of their own.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

from burnish.rewards import worker_pool
from burnish.rewards.worker import WorkerSetup
from burnish.rewards.worker_pool import WorkerProcess

MAX_WAITING = 4

_waiting: list[tuple[Hashable, WorkerProcess]] = []
_keys: dict[int, Hashable] = {}  # of running processes that may be taken again, by process id
_start, _kill = worker_pool.start_worker, WorkerProcess.kill


def key_of(setup: WorkerSetup, directory: str) -> Hashable:
    """What two runs must have in common to share a process: all but the folder of plug-ins, which built-in verifiers do not use."""
    parts = tuple((index, part.name, repr(part.options)) for index, part in setup.parts.items())
    environment = frozenset((name, value) for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST")
    return parts, setup[2:], directory, environment


def _take_or_start(number: int, setup: WorkerSetup, directory: str) -> WorkerProcess:
    key = key_of(setup, directory)
    for at, (other, worker) in enumerate(_waiting):
        if other == key and worker.process.poll() is None:
            del _waiting[at]
            worker.number = number
            break
    else:
        worker = _start(number, setup, directory)
    if setup.isolated:
        _keys[worker.process.pid] = key
    return worker


def _keep_or_kill(worker: WorkerProcess) -> int:
    key = _keys.pop(worker.process.pid, None)
    if key is None or worker.owes_message or worker.process.poll() is not None:
        return _kill(worker)
    _waiting.append((key, worker))
    end_all(but=MAX_WAITING)
    return 0


@contextmanager
def reused_reward_workers() -> Iterator[None]:
    """Let runs in this process take scoring processes of earlier ones."""
    with patch.object(worker_pool, "start_worker", _take_or_start), patch.object(WorkerProcess, "kill", _keep_or_kill):
        yield


def end_all(but: int = 0) -> None:
    """End the processes that have waited longest, all but so many."""
    while len(_waiting) > but:
        _kill(_waiting.pop(0)[1])
