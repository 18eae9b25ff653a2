"""Throughput of `burnish serve` under many clients at once, and the CPU time it takes for a request.

python bench/serve_throughput.py [--engine simulated|native] [--requests 64 256 512 1024] [--tokenizer DIR] [--note before]

Requests of 128 random prompt tokens and 256 new ones with log-probs, each on a connection of its own, `--rounds` after each other. Then the
same as streams, and short requests beside 256 long ones for the time to the first byte. The server is a process of its own. This one sends
prepared bytes and only looks for the end of each answer, so that it is not the limit.

`simulated` needs no GPU: it is the native engine on a device that only keeps time (bench/simulated_device.py). `native` is the engine itself
with random weights: the 1.5B shape on a GPU, a small one on a CPU. `--tokenizer` names a directory with the tokenizer of Qwen2.5,
or another one of at most 151,936 tokens; without it the tokens are made-up words of up to four letters.

`cpu_ms_per_request` is user and system time of all of the server's processes, and `thread_cpu_ms_per_request` that of its three busiest threads:
one serves HTTP and one is the engine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
from common import on_this_gpu, save, table

PROMPT_TOKENS, NEW_TOKENS = 128, 256
SHORT_TOKENS, NUM_SHORT = 4, 40
TICKS = os.sysconf("SC_CLK_TCK")
NAME = "bench"
MAX_QUEUE = 2048
VOCAB = 151936


# --- the server's process -------------------------------------------------------------------------------------------------


def serve(args: argparse.Namespace) -> None:
    """Run the server at a socket that this process inherited."""
    from burnish.serve.app import Api
    from burnish.serve.async_engine import AsyncEngine
    from burnish.serve.engine_process import EngineProcess, ProcessScorer
    from burnish.serve.engine_worker import EngineThread
    from burnish.serve.http_server import run_server

    if args.engine_process == "on":
        host = EngineProcess(partial(load, args))
        scorer, (served, _) = ProcessScorer(), host.wait_until_loaded()
    else:
        loaded = load(args)
        host = EngineThread(loaded.make_engine)
        scorer, (served, _) = loaded.scorer, loaded.describe(host.worker.engine)
    loop = AsyncEngine(host, args.max_rows + MAX_QUEUE)
    api = Api(served, loop, 2**23, scorer)
    bound = socket.socket(fileno=args.serve)
    with Path(os.devnull).open("w") as log:
        lines = {"num": 0}

        def write(line: str) -> None:
            if not lines["num"]:
                print(line, flush=True)  # the line that says that the server is ready
            lines["num"] += 1
            log.write(line + "\n")

        run_server(api, bound, api_key=None, grace_s=5, log=write, note=args.engine)


def load(args: argparse.Namespace) -> Any:
    """The engine, in the process that runs it."""
    import torch

    from burnish.cli.serve import policy_engine
    from burnish.models.policy import PolicyModel

    torch.set_num_threads(1)
    model, tokenizer = _model(args), _tokenizer(args)
    options = argparse.Namespace(
        max_rows=args.max_rows, cache_gib=None, cache_dtype="auto", name=NAME, max_tokens=None, call_format=None
    )
    loaded = policy_engine(options, PolicyModel(model, tokenizer, None, ""), "")
    if args.engine == "simulated":
        loaded.make_engine = partial(_simulated, args, model, tokenizer.decode)
    if args.steps_per_launch is not None:
        loaded.make_engine = partial(_with_steps, loaded.make_engine, args.steps_per_launch)
    return loaded


def _with_steps(make: Any, steps: int, listener: Any) -> Any:
    from burnish.distributed.engine_builder import find_paged_engine

    engine = make(listener)
    paged = find_paged_engine(engine)
    assert paged is not None, "--steps-per-launch is of the paged engine, on a GPU or simulated"
    paged.steps_per_launch = steps
    return engine


def _simulated(args: argparse.Namespace, model: Any, decode: Any, listener: Any) -> Any:
    from simulated_device import SimulatedEngine

    engine = SimulatedEngine(model, args.max_rows, decode, listener, cache_bytes=2**30)
    engine.reserve(4096)
    return engine


def _model(args: argparse.Namespace) -> Any:
    import torch

    from burnish.models.architecture import Architecture
    from burnish.models.decoder import Decoder, initialise

    if args.engine == "native" and torch.cuda.is_available():
        from rollout import random_model

        return random_model("1.5B")
    small = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mlp_size": 48}
    model = Decoder(Architecture(family="qwen2", vocab_size=VOCAB, max_positions=32768, tied=True, **small))
    initialise(model, seed=0)
    return model


def _tokenizer(args: argparse.Namespace) -> Any:
    from burnish.models.tokenizer import Tokenizer

    if args.tokenizer is not None:
        tokenizer = Tokenizer.load(args.tokenizer)
    else:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        words = ("".join(word) for size in (2, 3, 4) for word in product(ascii_letters, repeat=size))
        names = ["<pad>", "<eos>", *letters, *islice(words, VOCAB - 2 - len(letters))]
        backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"))
    tokenizer.eos_ids = ()  # random weights would end a few of the requests early
    return tokenizer


# --- the clients ----------------------------------------------------------------------------------------------------------


@dataclass
class Counts:
    """What the clients saw."""

    tokens: int = 0
    size: int = 0
    first_byte_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One connection that sends its requests one after the other."""

    def __init__(self, bodies: list[bytes], num_tokens: int, counts: Counts) -> None:
        self.bodies, self.num_tokens, self.counts = bodies, num_tokens, counts
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer = bytearray()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._send()

    def _send(self) -> None:
        if not self.bodies:
            self.transport.close()
            self.done.set_result(None)
            return
        self.buffer.clear()
        self.started = time.perf_counter()
        self.transport.write(self.bodies.pop())

    def data_received(self, data: bytes) -> None:
        if not self.buffer:
            self.counts.first_byte_s.append(time.perf_counter() - self.started)
        self.buffer += data
        if self.buffer.endswith(b"}") or self.buffer.endswith(b"0\r\n\r\n"):
            self._finish()

    def _finish(self) -> None:
        head, _, body = bytes(self.buffer).partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r")[0]
        if not head.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(f"the server answered {bytes(self.buffer)[:300]!r}"))
            self.transport.close()
            return
        if length and len(body) < int(length):
            return
        at = body.rfind(b'"completion_tokens":') + len(b'"completion_tokens":')
        tokens = int(body[at : at + 20].lstrip().split(b",")[0])
        if tokens != self.num_tokens:
            self.done.set_exception(RuntimeError(f"{tokens} tokens instead of {self.num_tokens}"))
        self.counts.tokens += tokens
        self.counts.size += len(body)
        self.counts.whole_s.append(time.perf_counter() - self.started)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(RuntimeError(f"the server closed a connection: {error}"))


