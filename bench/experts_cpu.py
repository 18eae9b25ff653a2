"""A small mixture of experts that learns the default task, beside the dense model of equal active size.

Both are made from nothing, with the attention of Qwen3: the dense model has an MLP of 336, the other one 8 experts of 168, of which
2 compute a token. Everything else is recipes/sort_digits.yaml. The other systems show what replay of the engine's experts does: with
an engine of the same weights, and with one whose weights are rounded to 8 bits, so that it chooses other experts. Each run is saved
when it ends; `--read` takes a finished run of the recipe from its folder instead.

python bench/experts_cpu.py [--systems dense experts] [--seeds 0 1 2]
python bench/experts_cpu.py --read experts runs/sort_digits_experts-0
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save_beside, table

from burnish.config.yaml_text import parse_yaml
from burnish.models.architecture import architecture_from_hf, read_config
from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits_experts.yaml"
IN_INT8 = ["rollout.mismatch.name=quantised", "rollout.mismatch.kind=int8"]
SYSTEMS: dict[str, list[str]] = {
    "dense": ["model.new.family=qwen3", "model.new.experts=null"],
    "experts": [],
    "experts, replayed": ["algorithm.router.engine_experts=replay"],
    "experts, engine in int8": ["algorithm.router.engine_experts=compare", *IN_INT8],
    "experts, engine in int8, replayed": ["algorithm.router.engine_experts=replay", *IN_INT8],
}
COLUMNS = ["system", "seed", "parameters", "active_parameters", "greedy_before", "greedy_after", "sampled_before", "sampled_after"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--read", nargs=2, metavar=("SYSTEM", "FOLDER"), help="a finished run")
    args = parser.parse_args()
    if args.read:
        rows = [row_of(args.read[0], Path(args.read[1]))]
        path = save_rows(rows)
    else:
        rows = []
        for system in args.systems:
            for seed in args.seeds:
                rows.append(run(system, seed))
                path = save_rows(rows)
    print(table(rows, [*COLUMNS, "mismatch_mean", "mismatch_max", "router_agreement"]))
    print(f"saved {path}")


def save_rows(rows: list[dict[str, Any]]) -> Path:
    return save_beside("experts_cpu", rows, lambda row: (row["system"], row["seed"]))


def run(system: str, seed: int) -> dict[str, Any]:
    """Run the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["train", str(RECIPE), *SYSTEMS[system], f"seed={seed}", f"run.directory={folder}", "run.name=run"]
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
        return row_of(system, Path(folder) / "run")


def row_of(system: str, folder: Path) -> dict[str, Any]:
    """Accuracies on held-out problems before and after RL, the gap of engine and learner, and the router's numbers of the last step."""
    path, metrics = folder / "config.yaml", read_metrics(folder / "metrics.jsonl")
    config = parse_yaml(path.read_text(), str(path))
    checkpoint = next(folder.glob("checkpoints/step-*"))
    arch = architecture_from_hf(read_config(checkpoint), str(checkpoint))
    row = {"work": "sort_digits", "system": system, "seed": config["seed"], "steps": metrics[-1]["step"]}
    row |= {"parameters": arch.num_parameters, "active_parameters": arch.num_active_parameters}
    for mode in ("greedy", "sampled"):
        row |= {
            f"{mode}_before": metrics[0][f"validation/{mode}/accuracy"],
            f"{mode}_after": metrics[-1][f"validation/{mode}/accuracy"],
        }
    gaps = [m for m in metrics if "mismatch/mean" in m]
    row["mismatch_mean"] = sum(m["mismatch/mean"] for m in gaps) / len(gaps)
    row["mismatch_max"] = max(m["mismatch/max"] for m in gaps)
    for name in ("imbalance", "entropy", "dead", "agreement"):
        if f"router/{name}" in metrics[-1]:
            row[f"router_{name}"] = metrics[-1][f"router/{name}"]
    return row


if __name__ == "__main__":
    main()
