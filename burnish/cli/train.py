"""`burnish train recipe.yaml [key=value ...]`: RL from a config. A run that exists is continued.

The process that is started is a supervisor (`burnish.run.supervisor.supervisor`), and a fork of it is the driver of the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.main import print_note
from burnish.config.errors import UserError
from burnish.config.loading import ConfigType, Loaded, dump, load, load_shrunk
from burnish.config.recipe_names import RECIPE_HELP, recipe_path
from burnish.config.schema import TrainConfig
from burnish.config.yaml_text import parse_yaml, printable
from burnish.core.dispatch import WorkerLost
from burnish.run.durable_files import FolderId, folder_id
from burnish.run.run_directory import RunDirectory, run_name
from burnish.run.supervisor.exit_status import WORKER_LOST_STATUS
from burnish.run.supervisor.supervisor import is_supported, supervise

if TYPE_CHECKING:
    from burnish.run.run import Run

DRY_RUN_FAILED = 2
"""Exit status of a dry run that found a problem, the same as that of the run."""
MAX_RESTARTS = 3
DEADLINE_S = 1800.0
SUPERVISOR_MARGIN_S = 60.0
"""How much longer than the driver the supervisor waits for a worker."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options. `--help` also lists all keys of the config."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=recipe_path, help=RECIPE_HELP)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted overrides, such as rollout.n=16")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, and stop")
    parser.add_argument(
        "--cluster",
        metavar="MxGxGPU",
        help="with --dry-run: plan the run for a cluster, such as 64x8xH200 (mesh, memory, traffic, estimated time)",
    )
    parser.add_argument(
        "--shrink",
        action="store_true",
        help="run the same algorithm for a few steps, with a tiny model on a built-in task",
    )
    parser.add_argument(
        "--controls", action="store_true", help="then train two supervised controls on the same task and compare"
    )
    add_fresh_option(parser)
    add_profile_option(parser, "step")
    add_supervisor_options(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(TrainConfig)


def add_fresh_option(parser: argparse.ArgumentParser) -> None:
    """Add the option `--fresh`."""
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start a new run; an old one of the same name is moved to NAME.1 (or .2, ...) once the new one has passed its checks",
    )


def replaced_folder(args: argparse.Namespace, folder: Path) -> FolderId | None:
    """With `--fresh`, the folder that exists now. The new run renames it once its checks have passed."""
    return folder_id(folder) if args.fresh else None


def add_supervisor_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the supervisor."""
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="N",
        help=f"restart a run that dies at most N times (default {MAX_RESTARTS}); 0: no supervisor process",
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_S,
        metavar="SECONDS",
        help=f"restart a run without a sign of life for this long, and save its stacks (default {DEADLINE_S:g})",
    )


def add_profile_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option `--profile [STEP]`."""
    parser.add_argument(
        "--profile",
        nargs="?",
        const=0,
        type=_step_number,
        metavar="STEP",
        help=f"profile one {what} (default: the second from now): trace.json.gz and profile.txt in the run folder",
    )


