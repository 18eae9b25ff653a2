"""An engine in a process of its own: the messages of `engine_worker` over a socket pair.

The parent serves HTTP, and the child loads the model and runs the engine. Both collect messages and send all that have come as one frame:
eight bytes with the length, then a pickle. The parent reads and writes on its event loop. The child's reader and writer are threads, which
hardly need Python's lock. The child ends when its end of the pair is closed, so it never outlives the parent. Signals are for the parent.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import SamplingOptions
from burnish.rewards.score_types import ScoreRequest
from burnish.serve.engine_worker import (
    MAX_STEP_S,
    CallResult,
    EngineFailure,
    EngineWorker,
    FromEngine,
    LoadedEngine,
    Stop,
    ToEngine,
)
from burnish.serve.request_to_engine import Scorer, TokenScores

LENGTH = struct.Struct("!Q")
READ_BYTES = 2**20


Load = Callable[[], LoadedEngine]


def _frame(value: Any) -> bytes:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


# --- the child ------------------------------------------------------------------------------------------------------------

_scorer: Scorer | None = None  # of the child


@dataclass(frozen=True)
class ProcessScorer:
    """Stands for the child's scorer. Its calls are made in the child."""

    def score(
        self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None
    ) -> TokenScores:
        assert _scorer is not None, "called in the engine's process"
        return _scorer.score(tokens, first, num_top, options)

    def self_certainty(self, paths: Sequence[ScoreRequest]) -> list[float]:
        assert _scorer is not None, "called in the engine's process"
        return _scorer.self_certainty(paths)


def _run_child(pair: socket.socket, load: Load) -> None:
    """Load the engine, tell the parent about it, and run it until the parent closes the pair."""
    global _scorer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        loaded = load()
        worker = EngineWorker(loaded.make_engine)
        description = loaded.describe(worker.engine)
    except UserError as error:
        pair.sendall(_frame(error))
        return
    _scorer = loaded.scorer
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent lets requests finish, and closes the pair
    pair.sendall(_frame(description))
    has_output = threading.Event()
    worker.wake = has_output.set
    threads = [
        threading.Thread(target=_read_messages, args=(pair, worker), name="reader", daemon=True),
        threading.Thread(target=_write_messages, args=(pair, worker, has_output), name="writer", daemon=True),
    ]
    for thread in threads:
        thread.start()
    worker.run()
    worker.wake()
    threads[0].join()  # after a failure: until the parent has read of it and closed the pair


def _read_messages(pair: socket.socket, worker: EngineWorker) -> None:
    with suppress(OSError, EOFError):  # the parent is gone
        while True:
            for message in pickle.loads(_receive(pair, LENGTH.unpack(_receive(pair, LENGTH.size))[0])):
                worker.send(message)
    worker.send(Stop())


def _write_messages(pair: socket.socket, worker: EngineWorker, has_output: threading.Event) -> None:
    with suppress(OSError):  # the parent is gone
        while True:
            has_output.wait()
            has_output.clear()
            if items := [_portable(item) for item in worker.take()]:
                pair.sendall(_frame((items, worker.num_waiting)))


def _portable(item: FromEngine) -> FromEngine:
    """A message whose error can be pickled. The traceback of a failure is written here, since a pickle has none."""
    if isinstance(item, EngineFailure):
        traceback.print_exception(item, file=sys.stderr)
        return EngineFailure(str(item))
    if isinstance(item, CallResult) and item.error is not None:
        return item._replace(error=RuntimeError(f"{type(item.error).__name__}: {item.error}"))
    return item


def _receive(pair: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = pair.recv(min(READ_BYTES, size - len(data)))
        if not part:
            raise EOFError("the other process has closed the pair")
        data += part
    return bytes(data)


# --- the parent -----------------------------------------------------------------------------------------------------------


class EngineProcess:
    """The parent's side. After `start` it is used on the event loop, but for `stop`."""

    def __init__(self, load: Load) -> None:
        self._pair, theirs = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=_run_child, args=(theirs, load), name="burnish-engine", daemon=True
        )
        self._process.start()
        theirs.close()
        self.num_waiting = 0
        self._wake: Callable[[], None] = lambda: None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._received, self._unsent = bytearray(), bytearray()
        self._messages: list[ToEngine] = []
        self._items: list[FromEngine] = []
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The process id of the child."""
        return self._process.pid

    def wait_until_loaded(self) -> Any:
        """The description of what the child has loaded; raises the UserError that kept it from loading."""
        try:
            found = pickle.loads(_receive(self._pair, LENGTH.unpack(_receive(self._pair, LENGTH.size))[0]))
        except (EOFError, ConnectionResetError) as error:
            self._process.join(MAX_STEP_S)
            raise EngineFailure(
                f"the engine's process ended with code {self._process.exitcode} while loading"
            ) from error
        if isinstance(found, UserError):
            self.stop()
            raise found
        return found

    def start(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pair.setblocking(False)
        self._event_loop = asyncio.get_running_loop()
        self._event_loop.add_reader(self._pair, self._read)

    def send(self, message: ToEngine) -> None:
        assert self._event_loop is not None, "started"
        if not self._messages:  # one frame for all messages of this turn of the event loop
            self._event_loop.call_soon(self._flush)
        self._messages.append(message)

    def take(self) -> list[FromEngine]:
        items, self._items = self._items, []
        return items

    def stop(self) -> None:
        """Close the pair, at which the child ends after its present step. A child that does not is killed after `MAX_STEP_S`."""
        self._is_closed = True
        with suppress(OSError):
            self._pair.shutdown(socket.SHUT_RDWR)
        self._process.join(MAX_STEP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if messages:
            self._unsent += _frame(messages)
        self._write()

    def _write(self) -> None:
        assert self._event_loop is not None
        if self._is_closed:
            return
        try:
            del self._unsent[: self._pair.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the child is gone, which `_read` reports
            self._unsent.clear()
        if self._unsent:
            self._event_loop.add_writer(self._pair, self._write)
        else:
            self._event_loop.remove_writer(self._pair)

    def _read(self) -> None:
        assert self._event_loop is not None
        try:
            data = self._pair.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._event_loop.remove_reader(self._pair)
            if not self._is_closed:
                self._process.join(1)
                self._add(EngineFailure(f"the engine's process ended with code {self._process.exitcode}"))
            return
        self._received += data
        while len(self._received) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            items, self.num_waiting = pickle.loads(memoryview(self._received)[LENGTH.size : end])
            del self._received[:end]
            self._add(*items)

    def _add(self, *items: FromEngine) -> None:
        if not self._items:
            self._wake()
        self._items += items
