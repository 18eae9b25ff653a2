"""vLLM in this process, with a new engine for each test; it closes the one before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.model import Lora
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.models.lora.adapters import adapter_weights
from burnish.models.policy import PolicyModel, full_hf_tensors
from burnish.models.transformers_model import TransformersPolicy
from tests.inference.engine_contract import Subject, agree

pytestmark = pytest.mark.vllm
ROWS = 4
EAGER = Vllm(engine={"enforce_eager": True})
WANTED = [
    Request(f"r{k}", (4, 5, 6, 7) * 40, SamplingOptions(max_tokens=10, temperature=0.9, raw_logprobs=True), k)
    for k in range(6)
]


def engine_of(policy: PolicyModel, options: Vllm = EAGER) -> VllmEngine:
    return VllmEngine(policy, options, ROWS, cache_gib=0.05)


def test_weights_that_are_not_whole_are_never_sampled_from(make_policy: Any) -> None:
    """vLLM leaves the memory of a missing tensor undefined."""
    engine = engine_of(make_policy())
    named = list(full_hf_tensors(engine.policy))
    with pytest.raises(UserError, match=r"without 1 of 21 tensors, first model.layers.0.self_attn.v_proj.weight"):
        engine.load(1, [*named[:3], *named[4:]])
    with pytest.raises(RuntimeError, match="only in part"):
        engine.submit([Request("r", (3,), SamplingOptions(max_tokens=2), 0)])
    with pytest.raises(RuntimeError, match="only in part"):
        engine.load(1, named)


def test_a_model_that_vllm_cannot_run_is_an_error_at_the_start(make_policy: Any) -> None:
    """With a head size that vLLM's attention on a CPU does not support."""
    with pytest.raises(UserError, match=r"cannot run this model: .*head_dim=24"):
        engine_of(make_policy(num_heads=1, head_dim=24))


def test_float64_is_refused(make_policy: Any) -> None:
    policy = make_policy()
    policy.module.double()
    with pytest.raises(UserError, match="vLLM does not compute in float64"):
        engine_of(policy)


def test_an_engine_closes_the_one_before(tools: Any, make_policy: Any, subject_of: Callable[..., Subject]) -> None:
    first, second = engine_of(make_policy()), engine_of(make_policy(seed=1))
    with pytest.raises(RuntimeError, match="this vLLM engine is closed"):
        first.submit(WANTED)
    del first
    agree(tools, subject_of(second.policy, second), WANTED, tools.run(second, WANTED))


def test_a_tied_output_head_follows_its_embedding(
    tools: Any, make_policy: Any, subject_of: Callable[..., Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the probe after the load finds it."""
    policy = make_policy(tied=True)
    engine = engine_of(policy)
    subject = subject_of(policy, engine)
    for version in (1, 2):
        subject.change(version)
        agree(tools, subject, WANTED, tools.run(engine, WANTED))
    if next(engine.llm.model_executor.driver_worker.model_runner.model.parameters()).is_cuda:
        return  # there it has no copy that could be left behind
    monkeypatch.setattr("burnish.inference.vllm.vllm_engine.refresh_tied", lambda model: None)
    with pytest.raises(UserError, match=r"does not sample from the weights it was sent: token . of a probe"):
        subject.change(3)


def test_adapters_are_sent_alone_and_sampled_from(
    tools: Any, make_policy: Any, subject_of: Callable[..., Subject], tmp_path: Path
) -> None:
    policy = make_policy(tmp_path, Lora(rank=4, alpha=8))
    engine = engine_of(policy)
    subject = subject_of(policy, engine)
    base = tools.run(engine, WANTED)
    agree(tools, subject, WANTED, base)
    for version in (1, 2, 3):
        before = tools.run(engine, WANTED)
        subject.change(version)
        after = tools.run(engine, WANTED)
        agree(tools, subject, WANTED, after)
        assert any(abs(float(after[r.id].logp[0] - before[r.id].logp[0])) > 1e-2 for r in WANTED)
    with torch.no_grad():
        for weight in adapter_weights(policy.module).values():
            weight.zero_()
    engine.load(4, ())
    for name, completion in tools.run(engine, WANTED).items():
        assert completion.tokens.tolist() == base[name].tokens.tolist()


def test_an_architecture_that_only_transformers_knows(tools: Any, make_policy: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 256, "vocab_size": 13}
    torch.manual_seed(0)
    inner = GPT2LMHeadModel(GPT2Config(bos_token_id=None, eos_token_id=None, **sizes)).eval()
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else None
    policy = PolicyModel(TransformersPolicy(inner), make_policy().tokenizer, None, "gpt2")
    engine = engine_of(policy)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return inner(torch.tensor([tokens])).logits[0]

    subject = Subject(engine, logits, lambda version: None, ROWS, 256)
    for version in (1, 2):
        agree(tools, subject, WANTED, tools.run(engine, WANTED))
        with torch.no_grad():
            for parameter in inner.parameters():
                parameter.mul_(0.9)
        engine.load(version, ())
    agree(tools, subject, WANTED, tools.run(engine, WANTED))


def test_a_shorter_limit_and_another_type(tools: Any, make_policy: Any, subject_of: Callable[..., Subject]) -> None:
    policy = make_policy()
    engine = engine_of(policy, Vllm(engine={"enforce_eager": True, "max_model_len": 64, "dtype": "bfloat16"}))
    with pytest.raises(UserError, match="60 prompt tokens \\+ 5 new ones = 65, but vLLM is made for 64 positions"):
        engine.submit([Request("r", (3,) * 60, SamplingOptions(max_tokens=5), 0)])
    wanted = [Request(f"r{k}", (4, 5, 6), SamplingOptions(max_tokens=10), k) for k in range(6)]
    got = tools.run(engine, wanted)
    with pytest.raises(AssertionError):
        agree(tools, subject_of(policy, engine), wanted, got)  # it computes in another type
