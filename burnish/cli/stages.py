"""`burnish stages recipe.yaml [key=value ...]`: run several commands in a row. A killed run continues in the same stage.

The process that is started does not load torch. It forks a driver for each stage and supervises it like `burnish train`, so that all
memory of a stage is freed before the next one.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from burnish.cli.main import print_note
from burnish.cli.stage_plan import MEASURED_SUFFIX, Plan, RunnableStage, make_plan, stages_folder
from burnish.cli.train import (
    add_supervisor_options,
    heartbeat_timeout_s,
    num_restarts,
    print_problems_as_written,
)
from burnish.config.errors import UserError
from burnish.config.loading import Loaded, dump, load
from burnish.config.model import Model
from burnish.config.plugins import is_plugin, is_reference
from burnish.config.recipe_names import RECIPE_HELP, recipe_path
from burnish.config.requirements import data_sources
from burnish.config.schema import TrainConfig
from burnish.config.stages import BASE_STAGE, StagesConfig
from burnish.config.yaml_text import printable
from burnish.models.model_support import pin_supported_models
from burnish.run.stage_index import StageIndex
from burnish.run.supervisor.liveness import StopOnInterrupt
from burnish.run.supervisor.supervisor import Supervisor
from burnish.trainers.stages import RECIPE_FILE, PlannedStage, Stages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options. `--help` also lists all keys of the config."""
    from burnish.config.explain import help_text

    parser.add_argument("recipe", type=recipe_path, help=f"{RECIPE_HELP}, with stages")
    example = "stages.reasoning.config.training.steps=50"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"dotted overrides, such as {example}")
    parser.add_argument("--dry-run", action="store_true", help="check all stages, print them and their plans, and stop")
    parser.add_argument("--shrink", action="store_true", help="run every stage for a few steps with a tiny model")
    parser.add_argument(
        "--from",
        dest="start_from",
        metavar="STAGE",
        help="run this stage and all later ones again; their folders are deleted",
    )
    add_supervisor_options(parser)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(StagesConfig)


