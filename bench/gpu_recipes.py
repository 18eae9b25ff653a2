"""Two steps of every recipe, shrunk, on the GPU, through all of its slots, in float32 and bfloat16, with a corrected stale sampler.

python bench/gpu_recipes.py [--dtypes float32 bfloat16] [--only prime spo_tree]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from common import save_beside, table

from burnish.config.loading import load_shrunk
from burnish.config.recipe_names import named_recipes
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import checked_run, execute

RECIPES = Path(__file__).parents[1] / "recipes"
MORE = {
    "grpo+stale+seq_is_rs": ("grpo", ["rollout.mismatch={name: stale, steps: 1}", "algorithm.correction=decoupled_seq_is_rs"]),
    "grpo+bypass": ("grpo", ["algorithm.correction=bypass_ppo_clip_k3_rs"]),
    "rloo+bypass_pg": ("rloo", ["algorithm.correction=bypass_pg_is"]),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--only", nargs="+", help="names of recipes; their rows take the place of the saved ones")
    args = parser.parse_args()
    jobs = {one.name: (one.name, list[str]()) for one in named_recipes() if one.command == "train"} | MORE
    if args.only:
        jobs = {name: jobs[name] for name in args.only}
    rows = [run(name, *job, dtype) for dtype in args.dtypes for name, job in jobs.items()]
    print(table([row for row in rows if row["error"]] or rows, ["work", "dtype", "wall_s", "mismatch_max", "error"]))
    bad = sum(bool(row["error"]) for row in rows)
    print(
        f"{len(rows) - bad} of {len(rows)} ran; saved {save_beside('gpu_recipes', rows, lambda row: (row['work'], row['dtype']))}"
    )
    sys.exit(1 if bad else 0)


def run(name: str, recipe: str, overrides: list[str], dtype: str) -> dict[str, Any]:
    started = time.perf_counter()
    row: dict[str, Any] = {"work": name, "system": "burnish", "dtype": dtype, "error": ""}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        try:
            small = [f"model.device={device}", f"model.dtype={dtype}", f"run.directory={folder}", "run.name=run"]
            loaded, _ = load_shrunk(TrainConfig, RECIPES / f"{recipe}.yaml", [*small, *overrides])
            with checked_run(loaded.config, loaded.resolved, loaded.base, "run") as (parts, made):
                assert execute(parts, made)
            metrics = read_metrics(Path(folder) / "run" / "metrics.jsonl")
            losses = [m["actor/loss"] for m in metrics if "actor/loss" in m]
            assert losses, "no update was made"
            assert all(math.isfinite(loss) for loss in losses), f"losses {losses}"
            row["mismatch_max"] = max((m.get("mismatch/max", 0.0) for m in metrics), default=0.0)
        except Exception as error:  # noqa: BLE001  printed and counted: one that fails must not hide the others
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            traceback.print_exc()
    return {**row, "wall_s": time.perf_counter() - started}


if __name__ == "__main__":
    main()
