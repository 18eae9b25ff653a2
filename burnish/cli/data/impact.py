"""`burnish data impact RUN OUT`: the rows of a run's training data that taught it something (LIMR)."""

from __future__ import annotations

import argparse
from pathlib import Path

from burnish.cli.data.options import add_output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run of two epochs or more over its training data")
    add_output(parser)
    add("--threshold", type=float, default=0.6, help="lowest learning impact to keep (default 0.6, as in the paper)")
    add("--by", choices=("accuracy", "reward"), help="what the curves are of (default: accuracy where all is judged)")
    add("--epochs", type=int, metavar="K", help="use the first K epochs (default: all that were finished)")
    add("--data", type=Path, metavar="FILE", help="where the run's file lies now, if not where its config says")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.data.curation.row_selection import ImpactOptions, select_by_impact

    options = ImpactOptions(args.threshold, args.by, args.epochs)
    manifest, is_new = select_by_impact(args.run, args.out, options, args.data, args.force, say)
    show("\n".join(summary(manifest, args.out, is_new)))
    curve = " ".join(f"{value:.3f}" for value in manifest["average_curve"])
    show(f"  curve        mean {manifest['measured_by']} of {manifest['prompts_scored']:,} prompts by epoch: {curve}")
    bins = manifest["histogram"]
    starts = [low for low, _ in bins]
    names = ["below 0", *(f"{a:g} to {b:g}" for a, b in zip(starts[1:], [*starts[2:], 1], strict=True))]
    show(
        "\n".join(
            aligned_table(["impact", "rows"], [[name, f"{n:,}"] for name, (_, n) in zip(names, bins, strict=True)])
        )
    )
    return 0
