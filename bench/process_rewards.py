"""PRIME compared with GRPO on the built-in task, from the same warm start and with the same number of samples per step.

It measures how many tokens each system samples until its held-out accuracy (greedy) is GRPO's final one. It also measures
how well the process reward model classifies answers to held-out prompts, before and after training.

    grpo           the recipe unchanged
    prime          PRIME's advantage and its process reward model instead of GRPO's, everything else as in the recipe
    outcome alone  the same without the process rewards: the effect of the other half of PRIME's advantage
    prime preset   with PRIME's own choice of prompts: four times as many as are used, of medium difficulty
    slow policy    prime with a tenth of the policy's learning rate, for 40 steps: outcomes stay mixed, and the model can follow

python bench/process_rewards.py [--systems grpo prime ...] [--steps 100] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, save, table

from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
GREEDY, SAMPLED = "validation/greedy", "validation/sampled"
SAMPLES = 512
"""Of each step, in every system."""
# Answers of eight tokens, not of a thousand: beta 1 where the paper has 0.05, and a model that learns in a hundred steps.
PROCESS = "beta: 1.0, mini_batches: 4, optimizer: {lr: 2.0e-4, betas: [0.9, 0.95], clip_norm: 10, schedule: linear, final: 0.1}"
PRIME = [
    f"algorithm={{preset: prime, process: {{{PROCESS}}}}}",
    "algorithm.entropy.coef=0",
    "algorithm.filters=[zero_signal]",
    "algorithm.refill={oversample: 1, short: partial}",
]
SYSTEMS: dict[str, list[str]] = {
    "grpo": [],
    "prime": PRIME,
    "outcome alone": [*PRIME, "algorithm.advantage.process_coef=0"],
    "prime preset": [PRIME[0], "rollout.prompts=16"],
    "slow policy": [*PRIME, "training.optimizer.lr=2.0e-5", "training.steps=40"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=RESULTS / "process_rewards.json", help="where the rows go")
    args = parser.parse_args()
    # What was measured before stays, so that runs can be made one after the other.
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out.is_file() else []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name in args.systems:
                made = learn(name, seed, args.steps, Path(folder))
                rows = [row for row in rows if (row["system"], row["seed"]) != (name, seed)] + [made]
                save("process_rewards", with_bars(rows), args.out)
    rows = with_bars(rows)
    print(table(rows, [name for name in rows[0] if name != "curve"]))
    print(f"saved {save('process_rewards', rows, args.out)}")


def with_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in order, each with the tokens it took to where GRPO ended with the same seed."""
    ends = {row["seed"]: row["greedy_after"] for row in rows if row["system"] == "grpo"}
    for row in rows:
        bar = ends.get(row["seed"], 2.0)
        row["tokens_to_grpo"] = next((tokens for _, tokens, accuracy in row["curve"] if accuracy >= bar), None)
    return sorted(rows, key=lambda row: (list(SYSTEMS).index(row["system"]), row["seed"]))


def learn(name: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run of the command line; the first of a seed makes the warm start that the others begin with."""
    start = folder / "run-0" / "warm_start"
    here = f"run-{len(list(folder.glob('run-*')))}"
    command = ["train", str(RECIPE), f"seed={seed}", f"training.steps={steps}", *SYSTEMS[name]]
    if start.is_dir():
        command += ["model.new=null", f"model.path={start}", "warm_start=null"]
    command += ["validation.every=10", "validation.limit=500", f"run.directory={folder}", f"run.name={here}"]
    subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    curve, tokens, metrics = [], 0, read_metrics(folder / here / "metrics.jsonl")
    for row in metrics:
        tokens += round(SAMPLES * row.get("rollout/length_mean", 0))
        if f"{GREEDY}/accuracy" in row:
            curve.append([row["step"], tokens, row[f"{GREEDY}/accuracy"]])
    last = metrics[-1]
    return {
        "system": name,
        "seed": seed,
        "greedy_before": curve[0][2],
        "greedy_after": curve[-1][2],
        "greedy_best": max(accuracy for *_, accuracy in curve),
        "tokens": tokens,
        "sampled_after": last[f"{SAMPLED}/accuracy"],
        "process_accuracy": last.get(f"{SAMPLED}/process_accuracy"),
        "process_ranking": last.get(f"{SAMPLED}/process_ranking"),
        "curve": curve,
    }


if __name__ == "__main__":
    main()
