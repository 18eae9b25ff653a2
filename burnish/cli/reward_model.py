"""`burnish reward-model recipe.yaml [key=value ...]`: a scorer from pairs of answers, continued where it was if the run exists."""

from __future__ import annotations

import argparse
from pathlib import Path

from burnish.cli.train import add_profile, load_recipe
from burnish.config.load import dump
from burnish.config.reward_model import RewardModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; the keys of the config are explained by --help, from the schema."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, such as reward_model.updates=500"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument("--shrink", action="store_true", help="two updates of a tiny model on a built-in task")
    add_profile(parser, "update")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(RewardModelConfig)


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the accuracy on held-out pairs and where the model is."""
    loaded, name = load_recipe(RewardModelConfig, args)
    stage = loaded.config.reward_model
    if args.dry_run:
        sequences = 2 * stage.batch_size
        print(dump(loaded.config))
        print(
            f"training  {stage.updates:,} updates of {stage.batch_size:,} pairs (at most {sequences * stage.max_tokens:,} "
            f"tokens), {stage.updates * stage.batch_size:,} pairs in all"
        )
        return 0
    from burnish.trainers.reward_model_session import execute

    outcome, held = execute(loaded.config, loaded.resolved, loaded.base, name, args.profile)
    if not outcome.is_complete:
        print(f"stopped; the same command goes on from here: {outcome.directory}")
        return 0
    if held is not None:
        print(f"held-out pairs: {held.accuracy:.1%} of {held.pairs:,} in the right order, margin {held.margin:.3f}")
        print(f"scores: mean {held.mean:.3f}, standard deviation {held.std:.3f}")
    print(f"model: {outcome.model}")
    return 0