def run(args: argparse.Namespace) -> int:
    """Run the remaining stages; the last lines are a table of all stages."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("burnish stages starts a process for each stage: start it without torchrun")
    plan = load_plan(args)
    if args.dry_run:
        print_plan(plan)
        return 0
    # A shrunk job needs no supervisor. In one process, all stages together load torch once.
    restarts = 0 if args.shrink and args.max_restarts is None else num_restarts(args)
    with Stages.open(plan.folder, plan.planned, dump(plan.config), args.start_from) as stages:
        for stage in stages.left():
            print_stage_start(plan, stages, stage)
            stages.begin(stage)
            runnable, status = plan.stages[stage.name], None
            is_stop_requested, num_interrupts = False, StopOnInterrupt.num_heard
            if restarts:
                supervisor = Supervisor(plan.folder / stage.name, restarts, stage_timeout_s(args, runnable))
                status, is_stop_requested = supervisor.run(), supervisor.is_asked_to_stop
            if status is None:  # this is the forked driver, or there is no supervisor
                from burnish.cli.stage_commands import run_stage

                status = run_stage(plan, runnable, plan.base_output() | stages.made())
                if restarts:
                    return status
            is_done = stages.end(stage)
            is_stop_requested = is_stop_requested or StopOnInterrupt.num_heard > num_interrupts
            if not is_done or (is_stop_requested and stages.left()):
                how = "stopped" if status == 0 else f"ended with status {status}"
                where = f"{'after' if is_done else 'in'} stage {stage.name}"
                print(f"{how} {where}; the same command{_without_from(args)} goes on from here: {plan.folder}")
                return status
        print(printable("\n".join(summary(plan, stages.index))))
    return 0


def load_plan(args: argparse.Namespace) -> Plan:
    """The checked plan of a command line. Prints what `--shrink` changed."""
    if not args.shrink:
        name, loaded = args.recipe.stem, load(StagesConfig, args.recipe, args.overrides)
        record = stages_folder(loaded.config, name) / RECIPE_FILE
        pinned = pin_supported_models(loaded, record, print_note, not args.dry_run, args.recipe)
        return make_plan(pinned, args.recipe, name)
    from burnish.config.stages import load_shrunk_stages

    loaded, changes = load_shrunk_stages(args.recipe, args.overrides)
    print("\n".join(f"shrunk: {change}" for change in changes))
    print_problems_as_written(load(StagesConfig, args.recipe), args.recipe)
    return make_plan(loaded, args.recipe, f"{args.recipe.stem}-shrunk")


def stage_timeout_s(args: argparse.Namespace, runnable: RunnableStage) -> float:
    """How long the driver of a stage may be silent."""
    if runnable.loaded is not None and isinstance(runnable.loaded.config, TrainConfig):
        return heartbeat_timeout_s(args, runnable.loaded.config)
    return float(args.deadline)


def _without_from(args: argparse.Namespace) -> str:
    """A reminder to leave out `--from`, which would start again instead of continuing."""
    return " without --from" if args.start_from is not None else ""


# --- output ------------------------------------------------------------------------------------------------------------


def print_stage_start(plan: Plan, stages: Stages, stage: PlannedStage) -> None:
    """Print which stage starts."""
    names = list(plan.stages)
    begins = f", from {stage.start}" if stage.start is not None else ""
    again = ", going on" if stage.name in stages.index.entries else ""
    passed = sum(entry.seconds for entry in stages.index.entries.values())
    print(
        f"\nstage {names.index(stage.name) + 1} of {len(names)}: {stage.name} ({stage.command}{begins}{again}), "
        f"{passed:.0f} s so far",
        flush=True,
    )


def print_plan(plan: Plan) -> None:
    """Print every stage with its command, start, inputs, status and plan."""
    from burnish.config.explain import plan_text

    there = StageIndex.read(plan.folder)
    print(f"{plan.folder}: {len(plan.stages)} stages, all checked")
    rows = [
        [
            name,
            one.planned.command,
            one.planned.start or "-",
            ", ".join(one.planned.needs) or "-",
            stage_status(there, one.planned),
        ]
        for name, one in plan.stages.items()
    ]
    print("\n".join(align_columns([["stage", "command", "start", "needs", "is"], *rows], left=(0, 1, 2, 3, 4))))
    for name, one in plan.stages.items():
        if one.loaded is not None:
            print(f"\n{name}\n{plan_text(one.loaded.config)}", end="")
            print_stage_rows(one.loaded)
            print_stage_memory(plan, one)


def print_stage_rows(loaded: Loaded[Any]) -> None:
    """Print how often each row is used, unless an earlier stage makes the rows; raise for a row that cannot be used."""
    from burnish.cli.offline_training import print_row_counts
    from burnish.cli.train import print_rows

    if any(is_reference(source.path) for source in data_sources(loaded.config)):
        return
    if isinstance(loaded.config, TrainConfig):
        # The plan has checked a user's reward in a child process. Importing it here could start threads that keep this process alive.
        if not any(is_plugin(part.name) for part in loaded.config.reward.parts):
            print_rows(loaded)
    else:
        print_row_counts(loaded)


def print_stage_memory(plan: Plan, runnable: RunnableStage) -> None:
    """Print the memory plan of a training stage; raise if it does not fit."""
    from burnish.memory_plan.from_config import plan_run

    assert runnable.loaded is not None
    config = runnable.loaded.config
    if isinstance(config, TrainConfig) and config.placement.name != "local":
        return
    memory = plan_run(config.model_copy(update={"model": planned_model(plan, runnable)}), plan.base)
    print(memory.text)
    for warning in memory.check():
        print(f"note: {warning}")


def planned_model(plan: Plan, runnable: RunnableStage) -> Model:
    """The model of a stage for its memory plan: the architecture of the base, and the adapters that the stage trains."""
    from burnish.models.lora.peft_files import base_model_of
    from burnish.models.policy import find_directory

    assert runnable.loaded is not None
    base, model = plan.config.model, runnable.loaded.config.model
    own = {key: getattr(model, key) for key in ("dtype", "device", "backend", "lora")}
    if is_reference(model.adapter):
        assert runnable.planned.start is not None
        own["lora"] = planned_model(plan, plan.stages[runnable.planned.start]).lora
    elif model.adapter is None and base.adapter is not None:  # an earlier stage has merged the adapters
        own |= {
            "adapter": None,
            "path": base.path or str(base_model_of(find_directory(base.adapter, plan.base, with_weights=False))),
        }
    return base.model_copy(update=own)


def stage_status(index: StageIndex, stage: PlannedStage) -> str:
    """The status of a stage."""
    if stage.name not in index.entries:
        return "to do"
    is_other = index.entries[stage.name].asked != stage.asked
    return ("done" if index.is_done(stage.name) else "begun") + (" with other settings" if is_other else "")


def summary(plan: Plan, index: StageIndex) -> list[str]:
    """The final table: each stage with its seconds and the accuracy before and after."""
    rows, measuring = [], 0.0
    for name, one in plan.stages.items():
        entry = index.entries[name]
        assert entry.outcome is not None, "all stages are done"
        if one.planned.of is not None:
            measuring += entry.seconds
            continue
        before, after = accuracies(one.planned, index)
        measured = index.entries.get(name + MEASURED_SUFFIX)
        notes = [entry.outcome.note, measured.outcome.note if measured is not None and measured.outcome else ""]
        cells = [format_accuracy(before), format_accuracy(after), "; ".join(filter(None, notes))]
        rows.append([name, one.planned.command, one.planned.start or "-", f"{entry.seconds:.1f}", *cells])
    total = sum(index.entries[name].seconds for name in plan.stages)
    if measuring:
        rows.append(["(measuring)", "eval", "-", f"{measuring:.1f}", "", "", ""])
    rows.append(["all", "", "", f"{total:.1f}", "", "", ""])
    last = [name for name, one in plan.stages.items() if one.planned.command in ("train", "sft", "prefer", "merge")]
    lines = align_columns([["stage", "command", "start", "seconds", "before", "after", ""], *rows])
    if last:
        outcome = index.entries[last[-1]].outcome
        assert outcome is not None
        lines.append(f"model: {plan.folder / outcome.product}")
    return ["", *lines]


def align_columns(rows: list[list[str]], left: tuple[int, ...] = (0, 1, 2, 6)) -> list[str]:
    """Rows of text in columns; the columns in `left` are left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    return [f"  {line}".rstrip() for line in lines]


def accuracies(stage: PlannedStage, index: StageIndex) -> tuple[float | None, float | None]:
    """Accuracy of the model that a stage started from and of its output, on the data of `measure` or else on the stage's held-out data."""
    entry = index.entries[stage.name]
    assert entry.outcome is not None
    measured = index.entries.get(stage.name + MEASURED_SUFFIX)
    if measured is None or measured.outcome is None:
        return entry.outcome.before, entry.outcome.after
    earlier = index.entries.get((stage.start or BASE_STAGE) + MEASURED_SUFFIX) if stage.start is not None else None
    before = earlier.outcome.after if earlier is not None and earlier.outcome is not None else None
    return before, measured.outcome.after


def format_accuracy(value: float | None) -> str:
    """An accuracy with three digits, or `-`."""
    return "-" if value is None else f"{value:.3f}"
