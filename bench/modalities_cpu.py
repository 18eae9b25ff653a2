"""Policies that write codes or read pictures, made from nothing on a CPU: held-out accuracy before and after RL.

python bench/modalities_cpu.py [--runs llasa_tts simple_vla ...] [--seeds 0] [--threads 1]
python bench/modalities_cpu.py --finished count_shapes=runs/count_shapes-0     # takes the numbers of a run that is done

Each run is a recipe of that name: a decoder with random weights, a supervised warm start on poor demonstrations, then RL. It saves the rows in
bench/results/modalities_cpu.json, beside those of other runs and seeds.

For recipes with pictures, `greedy_blank` and `greedy_another` are the accuracy after RL with a grey picture and with another row's
(`other_pictures.py`).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from agents_cpu import outcome
from common import save_beside, table
from other_pictures import accuracies

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
WITH_PICTURES = ("count_shapes", "click_target", "frozen_lake_pictures", "sokoban_pictures")
RUNS = ("llasa_tts", "simple_vla", *WITH_PICTURES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=list(RUNS), choices=RUNS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for arithmetic")
    parser.add_argument(
        "--finished", nargs="+", metavar="RECIPE=RUN", default=[], help="runs that are done, instead of new ones"
    )
    args = parser.parse_args()
    rows = [finished(*text.split("=", 1)) for text in args.finished]
    for name in args.runs if not rows else []:
        rows += [learn(name, seed, args.threads) for seed in args.seeds]
    path = save_beside("modalities_cpu", rows, lambda row: (row["run"], row["seed"]))
    columns = [
        "run",
        "seed",
        "wall_s",
        "cpu_s",
        "rl_steps_s",
        "greedy_before",
        "greedy_after",
        "sampled_before",
        "sampled_after",
        "greedy_blank",
        "greedy_another",
    ]
    print(table(rows, columns))
    print(f"saved {path}")


def learn(name: str, seed: int, threads: int) -> dict[str, Any]:
    """One run of the command line, with its progress on the screen."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = [f"seed={seed}", f"run.directory={folder}", "run.name=run", f"run.threads={threads}"]
        command = ["train", str(RECIPES / f"{name}.yaml"), *options]
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        wall_s = time.perf_counter() - started
        seen = accuracies(Path(folder) / "run") if name in WITH_PICTURES else {}
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    steps_s = sum(row.get("time/step_s", 0.0) for row in rows)
    return {"run": name, "seed": seed, "wall_s": wall_s, "cpu_s": cpu_s, "rl_steps_s": steps_s, **outcome(rows), **seen}


def finished(name: str, folder: str) -> dict[str, Any]:
    """The numbers of a run that is done; its time is that of its RL steps."""
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    seed = load(TrainConfig, Path(folder) / "config.yaml").config.seed
    steps_s = sum(row.get("time/step_s", 0.0) for row in rows)
    seen = accuracies(Path(folder)) if name in WITH_PICTURES else {}
    return {"run": name, "seed": seed, "rl_steps_s": steps_s, **outcome(rows), **seen}


if __name__ == "__main__":
    main()
