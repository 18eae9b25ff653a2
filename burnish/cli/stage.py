"""What the commands that train in plain updates (`sft`, `prefer`, `reward-model`) ask for and say alike."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.train import add_profile

if TYPE_CHECKING:
    from burnish.trainers.updates import Outcome


def add_stage_arguments(parser: argparse.ArgumentParser, config: type[Any], example: str) -> None:
    """The options; the keys of the config are explained by --help, from the schema."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted overrides, such as {example}")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument("--shrink", action="store_true", help="two updates of a tiny model on a built-in task")
    add_profile(parser, "update")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(config)


def has_ended(outcome: Outcome) -> bool:
    """Whether all updates were made; of a run that was stopped it is said how to go on."""
    if not outcome.is_complete:
        print(f"stopped; the same command goes on from here: {outcome.directory}")
    return outcome.is_complete


def print_loss(outcome: Outcome) -> None:
    """The loss of the last update."""
    print(f"final loss: {'none (the last update was skipped)' if outcome.loss is None else f'{outcome.loss:.4f}'}")
