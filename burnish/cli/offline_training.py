"""`burnish sft`, `burnish prefer` and `burnish reward-model`: training on a fixed data set, without rollouts.

All three take `recipe.yaml [key=value ...]` and continue a run that exists.
"""

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
from burnish.config.loading import Loaded, add_missing_defaults, dump, read_recipe
from burnish.config.recipe_names import RECIPE_HELP, recipe_path
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig
from burnish.run.run_directory import RunDirectory, run_name

if TYPE_CHECKING:
    from burnish.run.durable_files import FolderId
    from burnish.run.run import Run
    from burnish.trainers.offline_run import Outcome


def add_sft_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish sft`."""
    _add_arguments(parser, SftConfig, "sft.updates=500")


def run_sft(args: argparse.Namespace) -> int:
    """Train; the last lines are the final loss and the path of the model."""
    return _train(args, SftConfig)


def add_prefer_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish prefer`."""
    _add_arguments(parser, PreferConfig, "preference.loss=ipo")


def run_prefer(args: argparse.Namespace) -> int:
    """Train; the last lines are the held-out accuracy before and after, the final loss and the path of the model."""
    return _train(args, PreferConfig)


def add_reward_model_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish reward-model`."""
    _add_arguments(parser, RewardModelConfig, "reward_model.updates=500")
    parser.add_argument(
        "--steps",
        action="store_true",
        help="train a process reward model on values of steps: reward_model.steps with its defaults, unless the recipe has the section",
    )


def run_reward_model(args: argparse.Namespace) -> int:
    """Train; the last lines are the measurements on held-out rows and the path of the model."""
    if args.steps and not (read_recipe(RewardModelConfig, args.recipe).get("reward_model") or {}).get("steps"):
        args.overrides.append("reward_model.steps={}")
    return _train(args, RewardModelConfig)


def _add_arguments(parser: argparse.ArgumentParser, config_type: type[Any], example: str) -> None:
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=recipe_path, help=RECIPE_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted overrides, such as {example}")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument("--shrink", action="store_true", help="two updates of a tiny model on a built-in task")
    add_fresh_option(parser)
    add_profile_option(parser, "update")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(config_type)


def _train(args: argparse.Namespace, config_type: type[Any]) -> int:
    """Train, or print the plan of a dry run."""
    from burnish.config.explain import plan_text

    loaded, name = load_recipe(config_type, args)
    settings = loaded.config.run
    folder_name = run_name(settings.name, name, loaded.config.seed)
    if args.dry_run:
        print(dump(loaded.config))
        print(plan_text(loaded.config))
        checks = [lambda: print_row_counts(loaded), lambda: print_memory(loaded)]
        if not args.fresh:
            place = Path(settings.directory), folder_name
            fill = partial(add_missing_defaults, config_type)
            checks.append(lambda: RunDirectory.check(*place, dump(loaded.config), fill))
        return print_problems(loaded, checks)
    replaced = replaced_folder(args, Path(settings.directory) / folder_name)
    return train_in_process(loaded, name, args.profile, replaced)


def train_in_process(
    loaded: Loaded[Any],
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
    on_open: Callable[[Run], None] | None = None,
) -> int:
    """Train in this process. `on_open` is called with the run once its directory exists."""
    from burnish.training.parallel.ranks import leave_process_group

    trainer, print_results = TRAINERS[type(loaded.config)]
    execute = importlib.import_module(trainer).execute
    outcome = execute(loaded.config, loaded.resolved, loaded.base, name, profile, replaced, on_open)
    leave_process_group()
    if outcome is None:  # another rank prints the results
        return 0
    if not outcome.is_complete:
        print(f"stopped; the same command goes on from here: {outcome.directory}")
        return 0
    print_results(outcome)
    print(f"model: {outcome.model}")
    return 0


def print_row_counts(loaded: Loaded[Any]) -> None:
    """Print how often each row is used, and raise for a row that cannot be used. Missing files are reported elsewhere."""
    from burnish.config.requirements import missing_inputs
    from burnish.data.preference_pairs import count_rows
    from burnish.data.step_values import count_stepped_answers
    from burnish.data.supervised import count_examples

    config = loaded.config
    if any(missing_inputs(loaded)):
        return
    section: Any
    if isinstance(config, SftConfig):
        section, what, count = config.sft, "examples", count_examples(config.sft.data, loaded.base, config.seed)
    elif isinstance(config, RewardModelConfig) and config.reward_model.steps is not None:
        section, steps = config.reward_model, config.reward_model.steps
        what, count = "answers", count_stepped_answers(section.data, loaded.base, config.seed, steps)
        count_stepped_answers(section.held_out, loaded.base, config.seed, steps, "test")
    else:
        section = config.preference if hasattr(config, "preference") else config.reward_model
        is_labelled = getattr(getattr(section, "loss", None), "name", None) == "kto"
        what, count = "rows", count_rows(section.data, loaded.base, config.seed, is_labelled)
        count_rows(section.held_out, loaded.base, config.seed, is_labelled, "test")
    draws = section.updates * section.batch_size
    print(f"data: {count:,} {what}; {section.updates:,} updates use each {draws / count:,.1f} times")


def print_loss(outcome: Outcome) -> None:
    """Print the loss of the last update."""
    if not outcome.is_loss_known:
        text = "not known (metrics.jsonl has no line of the last update)"
    elif outcome.loss is None:
        text = "none (the last update was skipped)"
    else:
        text = f"{outcome.loss:.4f}"
    print(f"final loss: {text}")


def _print_preference_results(outcome: Outcome) -> None:
    """Print the held-out accuracy of the first and the last evaluation, and the final loss."""
    from burnish.run.metrics import read_metrics

    for kind in ("pairs", "answers"):
        name = f"validation/{kind}/accuracy"
        values = [row[name] for row in read_metrics(RunDirectory(outcome.directory).metrics) if name in row]
        if values:
            print(f"held-out {kind[:-1]} accuracy: {values[0]:.3f} -> {values[-1]:.3f}")
    print_loss(outcome)


def _print_reward_model_results(outcome: Outcome) -> None:
    """Print the measurements on held-out rows, if there are any."""
    from burnish.trainers.reward_model import read_measurements

    held_out = read_measurements(outcome.model)
    if held_out is not None:
        print("\n".join(held_out.lines))


TRAINERS: dict[type[Any], tuple[str, Callable[[Outcome], None]]] = {
    SftConfig: ("burnish.trainers.sft", print_loss),
    PreferConfig: ("burnish.trainers.preference", _print_preference_results),
    RewardModelConfig: ("burnish.trainers.reward_model", _print_reward_model_results),
}
"""The module that trains a config, and the function that prints its results."""
