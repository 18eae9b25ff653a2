"""Algorithms on GSM8K with a real model: two seeds each, with a learning rate that the test file has not seen.

    python bench/gsm8k_rows.py MODEL --data DIR --work FOLDER [--systems dapo gspo max_rl] [--seeds 0 1] [--steps 40]
    python bench/gsm8k_rows.py --tiny               a model of its own, in about a minute on a CPU; saves nothing

`--data` is the folder of gsm8k_train.jsonl and gsm8k_test.jsonl. A system is a preset, with recipes/gsm8k_NAME.yaml where there is one and else
recipes/gsm8k.yaml. MaxRL (2602.02710) is the new one by default: rewards of 0 and 1 are what it is made for, its formula was checked in the paper and in
two programs, and a step costs what one of GSPO costs.

    choose    `--held-out` questions of the training file are never trained on. Runs of `--choose-steps` with the seed 100 and each of `--rates`
              are measured on them; the best rate is the system's. With one rate, or --choose-steps 0 (the recipe's rate), nothing is chosen.
    rows      every system and seed with that rate, greedy accuracy on all questions of the test file at the end

DAPO asks for twice the prompts of a step, so it makes half the steps. The accuracy of the base is measured once, before the first run. A run that
was interrupted goes on with the same command; rows are saved as runs end. The optimizer's state of a run that ended is deleted (18 GiB), and
its model too unless `--keep` names it (`--keep gspo-0`). Results: bench/results/gsm8k_rows[-gpu].json.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import on_this_gpu, save_beside, table, tiny_chat_model

from burnish.evaluation.statistics import wilson_interval
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
CHOOSING_SEED = 100
KEY = "validation/greedy/accuracy"
BASE_TOKENS = 1024
"""Tokens of an answer of the base, as in the recipe's validation."""
STEPS_SHARE = {"dapo": 0.5}
"""Steps of a system as a share of --steps."""
COLUMNS = ["system", "seed", "steps", "lr", "before", "after", "low", "high", "questions", "wall_s", "tokens"]
ALPHABET = "".join(chr(code) for code in range(32, 127)) + "\n"
TEMPLATE = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
"""Of the model of `--tiny`."""
TINY = (
    "model.dtype=float32",
    "model.device=cpu",
    "rollout={prompts: 4, n: 4, max_tokens: 8}",
    "training.mini_batches=2",
    "reward.workers=1",
    "validation.modes={greedy: {max_tokens: 8}}",
)


