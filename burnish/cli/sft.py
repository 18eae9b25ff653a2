"""`burnish sft recipe.yaml [key=value ...]`: training on demonstrations, continued where it was if the run exists."""

from __future__ import annotations

import argparse

from burnish.cli.stage import add_stage_arguments, print_loss, train_stage
from burnish.config.schema import SftConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, SftConfig, "sft.updates=500")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the final loss and where the model is."""
    return train_stage(args, SftConfig, "burnish.trainers.sft", print_loss)
