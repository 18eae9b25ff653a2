"""`burnish data pairs COMPLETIONS|RUN OUT`: the shortest right completion before longer ones, for `burnish prefer`."""

from __future__ import annotations

import argparse

from burnish.cli.data.options import add_output, add_samples


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_samples(parser)
    add_output(parser)
    add("--ratio", type=float, default=1.5, help="how much longer a right one must be to be rejected (default 1.5)")
    add("--most", type=int, metavar="M", help="pairs of one prompt at most, the longest rejected first (default: all)")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.evaluation.rejection_sampling import PairingOptions, write_pairs

    options = PairingOptions(args.ratio, args.most)
    manifest, is_new = write_pairs(args.source, args.out, options, args.prompts, args.force, say)
    show("\n".join(summary(manifest, args.out, is_new)))
    show(f"  prompts      {manifest['prompts_paired']:,} of {manifest['prompts']:,} have a pair")
    show(
        "\n".join(aligned_table(["rejected", "pairs"], [[what, f"{n:,}"] for what, n in manifest["rejected"].items()]))
    )
    return 0
