"""A stale sampler, twice with the same seed: GRPO collapses without a correction, and learns with one.

python examples/mismatch/run.py [--seed 0] [--steps-behind 16] [--correction token_tis] [--chart docs/mismatch-example.svg]
                                [key=value ...]      overrides of recipe.yaml, such as training.steps=50

Two runs in parallel, one core each: about three minutes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from experiment import CORRECTIONS, LABELS, learn, make_start, stale

CHART = Path(__file__).parents[2] / "docs" / "mismatch-example.svg"
COLOURS = ("#d1495b", "#1f6feb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("overrides", nargs="*", metavar="key=value", help="overrides of recipe.yaml")
    add("--seed", type=int, default=0)
    add("--steps-behind", type=int, default=16, help="how old the sampler's weights are, in steps")
    add("--correction", default="token_tis", choices=[name for name in CORRECTIONS if name != "none"])
    add("--chart", type=Path, default=CHART, help="where the picture goes")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the processes below: two runs, a core each
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, get_context("spawn")) as pool:
        start = pool.submit(make_start, Path(folder), args.seed, args.overrides).result()
        print("warm start made; training twice from it", flush=True)
        common = [
            stale(args.steps_behind),
            "validation.every=10",
            *(o for o in args.overrides if not o.startswith("warm_start.")),
        ]
        jobs = {
            name: pool.submit(
                learn, Path(folder), name, start, args.seed, [*common, f"algorithm.correction={CORRECTIONS[name]}"]
            )
            for name in ("none", args.correction)
        }
        found = {name: job.result() for name, job in jobs.items()}
    for name, curves in found.items():
        before, *_, after = [own for _, own, _ in curves["accuracy"]]
        print(f"correction {name}: held-out accuracy {before:.3f} -> {after:.3f}")
    draw(found, f"Accuracy, sampler {args.steps_behind} steps behind (seed {args.seed})", args.chart)
    print(f"drawn {args.chart}")


def draw(found: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Both runs in one picture: accuracy by step, and how far the sampler is from the trainer."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mismatch", "font.size": 9}):
        figure = Figure(figsize=(9.4, 3.2), layout="constrained")
        accuracy, gap = figure.subplots(1, 2)
        for colour, (name, curves) in zip(COLOURS, found.items(), strict=True):
            accuracy.plot(*zip(*[(step, own) for step, own, _ in curves["accuracy"]]), color=colour, label=LABELS[name])
            points = [(step, value) for step, value in enumerate(curves["k3_kl"], 1) if value]
            gap.plot(*zip(*points), color=colour, linewidth=1)
        accuracy.set_title(title, fontsize=10)
        accuracy.set_ylim(-0.02, 1.02)
        accuracy.legend(fontsize=8)
        gap.set_title("KL (k3) from sampler to trainer, a token", fontsize=10)
        gap.set_yscale("log")
        gap.set_ylim(bottom=1e-3)
        for axis in (accuracy, gap):
            axis.set_xlabel("step")
            axis.grid(alpha=0.3)
        figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
