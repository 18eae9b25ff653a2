"""Objects for the tests of workers: each method fails in one way."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import os
import sys
import threading
import time
from typing import Any

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Environment, Episode, Observation

_numbers = itertools.count()


class Counter(Environment):
    """Counts its steps, and tells which object and process it is."""

    def __init__(self, size: int = 1, base: str | None = None) -> None:
        self.number, self.size, self.base, self.steps = next(_numbers), size, base, -1
        self.num_closed = 0
        self.released = threading.Event()

    async def start(self, episode: Episode) -> Observation:
        self.steps = 0
        return Observation(text=episode.id, metrics={"seed": float(episode.seed)})

    async def step(self, answer: Answer) -> Observation | End:
        self.steps += 1
        return End(reward=float(self.steps)) if answer.text == "end" else Observation(text=answer.raw_text)

    def facts(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "number": self.number,
            "steps": self.steps,
            "base": self.base,
            "closed": self.num_closed,
        }

    async def close(self) -> None:
        self.num_closed += 1

    def echo(self, value: Any) -> Any:
        return value

    def raises(self) -> None:
        raise ValueError("no such square")

    async def raises_async(self) -> None:
        raise KeyError("lost")

    def user_error(self) -> None:
        raise UserError("give environment.options.size")

    def hangs(self) -> None:
        self.released.wait()

    def release(self) -> None:
        self.released.set()

    async def release_async(self) -> None:
        self.released.set()

    async def hangs_async(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.steps = 77

    def spins(self) -> None:
        while not self.released.is_set():
            pass

    async def blocks_loop(self) -> None:
        time.sleep(1000)

    def holds_python_lock(self) -> None:
        ctypes.PyDLL(None).sleep(1000)  # unlike CDLL, it does not release the lock

    def returns_bytes(self) -> bytes:
        return b"\x00"

    def returns_nan(self) -> Observation:
        return Observation(text="x", reward=float("nan"))

    def returns_object(self) -> list[Any]:
        return [1, threading.Lock()]

    async def end(self, reason: str = "") -> Any:
        return "the end"

    def returns_much(self) -> str:
        return "x" * 50_000_000

    def allocates(self) -> int:
        return len(bytearray(1 << 33))

    def exits(self) -> None:
        sys.exit(3)

    async def exits_async(self) -> None:
        sys.exit(3)

    def ends_process(self) -> None:
        print("about to end", file=sys.stderr)
        os._exit(7)

    def closes_descriptors(self) -> None:
        os.closerange(3, 1024)

    def forks(self) -> int:
        return os.fork()

    def prints(self) -> int:
        for k in range(2000):
            print(k, "y" * 1000)
        os.write(1, b'{"id": 0}\n')
        return 5


class Refuses:
    def __init__(self) -> None:
        raise UserError("the data folder is missing")


class Fails:
    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Plain:
    """A class that knows nothing of burnish."""

    def __init__(self, target: str = "") -> None:
        self.schema = {"function": {"name": target}}

    def greet(self, name: str) -> str:
        return f"hello {name}"
