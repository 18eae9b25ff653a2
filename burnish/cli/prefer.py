"""`burnish prefer recipe.yaml [key=value ...]`: training on preferences, continued where it was if the run exists."""

from __future__ import annotations

import argparse
from pathlib import Path

from burnish.cli.train import add_profile, load_recipe, print_memory
from burnish.config.load import dump
from burnish.config.preference import PreferConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options; the keys of the config are explained by --help, from the schema."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="dotted overrides, such as preference.loss=ipo"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument("--shrink", action="store_true", help="two updates of a tiny model on a built-in task")
    add_profile(parser, "update")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(PreferConfig)


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
    if outcome is None:  # another process speaks for all
        return 0
    if not outcome.is_complete:
        print(f"stopped; the same command goes on from here: {outcome.directory}")
        return 0
    print_accuracy(outcome.directory)
    print(f"final loss: {'none (the last update was skipped)' if outcome.loss is None else f'{outcome.loss:.4f}'}")
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
