"""Rollout correction under injected faults: two faults in five strengths, three seeds, plain GRPO and two corrections.

python bench/mismatch.py [--jobs 2] [--faults stale noise] [--strengths 16] [--seeds 0 1 2] [--only none token_tis]
                         [--steps 150] [--out FILE] [--chart docs/mismatch.svg]

The runs of a seed start from one warm start, and are compared with a run without a fault. A row is saved when its run
ends and is not run again. So a sweep that was stopped continues, and a complete one only prints and draws.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common import RESULTS, machine, table

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "mismatch"))
from experiment import CORRECTIONS, LABELS, learn, make_start, noise, stale  # noqa: E402  the example's own run

from burnish.run.durable_files import atomic_write  # noqa: E402

STRENGTHS: dict[str, tuple[float, ...]] = {"stale": (1, 4, 8, 16, 64), "noise": (0.05, 0.1, 0.2, 0.4, 0.8)}
TITLES = {
    "stale": ("Stale sampler", "steps behind the trainer"),
    "noise": ("Noise in the sampler's weights", "noise / weights (root mean square)"),
}
COLOURS = {"none": "#d1495b", "token_tis": "#1f6feb", "sequence_mis": "#2a9d4a"}
MATCHED = "matched"
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of the sweep; the one without a fault has strength 0."""

    fault: str
    strength: float
    correction: str
    seed: int

    @property
    def name(self) -> str:
        """What its folder and its lines are called."""
        fault = MATCHED if self.fault == MATCHED else f"{self.fault}-{self.strength:g}-{self.correction}"
        return f"{fault}-seed-{self.seed}"

    def overrides(self) -> list[str]:
        """What its run changes in the recipe."""
        match self.fault:
            case "stale":
                fault = [stale(int(self.strength))]
            case "noise":
                fault = [noise(self.strength, self.seed)]
            case _:
                fault = []
        return [*fault, f"algorithm.correction={CORRECTIONS[self.correction]}"]


def main() -> None:
    args = parsed()
    out = args.out or RESULTS / "mismatch.json"
    rows = read_rows(out, args.steps)
    cells = wanted_cells(args)
    todo = [cell for cell in cells if cell not in rows]
    print(f"{len(cells)} runs of {args.steps} steps, {len(todo)} to do, {args.jobs} at once", flush=True)
    failed = sweep(todo, rows, out, args) if todo else 0
    print(table(summary(rows), ["fault", "strength", "correction", "seeds", "mean", "worst", "to_matched"]))
    print(f"saved {out}")
    if args.chart is not None:
        draw(rows, args.chart)
        print(f"drawn {args.chart}")
    sys.exit(1 if failed else 0)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--jobs", type=int, default=2, help="runs at once, each on one thread")
    add("--faults", nargs="+", default=list(STRENGTHS), choices=list(STRENGTHS))
    add("--strengths", type=float, nargs="+", help="only these (default: five of each fault)")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--only", nargs="+", default=list(CORRECTIONS), choices=list(CORRECTIONS), help="only these corrections")
    add("--steps", type=int, default=150)
    add("--out", type=Path, help="where the rows are and go, instead of bench/results/mismatch.json")
    add("--chart", type=Path, help="also draw the final accuracies there, as SVG")
    return parser.parse_args()


def wanted_cells(args: argparse.Namespace) -> list[Cell]:
    """The runs asked for, seed by seed, each seed's run without a fault first."""
    chosen = [
        (fault, strength, correction)
        for fault in args.faults
        for strength in args.strengths or STRENGTHS[fault]
        for correction in args.only
    ]
    return [cell for s in args.seeds for cell in (Cell(MATCHED, 0, "none", s), *(Cell(*c, s) for c in chosen))]


# --- running -------------------------------------------------------------------------------------------------------------


def sweep(todo: list[Cell], rows: dict[Cell, Row], out: Path, args: argparse.Namespace) -> int:
    """Run the cells, `args.jobs` at once; each row is saved as it comes. How many failed: they are named and left out."""
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # read by the processes of the pool: threads of several runs would fight for cores
    )
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        folder = Path(name)
        pending: dict[Future[Any], Cell | int] = {pool.submit(make_start, folder, s): s for s in {c.seed for c in todo}}
        while pending:
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                job = pending.pop(future)
                if isinstance(
                    job, int
                ):  # a start: without it no run of its seed can be made, so an error ends the sweep
                    start = future.result()
                    waiting = [cell for cell in todo if cell.seed == job]
                    pending |= {pool.submit(run, cell, folder, start, args.steps): cell for cell in waiting}
                    print(f"{time.monotonic() - began:5.0f} s  start of seed {job} is made", flush=True)
                    continue
                if (error := future.exception()) is not None:
                    failed += 1
                    print(f"FAILED {job.name}: {type(error).__name__}: {error}", flush=True)
                    continue
                rows[job] = future.result()
                save(rows, out)
                left = sum(isinstance(other, Cell) for other in pending.values())
                print(f"{time.monotonic() - began:5.0f} s  {left:3} left  {described(rows[job], job)}", flush=True)
    return failed


