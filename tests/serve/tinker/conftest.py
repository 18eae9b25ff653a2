"""A tiny model behind a real server of the training API on loopback, and a client of plain HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from burnish.config.rollout import Rollout
from burnish.gateway.http_guards import ConnectionLimits, bind_socket
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.serve.tinker.checkpoints import CheckpointStore
from burnish.serve.tinker.protobuf import bytes_field, double_field, int_field, ints_field, map_field
from burnish.serve.tinker.requests import Datum
from burnish.serve.tinker.routes import Routes
from burnish.serve.tinker.sampler import SamplerPool
from burnish.serve.tinker.server import TinkerServer, base_url
from burnish.serve.tinker.service import TinkerService
from burnish.serve.tinker.worker import Worker
from tests.serve.conftest import architecture, byte_tokenizer

T = TypeVar("T")
NAME = "org/tiny"
MAX_POSITIONS = 256
TOKEN_BUDGET = 1024


@dataclass
class Answer:
    """An answer of the server."""

    status: int
    kind: str
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@dataclass
class Server:
    """A running server, and requests to it."""

    service: TinkerService
    routes: Routes
    url: str
    log: list[str] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def request(
        self, method: str, path: str, data: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        """One request, whatever its status."""
        asked = urllib.request.Request(f"{self.url}/api/v1/{path}", data, self.headers | (headers or {}), method=method)
        try:
            with urllib.request.urlopen(asked, timeout=60) as found:
                return Answer(found.status, found.headers.get("content-type", ""), found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers.get("content-type", ""), error.read())

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        """A request with a body; one of bytes is protobuf."""
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        return self.request("POST", path, data, {"content-type": kind} | (headers or {}))

    def get(self, path: str) -> Any:
        answer = self.request("GET", path)
        assert answer.status == 200, answer.content
        return answer.json()

    def ask(self, path: str, body: Any = None) -> dict[str, Any]:
        """The answer to a request that succeeds."""
        answer = self.post(path, body)
        assert answer.status == 200, answer.content
        found: dict[str, Any] = answer.json()
        return found

    def result(self, future: dict[str, Any], protobuf: bool = False) -> Any:
        """The result of a future."""
        accept = {"accept": "application/x-protobuf"} if protobuf else {}
        while True:
            answer = self.post("retrieve_future", {"request_id": future["request_id"]}, headers=accept)
            if answer.status != 408:
                break
            assert answer.json()["type"] == "try_again"
        assert answer.status == 200, answer.content
        return answer.content if answer.kind == "application/x-protobuf" else answer.json()

    def done(self, path: str, body: Any) -> Any:
        """The result of a request that returns a future."""
        return self.result(self.ask(path, body))

    def session(self) -> str:
        body = {"tags": [], "user_metadata": None, "sdk_version": "0.36.0", "type": "create_session"}
        found: str = self.ask("create_session", body)["session_id"]
        return found

    def model(self, session: str, number: int = 0, lora: dict[str, Any] | None = None, full: bool = False) -> str:
        """A new model, by its id."""
        body: dict[str, Any] = {"session_id": session, "model_seq_id": number, "base_model": NAME}
        body |= {"optimizer_config": {"type": "adamw"}, "type": "create_model"}
        if not full:
            body["lora_config"] = {"rank": 4, "seed": 7} | (lora or {})
        found = self.done("create_model", body)
        assert found.get("type") == "create_model", found
        model_id: str = found["model_id"]
        return model_id

    def sampler(self, session: str, number: int, path: str | None = None) -> str:
        """A sampler of a checkpoint, or of the base model."""
        where = {"base_model": NAME} if path is None else {"model_path": path}
        body = {"session_id": session, "sampling_session_seq_id": number, **where}
        found: str = self.ask("create_sampling_session", body)["sampling_session_id"]
        return found

    def on_event_loop(self, function: Callable[[], T]) -> T:
        """The result of a function that runs on the server's event loop."""

        async def call() -> T:
            return function()

        assert self.service.futures.loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self.service.futures.loop).result(60)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"waited {seconds} s for nothing; the log says {self.log}"
            time.sleep(0.005)


def training_message(model_id: str, seq_id: int, data: list[Datum], loss: str, **config: float) -> bytes:
    """A ForwardBackwardRequest as the stock client writes it."""
    out = bytes_field(1, model_id) + int_field(2, seq_id)
    out += b"".join(bytes_field(3, datum_message(datum)) for datum in data)
    out += bytes_field(4, loss)
    out += map_field(5, {name: double_field(2, value) for name, value in config.items()})
    return out + map_field(7, {name: bytes_field(2, double_field(1, value)) for name, value in config.items()})


def datum_message(datum: Datum) -> bytes:
    chunk = bytes_field(1, bytes_field(1, datum.tokens.astype(np.int32).tobytes()))
    return bytes_field(1, chunk) + map_field(
        2, {name: bytes_field(2, tensor_message(array)) for name, array in datum.inputs.items()}
    )


def tensor_message(array: np.ndarray) -> bytes:
    kind, array = (2, array.astype(np.int64)) if array.dtype.kind == "i" else (1, array.astype(np.float32))
    return bytes_field(1, array.tobytes()) + int_field(3, kind) + ints_field(4, list(array.shape))


def next_tokens(tokens: list[int], **inputs: Any) -> Datum:
    """A sequence whose targets are its own next tokens, with weights of 1 unless other inputs are given."""
    size = len(tokens) - 1
    columns = inputs or {"weights": np.ones(size, np.float32)}
    arrays = {name: np.asarray(value, np.float32) for name, value in columns.items()}
    return Datum(np.asarray(tokens[:-1]), {"target_tokens": np.asarray(tokens[1:]), **arrays})


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def tiny_base(tiny_tokenizer: Tokenizer) -> PolicyModel:
    """A random decoder in float64, whose numbers do not depend on how sequences are packed."""
    model = Decoder(architecture(tiny_tokenizer.vocab_size, MAX_POSITIONS))
    initialise(model, seed=4, std=0.3)
    return PolicyModel(model.double().requires_grad_(False), tiny_tokenizer, None, "")


Start = Callable[..., Server]


@pytest.fixture(scope="session")
def serve_tinker(tiny_base: PolicyModel) -> Iterator[Start]:
    """`serve_tinker(folder, ...)`: a server on a free port."""
    stops: list[Callable[[], None]] = []

    def build(folder: Path, api_key: str | None = None, base: PolicyModel = tiny_base, **options: Any) -> Server:
        log: list[str] = []
        pool = SamplerPool(base, Rollout(max_rows=8), TOKEN_BUDGET)
        worker = Worker(pool, log.append)
        service = TinkerService(NAME, base, worker, CheckpointStore(folder), TOKEN_BUDGET, None, **options)
        routes = Routes(service, 2**20, 64, log.append)
        bound = bind_socket("127.0.0.1", 0)
        server = TinkerServer(routes, api_key, ConnectionLimits(), log.append, "ready")
        found = Server(service, routes, base_url(bound), log)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()

        def stop() -> None:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()

        stops.append(stop)
        found.wait_until(lambda: server.started)
        return found

    yield build
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def tinker_server(serve_tinker: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """A server for tests that leave it as it was."""
    return serve_tinker(tmp_path_factory.mktemp("tinker"))
