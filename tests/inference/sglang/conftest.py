"""A tiny model behind a server of the test's making."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.models.decoder import Decoder
from tests.inference.sglang.fake_sglang_server import Behaviour, SglangServer

VOCAB = 13


def spell(tokens: list[int]) -> str:
    """Tokens as letters: 0 is a."""
    return "".join(chr(97 + token) for token in tokens)


@pytest.fixture
def serve(tools: Any) -> Iterator[Callable[..., SglangServer]]:
    """Starts a server: `serve(seed=..., **behaviour)`. All are stopped at the end."""
    started: list[SglangServer] = []

    def start(model: Decoder | None = None, seed: int = 0, port: int = 0, **behaviour: Any) -> SglangServer:
        model = tools.decoder(torch.float64, VOCAB, seed) if model is None else model
        started.append(SglangServer(model, Behaviour(**behaviour), spell).start(port))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def connect() -> Callable[..., SglangEngine]:
    """An engine on servers: `connect(server, ..., max_rows=...)`."""

    def make(*servers: SglangServer, **options: Any) -> SglangEngine:
        settings: dict[str, Any] = {"vocab_size": VOCAB, "max_rows": 8, "decode": spell, "timeout_s": 30.0}
        return SglangEngine([server.url for server in servers], **(settings | options))

    return make
