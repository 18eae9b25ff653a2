"""`burnish data pairs COMPLETIONS|RUN OUT`: the shortest right completion before longer ones, for `burnish prefer`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="COMPLETIONS|RUN", help="completions of `burnish eval DIR DATA --n K`, or a run")
    add("out", type=Path, metavar="OUT", help="the .jsonl or .parquet file to write; OUT.manifest.json goes beside it")
    add(
        "--prompts",
        type=Path,
        metavar="DATA",
        help="the file that was answered (of a run: if it is not where its config says); without it the prompts of "
        "completions are taken as text, which fits a plain template only",
    )
    add("--ratio", type=float, default=1.5, help="how much longer a right one must be to be rejected (default 1.5)")
    add("--most", type=int, metavar="M", help="pairs of one prompt at most, the longest rejected first (default: all)")
    add("--force", action="store_true", help="replace a file that this command did not write")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say
    from burnish.data.outputs import summary, table
    from burnish.evaluation.pairing import Pairing, pair_up

    options = Pairing(args.ratio, args.most)
    manifest, is_new = pair_up(args.source, args.out, options, args.prompts, args.force, say)
    print("\n".join(summary(manifest, args.out, is_new)))
    print(f"  prompts      {manifest['prompts_paired']:,} of {manifest['prompts']:,} have a pair")
    print("\n".join(table(["rejected", "pairs"], [[what, f"{n:,}"] for what, n in manifest["rejected"].items()])))
    return 0
