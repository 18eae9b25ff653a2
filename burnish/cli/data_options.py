"""Options and output that the `burnish data` commands share."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from burnish.config.yaml_text import printable


def add_output(parser: argparse.ArgumentParser) -> None:
    text = "the .jsonl or .parquet file to write, with OUT.manifest.json"
    parser.add_argument("out", type=Path, metavar="OUT", help=text)
    parser.add_argument("--force", action="store_true", help="replace a file that this command did not write")


def add_ngram(parser: argparse.ArgumentParser) -> None:
    from burnish.data.curation.decontamination import NGRAM_WORDS

    text = f"consecutive words that count as overlap (default {NGRAM_WORDS})"
    parser.add_argument("--ngram", type=int, default=NGRAM_WORDS, metavar="N", help=text)


def add_rows(parser: argparse.ArgumentParser) -> None:
    text = "rows to train on: jsonl, json, csv, parquet or arrow"
    parser.add_argument("source", type=Path, metavar="SRC", help=text)


def add_scores(parser: argparse.ArgumentParser, required: bool) -> None:
    text = "source of pass rates: a run that trained on SRC, or completions of `burnish eval DIR SRC --n K`"
    parser.add_argument("--scores", type=Path, required=required, metavar="RUN|COMPLETIONS", help=text)


def add_trees(parser: argparse.ArgumentParser) -> None:
    text = "take all finished answers of `burnish eval --strategy NAME --keep-trees` with verifier oracle, not only the chosen ones"
    parser.add_argument("--trees", action="store_true", help=text)


def add_samples(parser: argparse.ArgumentParser) -> None:
    text = "completions of `burnish eval DIR DATA --n K`, or a run"
    parser.add_argument("source", type=Path, metavar="COMPLETIONS|RUN", help=text)
    text = (
        "the file of the prompts (for a run: if it is not where its config says); without it, the prompts of "
        "completions are used as text, which is right for a plain template only"
    )
    parser.add_argument("--prompts", type=Path, metavar="DATA", help=text)


def print_progress(text: str) -> None:
    """Print progress to stderr."""
    print(f"  {printable(text)}", file=sys.stderr, flush=True)


def print_result(lines: list[str]) -> None:
    """Print results to stdout. Names and examples in them come from files, so control characters are replaced."""
    print(printable("\n".join(lines)))
