"""`burnish data decontaminate SRC OUT --against BENCHMARK_OR_FILE`: the rows that no test set has."""

from __future__ import annotations

import argparse
from pathlib import Path

from burnish.cli.data.options import add_output
from burnish.data.curation.decontamination import NGRAM_WORDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from burnish.data.published_datasets import BENCHMARKS

    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SRC",
        help="rows of any kind (to answer, imitate or prefer): jsonl, json, csv, parquet or arrow",
    )
    add_output(parser)
    add(
        "--against",
        action="append",
        default=[],
        metavar="BENCHMARK|[SHAPE:]FILE",
        help=f"a test set: {', '.join(BENCHMARKS)}, or a file; may be repeated",
    )
    add(
        "--ngram",
        type=int,
        default=NGRAM_WORDS,
        metavar="N",
        help=f"words in a row that count as overlap (default {NGRAM_WORDS})",
    )
    add("--data-dir", type=Path, metavar="FOLDER", help="where the benchmarks' files are (default: BURNISH_DATA)")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.decontamination import decontaminate
    from burnish.data.curation.output_files import aligned_table, summary

    manifest, is_new = decontaminate(
        args.source, args.out, tuple(args.against), args.ngram, args.data_dir, args.force, say
    )
    show("\n".join(summary(manifest, args.out, is_new)))
    rows = [[o["with"], o["test_rows"], o["exact"], o["words"]] for o in manifest["overlap"]]
    show("\n".join(aligned_table(["test set", "its rows", "same question", f"{args.ngram} words"], rows)))
    for overlap in manifest["overlap"]:
        for example in overlap["first"][:3]:
            show(f"  {example['row']} ~ {example['test_row']}: {example['shared']}")
    return 0
