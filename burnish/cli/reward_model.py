"""`burnish reward-model recipe.yaml [key=value ...]`: a scorer from pairs of answers, continued where it was if the run exists."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from burnish.cli.stage import add_stage_arguments, train_stage
from burnish.config.schema import RewardModelConfig

if TYPE_CHECKING:
    from burnish.trainers.offline_run import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, RewardModelConfig, "reward_model.updates=500")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the accuracy on held-out pairs and where the model is."""
    return train_stage(args, RewardModelConfig, "burnish.trainers.reward_model", tell)


def tell(outcome: Outcome) -> None:
    """How it does on held-out pairs, if there are any."""
    from burnish.trainers.reward_model import read_measurements

    held = read_measurements(outcome.model)
    if held is not None:
        print(f"held-out pairs: {held.accuracy:.1%} of {held.pairs:,} in the right order, margin {held.margin:.3f}")
        print(f"scores: mean {held.mean:.3f}, standard deviation {held.std:.3f}")
