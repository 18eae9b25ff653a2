"""The default job with several seeds: accuracy before and after RL, and the wall time of the whole command.

python bench/default_job.py [--seeds 0 1 2] [--recipe sort_digits.yaml] [--controls]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import save, table

from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipe", default="sort_digits.yaml")
    parser.add_argument("--controls", action="store_true", help="also the two supervised controls")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            command = ["train", str(RECIPES / args.recipe), f"seed={seed}", f"run.directory={folder}", "run.name=run"]
            command += ["--controls"] if args.controls else []
            started = time.perf_counter()
            subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
            wall_s = time.perf_counter() - started
            metrics = read_metrics(Path(folder) / "run" / "metrics.jsonl")
            controls = json.loads((Path(folder) / "run" / "controls.json").read_text()) if args.controls else {}
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
        for title, values in controls.items():
            accuracies = {f"{mode}_after": values[f"validation/{mode}/accuracy"] for mode in ("greedy", "sampled")}
            rows.append({"work": row["work"], "system": title, "seed": seed, **accuracies})
    columns = [
        "system",
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
    name = f"default_job-{Path(args.recipe).stem}" + ("-controls" if args.controls else "")
    print(f"saved {save(name, rows)}")


if __name__ == "__main__":
    main()
