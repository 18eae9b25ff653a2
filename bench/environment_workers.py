"""Worker processes for environments: latency of a call, steps at once, and the memory of ten thousand open episodes.

    python bench/environment_workers.py [--workers 4] [--objects 10000]

- `round trip`: one trivial `async` or plain `step` after the other, from the event loop of the runner to the worker and back.
- `calls at once`: trivial steps of all objects together, which is the most that the runner's loop can send and read.
- `1,000 sleeps of 1 s`: steps of 1,000 objects that each sleep for a second; 1 s would be perfect.
- `memory`: proportional set size (`smaps_rollup`) of the workers, and what the runner grew by, with all objects open and started.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.environments.base import Answer, Episode
from burnish.environments.workers import ObjectSpec, ObjectWorkers

SOURCE = """
import asyncio, os, time
from burnish.environments.base import End, Environment, Observation

class Waits(Environment):
    async def start(self, episode):
        self.episode, self.turns = episode, 0
        return Observation(text="go")

    async def pid(self):
        return os.getpid()

    async def step(self, answer):
        self.turns += 1
        return Observation(text=answer.text)

    def plain_step(self, answer):
        self.turns += 1
        return Observation(text=answer.text)

    async def sleep(self, answer):
        await asyncio.sleep(1)
        return End(1.0)

    def plain_sleep(self, answer):
        time.sleep(1)
        return End(1.0)
"""
EPISODE = Episode("rows/1#0.0", 7, [{"role": "user", "content": "x" * 200}], extra={"board": [[0] * 6] * 6})
ANSWER = Answer("move left " * 20, "move left " * 20)


def memory_mib(pid: int | str) -> float:
    """Proportional set size of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"process {pid} has no Pss")


async def measure(num_workers: int, num_objects: int, folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def add(what: str, value: float, unit: str) -> None:
        rows.append({"what": what, "value": value, "unit": unit})
        print(f"{what}: {value:,.4g} {unit}", flush=True)

    spec = ObjectSpec("waits.py:Waits", base=folder)
    workers = ObjectWorkers(num_workers)
    started = time.perf_counter()
    first = await workers.open(spec)
    add(f"first object, {num_workers} workers starting", time.perf_counter() - started, "s")
    await first.call("start", EPISODE)
    for method in ("step", "plain_step"):
        times = []
        for _ in range(2000):
            begin = time.perf_counter()
            await first.call(method, ANSWER)
            times.append(time.perf_counter() - begin)
        add(f"round trip of {method}, median", 1e6 * statistics.median(times), "us")
        add(f"round trip of {method}, 99th percentile", 1e6 * statistics.quantiles(times, n=100)[98], "us")
    games = await asyncio.gather(*[workers.open(spec) for _ in range(1000)])
    for method in ("sleep", "plain_sleep"):
        begin = time.perf_counter()
        await asyncio.gather(*[game.call(method, ANSWER) for game in games])
        add(f"1,000 calls of {method} (1 s) at once", time.perf_counter() - begin, "s")
    await asyncio.gather(*[game.close() for game in games])
    await workers.aclose()

    workers = ObjectWorkers(num_workers)
    kept = [await workers.open(spec) for _ in range(num_workers)]
    pids = [(await game.call("pid")) for game in kept]
    empty, own = sum(map(memory_mib, pids)), memory_mib("self")
    add(f"memory of {num_workers} workers without episodes", empty, "MiB")
    begin = time.perf_counter()
    games = await asyncio.gather(*[workers.open(spec) for _ in range(num_objects)])
    await asyncio.gather(*[game.call("start", EPISODE) for game in games])
    add(f"opening and starting {num_objects} episodes", time.perf_counter() - begin, "s")
    add(f"memory of {num_workers} workers with {num_objects} episodes", sum(map(memory_mib, pids)), "MiB")
    add(f"growth of the runner with {num_objects} episodes", memory_mib("self") - own, "MiB")
    begin = time.perf_counter()
    await asyncio.gather(*[game.call("step", ANSWER) for game in games])
    add(f"steps a second, {num_objects} at once", num_objects / (time.perf_counter() - begin), "1/s")
    begin = time.perf_counter()
    await asyncio.gather(*[game.close() for game in [*games, *kept]])
    add(f"closing {num_objects} episodes", time.perf_counter() - begin, "s")
    await workers.aclose()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--objects", type=int, default=10_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "waits.py").write_text(SOURCE)
        rows = asyncio.run(measure(arguments.workers, arguments.objects, folder))
    print(table(rows, ["what", "value", "unit"]))
    print(save("environment_workers", rows))


if __name__ == "__main__":
    main()
