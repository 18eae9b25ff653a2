"""`burnish data steps` turns trees of searches into rows for a step reward model, and `burnish data reject --strategy` searches first."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from burnish.cli.data_options import add_output, add_samples, print_progress, print_result
from burnish.config.errors import UserError
from burnish.data.files import find_files


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data steps COMPLETIONS OUT`."""
    add = parser.add_argument
    add_samples(parser)
    add_output(parser)
    text = "what ended a step of the search, for completions that do not say it (default: what they say)"
    add("--step", metavar="TEXT", help=text)
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


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which `burnish data reject` makes the completions itself."""
    group = parser.add_argument_group(
        "searching first",
        "with --strategy, the source is what `burnish eval` takes as data: a file of rows, or task:NAME; --force also starts the search again",
    )
    group.add_argument(
        "--strategy", metavar="NAME", help="the strategy that answers the rows (burnish eval --strategies)"
    )
    group.add_argument("--model", metavar="DIR", help="the model that answers them: a directory or a run")
    text = "settings of the evaluation, such as strategy.n=16 strategy.verifier=oracle limit=1000"
    group.add_argument("settings", nargs="*", metavar="key=value", help=text)


def search_first(args: argparse.Namespace) -> None:
    """With --strategy, answer the rows of the source by `burnish eval`, and put the file of completions in the source's place.

    The completions stay beside the output, so that a search that was interrupted goes on when the command is repeated.
    """
    if args.strategy is None:
        for name, value in (("--model", args.model), ("key=value", args.settings)):
            if value:
                raise UserError(f"{name} has no effect without --strategy, which makes the completions")
        return
    from burnish.cli.main import main

    if args.model is None:
        raise UserError("--strategy needs --model DIR, the model that answers the rows")
    if args.prompts is not None:
        raise UserError("--prompts has no effect with --strategy, whose prompts are the rows of the source")
    completions = args.out.with_suffix(".completions.jsonl")
    if args.trees:
        _check_trees(args.strategy, args.settings)
    words = [args.model, str(args.source), "--strategy", args.strategy, "--keep-trees", "--out", str(completions)]
    words += ["--force"] if args.force else []
    if not any(setting.startswith("sampling.temperature=") for setting in args.settings):
        words += ["--temperature", "1"]
    if main(["eval", *words, *args.settings]) != 0:
        raise UserError(f"the evaluation failed, so there are no completions in {completions}")
    if not str(args.source).startswith("task:"):
        find_files(str(args.source))
        args.prompts = args.source
    args.source = Path(completions)


def _check_trees(name: str, settings: Sequence[str]) -> None:
    """Refuse --trees, before anything is sampled, for a strategy whose trees will not have scores of the answer key."""
    from burnish.config.loading import load
    from burnish.evaluation.scored_samples import check_is_oracle
    from burnish.evaluation.strategies.registry import strategy_verifier
    from burnish.evaluation.strategies.solve_settings import SolveSettings

    chosen = [text for text in settings if text.partition("=")[0].partition(".")[0].strip() == "strategy"]
    strategy = load(SolveSettings, None, [f"strategy.name={json.dumps(name)}", *chosen]).config.strategy
    part = strategy_verifier(strategy)
    check_is_oracle("--trees", strategy.name, None if part is None else part.name)
