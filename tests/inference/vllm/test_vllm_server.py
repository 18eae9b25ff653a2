"""The engine contract and further tests, on a vLLM server that is started for them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.model import Lora
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.server_client import ServerError
from burnish.inference.vllm.vllm_requests import VLLM
from burnish.inference.vllm.vllm_server import VllmServer
from burnish.models.policy import PolicyModel, full_hf_tensors
from burnish.run.metrics import read_metrics
from tests.inference.engine_contract import *  # noqa: F403
from tests.inference.engine_contract import Subject, agree
from tests.trainers.tiny import run_of

pytestmark = pytest.mark.vllm
ROWS = 4
START_S = 240.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
DEFAULTS = {"eos_token_id": 7, "temperature": 0.3, "top_k": 2, "top_p": 0.5, "repetition_penalty": 1.5}
"""Generation config of the served model: a server fills open options from it, and ends at its end token."""
FLAGS = (
    *("--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority", "--max-num-seqs", str(ROWS)),
    *(
        "--dtype",
        "float32",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        str(1 << 26),
        "--gpu-memory-utilization",
        "0.01",
    ),
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"),
)


@pytest.fixture(scope="module")
def policy(make_policy: Any, tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    policy = make_policy(tmp_path_factory.mktemp("served"), seed=3)
    (policy.source / "generation_config.json").write_text(json.dumps(DEFAULTS))
    return policy


@pytest.fixture(scope="module")
def url(policy: PolicyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model of the policy's kind, with other weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    module, where = "vllm.entrypoints.openai.api_server", ["--model", str(policy.source), "--port", str(port)]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *where, "--host", "127.0.0.1", *FLAGS],
            env=os.environ | ENVIRONMENT, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while True:
            try:
                VLLM.call(address, "/health", 5.0)
                break
            except ServerError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.5)
        yield address
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


@pytest.fixture(scope="module")
def engine(url: str, make_policy: Any) -> VllmServer:
    return VllmServer(make_policy(), Vllm(url=url, timeout_s=60), ROWS)


@pytest.fixture
def subject(engine: VllmServer, subject_of: Callable[..., Subject]) -> Subject:
    if not engine._has_weights or VLLM.call(engine.info.url, "/weight_info", 5.0)["weight_version"] != engine._label:
        engine.load(engine.version, ())  # another test's client has sent others
    return subject_of(engine.policy, engine)


# --- weights -----------------------------------------------------------------------------------------------------------------


def test_a_server_says_what_it_can_do(engine: VllmServer) -> None:
    info = engine.info
    assert (info.max_positions, info.has_priorities, info.can_sleep, info.dtype) == (256, True, False, "float32")
    assert info.has_labels


def test_weights_that_are_handed_over_are_those_it_samples_from(
    tools: Any, make_policy: Any, subject: Subject, engine: VllmServer, subject_of: Callable[..., Subject]
) -> None:
    other = make_policy(seed=5)
    engine.load(7, full_hf_tensors(other))
    wanted = [Request(f"r{k}", (4, 5, 6), SamplingOptions(max_tokens=10), k) for k in range(3)]
    agree(tools, subject_of(other, engine), wanted, tools.run(engine, wanted))
    engine.load(8, ())
    agree(tools, subject, wanted, tools.run(engine, wanted))


def test_only_the_weights_it_has_are_on_disk_and_none_at_the_end(url: str, make_policy: Any, tmp_path: Path) -> None:
    engine = VllmServer(make_policy(), Vllm(url=url, weights_dir=str(tmp_path)), ROWS)
    for version in (1, 2, 3):
        engine.load(version, ())
        assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 1
    del engine
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_whole_are_refused_and_the_server_keeps_its_own(
    tools: Any, subject: Subject, engine: VllmServer
) -> None:
    with pytest.raises(UserError, match=r"without 1 of 21 tensors, first lm_head\.weight"):
        engine.load(9, list(full_hf_tensors(engine.policy))[:-1])
    wanted = [Request(f"r{k}", (4, 5, 6), SamplingOptions(max_tokens=10), k) for k in range(3)]
    agree(tools, subject, wanted, tools.run(engine, wanted))


def test_a_server_with_weights_of_another_is_found_out(
    url: str, make_policy: Any, subject: Subject, engine: VllmServer
) -> None:
    """As after a restart, with the weights of its own directory."""
    other = VllmServer(make_policy(seed=2), Vllm(url=url), ROWS)
    other.load(1, ())
    engine.submit([Request("r", (3,), SamplingOptions(max_tokens=2), 0)])
    with pytest.raises(ServerError, match="was it started again"):
        list(engine.stream())
    engine.abort(["r"], keep=False)
    engine.load(engine.version, ())


def test_adapters_are_sent_alone_and_sampled_from(
    tools: Any, url: str, policy: PolicyModel, make_policy: Any, subject_of: Callable[..., Subject]
) -> None:
    """On the weights that the server has: those of the directory it serves."""
    adapted = make_policy(seed=3, lora=Lora(rank=4, alpha=8, targets=["q_proj", "v_proj"]))
    adapted.source = policy.source
    VllmServer(make_policy(seed=3), Vllm(url=url), ROWS).load(0, ())
    engine = VllmServer(adapted, Vllm(url=url), ROWS)
    subject = subject_of(adapted, engine)
    wanted = [Request(f"r{k}", (4, 5, 6, 7) * 40, SamplingOptions(max_tokens=10, temperature=0.9), k) for k in range(6)]
    for version in (1, 2):
        before = tools.run(engine, wanted)
        subject.change(version)
        after = tools.run(engine, wanted)
        agree(tools, subject, wanted, after)
        assert any(abs(float(after[r.id].logp[0] - before[r.id].logp[0])) > 1e-2 for r in wanted)
    with pytest.raises(UserError, match="no raw log-probs"):
        engine.submit([Request("r", (3,), SamplingOptions(max_tokens=2, temperature=0.5, raw_logprobs=True), 0)])


# --- refusals ----------------------------------------------------------------------------------------------------------------


def test_a_server_of_another_model_is_refused(url: str, make_policy: Any) -> None:
    for vocab in (12, 14):
        with pytest.raises(UserError, match=f"serves another model: its vocabulary is not the policy's {vocab} tokens"):
            VllmServer(make_policy(vocab=vocab), Vllm(url=url), ROWS)


def test_what_a_server_would_change_in_silence_is_refused(engine: VllmServer) -> None:
    with pytest.raises(UserError, match="the bias of token 3 is past the 100"):
        engine.submit([Request("r", (3,), SamplingOptions(max_tokens=2, logit_bias=((3, 101.0),)), 0)])
    with pytest.raises(UserError, match="vLLM samples at 0 or at"):
        engine.submit([Request("r", (3,), SamplingOptions(max_tokens=2, temperature=0.005), 0)])


# --- a whole run -------------------------------------------------------------------------------------------------------------


def test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with(
    url: str, policy: PolicyModel, tmp_path: Path
) -> None:
    rows = [{"prompt": a + b, "answer": b} for a in "abcd" for b in "efgh"]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = f"""
model: {{path: {policy.source}}}
data: {{train: {{path: {tmp_path / "letters.jsonl"}}}, template: {{kind: plain}}}}
reward: {{parts: exact, workers: 1}}
rollout: {{prompts: 8, n: 8, max_tokens: 3, engine: vllm, vllm: {{url: "{url}"}}}}
training: {{steps: 4, optimizer: {{lr: 1.0e-2}}}}
algorithm: {{preset: grpo, filters: [], advantage: {{name: grpo}}, kl: {{loss: {{coef: 0}}, reference: none}}}}
run: {{samples_every: 100, save_every: 100}}
"""
    found = [
        row["mismatch/max"]
        for row in read_metrics(run_of(tmp_path / "it", recipe, []) / "metrics.jsonl")
        if "mismatch/max" in row
    ]
    assert len(found) >= 2
    assert max(found) < 1e-4
