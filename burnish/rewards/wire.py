"""Messages between the pool and its worker processes: length-prefixed frames on a socket.

Requests travel pickled; replies are JSON, because a worker may have evaluated a hostile answer and nothing it says
should be able to run code in the trainer.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from burnish.rewards.types import PartSpec

HEADER = struct.Struct("!I")
MAX_REPLY_BYTES = 1 << 24


class Setup(NamedTuple):
    """The first message to a worker: what it has to load and the limits it puts on itself."""

    parts: dict[int, PartSpec]  # by their index in the reward's list
    base: str | None  # folder of relative plug-in paths
    timeout_s: float
    isolated: bool  # no network and a CPU limit: for built-in verifiers, never for a user's function
    memory_gib: float
    sandbox: str = "namespaces"  # or unsafe: where programs of answers run
    max_steps: int = 0  # of the run, for functions that ask for the trainer's state; 0 outside of training


def frame(body: bytes) -> bytes:
    """A message as it goes over the socket."""
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes back into messages; `feed` takes whatever has arrived and returns what is complete."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The messages completed by `data`; ValueError for one longer than the limit."""
        self._buffer += data
        bodies, at = [], 0
        while len(self._buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, at)
            if self._max_bytes is not None and size > self._max_bytes:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) - at - HEADER.size < size:
                break
            at += HEADER.size
            bodies.append(bytes(self._buffer[at : at + size]))
            at += size
        del self._buffer[:at]
        return bodies
