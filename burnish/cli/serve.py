"""`burnish serve DIR`: serve a model with an OpenAI-compatible API, by default on this machine only."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.cli.main import print_note
from burnish.config.errors import UserError
from burnish.config.extras import install_hint

if TYPE_CHECKING:
    from burnish.core.engine import Engine
    from burnish.evaluation.model_source import ModelSource
    from burnish.evaluation.strategies.spec import VerifierPart
    from burnish.inference.native.paged_engine import PagedEngine
    from burnish.models.policy import PolicyModel
    from burnish.serve.async_engine import EngineHost
    from burnish.serve.engine_worker import Listener, LoadedEngine
    from burnish.serve.request_to_engine import Scorer, ServedModel
    from burnish.serve.server_verifiers import ServerVerifier

KEY_VARIABLE = "BURNISH_API_KEY"
EXTRA = ("starlette", "uvicorn")
MIB = 1024**2
QUICK_ROWS = 384
"""Requests at once up to which the first token is worth more than the rate (docs/serve.md, Speed)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "model",
        type=Path,
        metavar="DIR",
        help="a Hugging Face model directory, a run (its best checkpoint), or an id of the hub (org/name)",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default 8000)")
    add(
        "--api-key", metavar="KEY", help=f"key that clients must send (default: ${KEY_VARIABLE}, else none is required)"
    )
    add("--name", help="name of the model for clients (default: the name of DIR)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="type of the arithmetic (default: that of the run; else bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--max-rows", type=int, help="most completions decoded at once (default: 1024 on a GPU, 256 on a CPU)")
    add(
        "--max-queue",
        type=int,
        default=1024,
        help="most completions that wait; clients get status 429 beyond it (default 1024)",
    )
    add(
        "--engine-process",
        choices=("auto", "on", "off"),
        default="auto",
        help="run the engine in a process of its own, so that HTTP does not delay it (default auto: on with a GPU)",
    )
    add("--cache-gib", type=float, metavar="GIB", help="size of the KV cache (default: 40%% of the free GPU memory)")
    add("--cache-dtype", choices=("auto", "fp8"), default="auto", help="fp8 stores keys and values in 8 bits")
    add("--weights", choices=("model", "fp8"), default="model", help="fp8 multiplies by 8-bit copies of the weights")
    add(
        "--max-tokens",
        type=int,
        help="most new tokens of one completion (default: limited by the model's positions only)",
    )
    add(
        "--call-format",
        metavar="NAME",
        help="format of the model's tool calls, such as hermes or llama3 (default: the one that the chat template names)",
    )
    add(
        "--image-folder",
        type=Path,
        metavar="DIR",
        help="clients may name images below this folder by their paths (default: they send images as data: URLs)",
    )
    add(
        "--verifier",
        action="append",
        metavar="NAME",
        help="a verifier for requests with a strategy, besides likelihood and self_certainty; may be repeated: format, "
        "FILE.py:FUNCTION, '{name: model, options: {path: DIR}}', '{name: judge, options: {...}}'",
    )
    add(
        "--max-search-tokens",
        type=int,
        default=2**20,
        help="most tokens that one request with a strategy may sample (default 1048576)",
    )
    add(
        "--max-body",
        type=float,
        default=8,
        metavar="MIB",
        help="largest request in MiB; clients get status 413 beyond it (default 8)",
    )
    add(
        "--grace",
        type=int,
        default=30,
        metavar="S",
        help="seconds to finish running requests when the server is stopped (default 30)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    require_extra()
    check_options(args)
    from burnish.evaluation.model_source import find_model
    from burnish.serve.server_verifiers import read_verifiers

    parts = read_verifiers(args.verifier or ())
    subject = find_model(args.model, print_note)
    if subject.note is not None:
        print_note(subject.note)
    api_key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    if api_key is not None and not re.fullmatch("[!-~]+", api_key):
        raise UserError("the API key must be of printable ASCII characters without spaces, and not empty")
    from burnish.gateway.http_guards import bind_socket, is_loopback
    from burnish.models.policy import resolve_device

    is_gpu = resolve_device(args.device).type == "cuda"
    args.max_rows = args.max_rows or (1024 if is_gpu else 256)
    if args.engine_process == "auto":
        args.engine_process = "on" if is_gpu else "off"
    bound = bind_socket(args.host, args.port)  # before the model is loaded, so that a port in use is reported at once
    if api_key is None and not is_loopback(bound):
        print_note(f"anyone who can reach {args.host} may use this server: it requires no key (--api-key)")
    from burnish.serve.app import Api
    from burnish.serve.async_engine import AsyncEngine
    from burnish.serve.http_server import run_server as serve

    with engine_host(args, subject) as (host, scorer, (served, note)), loaded_verifiers(parts, served) as verifiers:
        loop = AsyncEngine(host, args.max_rows + args.max_queue)
        api = Api(served, loop, int(args.max_body * MIB), scorer, verifiers, args.max_search_tokens)
        serve(api, bound, api_key=api_key, grace_s=args.grace, log=print_note, note=note)
    return 0


@contextlib.contextmanager
def loaded_verifiers(parts: dict[str, VerifierPart], served: ServedModel) -> Iterator[dict[str, ServerVerifier]]:
    """The verifiers of `--verifier`, loaded. They end with the block."""
    from burnish.serve.server_verifiers import load_verifiers

    found = load_verifiers(parts, served.tokenizer, print_note)
    try:
        yield found
    finally:
        for verifier in found.values():
            verifier.close()


@contextlib.contextmanager
def engine_host(
    args: argparse.Namespace, source: ModelSource
) -> Iterator[tuple[EngineHost, Scorer, tuple[ServedModel, str]]]:
    """The engine in a process or in a thread of its own, its scorer, and the served model with a note. It ends with the block."""
    load = partial(load_engine, args, source)
    if args.engine_process == "on":
        from burnish.serve.engine_process import EngineProcess, ProcessScorer

        process = EngineProcess(load)
        try:
            yield process, ProcessScorer(), process.wait_until_loaded()
        finally:
            process.stop()
        return
    from burnish.serve.engine_worker import EngineThread

    loaded = load()
    thread = EngineThread(loaded.make_engine)
    try:
        yield thread, loaded.scorer, loaded.describe(thread.worker.engine)
    finally:
        thread.stop()


def load_engine(args: argparse.Namespace, source: ModelSource) -> LoadedEngine:
    """Load the policy and prepare its engine."""
    from burnish.evaluation.model_source import sampling_model
    from burnish.models.policy import check_finite, load_policy

    model = sampling_model(source, args.dtype, args.device)
    policy = load_policy(model, source.path, None, seed=0)
    check_finite(policy)
    return policy_engine(args, policy, f"{policy.note}, {model.dtype}")


def policy_engine(args: argparse.Namespace, policy: PolicyModel, note: str) -> LoadedEngine:
    """The engine of a policy, with its description: the served model and a note."""
    from burnish.serve.engine_worker import LoadedEngine
    from burnish.serve.request_to_engine import TokenScorer

    return LoadedEngine(
        partial(make_engine, args, policy),
        TokenScorer(policy.module),
        lambda engine: (served_model(args, policy, engine), note),
    )


def require_extra(command: str = "serve") -> None:
    """Raise if packages of the extra `serve` are missing."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise UserError(
            f"burnish {command} needs {' and '.join(missing)}, which is not installed: {install_hint('serve')}"
        )


def check_options(args: argparse.Namespace) -> None:
    """Refuse invalid numbers and names before anything is loaded."""
    from burnish.environments.tools.call_formats import call_format

    for name, least in (
        ("port", 0),
        ("max_rows", 1),
        ("max_queue", 0),
        ("max_tokens", 1),
        ("max_search_tokens", 1),
        ("grace", 0),
    ):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if args.port > 65535:
        raise UserError(f"--port {args.port}: expected 65535 or less")
    for name in ("max_body", "cache_gib"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected more than 0")
    if args.image_folder is not None and not args.image_folder.is_dir():
        raise UserError(f"--image-folder {args.image_folder}: there is no such folder")
    if args.call_format is not None:
        call_format(args.call_format, "--call-format")


def served_model(args: argparse.Namespace, policy: PolicyModel, engine: Engine) -> ServedModel:
    """The model under its public name, with the longest sequence that its positions and the engine's cache allow."""
    from burnish.distributed.engine_builder import find_paged_engine
    from burnish.models.decoder import Decoder
    from burnish.serve.request_to_engine import ServedModel

    module = policy.module
    if isinstance(module, Decoder):
        num_embeddings = module.arch.vocab_size
    else:
        num_embeddings = module.inner.get_input_embeddings().num_embeddings
    name, longest, paged = args.name or args.model.resolve().name, policy.max_positions, find_paged_engine(engine)
    if paged is not None and paged.stats.plan is not None:
        longest = min(longest or paged.stats.plan.longest, paged.stats.plan.longest)
    return ServedModel(
        name, policy.tokenizer, num_embeddings, longest, args.max_tokens, args.call_format, args.image_folder
    )


def make_engine(args: argparse.Namespace, policy: PolicyModel, listener: Listener) -> Engine:
    """The engine, with its cache allocated."""
    from burnish.config.rollout import Fp8Weights, ModelWeights, Rollout
    from burnish.distributed.engine_builder import build_engine, find_paged_engine

    rollout = Rollout(
        max_rows=args.max_rows,
        cache_gib=args.cache_gib,
        cache_dtype=args.cache_dtype,
        weights=Fp8Weights() if args.weights == "fp8" else ModelWeights(),
    )
    engine = build_engine(policy, rollout, listener)
    paged = find_paged_engine(engine)
    if paged is not None:
        paged.on_cache = lambda plan: print_note(plan.text)
        paged.quick_rows = QUICK_ROWS
        reserve(paged)
    return engine


def reserve(engine: PagedEngine) -> None:
    """Allocate the cache now for the longest possible requests.

    A cache for shorter requests would have to be allocated again, with all running requests preempted, when a longer one arrives.
    """
    positions = engine.model.arch.max_positions
    engine.reserve(max(1, min(positions, engine.plan(positions).tokens)))
