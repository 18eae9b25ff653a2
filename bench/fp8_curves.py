"""Learning with the products of the layers in 8 bits (`training.layers=fp8`) beside bfloat16: the default job, on a CPU or a GPU.

python bench/fp8_curves.py [--seeds 0 1] [--steps 150] [--tiny]

Trains recipes/sort_digits.yaml in bfloat16 (float32 master weights), once as it is and once with 8-bit layers, from the same seeds: a decoder made
from nothing, its supervised warm start, which never uses 8-bit layers, and RL. A CPU multiplies the same rounded numbers as a GPU. Both runs of a seed run at once, with a
thread each. A row has the held-out accuracies after the warm start and after RL, and the curve of the mean reward in tenths of the run.
Results: bench/results/fp8_curves[-gpu].json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from common import on_this_gpu, save_beside, table

from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
LAYERS = ("plain", "fp8")
TINY = ("warm_start.updates=10", "warm_start.data.options.num=100", "validation.limit=50", "rollout.prompts=8")
COLUMNS = ["layers", "seed", "greedy_before", "greedy_after", "sampled_before", "sampled_after", "wall_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=150, help="of RL")
    parser.add_argument("--tiny", action="store_true", help="a few steps, saves nothing")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        for seed in args.seeds:
            runs = [(layers, started(Path(place), layers, seed, args)) for layers in LAYERS]
            for layers, process in runs:
                if process.wait():
                    sys.exit(
                        f"the run with training.layers={layers}, seed {seed}, ended with status {process.returncode}"
                    )
                rows.append(row_of(Path(place) / name_of(layers, seed), layers, seed))
            print(table(rows, COLUMNS), flush=True)
    if not args.tiny:
        print(f"saved {save_beside(on_this_gpu('fp8_curves'), rows, lambda row: (row['layers'], row['seed']))}")


def name_of(layers: str, seed: int) -> str:
    return f"{layers}-{seed}"


def started(place: Path, layers: str, seed: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """The process of a run."""
    words = [f"run.directory={place}", f"run.name={name_of(layers, seed)}", "run.threads=1", f"seed={seed}"]
    words += ["model.dtype=bfloat16", f"training.layers={layers}", f"training.steps={4 if args.tiny else args.steps}"]
    words += TINY if args.tiny else ()
    command = [sys.executable, "-m", "burnish.cli.main", "train", str(RECIPE), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def row_of(run: Path, layers: str, seed: int) -> dict[str, Any]:
    """What a run measured."""
    metrics = read_metrics(run / "metrics.jsonl")
    row = {"layers": layers, "seed": seed, "wall_s": metrics[-1]["time/elapsed_s"]}
    for mode in ("greedy", "sampled"):
        found = [row[f"validation/{mode}/accuracy"] for row in metrics if f"validation/{mode}/accuracy" in row]
        row |= {f"{mode}_before": found[0], f"{mode}_after": found[-1]}
    rewards = [row["reward/mean"] for row in metrics if "reward/mean" in row]
    return row | {"reward_curve": tenths(rewards)}


def tenths(values: list[float]) -> list[float]:
    """The means of ten parts of a curve, or of fewer if it is shorter."""
    parts = min(10, len(values))
    return [round(fmean(values[k * len(values) // parts : (k + 1) * len(values) // parts]), 4) for k in range(parts)]


if __name__ == "__main__":
    main()
