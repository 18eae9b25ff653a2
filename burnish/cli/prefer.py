"""`burnish prefer recipe.yaml [key=value ...]`: training on preferences, continued where it was if the run exists."""

from __future__ import annotations

import argparse
from pathlib import Path

from burnish.cli.stage import add_stage_arguments, has_ended, print_loss
from burnish.cli.train import load_recipe, print_memory
from burnish.config.load import dump
from burnish.config.preference import PreferConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_stage_arguments(parser, PreferConfig, "preference.loss=ipo")


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the held-out accuracy before and after, the final loss and where the model is."""
    from burnish.config.explain import plan_text

    loaded, name = load_recipe(PreferConfig, args)
    if args.dry_run:
        print(dump(loaded.config))
        print(plan_text(loaded.config))
        print_memory(loaded)
        return 0
    from burnish.trainers.preference_session import execute
    from burnish.training.parallel.join import leave

    outcome = execute(loaded.config, loaded.resolved, loaded.base, name, args.profile)
    leave()
    if outcome is None or not has_ended(outcome):  # None: another process speaks for all
        return 0
    print_accuracy(outcome.directory)
    print_loss(outcome)
    print(f"model: {outcome.model}")
    return 0


def print_accuracy(folder: Path) -> None:
    """How often the held-out preference is the model's, at the first measurement and at the last."""
    from burnish.run.directory import RunDirectory
    from burnish.run.metrics import read

    for kind in ("pairs", "answers"):
        name = f"validation/{kind}/accuracy"
        measured = [row[name] for row in read(RunDirectory(folder).metrics) if name in row]
        if measured:
            print(f"held-out {kind[:-1]} accuracy: {measured[0]:.3f} -> {measured[-1]:.3f}")
