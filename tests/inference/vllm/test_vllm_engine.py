"""The engine contract and further tests, on vLLM in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.models.policy import full_hf_tensors
from tests.inference.engine_contract import *  # noqa: F403
from tests.inference.engine_contract import Subject

pytestmark = pytest.mark.vllm
ROWS = 4


@pytest.fixture(scope="module")
def engine(make_policy: Any) -> VllmEngine:
    return VllmEngine(make_policy(), Vllm(engine={"enforce_eager": True}), ROWS, cache_gib=0.05)


@pytest.fixture
def subject(engine: VllmEngine, subject_of: Callable[..., Subject]) -> Subject:
    return subject_of(engine.policy, engine)


# --- weights -----------------------------------------------------------------------------------------------------------------


def test_weights_that_are_handed_over_are_those_it_samples_from(
    tools: Any, make_policy: Any, engine: VllmEngine, subject_of: Callable[..., Subject]
) -> None:
    other = make_policy(seed=5)
    engine.load(7, full_hf_tensors(other))
    wanted = [Request(f"r{k}", (4, 5, 6), SamplingOptions(max_tokens=10), k) for k in range(3)]
    got = tools.run(engine, wanted)
    agree(tools, subject_of(other, engine), wanted, got)  # noqa: F405
    assert {c.version for c in got.values()} == {7}
    engine.load(8, ())  # none: those of its own policy
    agree(tools, subject_of(engine.policy, engine), wanted, tools.run(engine, wanted))  # noqa: F405


# --- other things of its own -------------------------------------------------------------------------------------------------


def test_a_listener_hears_every_token_as_it_is_drawn(tools: Any, engine: VllmEngine) -> None:
    heard: dict[str, list[int]] = {}
    engine.listener = lambda name, token: heard.setdefault(name, []).append(token)
    options = SamplingOptions(max_tokens=5, stop=("a", "cd"))
    got = tools.run(engine, [Request(f"r{k}", (4, 5, 6), options, k) for k in range(6)])
    engine.listener = None
    assert heard == {name: c.tokens.tolist() for name, c in got.items()}
    assert any(c.finish == "stop" for c in got.values())


@pytest.mark.parametrize("temperature", [0.001, 3.0])
def test_a_temperature_that_vllm_would_change_is_refused(engine: VllmEngine, temperature: float) -> None:
    with pytest.raises(UserError, match=r"vLLM samples at 0 or at 0\.01 to 2"):
        engine.submit([Request("r", (3,), SamplingOptions(temperature=temperature, max_tokens=2), 0)])


def test_a_token_that_the_model_does_not_have_is_refused(engine: VllmEngine) -> None:
    """vLLM would look it up and crash."""
    with pytest.raises(UserError, match="token 13 is not one of the model's, 0 to 12"):
        engine.submit([Request("r", (3, 13), SamplingOptions(max_tokens=2), 0)])


def test_equal_prompts_are_computed_once(tools: Any, engine: VllmEngine) -> None:
    """The next sample of a prompt reads its cached prefix, until new weights are loaded."""
    cached = []
    step = engine.llm.step

    def watched() -> Any:
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs)
        return outputs

    engine.llm.step = watched
    prompt = tuple(k % 13 for k in range(200))
    try:
        for k in range(2):
            tools.run(engine, [Request(f"r{k}", prompt, SamplingOptions(max_tokens=1), k)])
        engine.load(10, ())
        tools.run(engine, [Request("r2", prompt, SamplingOptions(max_tokens=1), 2)])
    finally:
        engine.llm.step = step
    assert cached[1] >= 128
    assert cached[2] == 0


def test_the_process_keeps_its_threads_and_its_distributed_work(engine: VllmEngine) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    torch.set_num_threads(before)
