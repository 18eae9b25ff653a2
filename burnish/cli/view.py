"""`burnish view RUN`: write the report of a run, finished or not, as one HTML file.

A run writes its report when it ends. This command writes one for a run that is still training or was stopped. It reads the
run's files only and takes no lock. `--png` also draws the main curves as an image.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="the folder of a run")
    parser.add_argument("--png", action="store_true", help="also write curves.png (needs: pip install 'burnish[plot]')")


def run(args: argparse.Namespace) -> int:
    """Write report.html, and curves.png if asked for; print their paths."""
    from burnish.report.curves import write_curves_png
    from burnish.report.html_report import write_report
    from burnish.run.run_directory import RunDirectory

    directory = RunDirectory.open(args.path)
    print(f"report: {write_report(directory.path)}")
    if args.png:
        print(f"curves: {write_curves_png(directory.path)}")
    return 0
