"""Sokoban and FrozenLake with a real 1.5B model on one GPU: held-out boards solved before, during and after RL.

python bench/games_gpu.py MODEL [--runs sokoban frozen_lake] [--steps 90] [--ppo]

GiGPO on episodes of at most five turns of 200 tokens, 16 boards x 8 a step, learning rate 3e-6, two updates a step. `--ppo` runs the recipes
`ragen_sokoban` and `ragen_frozen_lake` instead, for as many steps. 512 held-out boards at temperature 0.5, as RAGEN-2 (2604.06268) measures.
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

RECIPES = Path(__file__).parents[1] / "recipes"
PUBLISHED = {"sokoban": 0.170, "frozen_lake": 0.365}
"""RAGEN-2, Qwen2.5-1.5B, PPO, 400 steps; measured there."""
GIGPO = [
    "algorithm=gigpo",
    "algorithm.kl={loss: {coef: 0}, reference: none}",
    "rollout={prompts: 16, n: 8, max_tokens: 200, max_rows: 256}",
    "training={mini_batches: 2, token_budget: 32768, optimizer: {lr: 3.0e-6, schedule: linear, final: 0.1}}",
    "validation.modes={sampled: {temperature: 0.5, max_tokens: 200}}",
]
KEY = "validation/sampled/accuracy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--runs", nargs="+", default=["sokoban", "frozen_lake"], choices=list(PUBLISHED))
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ppo", action="store_true", help="the recipe's own PPO instead of GiGPO")
    args = parser.parse_args()
    rows = [learn(game, args) for game in args.runs]
    print(
        table(
            rows, ["work", "system", "steps", "wall_s", "solved_before", "solved_halfway", "solved_after", "published"]
        )
    )
    print(f"saved {save('games-h200', rows)}")


def learn(game: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run the command line once and read its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "train",
            str(RECIPES / f"ragen_{game}.yaml"),
            *([] if args.ppo else GIGPO),
            f"model.path={args.model}",
        ]
        command += [f"training.steps={args.steps}", f"validation.every={args.steps // 2}", f"seed={args.seed}"]
        command += ["run.save_every=1000", f"run.directory={folder}", "run.name=it"]
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True)
        wall_s = time.perf_counter() - started
        solved = [row[KEY] for row in read_metrics(Path(folder) / "it" / "metrics.jsonl") if KEY in row]
    system = "burnish, PPO" if args.ppo else "burnish, GiGPO"
    return {
        "work": game, "system": system, "steps": args.steps, "seed": args.seed, "wall_s": wall_s, "solved_before": solved[0],
        "solved_halfway": solved[len(solved) // 2], "solved_after": solved[-1], "published": PUBLISHED[game],
    }  # fmt: skip


if __name__ == "__main__":
    main()
