"""A small decoder made from nothing learns to prove theorems of propositional logic: flawed proofs first, then RL on the checker's verdict.

python bench/proofs.py [--seeds 0 1] [--out FILE]

It runs recipes/proofs.yaml for each seed. Held-out theorems differ from all that were trained on, up to the names of variables. The table has
the share of held-out theorems proved before and after RL, greedy and sampled, and by the number of lines of the known proof.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes/proofs.yaml"
PREFIX = "validation/"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/proofs.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        rows.append(learn(seed))
        print(table(rows, [key for key in rows[0] if key not in ("work", "by_length", "curve")]))
        print(f"saved {save('proofs', rows, args.out)}", flush=True)


def learn(seed: int) -> dict[str, Any]:
    """One seed from nothing to the end, through the command line."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        command = ["train", str(RECIPE), f"seed={seed}", f"run.directory={place}", "run.name=proofs"]
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
        measured = read_metrics(Path(place, "proofs/metrics.jsonl"))
    checked = [row for row in measured if f"{PREFIX}greedy/accuracy" in row]
    first, last = checked[0], checked[-1]
    by_length = {
        key.removeprefix(PREFIX): [first.get(key), last[key]]
        for key in last
        if key.startswith(PREFIX) and "length" in key
    }
    return {
        "work": "recipes/proofs.yaml",
        "seed": seed,
        "greedy_before": first[f"{PREFIX}greedy/accuracy"],
        "greedy_after": last[f"{PREFIX}greedy/accuracy"],
        "sampled_before": first[f"{PREFIX}sampled/accuracy"],
        "sampled_after": last[f"{PREFIX}sampled/accuracy"],
        "steps": last["step"],
        "wall_s": time.perf_counter() - started,
        "by_length": by_length,
        "curve": [[row["step"], row[f"{PREFIX}greedy/accuracy"], row[f"{PREFIX}sampled/accuracy"]] for row in checked],
    }


if __name__ == "__main__":
    main()
