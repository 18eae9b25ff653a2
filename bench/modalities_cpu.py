"""Policies that write codes or read pictures, made from nothing on a CPU: held-out accuracy before and after RL.

python bench/modalities_cpu.py [--runs llasa_tts simple_vla ...] [--seeds 0] [--threads 1]
python bench/modalities_cpu.py --finished count_shapes=runs/count_shapes-0     # takes the numbers of a run that is done

Each run is a recipe of that name: a decoder with random weights, a supervised warm start on poor demonstrations, then RL. It saves the rows in
bench/results/modalities_cpu.json, beside those of other runs and seeds.

For recipes with pictures, `greedy_blank` and `greedy_another` are the accuracy after RL with a grey picture and with that of another row, which
should be chance (`other_pictures.py`); `most_frequent` is that of always giving the most frequent count.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from agents_cpu import outcome
from common import save_beside, table
from other_pictures import SHOWN, Shown, write_rows

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.tasks.registry import make_task
from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
DRAWN = ("count_shapes", "click_target")
"""Recipes that have the name of their task, whose rows are drawn pictures."""
LAKE = "frozen_lake_pictures"
RUNS = ("llasa_tts", "simple_vla", *DRAWN, LAKE)


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
        seen = without_its_picture(name, seed, Path(folder) / "run")
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    steps_s = sum(row.get("time/step_s", 0.0) for row in rows)
    return {"run": name, "seed": seed, "wall_s": wall_s, "cpu_s": cpu_s, "rl_steps_s": steps_s, **outcome(rows), **seen}


def finished(name: str, folder: str) -> dict[str, Any]:
    """The numbers of a run that is done; its time is that of its RL steps."""
    rows = read_metrics(Path(folder) / "metrics.jsonl")
    seed = load(TrainConfig, Path(folder) / "config.yaml").config.seed
    steps_s = sum(row.get("time/step_s", 0.0) for row in rows)
    seen = without_its_picture(name, seed, Path(folder))
    return {"run": name, "seed": seed, "rl_steps_s": steps_s, **outcome(rows), **seen}


def without_its_picture(name: str, seed: int, run: Path) -> dict[str, float]:
    """Greedy accuracy of the last checkpoint on the rows of validation, with other pictures in their place."""
    if name not in (*DRAWN, LAKE):
        return {}
    config = load(TrainConfig, run / "config.yaml").config
    limit, found = config.validation.limit, dict[str, float]()
    assert limit is not None, "recipes with pictures limit their validation"
    for shown in SHOWN:
        found[f"greedy_{shown}"] = _greedy_accuracy(name, seed, run, shown, limit)
    if name == "count_shapes":
        task = make_task(name, {}, seed)
        answers = Counter(task.row("test", index).answer for index in range(limit))
        found["most_frequent"] = max(answers.values()) / limit
    return found


def _greedy_accuracy(name: str, seed: int, run: Path, shown: Shown, limit: int) -> float:
    config = load(TrainConfig, run / "config.yaml").config
    last = max((run / "checkpoints").glob("step-*"))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        if name == LAKE:
            plugin = f"{Path(__file__).parent / 'other_pictures.py'}:OtherPictureLake"
            options = json.dumps({**config.environment.options, "shown": shown})
            words = ["task:frozen_lake", f"environment.name={plugin}", f"environment.options={options}"]
            words += [
                f"environment.max_turns={config.environment.max_turns}",
                f"environment.max_tokens={config.model.new.max_positions if config.model.new else 0}",
            ]
        else:
            write_rows(Path(folder) / "rows.jsonl", name, seed, limit, shown)
            words = [str(Path(folder) / "rows.jsonl"), "--reward", "task", "--correct-at", "1"]
        options = [
            "--limit",
            str(limit),
            "--seed",
            str(seed),
            "--max-tokens",
            str(config.rollout.max_tokens),
            "--out",
            str(out),
        ]
        subprocess.run([sys.executable, "-m", "burnish.cli.main", "eval", str(last), *words, *options], check=True)
        result = next(path for path in out.glob("*.json"))
        return float(json.loads(result.read_text())["accuracy"])


if __name__ == "__main__":
    main()
