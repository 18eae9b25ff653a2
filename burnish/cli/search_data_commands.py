"""`burnish data steps`: the trees of searches become rows for a step reward model."""

from __future__ import annotations

import argparse

from burnish.cli.data_commands import add_output, add_samples, print_progress, print_result


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data steps COMPLETIONS OUT`."""
    add = parser.add_argument
    add_samples(parser)
    add_output(parser)
    add("--step", default="\n\n", help="what ends a step, as strategy.step of the search (default: a blank line)")
    text = "fewest continuations behind a value; steps with fewer have no label (default 1)"
    add("--min-count", type=int, default=1, metavar="N", help=text)
    add("--mixed", action="store_true", help="leave out answers whose steps all have the same value")


def run_steps(args: argparse.Namespace) -> int:
    """Write rows of prompt, steps and values for `burnish reward-model --steps`."""
    from burnish.data.curation.output_files import summary
    from burnish.evaluation.search_data import StepRowOptions, write_step_rows

    options = StepRowOptions(args.step, args.min_count, args.mixed)
    manifest, is_new = write_step_rows(args.source, args.out, options, args.prompts, args.force, print_progress)
    lines = [
        f"  trees        {manifest['trees']:,}",
        f"  labels       {manifest['labels']:,} of {manifest['steps']:,} steps",
    ]
    print_result([*summary(manifest, args.out, is_new), *lines])
    return 0
