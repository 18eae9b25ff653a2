"""Exact mode: whether a real run logs a gap of exactly 0 in every step, and what exact mode costs.

python bench/exact.py [--steps 200] [--device cpu]

A GRPO run of the built-in task with `rollout.exact=true` and the same run without it. On a GPU also the engine's
throughput in both modes on the work of R1 (1.5B shape, 256 x 256 tokens).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import on_this_gpu, save, table
from rollout import WORKS, drain, random_model, requests_of

from burnish.inference.native.paged_engine import PagedEngine
from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
GAPS = ("mismatch/mismatch_kl", "mismatch/mismatch_k3_kl", "mismatch/mean")


def trained(exact: bool, steps: int, device: str) -> dict[str, Any]:
    """A run of the command line and what its metrics say."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", str(RECIPE), f"rollout.exact={str(exact).lower()}", f"training.steps={steps}"]
        command += [f"model.device={device}", "validation.every=1000", f"run.directory={folder}", "run.name=run"]
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - started
        rows = [row for row in read_metrics(Path(folder) / "run" / "metrics.jsonl") if GAPS[0] in row]
    times = sorted(row["time/step_s"] for row in rows)
    return {
        "work": f"sort_digits, {steps} steps on {device}",
        "system": "burnish exact" if exact else "burnish",
        "wall_s": wall_s,
        "step_s": times[len(times) // 2],
        "steps_with_a_gap": sum(any(row[name] != 0 for name in GAPS) for row in rows),
        "largest_gap": max(abs(row[name]) for row in rows for name in GAPS),
        "reward_last": rows[-1]["reward/mean"],
    }


def rate(exact: bool) -> dict[str, Any]:
    """Tokens a second on R1's work."""
    model, work = random_model("1.5B"), WORKS["R1"]
    engine = PagedEngine(model, max_rows=work.requests, exact=exact)
    runs = []
    for k in range(3):
        engine.load(k, ())  # as after an update: nothing cached counts
        runs.append(drain(engine, requests_of(work, model.arch.vocab_size, f"run{k}")))
    tokens, wall_s = min(runs, key=lambda run: run[1])
    return {
        "work": "R1",
        "system": "burnish exact" if exact else "burnish",
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    rows = [trained(exact, args.steps, args.device) for exact in (False, True)]
    if torch.cuda.is_available():
        rows += [rate(exact) for exact in (False, True)]
    print(table(rows, ["work", "system", "wall_s", "step_s", "steps_with_a_gap", "largest_gap", "tokens_per_s"]))
    print(f"saved {save(on_this_gpu('exact'), rows)}")


if __name__ == "__main__":
    main()
