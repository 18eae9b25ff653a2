"""The engine contract, on an SGLang server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.models.weight_files import hf_tensors
from tests.inference.engine_contract import *  # noqa: F403
from tests.inference.engine_contract import Subject, spell
from tests.inference.sglang.fake_sglang_server import Behaviour, SglangServer, all_logits

ROWS, CONTEXT = 4, 256


@pytest.fixture(scope="module")
def subject(tools: Any) -> Iterator[Subject]:
    """One engine for all tests; its server has a copy of the model."""
    model, served = tools.decoder(torch.float32), tools.decoder(torch.float32)
    server = SglangServer(served, Behaviour(context=CONTEXT, delay_s=0.004, delay_from=60), spell).start()
    engine = SglangEngine([server.url], 13, ROWS, spell, 60.0, weights=lambda: hf_tensors(model))

    def change(version: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        engine.load(version, ())

    yield Subject(
        engine,
        lambda tokens: all_logits(model, tokens),
        change,
        ROWS,
        CONTEXT - 7,
        refused=("top k and p",),
    )
    server.stop()