def run(cell: Cell, folder: Path, start: Path, steps: int) -> Row:
    """One run, in a process of the pool."""
    began = time.perf_counter()
    found = learn(folder, cell.name, start, cell.seed, [*cell.overrides(), f"training.steps={steps}"])
    wall_s = round(time.perf_counter() - began, 1)
    (_, before, _), (_, after, _) = found["accuracy"][0], found["accuracy"][-1]
    return {**asdict(cell), "steps": steps, "wall_s": wall_s, "before": before, "after": after, **found}


def described(row: Row, cell: Cell) -> str:
    """A line about a run that ended."""
    return f"{cell.name}: {row['before']:.3f} -> {row['after']:.3f} ({row['wall_s']:.0f} s)"


# --- rows ----------------------------------------------------------------------------------------------------------------


def read_rows(path: Path, steps: int) -> dict[Cell, Row]:
    """The rows of an earlier sweep; its runs must be as long as the new ones."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["rows"]
    if others := {row["steps"] for row in rows} - {steps}:
        sys.exit(f"{path} has runs of {others.pop()} steps, not of {steps}: give --steps, or another file with --out")
    return {Cell(row["fault"], row["strength"], row["correction"], row["seed"]): row for row in rows}


def save(rows: dict[Cell, Row], path: Path) -> None:
    """All rows, one a line, in an order that does not depend on which run ended first."""
    ordered = [rows[cell] for cell in sorted(rows, key=lambda c: (c.fault != MATCHED, c.name))]
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in ordered)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, f'{{"machine": {json.dumps(machine() | {"threads": 1})},\n"rows": [\n{lines}\n]}}\n')


def groups(rows: Iterable[Row]) -> dict[tuple[str, float, str], list[float]]:
    """Final accuracies over seeds, of each fault, strength and correction, weak faults first."""
    found: dict[tuple[str, float, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["fault"], row["strength"], row["correction"]), []).append(row["after"])
    order = [MATCHED, *STRENGTHS]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1], item[0][2])))


def summary(rows: dict[Cell, Row]) -> list[Row]:
    """What the table shows; `to_matched` is the mean over seeds, in points, of the run without a fault less this one."""
    matched = {row["seed"]: row["after"] for row in rows.values() if row["fault"] == MATCHED}
    lines = []
    for (fault, strength, correction), values in groups(rows.values()).items():
        same = [row for row in rows.values() if (row["fault"], row["strength"], row["correction"]) == (fault, strength, correction)]  # fmt: skip
        gaps = [100 * (matched[row["seed"]] - row["after"]) for row in same if row["seed"] in matched]
        lines.append(
            {"fault": fault, "strength": f"{strength:g}", "correction": correction, "seeds": len(values)}
            | {"mean": f"{statistics.mean(values):.3f}", "worst": f"{min(values):.3f}"}
            | {"to_matched": f"{statistics.mean(gaps):.1f}" if gaps else None}
        )
    return lines


# --- the chart -----------------------------------------------------------------------------------------------------------


def draw(rows: dict[Cell, Row], path: Path) -> None:
    """Final accuracy against strength: a panel a fault, a line through the means of a correction, a dot a seed."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = groups(rows.values())
    faults = [fault for fault in STRENGTHS if any(key[0] == fault for key in found)]
    before = statistics.mean(row["before"] for row in rows.values())
    matched = found[(MATCHED, 0, "none")]
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mismatch", "font.size": 9}):
        figure = Figure(figsize=(4.7 * len(faults), 3.4), layout="constrained")
        axes = figure.subplots(1, len(faults), squeeze=False, sharey=True)[0]
        for axis, fault in zip(axes, faults, strict=True):
            panel(axis, fault, found, matched, before)
        axes[0].set_ylabel("final held-out accuracy of the policy")
        axes[0].legend(fontsize=8, loc="lower left")
        figure.savefig(path, format="svg", metadata={"Date": None})


def panel(axis: Any, fault: str, found: dict[tuple[str, float, str], list[float]], matched: list[float], before: float) -> None:  # fmt: skip
    strengths = sorted({strength for name, strength, _ in found if name == fault})
    top = statistics.mean(matched)
    axis.axhspan(top - 0.03, top, color="#6b7280", alpha=0.15, linewidth=0)
    axis.axhline(top, color="#6b7280", linewidth=1, label="no fault (band: 3 points)")
    axis.axhline(before, color="#6b7280", linewidth=1, linestyle=":", label="before RL")
    for correction, colour in COLOURS.items():
        places = [k for k, strength in enumerate(strengths) if (fault, strength, correction) in found]
        values = [found[(fault, strengths[k], correction)] for k in places]
        axis.plot(places, [statistics.mean(v) for v in values], color=colour, linewidth=1.6, label=LABELS[correction])
        for place, seeds in zip(places, values, strict=True):
            axis.plot([place] * len(seeds), seeds, "o", color=colour, markersize=3, alpha=0.7)
    title, label = TITLES[fault]
    axis.set_title(title, fontsize=10)
    axis.set_xlabel(label)
    axis.set_xticks(range(len(strengths)), [f"{strength:g}" for strength in strengths])
    axis.set_ylim(-0.02, 1.02)
    axis.grid(axis="y", alpha=0.3)


if __name__ == "__main__":
    main()
