"""The stages of DeepSeek-R1 on real weights (recipes/r1_small.yaml), with the accuracy of the base and after each stage.

    python bench/r1_stages.py --model models/qwen2.5-coder-1.5b --gsm8k DIR --work runs/r1 --seconds 300
    python bench/r1_stages.py --model models/smollm2-135m --sums --small --work runs/r1-sums

`--gsm8k` is the folder of gsm8k_train.jsonl and gsm8k_test.jsonl. `--sums` makes sums of numbers below 50 in the same layout, for a model of
135M parameters on a CPU; `--small` makes all sizes small. `--seconds` is the time of each training stage: the script measures a few steps
of the base first and sets the numbers of steps. Everything is in the folder `--work`: a killed run continues with the same command, and a
finished one prints its table again. Further `key=value` words override the recipe.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import on_this_gpu, save, table

from burnish.config.loading import dump, load
from burnish.config.recipe_names import recipe_path
from burnish.config.stages import StagesConfig, load_stage_configs
from burnish.run.metrics import read_metrics
from burnish.run.stage_index import StageIndex

RECIPE = "r1_small"
MEASURED = ("base", "cold_start", "reasoning", "second_sft", "all_scenarios")
MADE = ("demonstrations", "pairs")
"""Stages that make rows, whose numbers are saved."""
LENGTHS = {
    "cold_start": "sft.updates",
    "reasoning": "training.steps",
    "second_sft": "sft.updates",
    "helpfulness": "reward_model.updates",
    "all_scenarios": "training.steps",
}
"""The key of each training stage that says how long it is."""
PROBES = {"cold_start": ("sft", "sft.updates", 4), "reasoning": ("train", "training.steps", 3)}
"""Stages that are measured with a few steps: their command and the key of their length."""
SMALL = (
    "measure.limit=100",
    "measure.max_tokens=64",
    "stages.cold_start.config.sft.updates=20",
    "stages.cold_start.config.sft.batch_size=8",
    "stages.cold_start.config.sft.data.options.num=200",
    "stages.reasoning.config.rollout={prompts: 8, n: 8, max_tokens: 64}",
    "stages.reasoning.config.training={steps: 3, mini_batches: 1, token_budget: 4096}",
    "stages.reasoning.config.reward.workers=1",
    "stages.samples.options.limit=60",
    "stages.samples.options.max_tokens=64",
    "stages.second_sft.config.sft.updates=20",
    "stages.second_sft.config.sft.batch_size=8",
    "stages.helpfulness.config.reward_model.updates=5",
    "stages.helpfulness.config.reward_model.batch_size=4",
    "stages.all_scenarios.config.rollout={prompts: 8, n: 8, max_tokens: 64}",
    "stages.all_scenarios.config.training={steps: 3, mini_batches: 1, token_budget: 4096}",
    "stages.all_scenarios.config.reward.workers=1",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--gsm8k", type=Path, metavar="DIR", help="the folder of gsm8k_train.jsonl and gsm8k_test.jsonl")
    data.add_argument("--sums", action="store_true", help="sums of numbers below 50 instead")
    parser.add_argument("--work", type=Path, required=True, help="the folder of data, stages and results")
    parser.add_argument("--seconds", type=float, help="time of each training stage; without it, the recipe's steps")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    make_data(args.work / "data", args.gsm8k)
    overrides = planned_overrides(args)
    burnish(args.work, "stages", RECIPE, *overrides)
    rows = results(args, overrides)
    print(table(rows, ["model", "accuracy", "low", "high", "answers", "formatted", "tokens", "seconds", "steps"]))
    name = f"r1_stages{'-sums' if args.sums else ''}{'-small' if args.small else ''}"
    print(f"wrote {save(on_this_gpu(name), rows)}")


def burnish(work: Path, *words: str) -> None:
    """Run a command of burnish in the work folder."""
    done = subprocess.run([sys.executable, "-m", "burnish.cli.main", *words], cwd=work)
    if done.returncode:
        raise SystemExit(f"burnish {words[0]} ended with status {done.returncode}; the same command goes on in {work}")


def make_data(folder: Path, gsm8k: Path | None) -> None:
    """The files of the recipe: GSM8K's, or sums in its layout, and both splits prepared."""
    folder.mkdir(exist_ok=True)
    for split, count in (("train", 1500), ("test", 400)):
        raw, prepared = folder / f"gsm8k_{split}.jsonl", folder / f"gsm8k_{split}.parquet"
        if prepared.is_file():
            continue
        raw.write_text((gsm8k / raw.name).read_text() if gsm8k is not None else sums(split, count))
        burnish(folder, "data", "prepare", "gsm8k", raw.name, prepared.name, "--force")


