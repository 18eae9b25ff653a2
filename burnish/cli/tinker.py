"""`burnish tinker DIR`: train and sample a model from the stock `tinker` client, by default on this machine only."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.cli.main import print_note
from burnish.cli.serve import KEY_VARIABLE, MIB, require_extra
from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.models.policy import PolicyModel
    from burnish.serve.tinker.service import TinkerService

KEY_PREFIX = "tml-"
DEFAULT_BUDGET = {"cpu": 4096, "cuda": 16384}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", type=Path, metavar="DIR", help="a Hugging Face model directory, or a run (its best checkpoint)")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8700, help="port to listen on; 0 takes a free one (default 8700)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"key that clients must send, which begins with {KEY_PREFIX} (default: ${KEY_VARIABLE}, else none is required)",
    )
    add(
        "--name",
        help="name of the base model for clients, such as Qwen/Qwen3-8B (default: the path of DIR, by which clients on this "
        "machine find its tokenizer)",
    )
    add(
        "--checkpoints",
        type=Path,
        default=Path("runs/tinker"),
        metavar="DIR",
        help="where saved weights and states are kept (default runs/tinker)",
    )
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="type of the weights (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    add("--max-rows", type=int, default=256, help="most samples decoded at once (default 256)")
    add(
        "--token-budget",
        type=int,
        help=f"most tokens of a micro-batch; it changes memory and speed only (default {DEFAULT_BUDGET['cuda']} on a GPU, "
        f"{DEFAULT_BUDGET['cpu']} on a CPU)",
    )
    add("--cache-gib", type=float, metavar="GIB", help="size of the KV cache (default: 40%% of the free GPU memory)")
    add("--max-body", type=float, default=64, metavar="MIB", help="largest request in MiB (default 64)")
    add(
        "--session-timeout",
        type=float,
        default=3600,
        metavar="S",
        help="seconds without a sign of a client, after which its models are dropped (default 3600)",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    require_extra("tinker")
    args.api_key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE) or None
    check_options(args)
    from burnish.gateway.http_guards import bind_socket, is_loopback, process_limits, raise_file_limit
    from burnish.serve.tinker.routes import Routes
    from burnish.serve.tinker.server import TinkerServer, base_url, run_server

    bound = bind_socket(args.host, args.port)  # before the model is loaded, so that a port in use is reported at once
    if args.api_key is None and not is_loopback(bound):
        print_note(f"anyone who can reach {args.host} may use this server: it requires no key (--api-key)")
    raise_file_limit()
    limits = process_limits()
    service, note = load_service(args, is_loopback(bound))
    # A sample that is waited for holds a connection; the rest is for training requests.
    routes = Routes(service, int(args.max_body * MIB), max(1, limits.most // 2), print_note)
    key = "..." if args.api_key is not None else f"{KEY_PREFIX}any"
    ready = f"serving {service.name} ({note}); clients: TINKER_BASE_URL={base_url(bound)} TINKER_API_KEY={key}"
    run_server(TinkerServer(routes, args.api_key, limits, print_note, ready), bound)
    return 0


def load_service(args: argparse.Namespace, is_local: bool) -> tuple[TinkerService, str]:
    """The base model with its worker, and a note about it."""
    from burnish.config.rollout import Rollout
    from burnish.evaluation.model_source import find_model, sampling_model
    from burnish.models.policy import check_finite, load_policy, resolve_device
    from burnish.serve.tinker.checkpoints import CheckpointStore
    from burnish.serve.tinker.sampler import SamplerPool
    from burnish.serve.tinker.service import TinkerService
    from burnish.serve.tinker.worker import Worker

    source = find_model(args.model, print_note)
    if source.note is not None:
        print_note(source.note)
    device = resolve_device(args.device)
    model = sampling_model(source, args.dtype, args.device)
    base = load_policy(model, source.path, None, seed=0)
    check_base(base, source.path)
    check_finite(base)
    base.module.requires_grad_(False)
    budget = args.token_budget or DEFAULT_BUDGET[device.type]
    pool = SamplerPool(base, Rollout(max_rows=args.max_rows, cache_gib=args.cache_gib), budget)
    directory = source.path.resolve()
    name = args.name or str(directory)
    service = TinkerService(
        name,
        base,
        Worker(pool, print_note),
        CheckpointStore(args.checkpoints.resolve()),
        budget,
        tokenizer_id=str(directory) if is_local and ":" not in str(directory) else None,
        aliases=frozenset({str(args.model), str(directory), directory.name}),
        session_timeout_s=args.session_timeout,
    )
    return service, f"{base.note}, {model.dtype}, checkpoints in {args.checkpoints}"


def check_base(base: PolicyModel, path: Path) -> None:
    """Refuse models that adapters cannot be added to."""
    if base.arch is None:
        raise UserError(f"{path} cannot be trained by this server: {base.note}")
    if base.lora is not None:
        raise UserError(f"{path} is an adapter; write its merged model first: burnish export {path} FOLDER")


def check_options(args: argparse.Namespace) -> None:
    """Refuse invalid numbers and names before anything is loaded."""
    for name, least in (("port", 0), ("max_rows", 1), ("token_budget", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected {least} or more")
    if args.port > 65535:
        raise UserError(f"--port {args.port}: expected 65535 or less")
    for name in ("max_body", "cache_gib", "session_timeout"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected more than 0")
    if args.api_key is not None and not re.fullmatch(f"{KEY_PREFIX}[!-~]+", args.api_key):
        raise UserError(
            f"the API key must begin with {KEY_PREFIX}, which the client checks, and be of printable ASCII characters without spaces"
        )
