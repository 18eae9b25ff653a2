"""The default job on several seeds: accuracy before and after RL, and the wall time of the whole command.

python bench/default_job.py [--seeds 0 1 2] [--recipe recipes/sort_digits.yaml]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, table

from burnish.run.metrics import read

RECIPES = Path(__file__).parents[1] / "recipes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="sort_digits.yaml")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = ["train", str(RECIPES / args.recipe), f"seed={seed}", f"run.directory={folder}", "run.name=run"]
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
            wall_s = time.perf_counter() - started
            metrics = read(Path(folder) / "run" / "metrics.jsonl")
        before, after = metrics[0], metrics[-1]
        row = {"work": Path(args.recipe).stem, "system": "burnish", "seed": seed, "wall_s": wall_s}
        for mode in ("greedy", "sampled"):
            row |= {
                f"{mode}_before": before[f"validation/{mode}/accuracy"],
                f"{mode}_after": after[f"validation/{mode}/accuracy"],
            }
        lengths = {k.rsplit("=", 1)[1]: v for k, v in after.items() if "greedy/accuracy/length=" in k}
        row |= {f"greedy_length_{n}_before": before[f"validation/greedy/accuracy/length={n}"] for n in lengths}
        row |= {f"greedy_length_{n}_after": v for n, v in lengths.items()}
        row["mismatch_mean"] = max(m["mismatch/mean"] for m in metrics if "mismatch/mean" in m)
        row["mismatch_max"] = max(m["mismatch/max"] for m in metrics if "mismatch/max" in m)
        rows.append(row)
    columns = [
        "seed",
        "wall_s",
        "greedy_before",
        "greedy_after",
        "sampled_before",
        "sampled_after",
        "mismatch_mean",
        "mismatch_max",
    ]
    print(table(rows, columns))
    print(f"saved {save(f'default_job-{Path(args.recipe).stem}', rows)}")


if __name__ == "__main__":
    main()