def body(random: np.random.Generator, num_tokens: int, **fields: Any) -> bytes:
    """A whole HTTP request."""
    asked = {"model": NAME, "prompt": random.integers(2, VOCAB, PROMPT_TOKENS).tolist(), "max_tokens": num_tokens}
    text = json.dumps(asked | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
KINDS: dict[str, dict[str, Any]] = {"log-probs": {"logprobs": 0}, "stream": STREAM}


async def drive(port: int, clients: list[list[bytes]], num_tokens: int, counts: Counts) -> None:
    """Run all clients to their end."""
    loop = asyncio.get_running_loop()

    async def one(bodies: list[bytes]) -> None:
        _, client = await loop.create_connection(lambda: Client(bodies, num_tokens, counts), "127.0.0.1", port)
        await client.done

    await asyncio.gather(*(one(bodies) for bodies in clients))


# --- measurements ---------------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> tuple[float, dict[int, float]]:
    """User and system seconds of a process and its children, and those of each thread."""
    threads: dict[int, float] = {}
    pids = [pid]
    for one in pids:
        for task in Path(f"/proc/{one}/task").iterdir():
            fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
            threads[int(task.name)] = (int(fields[11]) + int(fields[12])) / TICKS
            pids += [int(child) for child in (task / "children").read_text().split()]
    return sum(threads.values()), threads


class Server:
    """A server in a process of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        self.port = bound.getsockname()[1]
        options = [
            "--engine",
            args.engine,
            "--max-rows",
            str(args.max_rows),
            "--engine-process",
            args.engine_process,
            "--serve",
            str(bound.fileno()),
        ]
        options += ["--tokenizer", str(args.tokenizer)] if args.tokenizer is not None else []
        options += ["--steps-per-launch", str(args.steps_per_launch)] if args.steps_per_launch is not None else []
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options], pass_fds=[bound.fileno()], stdout=subprocess.PIPE, text=True
        )
        bound.close()
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("serving"):
                return
        raise RuntimeError("the server did not start")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def measure(args: argparse.Namespace, server: Server, num: int, kind: str, rounds: int) -> dict[str, Any]:
    """A row: `num` clients at once, `rounds` requests each."""
    random, counts = np.random.default_rng(num), Counts()
    clients = [[body(random, NEW_TOKENS, **KINDS[kind]) for _ in range(rounds)] for _ in range(num)]
    before, threads = cpu_seconds(server.process.pid)
    own, started = time.process_time(), time.perf_counter()
    asyncio.run(drive(server.port, clients, NEW_TOKENS, counts))
    wall, own = time.perf_counter() - started, time.process_time() - own
    after, now = cpu_seconds(server.process.pid)
    each = sorted((seconds - threads.get(tid, 0) for tid, seconds in now.items()), reverse=True)
    total = num * rounds
    return {
        "work": f"{num} requests at once, {kind}",
        "system": "burnish",
        "engine": args.engine,
        "engine_process": args.engine_process,
        "note": args.note,
        "requests": num,
        "rounds": rounds,
        "tokens_per_s": counts.tokens / wall,
        "wall_s": wall,
        "cpu_ms_per_request": 1000 * (after - before) / total,
        "thread_cpu_ms_per_request": [round(1000 * seconds / total, 3) for seconds in each[:3]],
        "client_cpu_ms_per_request": 1000 * own / total,
        "first_byte_s": statistics.median(counts.first_byte_s),
        "answer_bytes": counts.size / total,
        "max_rows": args.max_rows,
        "seed": num,
    }


def short_beside_long(args: argparse.Namespace, server: Server, num: int) -> dict[str, Any]:
    """The time to the first byte of short streams, one after the other, while `num` long requests run."""
    random, long, short = np.random.default_rng(0), Counts(), Counts()
    clients = [[body(random, 8 * NEW_TOKENS, **KINDS["log-probs"])] for _ in range(num)]

    async def both() -> None:
        running = asyncio.create_task(drive(server.port, clients, 8 * NEW_TOKENS, long))
        await asyncio.sleep(1.5)
        await drive(
            server.port, [[body(random, SHORT_TOKENS, **STREAM) for _ in range(NUM_SHORT)]], SHORT_TOKENS, short
        )
        assert not long.tokens, "the long requests ended before the short ones"
        await running

    asyncio.run(both())
    times = sorted(short.first_byte_s)
    return {
        "work": f"short requests beside {num}",
        "system": "burnish",
        "engine": args.engine,
        "engine_process": args.engine_process,
        "note": args.note,
        "requests": num,
        "first_byte_s": statistics.median(times),
        "first_byte_p90_s": times[int(0.9 * len(times))],
        "first_byte_max_s": times[-1],
        "max_rows": args.max_rows,
        "seed": 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--engine", choices=("simulated", "native"), default="simulated")
    add("--engine-process", choices=("on", "off"), default="on", help="as the option of `burnish serve`")
    add("--requests", type=int, nargs="+", default=[64, 256, 512, 1024], help="clients at once")
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--rounds", type=int, default=3, help="requests of each client")
    add("--max-rows", type=int, default=256)
    add(
        "--steps-per-launch", type=int, help="decode steps that the engine launches at once (default: the engine's own)"
    )
    add("--beside", type=int, default=256, help="long requests beside the short ones; 0: leave that out")
    add("--tokenizer", type=Path, help="a directory with a tokenizer")
    add("--note", default="", help="a word for the rows, such as `before`")
    add("--out", type=Path, help="another file for the results")
    add("--append", action="store_true", help="keep the rows that the file has with other notes")
    add("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args)
        return
    rows: list[dict[str, Any]] = []
    server = Server(args)
    try:
        measure(args, server, 16, "log-probs", 1)  # warm up
        for kind in args.kinds:
            for num in args.requests:
                if args.engine == "native":
                    measure(args, server, num, kind, 1)  # CUDA graphs of this number of rows are captured
                rows.append(measure(args, server, num, kind, args.rounds))
                print(
                    json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}), flush=True
                )
    finally:
        server.stop()
    if args.beside:
        args.max_rows = max(args.max_rows, args.beside + 16)  # a row for the short ones
        server = Server(args)
        try:
            rows.append(short_beside_long(args, server, args.beside))
        finally:
            server.stop()
    columns = [
        "work",
        "note",
        "tokens_per_s",
        "cpu_ms_per_request",
        "client_cpu_ms_per_request",
        "first_byte_s",
        "first_byte_p90_s",
    ]
    print(table(rows, columns))
    name = on_this_gpu("serve_throughput") if args.engine == "native" else "serve_throughput"
    path = args.out or Path(__file__).parent / "results" / f"{name}.json"
    if args.append and path.is_file():
        rows = [row for row in json.loads(path.read_text())["rows"] if row["note"] != args.note] + rows
    print("saved", save(name, rows, args.out).name)


if __name__ == "__main__":
    main()
