"""The engine on a real SGLang server, where there is one:

    python -m sglang.launch_server --model-path DIRECTORY --port 30000
    SGLANG_URL=http://localhost:30000 SGLANG_MODEL=DIRECTORY pytest tests/inference/sglang/test_sglang_real.py

SGLANG_MODEL is the same model on this machine; the server must be able to read this machine's temporary folder. `real.sh` in this
folder installs SGLang, starts it on the CPU with a tiny model, and runs these tests.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.rollout import Rollout
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.distributed.engine_builder import build_engine
from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.inference.sglang.sglang_servers import SPARE_POSITIONS
from burnish.models.policy import PolicyModel, load_policy
from burnish.run.metrics import read_metrics
from tests.trainers.tiny import run_of

URL, MODEL = os.environ.get("SGLANG_URL"), os.environ.get("SGLANG_MODEL")
pytestmark = pytest.mark.skipif(
    not (URL and MODEL),
    reason="no SGLang server: set SGLANG_URL to its address and SGLANG_MODEL to its model directory",
)
TOLERANCE = 0.3
"""A log-prob of bfloat16 against one of float32; another distribution is further off on average, by far."""


@pytest.fixture(scope="module")
def policy() -> PolicyModel:
    return load_policy(Model(dtype="float32", device="cpu"), Path(MODEL or ""), None, seed=0)


@pytest.fixture
def engine(policy: PolicyModel) -> SglangEngine:
    made = build_engine(policy, Rollout.model_validate({"engine": "sglang", "sglang": {"urls": URL}, "max_rows": 16}))
    assert isinstance(made, SglangEngine)
    return made


def requests(policy: PolicyModel, n: int, **options: Any) -> list[Request]:
    tokens = tuple(fold("prompt", k) % policy.tokenizer.vocab_size for k in range(12))  # good for any tokenizer
    sampling = SamplingOptions(**({"max_tokens": 24} | options))
    return [Request(f"r{k}", tokens, sampling, fold("real", k)) for k in range(n)]


def learner_logp(policy: PolicyModel, request: Request, tokens: np.ndarray) -> np.ndarray:
    packed = torch.tensor([*request.tokens, *tokens.tolist()])
    wanted = torch.arange(len(request.tokens), len(packed))
    temperature = request.sampling.temperature or 1.0
    with torch.no_grad():
        logp, _ = policy.module.token_logprobs(packed, torch.tensor([0, len(packed)]), wanted, temperature)
    return logp.numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_learners(policy: PolicyModel, engine: SglangEngine, temperature: float) -> None:
    wanted = requests(policy, 8, temperature=temperature)
    engine.submit(wanted)
    found = {c.id: c for c in engine.stream()}
    assert found.keys() == {r.id for r in wanted}
    gaps = []
    for request in wanted:
        completion = found[request.id]
        assert (len(completion.tokens), completion.finish) == (24, "length")
        gaps.append(np.abs(completion.logp - learner_logp(policy, request, completion.tokens)))
    assert float(np.mean(gaps)) < 0.1 * TOLERANCE
    assert float(np.max(gaps)) < TOLERANCE


def test_ends_and_aborts(policy: PolicyModel, engine: SglangEngine) -> None:
    (plain,) = requests(policy, 1, temperature=0.0)
    engine.submit([plain])
    (whole,) = engine.stream()
    third = int(whole.tokens[2])
    engine.submit([replace(plain, sampling=replace(plain.sampling, stop_tokens=(third,)))])
    (stopped,) = engine.stream()
    assert stopped.finish == "stop"
    assert stopped.tokens.tolist() == whole.tokens.tolist()[: whole.tokens.tolist().index(third) + 1]
    long = requests(policy, 4, max_tokens=min(2000, (engine.servers[0].context or 2000) - 20))
    engine.submit(long)
    kept = engine.abort([r.id for r in long], keep=True)
    assert {c.id for c in kept} == {r.id for r in long}
    assert list(engine.stream()) == []


def test_weights_arrive_and_change_what_is_sampled(policy: PolicyModel, engine: SglangEngine) -> None:
    (request,) = requests(policy, 1, temperature=0.0)
    engine.submit([request])
    (before,) = engine.stream()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.mul_(0.97)
    engine.load(5, ())
    engine.submit([request])
    (after,) = engine.stream()
    assert after.version == 5
    gap = np.abs(after.logp - learner_logp(policy, request, after.tokens))
    assert float(gap.max()) < TOLERANCE
    assert np.abs(before.logp - learner_logp(policy, request, before.tokens)).max() > gap.max()
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.div_(0.97)
    engine.load(6, ())


def test_truncation_is_right_or_refused(policy: PolicyModel, engine: SglangEngine) -> None:
    wanted = requests(policy, 4, top_k=2, max_tokens=8, raw_logprobs=True)
    if not engine.servers[0].has_mask:
        with pytest.raises(UserError, match="return_sampling_mask"):
            engine.submit(wanted)
        return
    engine.submit(wanted)
    for completion in engine.stream():
        whole = learner_logp(policy, wanted[0], completion.tokens)
        assert completion.raw_logp is not None
        assert float(np.abs(completion.raw_logp - whole).max()) < TOLERANCE
        assert (completion.logp >= whole - TOLERANCE).all()
        assert (completion.logp <= 1e-6).all()


def test_what_a_server_would_cut_short_is_refused_and_the_longest_it_takes_is_whole(
    policy: PolicyModel, engine: SglangEngine
) -> None:
    context = engine.servers[0].context
    if context is None or context > 1024:
        pytest.skip("a context of this size takes too long to fill")
    (request,) = requests(policy, 1, max_tokens=context - 12 - SPARE_POSITIONS + 1)
    with pytest.raises(UserError, match="positions"):
        engine.submit([request])
    request = replace(request, sampling=replace(request.sampling, max_tokens=context - 12 - SPARE_POSITIONS))
    engine.submit([request])
    (whole,) = engine.stream()
    assert (len(whole.tokens), whole.finish) == (request.sampling.max_tokens, "length")


def test_an_end_token_of_the_model_ends_only_requests_that_name_it(policy: PolicyModel, engine: SglangEngine) -> None:
    (end, *_) = policy.tokenizer.eos_ids
    forced = ((end, 100.0),)
    (free,) = requests(policy, 1, max_tokens=5, logit_bias=forced, stop_tokens=(0 if end else 1,))
    named = replace(free, id="named", sampling=replace(free.sampling, stop_tokens=(end,)))
    engine.submit([free, named])
    found = {c.id: (c.tokens.tolist(), c.finish) for c in engine.stream()}
    assert found == {free.id: ([end] * 5, "length"), "named": ([end], "stop")}


def test_a_run_of_grpo(policy: PolicyModel, tmp_path: Path) -> None:
    if sum(p.numel() for p in policy.module.parameters()) > 50_000_000:
        pytest.skip("a model of this size trains too slowly on a CPU")
    text = f"""
model: {{path: {MODEL}}}
data: {{train: {{task: sort_digits, limit: 8, options: {{min_digits: 2, max_digits: 3}}}}}}
rollout: {{engine: sglang, sglang: {{urls: "{URL}"}}, prompts: 4, n: 4, max_tokens: 6, temperature: 0.9}}
training: {{steps: 3, optimizer: {{lr: 1.0e-2}}}}
warm_start: {{data: {{task: sort_digits, options: {{num: 300, clean: true, min_digits: 2, max_digits: 3}}}}, updates: 40}}
"""
    run = run_of(tmp_path, text, ["reward.workers=1", "warm_start.optimizer.lr=0.01", "warm_start.batch_size=64"])
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["mismatch/mean"] for row in rows) < 0.1 * TOLERANCE
