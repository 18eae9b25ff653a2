"""The thread that owns the device: it runs training tasks one by one, and sampling requests in batches.

Training tasks run in the order in which they are given. Sampling requests read weights that never change, so all that wait for
the same weights run together; more of them join while no other task waits. Nothing ends the thread: a task that raises is answered
with the error.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from burnish.config.errors import UserError
from burnish.serve.tinker.requests import BadRequest
from burnish.serve.tinker.responses import Failure, Result
from burnish.serve.tinker.sampler import SampleJob, SamplerPool

MEMORY_ADVICE = "the device has no memory left for this: send shorter sequences, or start the server with a lower --token-budget or --cache-gib"

SHUTTING_DOWN = Failure("the server is shutting down", "server")


@dataclass(eq=False)
class Task:
    """Work of a training request. `finish` gets what `run` returns, or the reason why it raised."""

    label: str
    run: Callable[[], Result]
    finish: Callable[[Result], None]


class Worker:
    """The thread with its queue."""

    def __init__(self, pool: SamplerPool, log: Callable[[str], None]) -> None:
        self.pool, self.log = pool, log
        self._queue: deque[Task | SampleJob] = deque()
        self._changed = threading.Condition()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="tinker worker", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, item: Task | SampleJob) -> None:
        """Queue a task or a sampling request."""
        with self._changed:
            self._queue.append(item)
            self._changed.notify()
        if isinstance(item, SampleJob):  # it joins a batch of the same weights at once, not when a long sample ends
            self.pool.interrupt()

    def stop(self) -> None:
        """End after the present training task, or after the engine's present step. What waits is failed."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self.pool.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._is_stopping:
                    self._changed.wait()
                if self._is_stopping:
                    break
                item = self._queue.popleft()
            if isinstance(item, Task):
                self._train(item)
            else:
                self._sample(item)
        for item in self._queue:
            item.finish(SHUTTING_DOWN)

    def _train(self, task: Task) -> None:
        started = time.perf_counter()
        result, trace = guarded(task.run)
        task.finish(result)
        self._log(task.label, result, time.perf_counter() - started, trace)

    def _sample(self, first: SampleJob) -> None:
        """Run a sampling request with all others for the same weights."""
        started, jobs = time.perf_counter(), [first, *self._take(first)]
        finished = set[str]()

        def joined() -> list[SampleJob]:
            with self._changed:
                has_other = any(isinstance(x, Task) or x.weights is not first.weights for x in self._queue)
            more = [] if has_other or self._is_stopping else self._take(first)
            watch(more)
            jobs.extend(more)
            return more

        def watch(new: list[SampleJob]) -> None:
            for job in new:
                job.finish = _once(job, finished)

        watch(jobs)

        def work() -> Result:
            self.pool.run(list(jobs), joined)
            return SHUTTING_DOWN  # all jobs are finished unless the engine was interrupted

        result, trace = guarded(work)
        left = [job for job in jobs if job.id not in finished]
        for job in left:
            job.finish(result)
        num = sum(job.asked.num_samples for job in jobs)
        label = f"sample  {len(jobs)} prompts, {num} samples"
        self._log(label, result if left else None, time.perf_counter() - started, trace if left else "")

    def _take(self, like: SampleJob) -> list[SampleJob]:
        """Remove the waiting requests for the same weights from the queue."""
        with self._changed:
            same = [x for x in self._queue if isinstance(x, SampleJob) and x.weights is like.weights]
            taken = set(map(id, same))
            self._queue = deque(x for x in self._queue if id(x) not in taken)
        return same

    def _log(self, label: str, result: Result | None, seconds: float, trace: str) -> None:
        outcome = f"  failed: {result.error}" if isinstance(result, Failure) else ""
        self.log(f"{time.strftime('%H:%M:%S')}  {label}  {seconds:.2f} s{outcome}")
        if trace:
            self.log(trace.rstrip())


def _once(job: SampleJob, finished: set[str]) -> Callable[[Result], None]:
    """The job's `finish`, which also notes that the job is finished."""
    finish = job.finish

    def call(result: Result) -> None:
        finished.add(job.id)
        finish(result)

    return call


def guarded(run: Callable[[], Result]) -> tuple[Result, str]:
    """The result of a function, or its error as a failure; and the traceback of an error that is not the client's."""
    try:
        return run(), ""
    except (BadRequest, UserError) as error:
        return Failure(str(error), "user"), ""
    except torch.OutOfMemoryError as error:
        return Failure(f"{MEMORY_ADVICE} ({error})", "server"), ""
    except Exception as error:  # noqa: BLE001 - any fault ends this request with its reason, not the server
        return Failure(f"{type(error).__name__}: {error}", "server"), traceback.format_exc()
