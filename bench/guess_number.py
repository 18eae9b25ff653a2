"""GiGPO compared with GRPO in an environment of several turns, from the same warm start: held-out games won during training.

python bench/guess_number.py [--algorithms gigpo grpo] [--seeds 0 1 2] [--steps 100]
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "guess_number.yaml"
KEY = "validation/sampled/accuracy"
OPTIONS = {
    "gigpo": [],
    "gigpo-std": ["algorithm.advantage.normalise=std"],
    "grpo": [],
}
NO_KL = "algorithm.kl={loss: {coef: 0}, reference: none}"
EVERY = 20
ENOUGH = 0.65
"""Tokens are counted until so many held-out games are won."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["gigpo", "grpo"], choices=list(OPTIONS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=None, help="CPU threads for arithmetic")
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/guess_number.json")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            for name in args.algorithms:
                rows.append(learn(name, seed, Path(folder), args))
                save("guess_number", rows, args.out)
    columns = ["system", "seed", "cpu_s", "won_before", "won_after", "greedy_after", "turns_after", "tokens_to_enough"]
    print(table(rows, columns))
    print(f"saved {save('guess_number', rows, args.out)}")


def learn(name: str, seed: int, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of the command line; the first of a seed makes the warm start that the others begin with."""
    command = ["train", str(RECIPE), f"algorithm={name.partition('-')[0]}", NO_KL, "algorithm.aggregation=token-mean"]
    command += [*OPTIONS[name], f"seed={seed}", f"training.steps={args.steps}", f"validation.every={EVERY}"]
    command += [f"run.directory={folder}", f"run.name={name}"]
    command += [f"run.threads={args.threads}"] if args.threads is not None else []
    warm = next(folder.glob("*/warm_start"), None)
    command += ["model.new=null", f"model.path={warm}", "warm_start=null"] if warm is not None else []
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    work = {"wall_s": time.perf_counter() - started, "cpu_s": cpu_s, "has_warm_start": warm is None}
    return {"work": "guess_number", "system": name, "seed": seed, **work, **outcome(folder / name / "metrics.jsonl")}


def outcome(metrics: Path) -> dict[str, Any]:
    """What a run came to: games won, turns, tokens, and its curve as [step, won, tokens]."""
    rows = read_metrics(metrics)
    tokens, curve, enough = 0.0, list[list[float]](), None
    for row in rows:
        tokens += row.get("rollout/tokens", 0.0)
        if KEY in row:
            curve.append([row["step"], row[KEY], tokens])
            enough = tokens if enough is None and row[KEY] >= ENOUGH else enough
    return {
        "won_before": curve[0][1],
        "won_after": curve[-1][1],
        "greedy_after": rows[-1]["validation/greedy/accuracy"],
        "turns_after": rows[-1]["validation/sampled/turns_mean"],
        "tokens": tokens,
        "tokens_to_enough": enough,
        "curve": curve,
    }


if __name__ == "__main__":
    main()
