"""Writes the accuracy and curve of a run to docs/results/<recipe>-<seed>.json, and all such curves to one chart.

    python bench/results_of_runs.py runs/gsm8k-seed0 --recipe gsm8k --questions 1319 --base 0.620
    python bench/results_of_runs.py --chart docs/results.svg --recipe gsm8k

The accuracy is the last that the run measured, with Wilson's interval over the questions. Seconds count from the start of
the process (`time/elapsed_s`), including start-up and every validation. A resumed run is refused, because its clock
started again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml

from burnish.evaluation.statistics import wilson_interval
from burnish.report.svg_chart import svg_chart
from burnish.run.metrics import read_metrics

KEY, CLOCK = "validation/greedy/accuracy", "time/elapsed_s"
RESULTS = Path(__file__).parents[1] / "docs" / "results"


def result(run: Path, questions: int, base: float | None) -> dict[str, Any]:
    """A run's last accuracy with its interval, and the curve as [seconds, accuracy] pairs."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if KEY in row]
    clock = [row[CLOCK] for row in rows]
    if clock != sorted(clock):
        raise SystemExit(f"{run} was resumed: its clock began anew, so there is no time from start to finish")
    last = wilson_interval(rows[-1][KEY], questions)
    measured_base = next((row[KEY] for row in rows if row["step"] == 0), base)
    if measured_base is None:
        raise SystemExit(f"{run} did not measure its base (validation.before): give --base")
    return {
        "accuracy": last.mean,
        "ci": [last.low, last.high],
        "wall_s": clock[-1],
        "seed": yaml.safe_load((run / "config.yaml").read_text())["seed"],
        "base_accuracy": measured_base,
        "curve": [[round(row[CLOCK], 1), row[KEY]] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="the directory of a run")
    parser.add_argument("--recipe", required=True, help="name of the recipe")
    parser.add_argument("--questions", type=int, help="how many questions an accuracy is over")
    parser.add_argument("--base", type=float, help="accuracy of the base model, where the run did not measure it")
    parser.add_argument("--chart", type=Path, help="draw all results of the recipe there")
    args = parser.parse_args()
    if args.run is not None:
        if args.questions is None:
            parser.error("--questions is needed for the interval")
        found = result(args.run, args.questions, args.base)
        target = RESULTS / f"{args.recipe}-{found['seed']}.json"
        target.write_text(json.dumps(found, indent=1) + "\n")
        print(
            f"{target}: {found['accuracy']:.3f} [{found['ci'][0]:.3f}, {found['ci'][1]:.3f}] after {found['wall_s']:.0f} s"
        )
    if args.chart is not None:
        curves = {
            path.stem: json.loads(path.read_text())["curve"] for path in sorted(RESULTS.glob(f"{args.recipe}*.json"))
        }
        args.chart.write_text(svg_chart(curves, "Held-out accuracy (greedy) by seconds since the start"))
        print(f"drawn {args.chart}: {', '.join(curves)}")


if __name__ == "__main__":
    main()
