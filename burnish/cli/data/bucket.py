"""`burnish data bucket SRC OUT --scores RUN|COMPLETIONS`: rows with a column that says how hard they are."""

from __future__ import annotations

import argparse

from burnish.cli.data.options import add_output, add_rows, add_scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_rows(parser)
    add_output(parser)
    add_scores(parser, required=True)
    add("--buckets", type=int, default=4, metavar="N", help="how many, equally large (default 4)")
    add("--column", default="difficulty", help="the column of 1 - pass rate (default difficulty)")


def run(args: argparse.Namespace) -> int:
    from burnish.cli.data import say, show
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.data.curation.row_selection import bucket_rows

    manifest, is_new = bucket_rows(args.source, args.out, args.scores, args.buckets, args.column, args.force, say)
    show("\n".join(summary(manifest, args.out, is_new)))
    rows = [
        [b["bucket"], b["rows"], f"{b['highest_pass_rate']:.3f}", f"{b['lowest_pass_rate']:.3f}"]
        for b in manifest["buckets"]
    ]
    show("\n".join(aligned_table(["bucket", "rows", "pass rate from", "down to"], rows)))
    show(
        f"  recipe       algorithm: {{curriculum: {{name: easy_to_hard, column: {args.column}, buckets: {args.buckets}}}}}"
    )
    return 0
