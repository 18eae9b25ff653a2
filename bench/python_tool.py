"""Calls of the Python tool: time of one call, calls a second of many at once, and the memory of idle sessions.

python bench/python_tool.py [--calls 200]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.environments.tools import python_tool
from burnish.environments.tools.python_tool import PythonSession, PythonTool, close_sandboxes

CODE = {"code": "x = 1\nx + 1"}


def descendants(pid: int) -> list[int]:
    """The processes below one."""
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [below for child in children for below in descendants(child)]


def memory_mib(pids: list[int]) -> float:
    """The memory of processes, with shared pages divided among those that share them."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0]) for text in texts) / 1024


async def measured(what: str, tools: list[PythonTool]) -> dict[str, Any]:
    """The median of calls one after the other, and the rate of one call of each tool at the same time."""
    await asyncio.gather(*(tool.call(CODE) for tool in tools))
    times = []
    for _ in range(len(tools)):
        began = time.perf_counter()
        assert await tools[0].call(CODE) == "2"
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*(tool.call(CODE) for tool in tools))
    rate = len(tools) / (time.perf_counter() - began)
    (sandbox,) = python_tool._sandboxes.values()
    assert sandbox._process is not None
    (zygote,) = descendants(sandbox._process.pid)[:1]
    idle = descendants(zygote)
    row = {"tool": what, "call_ms": statistics.median(times) * 1e3, "calls_per_s": rate, "sessions": sandbox.num_open}
    if sandbox.num_open:
        row["mib_per_idle_session"] = memory_mib(idle) / sandbox.num_open
    return row


async def main(num_calls: int) -> list[dict[str, Any]]:
    tool = PythonTool()
    rows = [
        await measured("python", [tool] * num_calls),
        await measured("python_session", [PythonSession() for _ in range(num_calls)]),
    ]
    close_sandboxes()
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=200)
    rows = asyncio.run(main(parser.parse_args().calls))
    print(table(rows, ["tool", "call_ms", "calls_per_s", "sessions", "mib_per_idle_session"]))
    print(save("python-tool", rows))
