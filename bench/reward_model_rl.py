"""RL from a reward model: it learns from pairs that the checker judged, and a policy learns from its score alone.

python bench/reward_model_rl.py [--seeds 0 1 2] [--steps 60] [--updates 800] [--out FILE]

For each seed: supervised training on flawed demonstrations of sort_digits; pairs of the correct answer and a corrupted one
that the checker rejects; a reward model trained on them, from the supervised model; GRPO with its score as the only reward
(the checker has weight 0 and only measures). The result is held-out accuracy before and after, by the checker.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.config.yaml_text import render_yaml
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Dice
from burnish.run.metrics import read_metrics

DIGITS = {"min_digits": 4, "max_digits": 6}
MODEL = {"new": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "mlp_size": 336, "max_positions": 64}}
BETAS = {"betas": [0.9, 0.95], "schedule": "linear", "final": 0.1}
ACCURACY = "validation/greedy/accuracy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="of RL")
    parser.add_argument("--updates", type=int, default=800, help="of the reward model, 64 pairs each")
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/reward_model_rl.json")
    args = parser.parse_args()
    rows = [learn(seed, args.steps, args.updates) for seed in args.seeds]
    print(table(rows, ["seed", "pairs_accuracy", "before", "after", "best", "score_before", "score_after", "wall_s"]))
    print(f"saved {save('reward_model_rl', rows, args.out)}")


def learn(seed: int, steps: int, updates: int) -> dict[str, Any]:
    """One seed from nothing to the end, through the command line."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        policy = burnish("sft", folder, seed, supervised()) / "checkpoints/step-000200"
        for split, num in (("train", 64 * updates), ("test", 500)):
            lines = [json.dumps(row) + "\n" for row in verified_pairs(num, seed, split)]
            (folder / f"{split}.jsonl").write_text("".join(lines))
        scorer = burnish("reward-model", folder, seed, scoring(policy, folder, updates))
        held = read_metrics(scorer / "metrics.jsonl")[-1]
        checkpoint = scorer / f"checkpoints/step-{updates:06d}"
        rows = read_metrics(burnish("train", folder, seed, rl(policy, checkpoint, steps)) / "metrics.jsonl")
    curve = [[row["step"], row[ACCURACY]] for row in rows if ACCURACY in row]
    scores = [row["reward/part/model"] for row in rows if "reward/part/model" in row]
    return {
        "work": "sort_digits, 4 to 6 digits",
        "seed": seed,
        "pairs_accuracy": held["validation/pairs/accuracy"],
        "before": curve[0][1],
        "after": curve[-1][1],
        "best": max(accuracy for _, accuracy in curve),
        "score_before": scores[0],
        "score_after": scores[-1],
        "wall_s": time.perf_counter() - started,
        "curve": curve,
    }


def burnish(command: str, folder: Path, seed: int, recipe: dict[str, Any]) -> Path:
    """Run a command to its end; its run directory."""
    path = folder / f"{command}.yaml"
    recipe = {"seed": seed, "run": {"directory": str(folder), "name": command, "save_every": 1000}, **recipe}
    path.write_text(render_yaml(recipe))
    subprocess.run(
        [sys.executable, "-m", "burnish.cli.main", command, str(path)], check=True, stdout=subprocess.DEVNULL
    )
    return folder / command


def supervised() -> dict[str, Any]:
    data = {"task": "sort_digits", "options": {"num": 2000, **DIGITS}}
    stage = {"data": data, "updates": 200, "batch_size": 128, "optimizer": {"lr": 3e-3, "warmup": 20, **BETAS}}
    return {"model": MODEL, "sft": stage}


def scoring(policy: Path, folder: Path, updates: int) -> dict[str, Any]:
    stage = {
        "data": {"path": str(folder / "train.jsonl")},
        "held_out": {"path": str(folder / "test.jsonl")},
        "updates": updates,
        "batch_size": 64,
        "max_tokens": 32,
        "centre": 0.01,
        "optimizer": {"lr": 2e-3, "warmup": 20, **BETAS},
    }
    return {"model": {"path": str(policy)}, "reward_model": stage}


def rl(policy: Path, scorer: Path, steps: int) -> dict[str, Any]:
    task = {"task": "sort_digits", "options": DIGITS}
    return {
        "model": {"path": str(policy)},
        "data": {"train": task, "validation": task, "max_prompt_tokens": 16},
        "reward": {
            "parts": [
                {"name": "model", "options": {"path": str(scorer), "standardise": True, "clip": 2}},
                {"name": "task", "weight": 0},
            ]
        },
        "rollout": {"prompts": 64, "n": 8, "max_tokens": 8, "max_rows": 512},
        # The pairs hold whole answers only, so nobody told the scorer what an unfinished one is worth.
        "algorithm": {
            "preset": "grpo",
            "aggregation": "token-mean",
            "kl": {"loss": {"coef": 0.05}, "reference": "frozen"},
            "shaping": [{"name": "stop_properly", "coef": -2}],
        },
        "training": {"steps": steps, "optimizer": {"lr": 3e-4, **BETAS}},
        "validation": {"limit": 500, "every": 20},
    }


def verified_pairs(num: int, seed: int, split: str) -> list[dict[str, str]]:
    """Right answers, each beside a spoilt one that the checker refuses."""
    task = make_task("sort_digits", DIGITS, seed)
    rows: list[dict[str, str]] = []
    index = 0
    while len(rows) < num:
        row = task.row(split, index)
        assert isinstance(row.prompt, str)
        wrong = spoilt(Dice(seed, "spoilt", split, index), row.prompt.removesuffix(">"), row.answer)
        index += 1
        if wrong and task.score(wrong, row.answer, row.extra) == 0:
            rows.append({"prompt": row.prompt, "chosen": row.answer, "rejected": wrong})
    return rows


def spoilt(dice: Dice, digits: str, answer: str) -> str:
    """An answer with one of the mistakes that sorting digits knows; now and then it is still right."""
    at, other = dice.between(0, len(answer) - 1), str(dice.between(0, 9))
    next_to = min(at, len(answer) - 2)
    choices = [
        digits,
        digits[: at + 1] + "".join(sorted(digits[at + 1 :])),
        "".join(sorted(digits[: at + 1])) + digits[at + 1 :],
        answer[:next_to] + answer[next_to + 1] + answer[next_to] + answer[next_to + 2 :],
        "".join(sorted(answer[:at] + other + answer[at + 1 :])),
        answer[:at] + other + answer[at + 1 :],
        answer[:at] + answer[at + 1 :],
        "".join(sorted(answer + other)),
        answer[: at + 1] + answer[at:],
    ]
    return choices[dice.between(0, len(choices) - 1)]


if __name__ == "__main__":
    main()
