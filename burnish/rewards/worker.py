"""The scoring process: `python -m burnish.rewards.worker SOCKET LIFELINE`, started by burnish.rewards.worker_pool.

It reports once that it is ready. Then it answers batches of calls with one reply per call, in order, so that the pool always knows which
call is running. It never retries and has no timeout: the pool retries, and kills the process when a call is overdue.

Messages are length-prefixed frames on a socket. Requests are pickled. Replies are JSON, because a worker may have evaluated a hostile
answer, and nothing it sends may run code in the trainer.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.rewards import code_reward, worker_limits
from burnish.rewards.score_types import PartResult, PartSpec, ScoreRequest
from burnish.rewards.user_rewards import call_user_scorer, load_user_scorer
from burnish.rewards.verifiers import VERIFIERS, warm_up
from burnish.sandbox.rpc import HEADER, frame

PartScorer = Callable[[list[ScoreRequest]], list[PartResult]]
MAX_TRACEBACK_CHARS = 8_000


class WorkerSetup(NamedTuple):
    """The first message to a worker: the parts to load and the limits to set on itself."""

    parts: dict[int, PartSpec]  # by their index in `reward.parts`
    base: str | None  # folder that plug-in paths are relative to
    timeout_s: float
    isolated: bool  # no network and a CPU limit: for built-in verifiers, never for users' functions
    memory_gib: float
    sandbox: str = "namespaces"  # or "unsafe": where programs of completions run
    max_steps: int = 0  # of the run, for TRL's `trainer_state`; 0 outside of training


class FrameReader:
    """Splits a stream of bytes into messages. `feed` takes the bytes that have arrived and returns the complete messages."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes; ValueError for one longer than the limit."""
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


def load_part(part: PartSpec, base: str | None, max_steps: int = 0) -> PartScorer:
    """Load the function that scores the requests of one call: one request, or several for a batch function."""
    if is_plugin(part.name):
        where = f"reward part {part.name!r}"
        user = load_user_scorer(part.name, Path(base) if base is not None else None, part.options, where)
        return functools.partial(call_user_scorer, user, options=part.options, max_steps=max_steps)
    warm_up(part.name)
    verifier = VERIFIERS[part.name]
    return lambda requests: [_as_result(verifier(r.completion, r.answer, r.extra, **part.options)) for r in requests]


def _as_result(returned: float | PartResult) -> PartResult:
    return returned if isinstance(returned, PartResult) else PartResult(returned)


def run_call(scorer: PartScorer, payload: bytes) -> dict[str, Any]:
    """Run one call: return the results, or the traceback of what the scorer raised."""
    try:
        results = scorer(pickle.loads(payload))
        return {
            "results": [(r.value, r.accuracy, dict(r.parts), r.details, r.timed_out, dict(r.extra)) for r in results]
        }
    except BaseException as error:  # noqa: BLE001 - a scorer may even call sys.exit; the pool retries, then reports
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        text = "".join(traceback.format_exception(type(error), error, trace))
        return {"error": text[-MAX_TRACEBACK_CHARS:]}


def serve_calls(
    channel: socket.socket, frames: FrameReader, scorers: dict[int, PartScorer], setup: WorkerSetup
) -> None:
    """Answer batches until the pool closes the connection."""
    while data := channel.recv(1 << 20):
        for body in frames.feed(data):
            for serial, part, payload in pickle.loads(body):
                if setup.isolated:
                    worker_limits.extend_cpu_limit(setup.timeout_s)
                start = time.monotonic()
                reply = run_call(scorers[part], payload)
                reply |= {"serial": serial, "elapsed_s": time.monotonic() - start}
                channel.sendall(frame(json.dumps(reply).encode()))


def main() -> None:
    """Set limits on this process, load the parts, and serve calls."""
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for descriptor in (channel.fileno(), lifeline):
        os.set_inheritable(descriptor, False)  # a scorer's own children must not hold the pool's connection open
    worker_limits.die_with_parent(lifeline)
    frames = FrameReader()
    bodies: list[bytes] = []
    while not bodies:
        data = channel.recv(1 << 20)
        if not data:
            return
        bodies = frames.feed(data)
    setup: WorkerSetup = pickle.loads(bodies[0])
    is_offline = setup.isolated and worker_limits.leave_network()
    worker_limits.limit_resources(setup.memory_gib)
    code_reward.configure_runner(setup.timeout_s, setup.memory_gib, setup.sandbox != "unsafe")
    try:
        scorers = {index: load_part(part, setup.base, setup.max_steps) for index, part in setup.parts.items()}
    except UserError as error:
        channel.sendall(frame(json.dumps({"failed": str(error)}).encode()))
        return
    if setup.isolated:
        worker_limits.silence_output()
    channel.sendall(frame(json.dumps({"ready": True, "offline": is_offline}).encode()))
    serve_calls(channel, frames, scorers, setup)


if __name__ == "__main__":
    main()
