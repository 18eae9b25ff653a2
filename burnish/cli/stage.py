"""What the commands that train in plain updates (`sft`, `prefer`, `reward-model`) ask for and say alike."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.train import (
    add_fresh_option,
    add_profile_option,
    load_recipe,
    print_memory,
    print_problems,
    replaced_folder,
)
from burnish.config.loading import Loaded, add_missing_defaults, dump
from burnish.run.run_directory import RunDirectory, run_name

if TYPE_CHECKING:
    from burnish.trainers.offline_run import Outcome


def add_stage_arguments(parser: argparse.ArgumentParser, config: type[Any], example: str) -> None:
    """The options; the keys of the config are explained by --help, from the schema."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=Path, help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted overrides, such as {example}")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument("--shrink", action="store_true", help="two updates of a tiny model on a built-in task")
    add_fresh_option(parser)
    add_profile_option(parser, "update")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(config)


def train_stage(args: argparse.Namespace, kind: type[Any], session: str, tell: Callable[[Outcome], None]) -> int:
    """Train with the module `session`, or show the plan; the last lines are what `tell` says of the outcome, and where the model is."""
    from burnish.config.explain import plan_text

    loaded, name = load_recipe(kind, args)
    if args.dry_run:
        print(dump(loaded.config))
        print(plan_text(loaded.config))
        checks = [lambda: print_rows_to_learn(loaded), lambda: print_memory(loaded)]
        if not args.fresh:
            place = Path(loaded.config.run.directory), run_name(loaded.config.run.name, name, loaded.config.seed)
            checks.append(lambda: RunDirectory.check(*place, dump(loaded.config), partial(add_missing_defaults, kind)))
        return print_problems(loaded, checks)
    settings = loaded.config.run
    replaced = replaced_folder(args, Path(settings.directory) / run_name(settings.name, name, loaded.config.seed))
    from burnish.training.parallel.ranks import leave_process_group

    execute = importlib.import_module(session).execute
    outcome = execute(loaded.config, loaded.resolved, loaded.base, name, args.profile, replaced)
    leave_process_group()
    if outcome is None or not has_ended(outcome):  # None: another process speaks for all
        return 0
    tell(outcome)
    print(f"model: {outcome.model}")
    return 0


def print_rows_to_learn(loaded: Loaded[Any]) -> None:
    """How often each row is learnt; the error for a row that cannot be used. What is not there is told elsewhere."""
    from burnish.config.requirements import matching_paths, missing_inputs
    from burnish.config.schema import RewardModelConfig, SftConfig
    from burnish.data.preference_pairs import count_rows
    from burnish.data.supervised import count_examples
    from burnish.models.architecture import check_score_model_base

    config = loaded.config
    if any(missing_inputs(loaded)):
        return
    if isinstance(config, SftConfig):
        stage, what, count = config.sft, "examples", count_examples(config.sft.data, loaded.base, config.seed)
    else:
        stage = config.preference if hasattr(config, "preference") else config.reward_model
        labelled = getattr(getattr(stage, "loss", None), "name", None) == "kto"
        what, count = "rows", count_rows(stage.data, loaded.base, config.seed, labelled)
        count_rows(stage.held_out, loaded.base, config.seed, labelled, "test")
    if isinstance(config, RewardModelConfig) and config.model.path is not None and config.model.adapter is None:
        for place in matching_paths(config.model.path, loaded.base, Path.is_dir)[:1]:
            check_score_model_base(place)
    draws = stage.updates * stage.batch_size
    print(f"data: {count:,} {what}; {stage.updates:,} updates use each {draws / count:,.1f} times")


def has_ended(outcome: Outcome) -> bool:
    """Whether all updates were made; of a run that was stopped it is said how to go on."""
    if not outcome.is_complete:
        print(f"stopped; the same command goes on from here: {outcome.directory}")
    return outcome.is_complete


def print_loss(outcome: Outcome) -> None:
    """The loss of the last update."""
    if not outcome.is_loss_known:
        text = "not known (metrics.jsonl has no line of the last update)"
    elif outcome.loss is None:
        text = "none (the last update was skipped)"
    else:
        text = f"{outcome.loss:.4f}"
    print(f"final loss: {text}")
