"""Experts that vLLM records, on a stand-in for its engine: vLLM records them on GPUs only (0.32, model runner V2)."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.core.engine import Request, SamplingOptions
from burnish.core.routed_experts import UNKNOWN_EXPERT
from burnish.inference.vllm import vllm_engine
from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.policy import PolicyModel
from tests.made_tokenizers import merging

NUM_EXPERTS, CHOSEN = 6, 2
LETTERS = "abcdefgh"


def experts_of(tokens: list[int], layer: int) -> np.ndarray:
    """What the stand-in records: experts that tell position, token and layer."""
    first = np.arange(len(tokens)) + np.array(tokens) + 2 * layer
    return np.stack([first, first + 1], axis=1) % NUM_EXPERTS


class StandIn:
    """The methods of vLLM's engine that are used. It draws tokens in turn, and records experts of all three layers."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.running, self.params = given, {}, {}
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 10, max_model_len=64, dtype=torch.float32)
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_request(self, name: str, prompt: dict[str, Any], params: Any, **_: Any) -> None:
        self.running[name] = (list(prompt["prompt_token_ids"]), [])
        self.params[name] = params

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running)

    def step(self) -> list[Any]:
        outputs = []
        for name, (prompt, drawn) in list(self.running.items()):
            drawn.append(2 + len(drawn) % len(LETTERS))
            is_last = len(drawn) == self.params[name].max_tokens
            known = [*prompt, *drawn][:-1]
            routed = np.stack([experts_of(known, layer) for layer in range(3)], axis=1).astype(np.uint8)
            one = SimpleNamespace(
                token_ids=drawn[-1:],
                logprobs=[{token: SimpleNamespace(logprob=0.0) for token in range(10)}],
                finish_reason="length" if is_last else None,
                routed_experts=routed if is_last else None,
            )
            scored = [None, *({token: SimpleNamespace(logprob=-1.0)} for token in prompt[1:])]
            outputs.append(
                SimpleNamespace(request_id=name, outputs=[one], prompt_token_ids=prompt, prompt_logprobs=scored)
            )
            if is_last:
                del self.running[name]
        return outputs


class Arguments:
    """vLLM's arguments, as it names them."""

    def __init__(self, enable_return_routed_experts: bool = False, **given: Any) -> None:
        self.given = given | {"enable_return_routed_experts": enable_return_routed_experts}


@pytest.fixture
def make_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., VllmEngine]:
    def make(arguments: type = Arguments, records: bool = True) -> VllmEngine:
        library = vllm_engine.VllmLibrary(
            version="stand-in",
            EngineArgs=arguments,
            LLMEngine=SimpleNamespace(from_engine_args=lambda made: StandIn(made.given)),
            SamplingParams=SimpleNamespace,
            TokensPrompt=dict,
            LoRARequest=None,
            delta=None,
            can_sleep=False,
        )
        monkeypatch.setattr(vllm_engine, "find_library", lambda: library)
        monkeypatch.setattr(vllm_engine, "check_logprobs_mode", lambda logp, name: None)
        sizes = {"hidden_size": 8, "num_layers": 3, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "mlp_size": 8}
        shape = ExpertShape(NUM_EXPERTS, CHOSEN, 8, (False, True, True))
        model = Decoder(Architecture(family="qwen3_moe", vocab_size=10, max_positions=64, experts=shape, **sizes))
        initialise(model, seed=0)
        model.records_experts = records
        engine = VllmEngine(PolicyModel(model, merging(LETTERS), None, ""), Vllm(), 4)
        engine._weights = "all"  # weights are not what is tested
        return engine

    return make


def test_experts_come_with_every_completion_in_the_layers_that_have_them(
    make_engine: Callable[..., VllmEngine], tools: Any
) -> None:
    engine = make_engine()
    assert engine.llm.given["enable_return_routed_experts"] is True
    scored = SamplingOptions(max_tokens=4, temperature=0.5, raw_logprobs=True)
    wanted = [
        Request("limit", (3, 4, 5), SamplingOptions(max_tokens=4), 1),
        Request("stop", (3, 4), SamplingOptions(max_tokens=9, stop=("cd",)), 2),
        Request("scored", (5, 3), scored, 3),
        Request("both", (5, 3, 2), SamplingOptions(max_tokens=9, temperature=0.5, raw_logprobs=True, stop=("c",)), 4),
    ]
    got = tools.run(engine, wanted)
    assert {name: one.finish for name, one in got.items()} == {
        "limit": "length",
        "stop": "stop",
        "scored": "length",
        "both": "stop",
    }
    for request in wanted:
        one = got[request.id]
        tokens = [*request.tokens, *one.tokens.tolist()]
        expected = np.stack([experts_of(tokens[:-1], layer) for layer in (1, 2)], axis=1)
        assert one.experts is not None
        assert one.experts.dtype == np.int16
        np.testing.assert_array_equal(one.experts[:-1], expected)
        assert (one.experts[-1] == UNKNOWN_EXPERT).all(), "nothing computed the last token"
        assert (one.raw_logp is not None) == request.sampling.raw_logprobs


def test_experts_of_an_aborted_request_are_kept_with_its_tokens(make_engine: Callable[..., VllmEngine]) -> None:
    engine = make_engine()
    engine.submit([Request("r", (3, 4), SamplingOptions(max_tokens=20), 1)])
    engine._step()
    engine._step()
    (kept,) = engine.abort(["r"], keep=True)
    assert kept.tokens.tolist() == [2, 3]
    assert kept.experts is not None
    np.testing.assert_array_equal(kept.experts[:-1, 0], experts_of([3, 4, 2], 1))


def test_experts_are_only_asked_for_where_the_algorithm_reads_them(
    make_engine: Callable[..., VllmEngine], tools: Any
) -> None:
    engine = make_engine(records=False)
    assert engine.llm.given["enable_return_routed_experts"] is False
    assert tools.run(engine, [Request("r", (3,), SamplingOptions(max_tokens=2), 1)])["r"].experts is None


def test_a_vllm_without_them_and_records_of_another_form_are_refused(
    make_engine: Callable[..., VllmEngine], tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Older:
        def __init__(self, model: str, dtype: str) -> None: ...

    with pytest.raises(UserError, match=r"vLLM stand-in does not return the experts .*rollout\.engine=native"):
        make_engine(Older)
    monkeypatch.setattr(f"{__name__}.experts_of", lambda tokens, layer: np.zeros((len(tokens) + 1, 2)))
    with pytest.raises(RuntimeError, match=r"experts of shape \(5, 3, 2\), expected \(4, 3, 2\)"):
        tools.run(make_engine(), [Request("r", (3, 4, 5), SamplingOptions(max_tokens=2), 1)])
