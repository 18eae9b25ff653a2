"""The process of a judge model (`judge_process.py` starts it): `python -m burnish.distributed.judge_worker FD`.

It reads framed JSON from a socket: first what to load, then chat requests in the format of an endpoint, each with an `id`, or
`{"forget": id}`. It answers `{"ready": note}` or `{"failed": why}`, then `{"id", "text", "num_tokens"}` or `{"id", "error"}` for each
request. It ends when the socket is closed, because the parent process is then gone.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.rollout import Rollout
from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.data.row import Row
from burnish.data.template import render
from burnish.distributed.engine_builder import build_engine
from burnish.models.policy import PolicyModel, check_finite, load_policy, resolve_device
from burnish.rewards.worker import FrameReader
from burnish.sandbox.rpc import frame

READ_BYTES = 1 << 16
Message = dict[str, Any]


class JudgeServer:
    """Runs the engine in the main thread. A second thread reads questions, which interrupt the decoding and join it."""

    def __init__(self, channel: socket.socket, policy: PolicyModel, engine: Engine) -> None:
        self.channel, self.policy, self.engine = channel, policy, engine
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.running: dict[str, int] = {}
        """The tokens of each question, by its id."""

    def run(self, frames: FrameReader, waiting: list[bytes]) -> None:
        """Answer until the process ends; `waiting` are messages that arrived together with the setup."""
        for body in waiting:
            self.inbox.put(json.loads(body))
        threading.Thread(target=self.listen, args=(frames,), name="questions", daemon=True).start()
        while True:
            self.read_inbox()
            for completion in self.engine.stream():
                self.answer(completion)

    def listen(self, frames: FrameReader) -> None:
        """Read questions. When the socket is closed, end the process at once, whatever the engine is doing."""
        status = 1
        try:
            while data := self.channel.recv(READ_BYTES):
                for body in frames.feed(data):
                    self.inbox.put(json.loads(body))
                self.engine.interrupt()  # after the put, so that the main thread finds the message
            status = 0
        except ConnectionError:
            status = 0
        except BaseException:  # noqa: BLE001 -- the parent process reads it from stderr
            traceback.print_exc()
        os._exit(status)

    def read_inbox(self) -> None:
        """Submit new questions; waits for one if nothing runs."""
        while True:
            try:
                message = self.inbox.get(block=not self.running)
            except queue.Empty:
                return
            if "forget" in message:
                name = str(message["forget"])
                if name in self.running:
                    self.engine.abort([name], keep=False)
                    del self.running[name]
                continue
            try:
                request = request_of(message, self.policy)
                self.engine.submit([request])
                self.running[request.id] = len(request.tokens)
            except UserError as error:
                send(self.channel, {"id": message["id"], "error": str(error)})

    def answer(self, completion: Completion) -> None:
        num_tokens = self.running.pop(completion.id) + len(completion.tokens)
        text = self.policy.tokenizer.decode(completion.tokens.tolist())
        send(self.channel, {"id": int(completion.id), "text": text, "num_tokens": num_tokens})


def request_of(message: Message, policy: PolicyModel) -> Request:
    """A chat request for the engine, rendered by the model's chat template if it has one.

    The random key depends on the question and its seed only. The answer is limited to the positions that the question leaves.
    """
    tokens = render(Row("judge", message["messages"], "judge", None), policy.tokenizer, Template()).text_tokens(
        "the judge"
    )
    room = message["max_tokens"]
    if policy.max_positions is not None:
        room = min(room, policy.max_positions - len(tokens))
    if room < 1:
        raise UserError(
            f"the question has {len(tokens)} tokens, and the judge's model {policy.max_positions} positions: no room is left for an answer"
        )
    sampling = SamplingOptions(
        temperature=message["temperature"], max_tokens=room, stop_tokens=policy.tokenizer.eos_ids
    )
    return Request(str(message["id"]), tuple(tokens), sampling, fold(message["seed"], "judge", *tokens))


def load(setup: Message) -> tuple[PolicyModel, Engine]:
    """Load the model and its engine."""
    backend = "transformers" if setup["engine"] == "transformers" else "auto"
    policy = load_policy(
        Model(dtype=setup["dtype"], device=setup["device"], backend=backend), Path(setup["path"]), None, seed=0
    )
    check_finite(policy)
    cache = setup["cache_gib"]
    if cache is None and resolve_device(setup["device"]).type == "cuda":
        cache = setup["gpu_cache_gib"]
    engine = setup["engine"]
    return policy, build_engine(policy, Rollout(engine=engine, max_rows=setup["rows"], cache_gib=cache))


def send(channel: socket.socket, message: Message) -> None:
    channel.sendall(frame(json.dumps(message).encode()))


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    frames, bodies = FrameReader(), list[bytes]()
    while not bodies:
        data = channel.recv(READ_BYTES)
        if not data:
            return
        bodies = frames.feed(data)
    setup = json.loads(bodies[0])
    try:
        policy, engine = load(setup)
    except UserError as error:
        send(channel, {"failed": str(error)})
        return
    device = next(policy.module.parameters()).device
    send(channel, {"ready": f"{policy.note}, {setup['dtype']} on {device}"})
    with torch.inference_mode():
        JudgeServer(channel, policy, engine).run(frames, bodies[1:])


if __name__ == "__main__":
    main()
