"""A judge that is a model directory: an engine in a separate process answers its questions.

    reward:
      parts: [{name: judge, options: {path: models/judge, votes: 3, temperature: 0.7}}]

The judge has its own weights, cache and process, independent of the policy's engine; the process ends with this one. Many questions
are decoded at once, and an answer depends only on the question and its seed. A process that dies is restarted, and its questions are
asked again, as often as a call to an endpoint would be retried.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from pathlib import Path
from typing import Any

import burnish
from burnish.config.errors import UserError
from burnish.memory_plan.from_config import JUDGE_CACHE_GIB
from burnish.models.architecture import read_config
from burnish.models.compatibility import model_digest
from burnish.rewards.judge_endpoint import JudgeFailed, JudgeReply
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.worker import FrameReader
from burnish.rewards.worker_pool import describe_exit
from burnish.sandbox.rpc import frame

START_S = 900.0
"""How long a model may take to load."""
MAX_JUDGE_STARTS = 3
"""Restarts in a row without an answer."""
KILL_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16
MAX_ERROR_CHARS = 2000


class JudgeProcessDied(Exception):
    """The process ended before it answered."""


class EngineJudge:
    """Answers chat requests from a model directory. Threads may share it; call `close` at the end."""

    def __init__(self, directory: Path, options: JudgeOptions) -> None:
        """Returns when the model is loaded; raises UserError with the process's output if it cannot be loaded."""
        read_config(directory)  # raises for a directory without a model, before a process is started
        self.directory, self.options = directory, options
        self.address = f"engine://{model_digest(directory)}/{options.engine}/{options.dtype}"
        self._lock = threading.Lock()
        self._is_closed = False
        self._num_fruitless_starts = 0  # starts since the last answer
        self._worker = JudgeProcess(directory, options)
        self.note = f"judge {directory.name}: {self._worker.note}, in a process of its own"

    def ask(self, body: Mapping[str, Any], deadline: float) -> JudgeReply:
        """The answer; raises JudgeFailed if there is none in time."""
        options, problem = self.options, "nothing was asked"
        for attempt in range(options.retries + 1):
            left_s = min(options.call_s, deadline - time.monotonic())
            if left_s <= 0:
                raise JudgeFailed(f"the deadline of the sample is reached; {problem}")
            worker = self._running()
            left_s = max(0.0, min(left_s, deadline - time.monotonic()))  # a restart may have taken most of the time
            question = worker.submit(body)
            try:
                answer = question.result(left_s)
                self._num_fruitless_starts = 0
                return answer._replace(num_retries=attempt)
            except NotInTime:
                worker.forget(question)
                problem = f"judge {self.directory.name} gave no answer in {left_s:g} s"
            except JudgeProcessDied as error:
                problem = str(error)
        raise JudgeFailed(f"{problem} (asked {options.retries + 1} times)")

    def close(self) -> None:
        """Kill the process; one that is being started is killed when it is ready."""
        self._is_closed = True
        self._worker.kill()

    def _running(self) -> JudgeProcess:
        """The process, restarted if it has died."""
        with self._lock:
            if self._is_closed:
                raise JudgeFailed("the judge was closed")
            if self._worker.is_dead:
                if self._num_fruitless_starts >= MAX_JUDGE_STARTS:
                    raise JudgeFailed(
                        f"judge {self.directory.name} died after each of {MAX_JUDGE_STARTS} starts without an answer"
                    )
                self._num_fruitless_starts += 1
                try:
                    self._worker = JudgeProcess(self.directory, self.options)
                except UserError as error:
                    raise JudgeFailed(str(error)) from error
                if self._is_closed:
                    self._worker.kill()
                    raise JudgeFailed("the judge was closed")
            return self._worker


class JudgeProcess:
    """The process, and a thread that passes its answers to the waiting callers."""

    def __init__(self, directory: Path, options: JudgeOptions) -> None:
        self.note = ""
        self._waiting: dict[int, Future[JudgeReply]] = {}
        self._number = 0
        self._lock = threading.Lock()
        self._ready: Future[str] = Future()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 -- quoted when the process dies
        ours, theirs = socket.socketpair()
        self._channel = ours
        root = str(Path(burnish.__file__).parents[1])
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "burnish.distributed.judge_worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()
        self._thread = threading.Thread(target=self._read, name="burnish-judge-answers", daemon=True)
        self._thread.start()
        setup = {
            "path": str(directory.resolve()),
            "engine": options.engine,
            "device": options.device,
            "dtype": options.dtype,
            "cache_gib": options.cache_gib,
            "gpu_cache_gib": JUDGE_CACHE_GIB,
            "rows": options.concurrency,
        }
        self._send(setup)
        self.note = self._started(directory)

    @property
    def is_dead(self) -> bool:
        return not self._thread.is_alive()

    def submit(self, body: Mapping[str, Any]) -> Future[JudgeReply]:
        """Ask a question; the future gets the answer or `JudgeProcessDied`."""
        question: Future[JudgeReply] = Future()
        with self._lock:
            number = self._number = self._number + 1
            self._waiting[number] = question
        self._send({**body, "id": number})
        if self.is_dead:  # it may have died before this question was registered
            self._end()
        return question

    def forget(self, question: Future[JudgeReply]) -> None:
        """Drop a question whose answer is no longer wanted."""
        with self._lock:
            number = next((n for n, one in self._waiting.items() if one is question), None)
            self._waiting.pop(number or 0, None)
        if number is not None:
            self._send({"forget": number})

    def kill(self) -> None:
        """Kill the process, which also ends the thread."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in an uninterruptible system call; it ends later
            self._process.wait(KILL_TIMEOUT_S)
        self._thread.join(KILL_TIMEOUT_S)
        self._channel.close()

    def _started(self, directory: Path) -> str:
        try:
            return self._ready.result(START_S)
        except NotInTime as error:
            self.kill()
            raise UserError(f"judge {directory}: the model was not loaded after {START_S:g} s") from error
        except (JudgeProcessDied, UserError) as error:
            self.kill()
            raise UserError(f"judge {directory}: {error}") from error

    def _send(self, message: Mapping[str, Any]) -> None:
        with (
            self._lock,
            contextlib.suppress(OSError),
        ):  # the process is gone; the reading thread tells the waiting callers
            self._channel.sendall(frame(json.dumps(message).encode()))

    def _read(self) -> None:
        """Read answers until the process ends."""
        frames = FrameReader()
        with contextlib.suppress(OSError):
            while data := self._channel.recv(READ_BYTES):
                for body in frames.feed(data):
                    self._take(json.loads(body))
        self._end()

    def _take(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            self._ready.set_result(said["ready"])
        elif "failed" in said:
            self._ready.set_exception(UserError(said["failed"]))
        else:
            with self._lock:
                question = self._waiting.pop(said["id"], None)
            if question is None:
                return
            if "error" in said:
                question.set_exception(JudgeFailed(said["error"]))
            else:
                question.set_result(JudgeReply(said["text"], said["num_tokens"]))

    def _end(self) -> None:
        """Give all waiting callers the error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        status = self._process.returncode
        self._errors.seek(0)
        last = self._errors.read()[-MAX_ERROR_CHARS:].decode(errors="replace").strip()
        how = "is gone" if status is None else describe_exit(status)
        died = JudgeProcessDied(f"the judge's process {how}" + (f": {last}" if last else ""))
        with self._lock:
            waiting, self._waiting = list(self._waiting.values()), {}
        if not self._ready.done():
            self._ready.set_exception(died)
        for question in waiting:
            question.set_exception(died)
