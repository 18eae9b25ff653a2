"""Runs every recipe shrunk, and the default job for ten steps, and compares all numbers with an earlier run: a refactor changes none.

    python bench/same_numbers.py --save before.json         # on the tree before the change
    python bench/same_numbers.py --compare before.json      # on the tree after it, on the same machine

The numbers of a recipe are all metrics of all its runs except timings, and a digest of the final weights. The recipes run
through the command line, so the script does not depend on the package's internal layout. Bits differ between machines:
both runs must be on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from common import machine, table

ROOT = Path(__file__).parents[1]
COMMANDS = {"stages": "stages", "sft": "sft", "preference": "prefer", "reward_model": "reward-model"}
"""The top-level key that only recipes of this command have. All others are for `burnish train`."""
MEASURED = ("time/", "performance/", "memory/", "controller/")
"""Metrics of the machine, which differ between two runs of one config."""
DEFAULT_JOB = {"sort_digits, 10 steps": ["train", "recipes/sort_digits.yaml", "training.steps=10"]}

Numbers = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="write all numbers to this file")
    parser.add_argument("--compare", type=Path, help="compare with the numbers in this file")
    parser.add_argument("--only", nargs="+", default=[], help="names of recipes")
    parser.add_argument("--jobs", type=int, default=2, help="how many recipes run at once, one thread each")
    args = parser.parse_args()
    jobs = {name: command for name, command in all_jobs().items() if not args.only or name in args.only}
    expected = json.loads(args.compare.read_text())["recipes"] if args.compare else {}
    with ThreadPoolExecutor(args.jobs) as pool:
        found = dict(zip(jobs, pool.map(numbers_of, jobs, jobs.values()), strict=True))
    if args.save:
        args.save.write_text(json.dumps({"machine": machine(), "recipes": found}, indent=1) + "\n")
    rows = [row_of(name, numbers, expected.get(name)) for name, numbers in found.items()]
    print(table(rows, ["recipe", "status", "seconds", "runs", "metrics", "weights", "compared"]))
    failed = [row for row in rows if row["status"] != 0 or row["compared"] not in ("", "same")]
    print(f"{len(rows) - len(failed)} of {len(rows)} recipes {'are the same' if args.compare else 'ran'}")
    sys.exit(1 if failed else 0)


def all_jobs() -> dict[str, list[str]]:
    """The command line of each recipe."""
    jobs = {}
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        keys = yaml.safe_load(path.read_text()).keys()
        command = next((command for key, command in COMMANDS.items() if key in keys), "train")
        jobs[path.stem] = [command, f"recipes/{path.name}", "--shrink"]
    return jobs | DEFAULT_JOB


def numbers_of(name: str, command: list[str]) -> Numbers:
    """Run one recipe and read back what it left."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "burnish.cli.main", *command, f"run.directory={folder}", "run.name=run"]
        started = time.perf_counter()
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
        seconds = time.perf_counter() - started
        print(f"{name}: status {done.returncode}, {seconds:.0f} s", file=sys.stderr, flush=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr, flush=True)
        files = sorted(Path(folder).rglob("metrics.jsonl"))
        runs = {str(file.parent.relative_to(folder)): metrics_of(file) for file in files}
        weights = {run: weights_of(Path(folder) / run) for run in runs}
    return {"status": done.returncode, "seconds": seconds, "runs": runs, "weights": weights}


def metrics_of(path: Path) -> list[Numbers]:
    """The lines of a metrics.jsonl without what was measured of the machine."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def weights_of(run: Path) -> str:
    """A digest of the tensors in a run's last checkpoint; empty where it has none."""
    checkpoints = sorted(run.glob("checkpoints/step-*"))
    digest = hashlib.sha256()
    for path in sorted(checkpoints[-1].glob("*.safetensors")) if checkpoints else []:
        content = path.read_bytes()
        header = int.from_bytes(content[:8], "little")
        for tensor, about in sorted(json.loads(content[8 : 8 + header]).items()):
            if tensor != "__metadata__":
                begin, end = (8 + header + offset for offset in about["data_offsets"])
                digest.update(f"{tensor} {about['dtype']} {about['shape']}".encode() + content[begin:end])
    return digest.hexdigest()[:16] if checkpoints else ""


def row_of(name: str, numbers: Numbers, expected: Numbers | None) -> Numbers:
    """A line of the table."""
    runs = numbers["runs"]
    lines = [line for metrics in runs.values() for line in metrics]
    return {
        "recipe": name,
        "status": numbers["status"],
        "seconds": numbers["seconds"],
        "runs": len(runs),
        "metrics": sum(map(len, lines)),
        "weights": " ".join(digest for digest in numbers["weights"].values() if digest),
        "compared": "" if expected is None else difference(numbers, expected),
    }


def difference(numbers: Numbers, expected: Numbers) -> str:
    """`same`, or the first thing that differs."""
    if numbers["runs"].keys() != expected["runs"].keys():
        return f"runs {sorted(numbers['runs'])}, before {sorted(expected['runs'])}"
    for run, lines in numbers["runs"].items():
        before = expected["runs"][run]
        if len(lines) != len(before):
            return f"{run}: {len(lines)} lines, before {len(before)}"
        for line, old in zip(lines, before, strict=True):
            for key in sorted(line.keys() | old.keys()):
                if line.get(key) != old.get(key):
                    return f"{run}, step {line['step']}, {key}: {line.get(key)}, before {old.get(key)}"
    return "same" if numbers["weights"] == expected["weights"] else "other weights"


if __name__ == "__main__":
    main()
