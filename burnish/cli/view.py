"""`burnish view RUN`: the report of a run, finished or not, as one HTML file to open.

A run writes its report when it ends. This makes one of a run that is still training, was stopped, or was made before; it reads the run's
files alone and takes no lock.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="RUN", help="the folder of a run")


def run(args: argparse.Namespace) -> int:
    """Write report.html and say where it is."""
    from burnish.report.html_report import write_report
    from burnish.run.run_directory import RunDirectory

    directory = RunDirectory.open(args.path)
    print(f"report: {write_report(directory.path)}")
    return 0
