"""Cost of the recording endpoint: calls a second, and processor time of the server for each call, with many open sessions.

    python bench/agent_endpoint.py [--sessions 1000] [--turns 8] [--tokenizer DIR] [--profile]

The engine is instant: it hands each call an answer of 100 tokens at once. Clients are in a process of their own and speak HTTP over one connection
for each session. An agent sends the whole conversation with each call; questions have about 40 words. `cpu_ms` is the processor time of the
server's process, all threads, divided by the number of calls: reading the request, placing it in the session's token tree, rendering and
tokenising what is new, recording the answer and writing it. The row of GET /models shows what HTTP alone costs.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import os
import pstats
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import save, table

ROOT = Path(__file__).parents[1]
QUESTION = (
    "Here is what the tool found: "
    + "the price of the item in shop number seven is nine coins, " * 3
    + "so go on, step "
)
ANSWER_TOKENS = 100


# --- the clients' process: the standard library alone -------------------------------------------------------------------------


async def request(reader: Any, writer: Any, method: str, path: str, key: str, body: bytes) -> Any:
    """One request over an open connection."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: policy\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    received = await reader.readuntil(b"\r\n\r\n")
    status = int(received.split(b" ", 2)[1])
    length = int(received.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    answer = await reader.readexactly(length)
    assert status == 200, answer[:300]
    return json.loads(answer)


async def agent(
    address: tuple[str, str], turns: int, is_floor: bool, slots: asyncio.Semaphore, ready: Any
) -> list[float]:
    """One agent. Returns the seconds of each call."""
    url, key = address
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    await ready()
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent with a long memory."}]
    times = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{QUESTION}{turn}"})
        async with slots:
            started = time.perf_counter()
            if is_floor:
                await request(reader, writer, "GET", f"{parts.path}/models", key, b"")
            else:
                body = json.dumps({"model": "policy", "messages": messages}).encode()
                answer = await request(reader, writer, "POST", f"{parts.path}/chat/completions", key, body)
                messages.append(answer["choices"][0]["message"])
            times.append(time.perf_counter() - started)
    writer.close()
    return times


async def clients(job: dict[str, Any]) -> dict[str, Any]:
    """All agents. They begin when all connections are open."""
    slots, connecting = asyncio.Semaphore(job["in_flight"]), asyncio.Semaphore(64)
    begin, num_ready = asyncio.Event(), 0

    async def one(address: Any) -> list[float]:
        async def ready() -> None:
            nonlocal num_ready
            connecting.release()
            num_ready += 1
            if num_ready == len(job["addresses"]):
                print("ready", flush=True)
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
                begin.set()
            await begin.wait()

        await connecting.acquire()
        return await agent(address, job["turns"], job["is_floor"], slots, ready)

    tasks = [asyncio.create_task(one(address)) for address in job["addresses"]]
    await begin.wait()
    started = time.perf_counter()
    times = sorted(t for found in await asyncio.gather(*tasks) for t in found)
    wall = time.perf_counter() - started
    return {"calls": len(times), "wall_s": wall, "median_ms": 1e3 * times[len(times) // 2], "p99_ms": 1e3 * times[int(0.99 * len(times))]}  # fmt: skip


# --- the server ---------------------------------------------------------------------------------------------------------------


def make_tokenizer(folder: str | None) -> Any:
    """The tokenizer of a directory, or the small one of examples/agents."""
    from burnish.models.tokenizer import Tokenizer

    if folder is not None:
        return Tokenizer.load(Path(folder))
    made = runpy.run_path(str(ROOT / "examples" / "agents" / "small_chat_model.py"))["make_tokenizer"]()
    return Tokenizer(made, {"eos_token_id": made.eos_token_id})


async def measure(args: argparse.Namespace, in_flight: int, is_floor: bool) -> dict[str, Any]:
    """Serve the clients of one job. Returns a row of the table."""
    from burnish.environments.tools.call_formats import call_format
    from burnish.gateway.endpoint import RecordingEndpoint
    from burnish.gateway.session import Sampled, SampleRequest, SessionLimits
    from burnish.gateway.session_renderer import SessionRenderer

    tokenizer = make_tokenizer(args.tokenizer)
    words = tokenizer.encode("I look at the shops again and then I take the one with the best price. " * 20)[
        : ANSWER_TOKENS - 1
    ]
    sampled = Sampled([*words, tokenizer.eos_ids[0]], [-0.5] * ANSWER_TOKENS, [0] * ANSWER_TOKENS, "stop")
    endpoint = RecordingEndpoint(SessionRenderer(tokenizer, call_format=call_format("hermes")))
    await endpoint.start()

    def answer(sample: SampleRequest) -> None:
        sample.complete(sampled)

    limits = SessionLimits(max_calls=10_000, max_tokens=512)
    sessions = [endpoint.open(str(k), limits, answer) for k in range(args.sessions)]
    job = {"addresses": [(s.base_url, s.api_key) for s in sessions], "turns": args.turns, "in_flight": in_flight, "is_floor": is_floor}  # fmt: skip
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(job).encode() + b"\n")
    line = await process.stdout.readline()
    assert line == b"ready\n", line
    profiler = cProfile.Profile(time.process_time) if args.profile and not is_floor else None
    started = time.process_time()
    process.stdin.write(b"go\n")
    if profiler is not None:
        profiler.enable()
    found = json.loads(await process.stdout.readline())
    cpu = time.process_time() - started
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    await process.wait()
    if not is_floor:
        assert all(len(s.tree.answers) == args.turns and s.tree.metrics["branches"] == 1 for s in sessions)
    await endpoint.close()
    return {
        "sessions": args.sessions,
        "in_flight": in_flight,
        "turns": args.turns,
        "request": "GET /models" if is_floor else "chat/completions",
        "calls_per_s": found["calls"] / found["wall_s"],
        "cpu_ms": 1e3 * cpu / found["calls"],
        "median_ms": found["median_ms"],
        "p99_ms": found["p99_ms"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokenizer")
    parser.add_argument(
        "--profile", action="store_true", help="print where the server spends its time, and save nothing"
    )
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(clients(json.loads(sys.stdin.readline())))), flush=True)
        return
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for all of the server's threads
    cases = [(16, False)] if args.profile else [(16, True), (16, False), (args.sessions, False)]
    rows = [asyncio.run(measure(args, in_flight, is_floor)) for in_flight, is_floor in cases]
    print(table(rows, list(rows[0])))
    if not args.profile:
        print(save("agent_endpoint", rows))


if __name__ == "__main__":
    main()
