"""Cost of running one program in the sandbox compared with starting Python, and the effect of hostile programs on harmless ones.

python bench/code_rewards.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import save, table

from burnish.config.data import Reward
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.sandbox.client import Sandbox
from burnish.sandbox.limits import Limits

REPEATS = 200
CALLED = {"program": "def f(x): return x + 1"}
TESTS = {"asserts": [f"assert f({n}) == {n + 1}" for n in range(3)], "entry_point": "f"}
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"


def cpu_s(process: int) -> float:
    """The CPU time of a process and of the children it has waited for."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def measured(work: str, run: Callable[[], Any], process: int) -> dict[str, Any]:
    """The median wall time and the mean CPU time of one run."""
    walls, before = [], cpu_s(process)
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        walls.append(time.perf_counter() - started)
    cpu_ms = (cpu_s(process) - before) / REPEATS * 1e3
    return {"work": work, "wall_ms": statistics.median(walls) * 1e3, "cpu_ms": cpu_ms}


def in_the_pool(work: str, hostile: int) -> dict[str, Any]:
    """Harmless programs through the pool of two workers, with so many fork bombs between them."""
    right = [ScoreRequest(f"{n}", "p", CALLED["program"], "s", TESTS, {}) for n in range(REPEATS)]
    bombs = [ScoreRequest("bomb", "p", BOMB, "s", TESTS, {}) for _ in range(hostile)]
    with Rewards(Reward.model_validate({"parts": ["code"], "workers": 2})) as rewards:
        rewards.score(right[:2])
        started = time.perf_counter()
        scores = rewards.score([*bombs, *right])
        wall_s = time.perf_counter() - started
    passed = sum(s.reward == 1.0 for s in scores)
    return {"work": work, "wall_ms": wall_s / REPEATS * 1e3, "passed": f"{passed} of {REPEATS}"}


def main() -> None:
    def start(*flags: str) -> Callable[[], Any]:
        return lambda: subprocess.run([sys.executable, *flags, "-c", "pass"], check=True)

    rows = [measured("start python -S", start("-S"), os.getpid()), measured("start python", start(), os.getpid())]
    with Sandbox(Limits()) as sandbox:
        sandbox.start()
        assert sandbox._process is not None
        waiting = sandbox._process.pid
        (zygote,) = map(int, Path(f"/proc/{waiting}/task/{waiting}/children").read_text().split())
        rows.append(measured("a program, standard input", lambda: sandbox.run_stdio("print(1)", "", 10.0), zygote))
        rows.append(measured("a program, three asserts", lambda: sandbox.run_calls(CALLED, TESTS, 10.0), zygote))
    rows.append(in_the_pool("the same in the pool of two", 0))
    rows.append(in_the_pool("the same beside 4 fork bombs", 4))
    print(table(rows, ["work", "wall_ms", "cpu_ms", "passed"]))
    print(f"saved {save('code_rewards', rows)}")


if __name__ == "__main__":
    main()
