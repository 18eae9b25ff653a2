"""A reward model that reasons (RM-R1) beside a Bradley-Terry scorer of the same base, on the same held-out pairs.

python bench/reasoning_reward_model.py [--seeds 0] [--pairs 4000] [--sft-updates 1000] [--steps 40] [--work FOLDER] [--seconds 3000]
python bench/reasoning_reward_model.py --model models/Qwen2.5-Coder-1.5B --train gsm8k_train.jsonl --test gsm8k_test.jsonl --work FOLDER --seconds 500

Without a model: a small decoder made from nothing on the task pair_verdict (two answers to sorting digits, one of them right). With one: the model
answers questions of GSM8K's files several times, and a right and a wrong answer to the same question are a pair. Pairs of --train questions are
trained on, pairs of --test questions are held out. A file of your own pairs (UltraFeedback's prompt, chosen, rejected) takes their place with
--train-pairs and --test-pairs.

Both start from the same base and see the same pairs. The judge is asked in both orders, and so is measured: `accuracy` is the mean over both orders,
`both_orders` the share of pairs with both right, `consistent` the share for which the same answer is preferred in both, `unread` the share of questions
without a verdict. A scorer does not depend on the order. Everything is in --work: the same command continues after --seconds or a kill.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import on_this_gpu, save, table

from burnish.config.yaml_text import render_yaml
from burnish.data.files import read_records
from burnish.data.pair_questions import verdict_of
from burnish.data.tasks.task import Dice
from burnish.run.metrics import read_metrics

NEW_MODEL = {"new": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "mlp_size": 336, "max_positions": 80}}
BETAS = {"betas": [0.9, 0.95], "schedule": "linear", "final": 0.1}
DIGITS = {"min_digits": 2, "max_digits": 3}
COLUMNS = [
    "model",
    "seed",
    "who",
    "accuracy",
    "both_orders",
    "consistent",
    "unread",
    "pairs",
    "trained_pairs",
    "wall_s",
]
INTERRUPT_S = 60.0
"""How long a command may take to save its last step after an interrupt."""


class OutOfTime(Exception):
    """--seconds are over; the same command continues."""


class Stages:
    """Runs commands of one folder to their ends, each once, until the time is over."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.end = folder, time.monotonic() + seconds
        self.notes = folder / "stages.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, float] = json.loads(self.notes.read_text()) if self.notes.exists() else {}

    def run(self, name: str, words: Sequence[str | Path]) -> float:
        """Run `burnish WORDS` unless it ended before; its seconds, all attempts together."""
        if f"{name} ended" in self.done:
            return self.done[name]
        left = self.end - time.monotonic()
        if left <= 0:
            raise OutOfTime(name)
        started = time.monotonic()
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "burnish.cli.main", *map(str, words)], stdout=log, stderr=log
            )
            try:
                status = process.wait(left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(INTERRUPT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                self._note(name, time.monotonic() - started)
                raise OutOfTime(name) from None
        self._note(name, time.monotonic() - started)
        if status != 0:
            sys.exit(f"burnish {words[0]} failed: see {self.folder / f'{name}.log'}")
        self._note(f"{name} ended", 0.0)
        return self.done[name]

    def _note(self, name: str, seconds: float) -> None:
        self.done[name] = self.done.get(name, 0.0) + seconds
        self.notes.write_text(json.dumps(self.done))


def main() -> None:
    args = parse_arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        for seed in args.seeds:
            stages = Stages((args.work or Path(place)) / f"seed-{seed}", args.seconds)
            try:
                rows += small(stages, seed, args) if args.model is None else real(stages, seed, args)
            except OutOfTime as stage:
                print(f"out of time in {stage}: the same command continues")
                break
    if rows:
        print(table(rows, COLUMNS))
        name = "reasoning_reward_model" if args.model is None else on_this_gpu("reasoning_reward_model-1.5b")
        print(f"saved {save(name, rows, args.out)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--seeds", type=int, nargs="+", default=[0])
    add("--model", type=Path, help="a model directory; without it a new small decoder")
    add("--train", type=Path, help="GSM8K's training file, for pairs of the model's own answers")
    add("--test", type=Path, help="GSM8K's test file")
    add("--train-pairs", type=Path, help="pairs to train on, in place of --train")
    add("--test-pairs", type=Path, help="held-out pairs, in place of --test")
    add("--questions", type=int, default=2000, help="training questions to answer; a quarter as many of the test file")
    add("--pairs", type=int, default=4000, help="most pairs to train on")
    add("--held-out", type=int, default=300, help="most held-out pairs")
    add("--steps", type=int, default=40, help="of RL")
    add("--sft-updates", type=int, default=1000, help="of the new decoder, on verdicts of a poor judge")
    add("--work", type=Path, help="where everything stays, so that the same command continues")
    add("--seconds", type=float, default=1e9, help="stop after so long")
    add("--out", type=Path, help="where the rows go instead of bench/results")
    args = parser.parse_args()
    if args.model is not None and args.work is None:
        parser.error("--model needs --work")
    has_pairs, has_files = args.train_pairs and args.test_pairs, args.train and args.test
    if args.model is not None and not (has_pairs or has_files):
        parser.error("--model needs --train and --test, or --train-pairs and --test-pairs")
    return args


# --- a small decoder made from nothing -------------------------------------------------------------------------------


def small(stages: Stages, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of base, judge and scorer on pair_verdict."""
    pairs = {"task": "pair_verdict", "options": {**DIGITS, "num": args.pairs}}
    sft = {
        "data": {"task": "pair_verdict", "options": {**DIGITS, "num": 8000, "flawed": 0.3}},
        "updates": args.sft_updates,
        "batch_size": 64,
        "max_tokens": 80,
        "optimizer": {"lr": 3e-3, "warmup": 20, **BETAS},
    }
    stages.run("sft", ["sft", recipe(stages, "sft", seed, {"model": NEW_MODEL, "sft": sft})])
    base = stages.folder / f"sft/checkpoints/step-{args.sft_updates:06d}"
    scorer = {
        "data": pairs,
        "held_out": {"task": "pair_verdict", "options": {**DIGITS, "num": args.held_out}},
        "updates": max(1, 3 * args.pairs // 64),
        "batch_size": 64,
        "max_tokens": 32,
        "centre": 0.01,
        "optimizer": {"lr": 2e-3, "warmup": 20, **BETAS},
    }
    judge = {
        "model": {"path": str(base)},
        "data": {
            "train": {"task": "pair_verdict", "options": DIGITS, "limit": 2 * args.pairs},
            "max_prompt_tokens": 40,
        },
        "reward": {"parts": "rm_r1"},
        "rollout": {"prompts": 32, "n": 8, "max_tokens": 36, "max_rows": 256},
        "algorithm": {
            "preset": "grpo",
            "aggregation": "token-mean",
            "kl": {"loss": {"coef": 0}, "reference": "none"},
            "filters": ["zero_signal"],
        },
        "training": {"steps": args.steps, "optimizer": {"lr": 3e-4, **BETAS}},
    }
    test = ["task:pair_verdict", "--max-tokens", "36", "--seed", str(seed), f"data.source.options={json.dumps(DIGITS)}"]
    return compare(stages, seed, "new, 0.5M", base, scorer, judge, test, args.pairs, args)


# --- a model that answers GSM8K --------------------------------------------------------------------------------------


def real(stages: Stages, seed: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of a model as judge before and after RL, and of a scorer made from it."""
    files = {}
    for split, source, given in (("train", args.train, args.train_pairs), ("test", args.test, args.test_pairs)):
        most = args.pairs if split == "train" else args.held_out
        files[split] = given or answered_pairs(stages, seed, split, source, args, most)
        words = ["data", "questions", files[split], stages.folder / f"{split}_questions.jsonl"]
        stages.run(f"questions-{split}", words)
    num_pairs = sum(1 for _ in read_records(str(files["train"])))
    scorer = {
        "data": {"path": str(files["train"]), "limit": args.pairs},
        "held_out": {"path": str(files["test"]), "limit": args.held_out},
        "updates": max(1, min(num_pairs, args.pairs) // 32),
        "batch_size": 32,
        "max_tokens": 2048,
        "centre": 0.01,
        "optimizer": {"lr": 5e-6, "warmup": 10},
    }
    judge = {
        "model": {"path": str(args.model.resolve()), "dtype": "bfloat16"},
        "data": {
            "train": {"path": str(stages.folder / "train_questions.jsonl"), "limit": 2 * args.pairs},
            "max_prompt_tokens": 1536,
        },
        "reward": {"parts": "rm_r1"},
        "rollout": {"prompts": 64, "n": 8, "max_tokens": 768},
        "algorithm": {
            "preset": "grpo",
            "aggregation": "token-mean",
            "kl": {"loss": {"coef": 0.001}},
            "filters": ["zero_signal"],
        },
        "training": {"steps": args.steps, "mini_batches": 2, "optimizer": {"lr": 1e-6}},
        "run": {"save_every": 1000, "keep_last": 1},
    }
    test = [stages.folder / "test_questions.jsonl", "--max-tokens", "768", "--seed", str(seed)]
    test += ["data.max_prompt_tokens=1536", "data.overlong_prompts=filter"]
    return compare(stages, seed, args.model.name, args.model, scorer, judge, test, min(num_pairs, args.pairs), args)


def answered_pairs(stages: Stages, seed: int, split: str, source: Path, args: argparse.Namespace, most: int) -> Path:
    """Pairs of a right and a wrong answer of the model to the same question, in a file."""
    limit = args.questions if split == "train" else max(1, args.questions // 4)
    out = stages.folder / f"{split}_answers.jsonl"
    words = ["eval", args.model, source, "data.source.shape=gsm8k", "--n", "8", "--temperature", "1", "--limit", limit]
    stages.run(f"answers-{split}", [*words, "--max-tokens", "512", "--seed", seed, "--reward", "number", "--out", out])
    answers: dict[str, dict[bool, list[str]]] = {}
    prompts: dict[str, str] = {}
    asked = [record["question"] for _, record in read_records(str(source))]
    for _, row in read_records(str(out)):
        if row["truncated"]:  # an answer without an end would give itself away
            continue
        prompts[row["id"]] = asked[int(row["id"].rpartition("/")[2])]
        answers.setdefault(row["id"], {True: [], False: []})[row["accuracy"] == 1].append(row["completion"].strip())
    rows = []
    for name, found in answers.items():
        if found[True] and found[False] and len(rows) < most:
            dice = Dice(seed, "pair", name)
            right, wrong = (one[dice.between(0, len(one) - 1)] for one in (found[True], found[False]))
            rows.append({"id": name, "prompt": prompts[name], "chosen": right, "rejected": wrong})
    path = stages.folder / f"{split}_pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- both ------------------------------------------------------------------------------------------------------------


def compare(
    stages: Stages,
    seed: int,
    model: str,
    base: Path,
    scorer: dict[str, Any],
    judge: dict[str, Any],
    test: list[Any],
    num_pairs: int,
    args: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Train the scorer and the judge on `num_pairs` pairs, and measure both and the base on the held-out pairs."""
    dtype = judge["model"].get("dtype", "float32")
    scoring = {
        "model": {"path": str(base.resolve()), "dtype": dtype},
        "reward_model": scorer,
        "run": {"save_every": 1000, "keep_last": 1},
    }
    seconds = {"scorer": stages.run("scorer", ["reward-model", recipe(stages, "scorer", seed, scoring)])}
    seconds["judge"] = stages.run("judge", ["train", recipe(stages, "judge", seed, judge)])
    rows = []
    for who, directory in (("base as judge", base), ("judge after RL", stages.folder / "judge")):
        out = stages.folder / f"{who.replace(' ', '-')}.jsonl"
        words = ["eval", directory, *test, "--reward", "rm_r1", "--limit", 2 * args.held_out, "--out", out]
        stages.run(f"eval-{who.replace(' ', '-')}", words)
        rows.append({"who": who, **judge_accuracy(out), "wall_s": seconds["judge"] if "RL" in who else 0.0})
    held = [row for row in read_metrics(stages.folder / "scorer/metrics.jsonl") if "validation/pairs/accuracy" in row][
        -1
    ]
    right = held["validation/pairs/accuracy"]
    rows.append(
        {"who": "Bradley-Terry", "accuracy": right, "both_orders": right, "consistent": 1.0, "unread": 0.0}
        | {"pairs": rows[0]["pairs"], "wall_s": seconds["scorer"]}
    )
    for row in rows:
        row.update(model=model, seed=seed, trained_pairs=0 if row["who"] == "base as judge" else num_pairs)
        row.update(sft_updates=args.sft_updates if args.model is None else 0, steps=args.steps)
    return rows


def recipe(stages: Stages, name: str, seed: int, content: dict[str, Any]) -> Path:
    """Write a recipe whose run directory is in the folder of the stages."""
    path = stages.folder / f"{name}.yaml"
    run = {"directory": str(stages.folder), "name": name, "save_every": 100, **content.get("run", {})}
    path.write_text(render_yaml({"seed": seed, **content, "run": run}))
    return path


def judge_accuracy(completions: Path) -> dict[str, float]:
    """The measures of a judge, from its verdicts on rows of which each two are one pair in both orders."""
    verdicts: dict[int, dict[str, str | None]] = {}
    for _, row in read_records(str(completions)):
        index = int(row["id"].rpartition("/")[2])
        verdicts.setdefault(index // 2, {})[row["answer"]] = verdict_of(row["completion"])
    both = [pair for pair in verdicts.values() if len(pair) == 2]
    asked = [(answer, verdict) for pair in both for answer, verdict in pair.items()]
    preferred = [[None if verdict is None else verdict == answer for answer, verdict in pair.items()] for pair in both]
    return {
        "accuracy": sum(answer == verdict for answer, verdict in asked) / len(asked),
        "both_orders": sum(one is True and other is True for one, other in preferred) / len(both),
        "consistent": sum(one is not None and one == other for one, other in preferred) / len(both),
        "unread": sum(verdict is None for _, verdict in asked) / len(asked),
        "pairs": len(both),
    }


if __name__ == "__main__":
    main()
