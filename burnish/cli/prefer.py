"""`burnish prefer recipe.yaml [key=value ...]`: training on preferences, continued where it was if the run exists."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.cli.stage import add_stage_arguments, print_loss, train_stage
from burnish.config.schema import PreferConfig

if TYPE_CHECKING:
    from burnish.trainers.offline_run import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, PreferConfig, "preference.loss=ipo")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the held-out accuracy before and after, the final loss and where the model is."""
    return train_stage(args, PreferConfig, "burnish.trainers.preference", tell)


def tell(outcome: Outcome) -> None:
    """Accuracy and loss."""
    print_accuracy(outcome.directory)
    print_loss(outcome)


def print_accuracy(folder: Path) -> None:
    """How often the held-out preference is the model's, at the first measurement and at the last."""
    from burnish.run.metrics import read_metrics
    from burnish.run.run_directory import RunDirectory

    for kind in ("pairs", "answers"):
        name = f"validation/{kind}/accuracy"
        measured = [row[name] for row in read_metrics(RunDirectory(folder).metrics) if name in row]
        if measured:
            print(f"held-out {kind[:-1]} accuracy: {measured[0]:.3f} -> {measured[-1]:.3f}")
