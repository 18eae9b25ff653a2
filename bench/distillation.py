"""Sampled tokens until an accuracy on the built-in task: learning from a teacher or demonstrations compared with rewards alone.

A small student has seen mostly wrong answers. It learns from one of these:

- the distributions of a teacher (on-policy distillation as a reward and as a loss; one sample of each of eight times as
  many prompts, because no group is needed)
- correct answers inside its groups (LUFFY, RL-PLUS)
- correct answers that are imitated besides RL
- rewards alone (GRPO)

All start from the same weights and draw the same number of samples per step. Sampled tokens are those that the student wrote.

python bench/distillation.py [--systems grpo luffy ...] [--steps 30] [--seeds 0 1]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save, table

from burnish.data.tasks.sort_digits import SortDigits
from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
KEY = "validation/greedy/accuracy"
PROMPTS, SAMPLES = 32, 8
LEVELS = (0.5, 0.8)
SMALL = "model.new={hidden_size: 64, num_layers: 2, num_heads: 4, mlp_size: 168, max_positions: 64}"
RIGHT = {4: 0.3, 5: 0.15, 6: 0.05, 7: 0.0}
"""How often the answers that the student has seen are right, by number of digits."""
CLEAN = "warm_start.data.options={num: 4000, clean: true}"
NO_FILTER, NO_KL = "algorithm.filters=[]", "algorithm.kl={loss: {coef: 0}, reference: none}"
SHOWN = ["data.demonstration_column=answer", "data.demonstrations_per_group=1", f"rollout.n={SAMPLES - 1}"]
IMITATED = [
    "data.demonstrations={task: sort_digits, options: {num: 2000, clean: true}}",
    "data.demonstrations_per_update=32",
]
ALONE = [f"rollout.prompts={PROMPTS * SAMPLES}", "rollout.n=1"]
"""As many samples, each of another prompt: a teacher needs no group to compare with."""
TEACHER = "algorithm.kl.reference.path={teacher}"
SYSTEMS: dict[str, list[str]] = {
    "grpo": ["algorithm=grpo", NO_KL],
    "distillation, reward": ["algorithm=on_policy_distillation", TEACHER, *ALONE],
    "distillation, loss": [
        "algorithm=on_policy_distillation",
        "algorithm.kl={reward: {coef: 0}, loss: {estimator: full, coef: 1}, reference: {path: '{teacher}'}}",
        *ALONE,
    ],
    "luffy": ["algorithm=luffy", NO_KL, *SHOWN],
    "rl_plus": ["algorithm=rl_plus", NO_KL, *SHOWN],
    "rl_sft": ["algorithm=rl_sft", NO_KL, *IMITATED],
    "distillation, loss, top 4": [
        "algorithm=on_policy_distillation",
        "algorithm.kl={reward: {coef: 0}, loss: {estimator: full, coef: 1, top: 4}, reference: {path: '{teacher}'}}",
        *ALONE,
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/distillation.json")
    args = parser.parse_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            student = started(folder, "student", seed, [SMALL, f"warm_start.data=[{{path: {flawed(folder, seed)}}}]"])
            teacher = started(folder, "teacher", seed, [CLEAN])
            taught = measured(folder / "teacher")
            for system in args.systems:
                rows.append({"teacher": taught[-1][2], **learn(folder, system, seed, args.steps, student, teacher)})
                save("distillation", rows, args.out)
                print(
                    table(rows[-1:], ["system", "seed", "before", "after", *(f"tokens_to_{x}" for x in LEVELS)]),
                    flush=True,
                )
    columns = ["system", "seed", "teacher", "before", "after", *(f"tokens_to_{x}" for x in LEVELS), "tokens"]
    print(table(rows, columns))
    print(f"saved {save('distillation', rows, args.out)}")


def flawed(folder: Path, seed: int) -> Path:
    """What the student has seen."""
    rows = SortDigits(seed).demonstrations(num=2000, seed=seed, right=RIGHT)
    path = folder / "flawed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def started(folder: Path, name: str, seed: int, overrides: list[str]) -> Path:
    """The directory of a warm-started model; one step of RL too small to change it measures it."""
    train(folder, name, seed, [*overrides, "training.steps=1", "training.optimizer.lr=1.0e-12", NO_FILTER])
    return folder / name / "warm_start"


def learn(folder: Path, system: str, seed: int, steps: int, student: Path, teacher: Path) -> dict[str, Any]:
    """One run, and how many tokens it sampled until it was that good."""
    name = system.replace(", ", "-").replace(" ", "_")
    own = [override.replace("{teacher}", str(teacher)) for override in SYSTEMS[system]]
    start = ["model.new=null", f"model.path={student}", "warm_start=null", f"training.steps={steps}"]
    train(folder, name, seed, [*start, NO_FILTER, "algorithm.aggregation=token-mean", *own])
    curve = measured(folder / name)
    reached = {
        f"tokens_to_{level}": next((tokens for _, tokens, accuracy in curve if accuracy >= level), None)
        for level in LEVELS
    }
    best = {"before": curve[0][2], "after": curve[-1][2], "tokens": curve[-1][1]}
    return {"work": "sort_digits", "system": system, "seed": seed, **best, **reached, "curve": curve}


def train(folder: Path, name: str, seed: int, overrides: list[str]) -> None:
    common = [f"rollout.prompts={PROMPTS}", f"rollout.n={SAMPLES}", "validation.every=5", "validation.limit=200"]
    common += [
        "validation.modes={greedy: {temperature: 0}}",
        "training.optimizer.lr=5.0e-4",
        f"seed={seed}",
        "run.threads=1",
    ]
    common += [f"run.directory={folder}", f"run.name={name}", "run.save_every=1000", "run.keep_best=false"]
    keys = {override.partition("=")[0] for override in overrides}
    chosen = [override for override in common if override.partition("=")[0] not in keys]
    command = [sys.executable, "-m", "burnish.cli.main", "train", str(RECIPE), *chosen, *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measured(run: Path) -> list[tuple[int, int, float]]:
    """(step, tokens sampled until then, held-out accuracy) at every validation."""
    found, tokens = [], 0.0
    for row in read_metrics(run / "metrics.jsonl"):
        if row["step"]:
            tokens += row["rollout/tokens"]
        if KEY in row:
            found.append((int(row["step"]), round(tokens), float(row[KEY])))
    return found


if __name__ == "__main__":
    main()