class Rows:
    """Runs trainings in a folder, and reads what they measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.folder = args, args.work.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model = (
            tiny_chat_model(self.folder / "tiny", ALPHABET, TEMPLATE, 512) if args.tiny else args.model.resolve()
        )
        self.files = prepared(self.folder, args.data, args.held_out)
        self.base: float | None = None

    def rate_of(self, system: str) -> tuple[float | None, str]:
        """The learning rate of a system (None: its recipe's), and how it was chosen."""
        args = self.args
        if args.choose_steps == 0:
            return None, "the recipe's"
        if len(args.rates) == 1:
            return args.rates[0], "given"
        found = {}
        for rate in args.rates:
            name = f"choose-{system}-{rate:g}"
            found[rate] = self.train(name, system, CHOOSING_SEED, args.choose_steps, rate, "held_out")[-1][KEY]
            print(f"{system}: {found[rate]:.3f} of the held-out training questions with lr {rate:g}", flush=True)
        best = max(found, key=lambda rate: found[rate])
        return best, ", ".join(f"{rate:g}: {value:.4f}" for rate, value in found.items())

    def row(self, system: str, seed: int, rate: float | None, chosen: str) -> dict[str, Any]:
        """Train a system with a seed and measure it on the test file."""
        steps = max(1, round(self.args.steps * STEPS_SHARE.get(system, 1.0)))
        name = f"{system}-{seed}"
        if self.base is None:
            self.base = self.measured_base()
        metrics = self.train(name, system, seed, steps, rate, "test")
        after, questions = metrics[-1][KEY], sum(1 for _ in (self.folder / "test.jsonl").open())
        _, low, high = wilson_interval(after, questions)
        tokens = sum(row.get("rollout/tokens", 0) for row in metrics)
        row = {"system": f"{system} {self.args.label}".strip(), "seed": seed, "steps": steps, "lr": rate}
        row |= {"chosen": chosen, "before": self.base, "after": after, "low": low, "high": high, "questions": questions}
        return row | {"wall_s": metrics[-1]["time/elapsed_s"], "tokens": tokens, "more": self.args.set}

    def measured_base(self) -> float:
        """The accuracy of the model before training, greedy, on the test file."""
        out = self.folder / "base"
        if not any(out.glob("*.json")):
            tokens = str(8 if self.args.tiny else BASE_TOKENS)
            words = ["eval", str(self.model), str(self.files["test"]), "--reward", "number", "--max-tokens", tokens]
            words += ["--device", "cpu"] if self.args.tiny else []
            subprocess.run([sys.executable, "-m", "burnish.cli.main", *words, "--out", str(out)], check=True)
        return float(json.loads(next(out.glob("*.json")).read_text())["accuracy"])

    def train(
        self, name: str, system: str, seed: int, steps: int, rate: float | None, data: str
    ) -> list[dict[str, Any]]:
        """Run `burnish train` to its end, unless it has ended, and return its metrics."""
        run = self.folder / name
        finished = run / "finished"
        asked = json.dumps([system, seed, steps, rate, data, self.args.held_out, self.args.set])
        if finished.exists() and finished.read_text() != asked:
            raise SystemExit(f"{run} has a run of other settings, {finished.read_text()}: give another --work")
        if not finished.exists():
            recipe = RECIPES / f"gsm8k_{system}.yaml"
            words = [str(recipe)] if recipe.exists() else [str(RECIPES / "gsm8k.yaml"), f"algorithm={system}"]
            words += [f"seed={seed}", f"model.path={self.model}", f"run.directory={self.folder}", f"run.name={name}"]
            words += [f"data.train.path={self.files['train']}", f"data.validation.path={self.files[data]}"]
            words += [f"training.steps={steps}", "validation.before=false"]
            words += [f"validation.every={steps}", "run.save_every=1000", "run.keep_last=1"]
            words += [] if rate is None else [f"training.optimizer.lr={rate}"]
            words += [*(TINY if self.args.tiny else ()), *self.args.set]
            print(f"--- {name}: {steps} steps", flush=True)
            done = subprocess.run([sys.executable, "-m", "burnish.cli.main", "train", *words])
            if done.returncode:
                raise SystemExit(f"{name} ended with status {done.returncode}; the same command goes on")
            finished.write_text(asked)
            free_disk(run, name in self.args.keep)
        return read_metrics(run / "metrics.jsonl")


def free_disk(run: Path, is_model_kept: bool) -> None:
    """Delete what a run that has ended needs no more."""
    if is_model_kept:
        Checkpoints(run / "checkpoints", keep_last=1).delete_training_state()
    else:
        shutil.rmtree(run / "checkpoints")


def prepared(folder: Path, data: Path | None, num_held_out: int) -> dict[str, Path]:
    """The files of questions: `train` and `held_out` are parts of the training file, drawn once, and `test` is the test file."""
    files = {name: folder / f"{name}.parquet" for name in ("train", "held_out", "test")}
    if not all(path.exists() for path in files.values()):
        lines = sums(60) if data is None else (data / "gsm8k_train.jsonl").read_text().splitlines(keepends=True)
        test = sums(12, seed=1) if data is None else (data / "gsm8k_test.jsonl").read_text().splitlines(keepends=True)
        held_out = set(random.Random(0).sample(range(len(lines)), num_held_out))
        parts = {
            "train": [line for k, line in enumerate(lines) if k not in held_out],
            "held_out": [lines[k] for k in sorted(held_out)],
            "test": test,
        }
        for name, rows in parts.items():
            raw = folder / f"{name}.jsonl"
            raw.write_text("".join(rows))
            words = ["data", "prepare", "gsm8k", str(raw), str(files[name]), "--force"]
            subprocess.run([sys.executable, "-m", "burnish.cli.main", *words], check=True)
    return files


def sums(count: int, seed: int = 0) -> list[str]:
    """Sums in the layout of GSM8K, for --tiny."""
    dice = random.Random(seed)
    pairs = [(dice.randint(1, 9), dice.randint(1, 9)) for _ in range(count)]
    return [
        json.dumps({"question": f"{a}+{b}={k}?", "answer": f"#### {a + b}"}) + "\n" for k, (a, b) in enumerate(pairs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, nargs="?", help="a Hugging Face directory")
    add("--data", type=Path, help="folder of gsm8k_train.jsonl and gsm8k_test.jsonl")
    add("--work", type=Path, help="folder of the runs")
    add("--systems", nargs="+", default=["dapo", "gspo", "max_rl"])
    add("--seeds", nargs="+", type=int, default=[0, 1])
    add("--steps", type=int, default=40, help="of every run; half of them for DAPO")
    add("--rates", nargs="+", type=float, default=[2e-6, 5e-6], help="learning rates to choose from")
    add("--choose-steps", type=int, default=10, help="of the runs that choose the rate; 0: the recipe's rate")
    add("--held-out", type=int, default=512, help="questions of the training file that choose")
    add("--keep", nargs="*", default=[], metavar="NAME", help="runs whose model stays, such as gspo-0")
    add("--label", default="", help="added to the system's name in the results, such as fp8")
    add("--set", nargs="*", default=[], metavar="key=value", help="further settings of every training")
    add("--tiny", action="store_true")
    args = parser.parse_args()
    if not args.tiny and (args.model is None or args.data is None or args.work is None):
        parser.error("give a model directory, --data and --work, or --tiny")
    temporary = tempfile.TemporaryDirectory() if args.tiny else None
    if temporary is not None:
        args.work, args.data, args.steps, args.choose_steps, args.held_out = Path(temporary.name), None, 4, 2, 16
        args.systems, args.seeds, args.keep = (
            [one for one in args.systems if one != "dapo"],
            [0],
            [*args.keep, "gspo-0"],
        )
    runs, rows = Rows(args), []
    for seed in args.seeds:
        for system in args.systems:
            rows.append(runs.row(system, seed, *runs.rate_of(system)))
            print(table(rows, COLUMNS), flush=True)
            if temporary is None:
                print(f"saved {save_beside(on_this_gpu('gsm8k_rows'), rows, lambda row: (row['system'], row['seed']))}")
    if temporary is not None:
        temporary.cleanup()
        print("tiny: nothing is saved")


if __name__ == "__main__":
    main()