def sums(split: str, count: int) -> str:
    """Sums of two numbers below 50 as rows of GSM8K. No pair of numbers is in both splits."""
    pairs = [(a, b) for a in range(2, 50) for b in range(2, 50) if ((7 * a + b) % 5 == 0) == (split == "test")]
    chosen = random.Random(0).sample(pairs, count)
    rows = [
        {
            "question": f"What is {a} + {b}?",
            "answer": f"{a} + {b} = {a + b}\n#### {a + b}",
        }
        for a, b in chosen
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def planned_overrides(args: argparse.Namespace) -> list[str]:
    """The overrides of the run. They are kept in the work folder, so that a run that continues has the same numbers of steps."""
    path = args.work / "overrides.json"
    asked = {"model": str(args.model.resolve()), "seconds": args.seconds, "small": args.small, "given": args.overrides}
    if path.is_file():
        kept = json.loads(path.read_text())
        if kept["asked"] != asked:
            raise SystemExit(
                f"{args.work} has a run with other arguments ({kept['asked']}): give those, or another --work"
            )
        return list(kept["overrides"])
    overrides = ["run.name=r1", f"model.path={args.model.resolve()}", *(SMALL if args.small else ()), *args.overrides]
    if args.seconds is not None:
        overrides += [f"stages.{stage}.config.{key}={value}" for stage, key, value in lengths(args, overrides)]
    path.write_text(json.dumps({"asked": asked, "overrides": overrides}, indent=1))
    return overrides


def lengths(args: argparse.Namespace, overrides: list[str]) -> list[tuple[str, str, int]]:
    """The numbers of steps that take about `--seconds` each, by the measured time of a step of the base."""
    recipe = recipe_path(RECIPE)
    configs = load_stage_configs(load(StagesConfig, recipe, overrides), recipe, Path())
    step_s: dict[str, float] = {}
    for stage, (command, key, count) in PROBES.items():
        config = configs[stage].config
        model = config.model.model_copy(update={"path": str(args.model.resolve())})
        probe = args.work / f"probe-{stage}.yaml"
        text = dump(config.model_copy(update={"model": model}))
        probe.write_text(text.replace("r1_small_rows.py:", f"{recipe.parent}/r1_small_rows.py:"))
        burnish(
            args.work, command, probe.name, f"{key}={count}", f"run.name=probe-{stage}", "run.directory=.", "--fresh"
        )
        run = args.work / f"probe-{stage}"
        shutil.rmtree(run / "checkpoints")  # 21 GB for a model of 1.5B
        times = [row["time/step_s"] for row in read_metrics(run / "metrics.jsonl") if row["step"] > 1]
        step_s[key] = sum(times) / len(times)
    step_s["reward_model.updates"] = 2 * step_s["sft.updates"]  # two answers of each pair
    return [(stage, key, max(2, round(args.seconds / step_s[key]))) for stage, key in LENGTHS.items()]


def results(args: argparse.Namespace, overrides: list[str]) -> list[dict[str, Any]]:
    """A row for the base and for each policy: its accuracy, and the seconds and steps of the stage that made it."""
    folder = args.work / "runs" / "r1"
    index = StageIndex.read(folder)
    rows = []
    for stage in MEASURED:
        result = json.loads((folder / f"{stage}.measured" / f"{stage}.measured.json").read_text())
        low, high = result["ci"]
        row = {
            "model": stage,
            "accuracy": result["accuracy"],
            "low": low,
            "high": high,
            "answers": result["num_samples"],
            "tokens": result["length"]["mean"],
            "formatted": result["formatted"]["value"],
            "seconds": round(index.entries[stage].seconds, 1) if stage in index.entries else None,
        }
        metrics = folder / stage / "metrics.jsonl"
        if metrics.is_file():
            last = read_metrics(metrics)[-1]
            row |= {"steps": last["step"], "reward": last.get("reward/mean")}
        rows.append(row)
    made = {stage: index.entries[stage].outcome for stage in MADE}
    rows[0]["made"] = {stage: outcome.note for stage, outcome in made.items() if outcome is not None}
    rows[0] |= {"of": args.model.name, "data": "sums" if args.sums else "gsm8k", "seconds_asked": args.seconds}
    return rows


if __name__ == "__main__":
    main()