def _step_number(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(
            f"{word!r} is not a step: give a number of 1 or more, or put --profile last to profile the second step"
        )
    return int(word)


def run(args: argparse.Namespace) -> int:
    """Train; the last lines are the held-out accuracy, or the mean reward, before and after RL."""
    if args.cluster is not None:
        return print_cluster_plan(args)
    loaded, name = load_recipe(TrainConfig, args)
    if args.dry_run:
        check_controls(args, loaded.config)
        return print_dry_run(loaded, name, args.fresh)
    restarts = num_restarts(args)
    folder = run_folder(loaded.config, name)
    replaced = replaced_folder(args, folder)  # read once: a restarted driver must continue the new run
    if restarts:
        status = supervise(folder, restarts, heartbeat_timeout_s(args, loaded.config), replaced)
        if status is not None:
            return status
    try:
        return train_in_process(args, loaded, name, replaced)
    except WorkerLost as error:
        print(f"burnish: error: {printable(str(error))}", file=sys.stderr)
        return WORKER_LOST_STATUS


def print_dry_run(loaded: Loaded[TrainConfig], name: str, is_fresh: bool) -> int:
    """Print the resolved config, the plan and all problems; return the exit status. With `is_fresh`, an old run is not checked."""
    from burnish.config.explain import config_notes, plan_text
    from burnish.distributed.placement import check_placement
    from burnish.trainers.rl_run import check_directory

    print(dump(loaded.config))
    print(plan_text(loaded.config))
    for remark in config_notes(loaded.config):
        print(f"note: {remark}")
    checks = [lambda: check_placement(loaded.config.placement), lambda: print_rows(loaded, name)]
    if not is_fresh:
        checks.append(lambda: check_directory(loaded.config, name))
    if loaded.config.placement.name == "local":
        checks.append(lambda: print_memory(loaded))
    return print_problems(loaded, checks)


def print_cluster_plan(args: argparse.Namespace) -> int:
    """Print the plan of a run on a cluster. It needs neither the cluster nor the files of the recipe."""
    from burnish.config.explain import plan_text
    from burnish.memory_plan.cluster_plan import plan_cluster, plan_report
    from burnish.memory_plan.hardware import parse_cluster

    if not args.dry_run or args.shrink:
        raise UserError("--cluster plans a run on paper: give it with --dry-run, and without --shrink")
    cluster = parse_cluster(args.cluster)
    loaded = load(TrainConfig, args.recipe, args.overrides)
    print(plan_text(loaded.config))
    print(plan_report(plan_cluster(loaded.config, loaded.base, cluster)))
    return 0


def check_controls(args: argparse.Namespace, config: TrainConfig) -> None:
    """Refuse `--controls` if there is nothing to compare with."""
    if args.controls:
        from burnish.trainers import rl_run

        rl_run.check_controls(config)


def num_restarts(args: argparse.Namespace) -> int:
    """How often the run may be restarted. 0 if a program called `main()`, because a fork would duplicate the program."""
    given: int | None = args.max_restarts
    if given is not None and given < 0:
        raise UserError(f"--max-restarts {given}: give 0 or more")
    if not args.deadline > 0:
        raise UserError(f"--deadline {args.deadline:g}: give a number of seconds above 0")
    can_fork = args.is_command and is_supported()
    if given and not can_fork:
        raise UserError(
            f"--max-restarts {given} needs the command `burnish train` on Linux: leave it out or set it to 0"
        )
    return given if given is not None else MAX_RESTARTS if can_fork else 0


def run_folder(config: TrainConfig, name: str) -> Path:
    """The folder of the run."""
    return Path(config.run.directory) / run_name(config.run.name, name, config.seed)


def heartbeat_timeout_s(args: argparse.Namespace, config: TrainConfig) -> float:
    """How long the driver may be silent. Longer than its own time limits for workers and servers, which it handles itself."""
    others = [config.placement] if config.placement.name == "ray" else []
    waits_s = [other.timeout_s for other in (*others, config.rollout.vllm, config.rollout.sglang) if other is not None]
    waits_s += [config.rollout.source.deadline_s] if config.rollout.source.name == "async" else []
    return max(float(args.deadline), *(wait_s + SUPERVISOR_MARGIN_S for wait_s in waits_s), 0.0)


def train_in_process(
    args: argparse.Namespace,
    loaded: Loaded[TrainConfig],
    name: str,
    replaced: FolderId | None = None,
    on_open: Callable[[Run], None] = lambda run: None,
) -> int:
    """Train in this process. `on_open` is called with the run once its directory exists."""
    from burnish.trainers.rl_run import checked_run, execute
    from burnish.training.parallel.ranks import require_single_process

    require_single_process("train")
    check_controls(args, loaded.config)
    with checked_run(loaded.config, loaded.resolved, loaded.base, name, replaced) as (parts, run):
        on_open(run)
        if not execute(parts, run, args.profile):
            run.display.stop()
            run.end(run.last_step, is_complete=False)
            print(f"stopped; the same command goes on from here: {run.directory.path}")
            return 0
        run.display.stop()
        if args.controls:
            from burnish.trainers.rl_run import run_controls

            run_controls(loaded.config, loaded.base, run)
        print_results(run)
        run.end(run.last_step, is_complete=True)
    return 0


def print_memory(loaded: Loaded[Any]) -> None:
    """Print the memory plan; raise if the run does not fit the device."""
    from burnish.memory_plan.from_config import plan_run

    memory = plan_run(loaded.config, loaded.base)
    print(memory.text)
    warnings = memory.check()
    print("\n".join(f"note: {warning}" for warning in warnings) or memory.verdict)


def print_rows(loaded: Loaded[TrainConfig], name: str | None = None) -> None:
    """Print how often each row is drawn, and raise for a row that cannot be used. Missing files are reported elsewhere.

    With the recipe's `name`, also raise for what does not fit the policy's tokenizer and architecture, if its model exists.
    """
    from burnish.config.requirements import missing_extras, missing_inputs, missing_models
    from burnish.rewards.scoring import Rewards
    from burnish.trainers.input_checks import read_checked_rows, row_repeats_text
    from burnish.trainers.rl_run import check_without_weights

    if any(missing_inputs(loaded)) or any(missing_extras(loaded.config)):
        return
    with Rewards(loaded.config.reward, loaded.base, is_remote=True) as rewards:
        rows = read_checked_rows(loaded.config, loaded.base, rewards)
        for line in row_repeats_text(loaded.config, rows.sizes):
            print(line)
        if name is not None and not any(missing_models(loaded)):
            check_without_weights(loaded.config, loaded.base, name, rewards, rows.take)


def print_problems(loaded: Loaded[Any], checks: list[Callable[[], None]]) -> int:
    """Print missing files and what each check finds; return the exit status of the dry run."""
    from burnish.config.requirements import missing_extras, missing_files
    from burnish.models.model_support import unsupported

    problems = [*missing_files(loaded), *missing_extras(loaded.config), *unsupported(loaded.config, loaded.base)]
    for check in checks:
        try:
            check()
        except UserError as error:
            problems.append(str(error))
    for problem in problems:
        print(f"this run would not start: {problem}")
    number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    print(f"dry run: {number}, the run would not start" if problems else "dry run: the run would start")
    return DRY_RUN_FAILED if problems else 0


def load_recipe(kind: type[ConfigType], args: argparse.Namespace) -> tuple[Loaded[ConfigType], str]:
    """The configuration of a command line and the name of its run. Prints what `--shrink` changed.

    Models that are named by their hub id are fetched and replaced by their commits, without weights for a dry run.
    """
    if not args.shrink:
        return with_pinned_models(load(kind, args.recipe, args.overrides), args.recipe.stem, args), args.recipe.stem
    loaded, changes = load_shrunk(kind, args.recipe, args.overrides)
    print("\n".join(f"shrunk: {change}" for change in changes))
    print_problems_as_written(load(kind, args.recipe), args.recipe)
    name = f"{args.recipe.stem}-shrunk"
    return with_pinned_models(loaded, name, args), name


def print_problems_as_written(loaded: Loaded[Any], recipe: Path) -> None:
    """Print why the models of the whole recipe could not do what it asks of them, which a tiny model would hide."""
    from burnish.models.model_support import recipe_problems

    for problem in recipe_problems(loaded, recipe):
        print_note(f"as written, this recipe would not start: {problem}")


def with_pinned_models(loaded: Loaded[ConfigType], name: str, args: argparse.Namespace) -> Loaded[ConfigType]:
    """The configuration with the commits of its hub ids: those that the run began with, if it goes on."""
    from burnish.models.model_support import pin_supported_models

    config: Any = loaded.config
    record = None if args.fresh else RunDirectory(run_folder(config, name)).config
    try:
        return pin_supported_models(loaded, record, print_note, with_weights=not args.dry_run)
    except UserError:
        if args.dry_run:
            return loaded  # the dry run lists it with its other problems
        raise


def print_results(run: Run) -> None:
    """Write the report, then print the best checkpoint and the held-out figures; those of the first mode come last."""
    from burnish.report.html_report import write_report
    from burnish.run.metrics import HELD_OUT_FIGURES, held_out_figures, read_metrics

    rows = read_metrics(run.directory.metrics)
    if rows:
        report = write_report(run.directory.path)
        run.trackers.attach_report(report)
        run.trackers.close(is_failed=False)
        print(f"report: {report}")
    else:
        print(f"report: not written, {run.directory.metrics} has no lines; restore it and run the same command again")
    best = run.checkpoints.best()
    model = best or run.checkpoints.latest()
    if model is not None:
        why = "the last, none has a score" if best is None else f"step {best.step} is the best: {best.score_text}"
        print(f"model:  {model.path}\n        {why}")
    if not rows:
        print("held-out figures: not known")
    measured = [row for row in rows if any(k.startswith("validation/") for k in row)]
    if not measured:
        return
    before, after = measured[0], measured[-1]
    figures = held_out_figures(after)
    if not figures:
        print("held-out accuracy: none, not one held-out sample could be scored")
        return
    modes = parse_yaml(run.directory.config.read_text(), str(run.directory.config))["validation"][
        "modes"
    ]  # in the order of the config
    # If the modes of a finished run were renamed, it has only results of the old ones.
    measured_modes = [mode for mode in modes if mode in figures] or list(figures)
    for mode in measured_modes:
        _print_table(mode, figures[mode], before, after)
    mode, figure = measured_modes[0], figures[measured_modes[0]]
    name = f"validation/{mode}/{figure}"
    if before["step"] == 0:
        print(f"{HELD_OUT_FIGURES[figure]} before RL: {before.get(name, float('nan')):.3f}")
    print(f"{HELD_OUT_FIGURES[figure]} after RL: {after[name]:.3f}")


def _print_table(mode: str, figure: str, before: dict[str, float], after: dict[str, float]) -> None:
    """Print the first and the last value of a mode, for all rows and for each value of `validation.by`."""
    from burnish.run.metrics import HELD_OUT_FIGURES

    prefix = f"validation/{mode}/{figure}"
    print(f"  {HELD_OUT_FIGURES[figure] + ', ' + mode:<32} step {before['step']} -> step {after['step']}")
    for key in [k for k in after if k == prefix or k.startswith(prefix + "/")]:
        label = printable(key.removeprefix(prefix).lstrip("/") or "all")
        print(f"    {label:<30} {before.get(key, float('nan')):.3f} -> {after[key]:.3f}")
