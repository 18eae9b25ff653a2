"""`burnish reward-model recipe.yaml [key=value ...]`: a scorer from pairs of answers, continued where it was if the run exists."""

from __future__ import annotations

import argparse

from burnish.cli.stage import add_stage_arguments, has_ended
from burnish.cli.train import load_recipe
from burnish.config.load import dump
from burnish.config.reward_model import RewardModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, RewardModelConfig, "reward_model.updates=500")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the accuracy on held-out pairs and where the model is."""
    from burnish.config.explain import plan_text

    loaded, name = load_recipe(RewardModelConfig, args)
    if args.dry_run:
        print(dump(loaded.config))
        print(plan_text(loaded.config))
        return 0
    from burnish.trainers.reward_model_session import execute

    outcome, held = execute(loaded.config, loaded.resolved, loaded.base, name, args.profile)
    if not has_ended(outcome):
        return 0
    if held is not None:
        print(f"held-out pairs: {held.accuracy:.1%} of {held.pairs:,} in the right order, margin {held.margin:.3f}")
        print(f"scores: mean {held.mean:.3f}, standard deviation {held.std:.3f}")
    print(f"model: {outcome.model}")
    return 0
