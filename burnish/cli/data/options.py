"""Options that several `burnish data` commands have, each said once."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_output(parser: argparse.ArgumentParser) -> None:
    """Where the result goes."""
    text = "the .jsonl or .parquet file to write; OUT.manifest.json goes beside it"
    parser.add_argument("out", type=Path, metavar="OUT", help=text)
    parser.add_argument("--force", action="store_true", help="replace a file that this command did not write")


def add_rows(parser: argparse.ArgumentParser) -> None:
    """The rows to choose from."""
    text = "rows to train on: jsonl, json, csv, parquet or arrow"
    parser.add_argument("source", type=Path, metavar="SRC", help=text)


def add_scores(parser: argparse.ArgumentParser, required: bool) -> None:
    """What says how hard rows are."""
    text = (
        "how often rows are answered right: a run that trained on SRC, or completions of `burnish eval DIR SRC --n K`"
    )
    parser.add_argument("--scores", type=Path, required=required, metavar="RUN|COMPLETIONS", help=text)


def add_samples(parser: argparse.ArgumentParser) -> None:
    """Completions to make training data of, and the prompts they answer."""
    text = "completions of `burnish eval DIR DATA --n K`, or a run"
    parser.add_argument("source", type=Path, metavar="COMPLETIONS|RUN", help=text)
    text = (
        "the file that was answered (of a run: if it is not where its config says); without it the prompts of "
        "completions are taken as text, which fits a plain template only"
    )
    parser.add_argument("--prompts", type=Path, metavar="DATA", help=text)
