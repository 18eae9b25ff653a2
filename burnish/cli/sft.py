"""`burnish sft recipe.yaml [key=value ...]`: training on demonstrations, continued where it was if the run exists."""

from __future__ import annotations

import argparse

from burnish.cli.stage import add_stage_arguments, has_ended, print_loss
from burnish.cli.train import load_recipe, print_memory
from burnish.config.load import dump
from burnish.config.schema import SftConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, SftConfig, "sft.updates=500")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the final loss and where the model is."""
    from burnish.config.explain import plan_text

    loaded, name = load_recipe(SftConfig, args)
    if args.dry_run:
        print(dump(loaded.config))
        print(plan_text(loaded.config))
        print_memory(loaded)
        return 0
    from burnish.trainers.sft_session import execute
    from burnish.training.parallel.join import leave

    outcome = execute(loaded.config, loaded.resolved, loaded.base, name, args.profile)
    leave()
    if outcome is None or not has_ended(outcome):  # None: another process speaks for all
        return 0
    print_loss(outcome)
    print(f"model: {outcome.model}")
    return 0
