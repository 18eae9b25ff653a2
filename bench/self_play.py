"""Self-play with and without role-conditioned advantages and opponents of earlier steps: does a tiny model keep what it knew?

A decoder of 95 thousand parameters learns from demonstrations to list the free cells of a tic-tac-toe board and to choose one. Then it
plays itself. Measured over the steps: games won against a fixed opponent with random moves, illegal moves, the length of its thoughts,
entropy and gradient norm. All systems of a seed begin with the same weights. CPU only.

    python bench/self_play.py [--systems reinforce reinforce-pool rae rae-pool] [--seeds 0] [--steps 100] [--lr 3e-4]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from common import save, table

from burnish.run.metrics import read_metrics

GAME = Path(__file__).with_name("self_play_game.py")
SYSTEMS: dict[str, list[str]] = {
    "reinforce": ["algorithm=reinforce"],
    "reinforce-pool": ["algorithm=reinforce", "rollout.opponents={name: pool, share: 0.75, every: 10, keep: 8}"],
    "rae": ["algorithm=rae"],
    "rae-pool": ["algorithm=rae", "rollout.opponents={name: pool, share: 0.75, every: 10, keep: 8}"],
}
"""reinforce: the reward itself, without a baseline, as in the ablation of SPIRAL. Loss, batch and learning rate are the same for all."""
SHOWN = {"plugin": f"{GAME}:demonstrations", "options": {"num": 600, "noise": 0.7}}
CONFIG: dict[str, Any] = {
    "model": {"new": {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "mlp_size": 128, "max_positions": 256}},
    "data": {
        "train": {"task": "tic_tac_toe_self_play"},
        "validation": {"task": "tic_tac_toe_self_play", "limit": 100},
        "template": {"kind": "plain"},
    },
    "environment": {"name": f"{GAME}:ThinkingTicTacToe", "max_turns": 9},
    "warm_start": {"data": SHOWN, "updates": 300, "batch_size": 64, "max_tokens": 256, "optimizer": {"lr": 3e-3}},
    "rollout": {"prompts": 32, "n": 1, "max_tokens": 14},
    "validation": {"modes": {"sampled": {"temperature": 1, "max_tokens": 14}}},
    "run": {"samples_every": 1000, "save_every": 1000, "threads": 1},
}
EVERY = 20
HELD_OUT = "validation/sampled/environment/"
LAST = 10
"""Steps at the end whose mean is given."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--systems", nargs="+", default=["reinforce", "reinforce-pool", "rae", "rae-pool"], choices=list(SYSTEMS)
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--folder", type=Path, help="keeps the runs here; one that is complete is not made again")
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/self_play.json")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as temporary:
        for seed in args.seeds:
            folder = (args.folder or Path(temporary)) / f"seed-{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            for name in args.systems:
                rows.append(learn(name, seed, folder, args))
                save("self_play", rows, args.out)
                print(table(rows[-1:], COLUMNS), flush=True)
    print(table(rows, COLUMNS))
    print(f"saved {save('self_play', rows, args.out)}")


COLUMNS = ["system", "seed", "won_before", "won_best", "best_step", "won_after", "illegal_after", "thoughts_before"]
COLUMNS += ["thoughts_after", "entropy_after", "grad_norm_after"]


def learn(name: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the command line. The first of a seed makes the warm start that the others begin with."""
    file = folder / "self_play.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    command = ["train", str(file), *SYSTEMS[name], f"seed={seed}", f"training.steps={args.steps}"]
    command += [f"training.optimizer.lr={args.lr}", f"validation.every={EVERY}"]
    command += [f"run.directory={folder}", f"run.name={name}"]
    warm = next(folder.glob("*/warm_start"), None)
    command += ["model.new=null", f"model.path={warm}", "warm_start=null"] if warm is not None else []
    metrics = folder / name / "metrics.jsonl"
    if not metrics.is_file() or read_metrics(metrics)[-1]["step"] < args.steps:
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    row = {"work": "self_play", "system": name, "seed": seed, "steps": args.steps, "lr": args.lr}
    return row | outcome(metrics)


def outcome(metrics: Path) -> dict[str, Any]:
    """What a run came to, with [step, won, lost, illegal, thought] of every held-out measurement."""
    rows = read_metrics(metrics)
    held_out = [
        [row["step"], *(row[HELD_OUT + key] for key in ("won", "lost", "illegal", "thought_chars"))]
        for row in rows
        if f"{HELD_OUT}won" in row
    ]
    steps = [row for row in rows if row["step"] > 0]
    best = max(held_out, key=lambda row: row[1])

    def last(key: str) -> float:
        found = [row[key] for row in steps[-LAST:] if row.get(key) is not None]
        return sum(found) / len(found)

    return {
        "won_before": held_out[0][1],
        "won_best": best[1],
        "best_step": best[0],
        "won_after": held_out[-1][1],
        "illegal_before": held_out[0][3],
        "illegal_after": held_out[-1][3],
        "thoughts_before": held_out[0][4],
        "thoughts_after": held_out[-1][4],
        "entropy_after": last("actor/entropy"),
        "grad_norm_after": last("actor/grad_norm"),
        "held_out": held_out,
    }


if __name__ == "__main__":
    main()
