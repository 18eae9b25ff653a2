"""`burnish view RUN...`: a page that shows runs while they train, or with `--report` the same page as one file.

It also shows the measurements of `burnish eval --scaling` in the folders.

It only reads the files of runs and takes no lock, so that a run may be training or finished. A run writes its report when it ends.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

from burnish.cli.main import print_note
from burnish.config.errors import UserError
from burnish.config.extras import install_hint

LOOPBACK = "127.0.0.1"
EXTRA = ("starlette", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "paths",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="runs, measurements of burnish eval --scaling, or folders of them",
    )
    add("--port", type=int, default=8100, help="port of the page on this machine; 0 takes a free one (default 8100)")
    add("--report", action="store_true", help="write report.html of each run instead: the page as one file")
    add("--png", action="store_true", help=f"write curves.png of each run instead (needs: {install_hint('plot')})")


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write the files that were asked for and print their paths."""
    if args.report or args.png:
        return write_files(args)
    require_extra()
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: expected 0 to 65535")
    from burnish.gateway.http_guards import bind_socket
    from burnish.report.live_server import run_page_server
    from burnish.report.run_list import RunList

    runs = RunList(args.paths)
    run_page_server(runs, bind_socket(LOOPBACK, args.port), print_note)
    return 0


def write_files(args: argparse.Namespace) -> int:
    """Write report.html, curves.png or both for each run."""
    from burnish.report.curves import write_curves_png
    from burnish.report.html_report import write_report
    from burnish.report.scaling_files import JSON_NAME, run_scalings
    from burnish.run.run_directory import RunDirectory

    for path in args.paths:
        scalings = [path] if (path / JSON_NAME).is_file() else run_scalings(path)
        if args.report:
            for folder in scalings:
                from burnish.report.scaling_page import write_scaling_page  # it loads torch

                print(f"scaling: {write_scaling_page(folder)}")
        if scalings == [path]:
            continue
        directory = RunDirectory.open(path)
        if args.report:
            print(f"report: {write_report(directory.path)}")
        if args.png:
            print(f"curves: {write_curves_png(directory.path)}")
    return 0


def require_extra() -> None:
    """Raise if packages of the extra `serve` are missing."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise UserError(
            f"the live page needs {' and '.join(missing)}: {install_hint('serve')}; "
            "burnish view RUN --report writes the page as a file without them"
        )
