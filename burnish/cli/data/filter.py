"""`burnish data filter SRC OUT`: the rows that are worth training on, by what is asked for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from burnish.cli.data.options import add_output, add_rows, add_scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_rows(parser)
    add_output(parser)
    add_scores(parser, required=False)
    add(
        "--pass-rate",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="keep rows whose share of right answers is in LOW..HIGH, such as 0.1 0.9",
    )
    add("--agree", type=int, metavar="N", help="keep rows whose answer N samples give at least (1: not a wrong label)")
    add(
        "--guesses",
        type=Path,
        metavar="COMPLETIONS",
        help="drop rows that one of these, asked for without reasoning, got right",
    )
    add("--contradictions", action="store_true", help="drop rows whose question stands there with another answer")
    add("--duplicates", action="store_true", help="of rows that ask the same keep the first")
    add("--words", type=int, nargs=2, metavar=("MIN", "MAX"), help="keep questions of so many words")
    add("--answer-chars", type=int, metavar="MAX", help="keep answers of at most so many characters")
    add("--keep-unseen", action="store_true", help="keep rows that were never sampled")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.output_files import summary
    from burnish.data.curation.row_selection import Criteria, filter_rows

    criteria = Criteria(
        pass_rate=None if args.pass_rate is None else tuple(args.pass_rate),
        agree=args.agree,
        contradictions=args.contradictions,
        duplicates=args.duplicates,
        words=None if args.words is None else tuple(args.words),
        answer_chars=args.answer_chars,
        keep_unseen=args.keep_unseen,
    )
    manifest, is_new = filter_rows(args.source, args.out, criteria, args.scores, args.guesses, args.force, say)
    show("\n".join([*summary(manifest, args.out, is_new), *rates(manifest)]))
    return 0


def rates(manifest: dict[str, Any]) -> list[str]:
    """The rows by their pass rate, as a table."""
    from burnish.data.curation.output_files import aligned_table

    counts = manifest.get("pass_rates")
    if counts is None:
        return []
    names = ["0", *(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10)), "1"]
    return aligned_table(["pass rate", "rows"], [[name, f"{n:,}"] for name, n in zip(names, counts, strict=True) if n])
