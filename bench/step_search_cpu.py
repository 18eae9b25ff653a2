"""From a model to a step reward model to a better search, with the commands a user has: a few minutes on two CPU cores.

The task is to sort digits, one digit a step (`4930>` is answered by `0,3,4,9`). Held-out digits are never trained on.

    sft            a decoder from nothing learns from demonstrations that take a wrong digit now and then
    step_values    it answers training rows, and every step is continued (Math-Shepherd, 2312.08935)
    data steps     the trees become rows of prompt, steps and values
    reward-model   a step reward model learns the values
    scaling        strategies with and without that model on held-out rows, accuracy against tokens

    python bench/step_search_cpu.py [--seed 0] [--work FOLDER]

Sizes and rates are chosen here and were not tuned. Results: bench/results/step_search_cpu.json, one set of rows a seed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save_beside, table

from burnish.cli.main import main as burnish
from burnish.config.model import Model, NewModel
from burnish.data.tasks.sort_digits import SortDigits
from burnish.data.tasks.task import Dice
from burnish.models.policy import load_policy

DEMONSTRATIONS, SEARCHED, TESTED = 3000, 500, 300
WRONG_DIGIT = 0.12
"""Probability that a step of a demonstration takes a random one of the digits that are left."""
MODEL = {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "mlp_size": 336, "max_positions": 64}
STEP = ","
STRATEGIES: tuple[dict[str, Any], ...] = (
    {"name": "majority"},
    {"name": "weighted_vote"},
    {"name": "best_of_n"},
    {"name": "beam_search"},
    {"name": "dvts"},
    {"name": "rebase"},
    {"name": "mcts"},
)
AGGREGATES = {"best_of_n": ("last", "min", "prod", "mean")}
"""How step scores become the score of an answer; prod for the other strategies."""
COLUMNS = ["seed", "strategy", "budget", "accuracy", "low", "high", "minus_majority", "tokens", "times"]


def flawed(digits: str, seed: int, index: int) -> str:
    """Sort the digits step by step, with a wrong choice now and then."""
    dice, left, steps = Dice(seed, "flawed", index), sorted(digits), []
    while left:
        place = dice.between(0, len(left) - 1) if dice.unit() < WRONG_DIGIT else 0
        steps.append(left.pop(place))
    return STEP.join(steps)


def write_rows(folder: Path, seed: int) -> None:
    """Write demonstrations, rows to search and rows to test. No digits of a test row are in the others, in any order."""
    task = SortDigits(seed)

    def row(split: str, index: int) -> dict[str, str]:
        prompt = str(task.row(split, index).prompt)
        return {"prompt": prompt, "answer": STEP.join(sorted(prompt.removesuffix(">")))}

    shown = [row("train", k)["prompt"] for k in range(DEMONSTRATIONS)]
    files = {
        "demonstrations": [{"prompt": p, "completion": flawed(p[:-1], seed, k)} for k, p in enumerate(shown)],
        "train": [row("train", k) for k in range(DEMONSTRATIONS, DEMONSTRATIONS + SEARCHED)],
        "test": [row("test", k) for k in range(TESTED)],
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def run(*words: object) -> float:
    """Run a command of burnish in this process and return its seconds."""
    started = time.perf_counter()
    if burnish([str(word) for word in words]):
        raise SystemExit(f"failed: burnish {' '.join(map(str, words))}")
    return time.perf_counter() - started


def recipe(path: Path, sections: dict[str, Any]) -> Path:
    """Write a recipe; JSON is YAML."""
    path.write_text(json.dumps(sections, indent=1))
    return path


def last_checkpoint(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    return max((folder / "checkpoints").glob("step-*"))


def measure(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Run the five stages and return a row for each point of the last."""
    write_rows(folder, seed)
    (folder / "new").mkdir(exist_ok=True)
    seconds: dict[str, float] = {}
    optimizer = {"lr": 3e-3, "warmup": 20, "schedule": "linear", "final": 0.1}
    sft = {"data": {"path": "demonstrations.jsonl"}, "updates": 250, "batch_size": 128, "max_tokens": 48}
    load_policy(Model(new=NewModel(**MODEL), device="cpu"), None, f"0123456789>{STEP}", seed=seed).save(folder / "new")
    start = {"seed": seed, "model": {"path": str(folder / "new")}, "sft": sft | {"optimizer": optimizer}}
    in_folder = [f"run.directory={folder}"]
    seconds["sft"] = run("sft", recipe(folder / "sft.yaml", start), *in_folder, "run.name=policy")
    policy = last_checkpoint(folder / "policy")
    asked = ["--reward", "exact", "--temperature", 1, "--max-tokens", 16, "--seed", seed]
    search = [
        "--strategy",
        "step_values",
        "strategy.n=4",
        "strategy.rollouts=8",
        f'strategy.step="{STEP}"',
        "--keep-trees",
    ]
    trees, steps = folder / "searched.jsonl", folder / "steps.jsonl"
    seconds["step_values"] = run("eval", policy, folder / "train.jsonl", *asked, *search, "--out", trees)
    seconds["data"] = run("data", "steps", trees, steps, "--step", STEP, "--prompts", folder / "train.jsonl")
    labelled = steps.read_text().splitlines(keepends=True)
    cut = len(labelled) * 9 // 10
    (folder / "labels.jsonl").write_text("".join(labelled[:cut]))
    (folder / "held_out.jsonl").write_text("".join(labelled[cut:]))
    scorer = {
        "seed": seed,
        "model": {"path": str(policy)},
        "reward_model": {
            "steps": {"delimiter": STEP},
            "data": {"path": "labels.jsonl"},
            "held_out": {"path": "held_out.jsonl"},
            "updates": 200,
            "batch_size": 64,
            "max_tokens": 48,
            "optimizer": {"lr": 1e-3, "warmup": 20, "schedule": "linear", "final": 0.1},
        },
    }
    seconds["reward_model"] = run("reward-model", recipe(folder / "scorer.yaml", scorer), *in_folder, "run.name=scorer")
    path = str(last_checkpoint(folder / "scorer"))
    sections = []
    for one in STRATEGIES:
        own = {"step": STEP} if one["name"] in ("beam_search", "dvts", "rebase", "mcts") else {}
        for how in AGGREGATES.get(one["name"], ("prod",)):
            verifier = {"verifier": {"name": "model", "options": {"path": path, "aggregate": how}}}
            sections.append(json.dumps({**one, **own, **(verifier if one["name"] != "majority" else {})}))
    words = [*asked, "--out", folder / "scaling", "--scaling", *sections, "best_of_n@oracle", "--budgets", 1, 4, 16]
    seconds["scaling"] = run("eval", policy, folder / "test.jsonl", *words)
    found = json.loads((folder / "scaling" / "scaling.json").read_text())
    rows = [point_row(point, seed) for point in found["points"]]
    return [*rows, {"seed": seed, "strategy": "seconds", "budget": None, "seconds": seconds, "labels": len(labelled)}]


def point_row(point: dict[str, Any], seed: int) -> dict[str, Any]:
    """One strategy at one budget."""
    none = {"mean": None, "low": None, "high": None}
    versus, equal = (point[name] or none for name in ("versus_majority", "versus_equal_tokens"))
    return {
        "seed": seed,
        "strategy": point["strategy"],
        "budget": point["budget"],
        "accuracy": point["accuracy"]["mean"],
        "low": point["accuracy"]["low"],
        "high": point["accuracy"]["high"],
        "minus_majority": versus["mean"],
        "versus_low": versus["low"],
        "versus_high": versus["high"],
        "minus_equal_tokens": equal["mean"],
        "equal_tokens_low": equal["low"],
        "equal_tokens_high": equal["high"],
        "tokens": point["tokens"],
        "times": point["times_one_answer"],
        "estimate": point["estimate"],
        "failed": point["num_failed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder of everything (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.work or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        rows = measure(folder, args.seed)
    print("\n" + table(rows, COLUMNS))
    print(f"\nsaved {save_beside('step_search_cpu', rows, lambda row: (row['seed'], row['strategy'], row['budget']))}")


if __name__ == "__main__":
    main()
