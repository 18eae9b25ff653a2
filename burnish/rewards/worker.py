"""The process that scores: `python -m burnish.rewards.worker SOCKET LIFELINE`, started by burnish.rewards.process.

It says once that it is ready, then answers batches of calls one reply a call, in order, so that the pool always knows
which call is running. It never retries and keeps no clock: the pool does both, and kills it when a call is overdue.
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
from typing import Any

from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.rewards import code, limits
from burnish.rewards.plugin import load_scorer, score
from burnish.rewards.types import PartSpec, Result, ScoreRequest
from burnish.rewards.verifiers import VERIFIERS, warm_up
from burnish.rewards.wire import Frames, Setup, frame

Scorer = Callable[[list[ScoreRequest]], list[Result]]
MAX_TRACEBACK_CHARS = 8_000


def load(part: PartSpec, base: str | None, max_steps: int = 0) -> Scorer:
    """The function that scores the requests of one call: one request, or a chunk for a batch function."""
    if is_plugin(part.name):
        where = f"reward part {part.name!r}"
        user = load_scorer(part.name, Path(base) if base is not None else None, part.options, where)
        return functools.partial(score, user, options=part.options, max_steps=max_steps)
    warm_up(part.name)
    verifier = VERIFIERS[part.name]
    return lambda requests: [_result(verifier(r.completion, r.answer, r.extra, **part.options)) for r in requests]


def _result(said: float | Result) -> Result:
    return said if isinstance(said, Result) else Result(said)


def answer(scorer: Scorer, payload: bytes) -> dict[str, Any]:
    """One call: the results, or the traceback of whatever the scorer raised."""
    try:
        results = scorer(pickle.loads(payload))
        return {
            "results": [(r.value, r.accuracy, dict(r.parts), r.details, r.timed_out, dict(r.extra)) for r in results]
        }
    except BaseException as error:  # noqa: BLE001 - a scorer may even call sys.exit: the pool retries, then reports
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        text = "".join(traceback.format_exception(type(error), error, trace))
        return {"error": text[-MAX_TRACEBACK_CHARS:]}


def serve(channel: socket.socket, frames: Frames, scorers: dict[int, Scorer], setup: Setup) -> None:
    """Answer batches until the pool closes the connection."""
    while data := channel.recv(1 << 20):
        for body in frames.feed(data):
            for serial, part, payload in pickle.loads(body):
                if setup.isolated:
                    limits.allow_cpu(setup.timeout_s)
                start = time.monotonic()
                reply = answer(scorers[part], payload)
                reply |= {"serial": serial, "elapsed_s": time.monotonic() - start}
                channel.sendall(frame(json.dumps(reply).encode()))


def main() -> None:
    """Limit this process, load the parts, and serve."""
    channel, lifeline = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for descriptor in (channel.fileno(), lifeline):
        os.set_inheritable(descriptor, False)  # a scorer's own children must not hold the pool's connection open
    limits.die_with_parent(lifeline)
    frames = Frames()
    bodies: list[bytes] = []
    while not bodies:
        data = channel.recv(1 << 20)
        if not data:
            return
        bodies = frames.feed(data)
    setup: Setup = pickle.loads(bodies[0])
    is_offline = setup.isolated and limits.leave_network()
    limits.limit_resources(setup.memory_gib)
    code.set_up(setup.timeout_s, setup.memory_gib, setup.sandbox != "unsafe")
    try:
        scorers = {index: load(part, setup.base, setup.max_steps) for index, part in setup.parts.items()}
    except UserError as error:
        channel.sendall(frame(json.dumps({"failed": str(error)}).encode()))
        return
    if setup.isolated:
        limits.be_quiet()
    channel.sendall(frame(json.dumps({"ready": True, "offline": is_offline}).encode()))
    serve(channel, frames, scorers, setup)


if __name__ == "__main__":
    main()
