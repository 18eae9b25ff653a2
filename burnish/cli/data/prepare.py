"""`burnish data prepare NAME SOURCE OUT`: a published data set as a file to train on, with its manifest."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from burnish.cli.data import show
from burnish.data.curation.decontamination import NGRAM_WORDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options."""
    from burnish.data.published_datasets import SHAPES

    add = parser.add_argument
    add("name", metavar="NAME", help="the data set whose shape the rows have (below)")
    add(
        "source",
        metavar="SOURCE",
        help="its file (jsonl, json, csv, parquet, arrow), a glob, or a folder of Hugging Face datasets",
    )
    add("out", type=Path, metavar="OUT", help="the parquet file to write; OUT.manifest.json goes beside it")
    add("--split", help="which split, where the source holds several")
    add("--config", help="which configuration (folder), where a snapshot holds several")
    add(
        "--against",
        action="append",
        default=[],
        metavar="[NAME:]PATH",
        help="a test set to look for in the rows; may be repeated, NAME where its shape is another (a folder's own test "
        "split is compared with anyway)",
    )
    add(
        "--ngram",
        type=int,
        default=NGRAM_WORDS,
        metavar="N",
        help=f"words in a row that count as overlap (default {NGRAM_WORDS})",
    )
    add(
        "--drop-overlap",
        choices=("exact", "any"),
        help="leave out rows that overlap: the same question, or N words in common too (default: only count them)",
    )
    add("--force", action="store_true", help="replace a file that this command did not write")
    width = max(map(len, SHAPES))
    rows = [f"  {name:<{width}}  {shape.title}; verifier {shape.verifier}" for name, shape in SHAPES.items()]
    parser.epilog = "data sets:\n" + "\n".join(rows)


def run(args: argparse.Namespace) -> int:
    """Prepare, and say what came of it."""
    from burnish.config.errors import UserError
    from burnish.data.curation.prepare import PrepareOptions, prepare

    if args.ngram < 2:
        raise UserError(f"--ngram {args.ngram}: expected 2 words or more")
    wanted = PrepareOptions(
        args.name, args.source, args.split, args.config, tuple(args.against), args.ngram, args.drop_overlap
    )
    manifest, is_new = prepare(wanted, args.out, args.force)
    show(report(manifest, args.out, is_new))
    return 0


def report(manifest: dict[str, Any], out: Path, is_new: bool) -> str:
    """What a person wants to know, a line each."""
    output = manifest["output"]
    lines = [
        f"{out}: {output['rows']:,} rows" if is_new else f"{out} is up to date: {output['rows']:,} rows, nothing to do",
        f"  read         {manifest['rows_read']:,} rows of {', '.join(s['file'] for s in manifest['asked']['source'])}",
    ]
    lines += [f"  left out     {count:,}: {reason}" for reason, count in manifest["left_out"].items()]
    if manifest["repeated_questions"]:
        lines.append(f"  repeated     {manifest['repeated_questions']:,} questions stand in it more than once (kept)")
    for overlap in manifest["overlap"]:
        near = next(key for key in overlap if key.endswith("_words"))
        lines.append(
            f"  overlap      {overlap['exact']:,} questions are in {overlap['with']} ({overlap['test_rows']:,} rows), "
            f"{overlap[near]:,} more share {near.removesuffix('_words')} words with it; "
            + (f"{overlap['left_out']:,} left out" if overlap["left_out"] else "all kept")
        )
        lines += [f"               {o['row']} ~ {o['test_row']}: {o['shared']}" for o in overlap["first"][:3]]
    if not manifest["overlap"]:
        lines.append("  overlap      not checked: name a test set with --against")
    lines.append(f"  sha256       {output['sha256']}")
    lines.append("  recipe       " + manifest["recipe"].rstrip().replace("\n", "\n               "))
    return "\n".join(lines)
