"""Absolute Zero on a CPU: do tasks that a small model makes itself raise its accuracy on held-out tasks of the same kind?

python bench/absolute_zero.py [--seeds 0 1] [--steps 40] [--work FOLDER] [--out FILE]

A decoder of 0.4 million parameters learns the one-line language from flawed demonstrations: tasks about programs such as `max(x)` on a tuple of digits, and their
solutions, of which about 0.6 are right. Then it proposes tasks and solves them; the sandbox checks both, as recipes/absolute_zero.yaml says. Measured before, between and
after: the share of held-out tasks that it solves, 120 of each type, whose inputs no demonstration has. The rows are in absolute_zero_rows.py. CPU only, one thread.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absolute_zero_rows import KINDS, held_out
from common import save, table

from burnish.config.yaml_text import render_yaml
from burnish.data.tasks.code_tasks import CodeTask, task_from_json
from burnish.run.metrics import read_metrics
from burnish.run.task_journal import TaskJournal

ROWS = Path(__file__).with_name("absolute_zero_rows.py")
MODES = {"greedy": {"temperature": 0, "max_tokens": 40}, "sampled": {"temperature": 1, "max_tokens": 40}}
BETAS = {"betas": [0.9, 0.95]}
EVERY = 10
ATTEMPTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--work", type=Path, help="keeps the runs here; one that is complete is not made again")
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/absolute_zero.json")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        for seed in args.seeds:
            rows.append(learn(seed, args.steps, args.work or Path(place)))
            print(table(rows, COLUMNS), flush=True)
    for row in rows:
        print(f"seed {row['seed']}\n{table(row['curve'], list(row['curve'][0]))}")
    print(f"saved {save('absolute_zero', rows, args.out)}")


COLUMNS = ["seed", "greedy_before", "greedy_after", "sampled_before", "sampled_after", "made_tasks", "distinct_made"]
COLUMNS += ["held_out", "held_out_made", "cpu_s"]


def recipe(seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run: the warm start and self-play."""
    return {
        "seed": seed,
        "model": {
            "new": {"hidden_size": 128, "num_layers": 2, "num_heads": 4, "mlp_size": 336, "max_positions": 128},
            "device": "cpu",
        },
        "data": {
            "train": {"task": "absolute_zero", "options": {"references": 2, "inputs": 4, "format": "expression"}},
            "validation": [{"plugin": f"{ROWS}:held_out", "options": {"kind": kind}, "name": kind} for kind in KINDS],
            "max_prompt_tokens": 80,
        },
        "environment": {"name": "absolute_zero", "max_turns": ATTEMPTS + 1, "options": {"attempts": ATTEMPTS}},
        "warm_start": {
            "data": {"plugin": f"{ROWS}:demonstrations", "options": {"num": 12000, "seed": seed}},
            "updates": 600,
            "batch_size": 128,
            "max_tokens": 128,
            "optimizer": {"lr": 3e-3, "warmup": 20, "schedule": "linear", "final": 0.1, **BETAS},
        },
        "rollout": {"prompts": 36, "n": 1, "max_tokens": 40},
        "algorithm": "trr_plus_plus",
        "training": {"steps": steps, "optimizer": {"lr": 3e-4, **BETAS}},
        "validation": {"every": EVERY, "modes": MODES, "by": "type"},
        "run": {
            "directory": str(folder),
            "name": f"seed-{seed}",
            "samples_every": 1000,
            "save_every": 1000,
            "threads": 1,
        },
    }


def learn(seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run of the command line, and what it came to."""
    folder.mkdir(parents=True, exist_ok=True)
    run, file = folder / f"seed-{seed}", folder / f"seed-{seed}.yaml"
    metrics, before_s = run / "metrics.jsonl", children_s()
    if not metrics.is_file() or read_metrics(metrics)[-1]["step"] < steps:
        file.write_text(render_yaml(recipe(seed, steps, folder.resolve())))
        command = [sys.executable, "-m", "burnish.cli.main", "train", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    curve = [
        {
            "step": row["step"],
            **{f"{mode} {kind}": row[f"validation/{mode}/accuracy/type={kind}"] for mode in MODES for kind in KINDS},
        }
        | {mode: row[f"validation/{mode}/accuracy"] for mode in MODES}
        for row in read_metrics(metrics)
        if "validation/greedy/accuracy" in row
    ]
    made = [task_from_json(one.task) for one in TaskJournal(run / "tasks.jsonl", steps).tasks]
    asked = [task_from_json(row["solve"]) for kind in KINDS for row in held_out(kind)]
    first, last = curve[0], curve[-1]
    return {
        "work": "tuples of digits",
        "seed": seed,
        "steps": steps,
        "greedy_before": first["greedy"],
        "greedy_after": last["greedy"],
        "sampled_before": first["sampled"],
        "sampled_after": last["sampled"],
        "made_tasks": len(made),
        "distinct_made": len({identity(task) for task in made}),
        "held_out": len(asked),
        "held_out_made": len({identity(task) for task in asked} & {identity(task) for task in made}),
        "cpu_s": children_s() - before_s,
        "curve": curve,
    }


def identity(task: CodeTask) -> tuple[str, str, tuple[str, ...]]:
    return task.kind, task.program, task.inputs


def children_s() -> float:
    """CPU seconds of all processes that have ended, sandboxes and workers of a run too."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
