"""What every run on data that is all there has in common: run directory, updates in order, checkpoints, going on.

`burnish sft`, `burnish prefer` and `burnish reward-model` hand in a loop that makes updates and calls back after each; this module commits
them, saves some, and stops when the user asks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from burnish.config.loading import add_missing_defaults, dump
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig
from burnish.config.schema import Run as RunConfig
from burnish.run.checkpoint.checkpoints import score_by
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Content, Snapshot, WriterRank
from burnish.run.durable_files import FolderId
from burnish.run.metrics import read_metrics
from burnish.run.run import FollowerRun, Run
from burnish.run.run_directory import RunDirectory, run_name
from burnish.run.supervisor.liveness import StopOnInterrupt
from burnish.trainers.input_checks import record_inputs
from burnish.trainers.performance import MemoryPlanCheck
from burnish.training.learner import Learner
from burnish.training.optimizers.update_rules import describe_lr
from burnish.training.parallel.ranks import Ranks
from burnish.training.profiler import profiled, step_to_profile

UpdateConfig = SftConfig | PreferConfig | RewardModelConfig
OnUpdate = Callable[[int, dict[str, float]], bool | None]
"""Called after every update with its number and metrics; True ends the training there."""
UpdateContext = Callable[[int], AbstractContextManager[None]]
"""The context an update is made in, by its number."""


@dataclass(frozen=True)
class Outcome:
    """How far a run has come and what it left."""

    directory: Path
    is_complete: bool
    loss: float | None
    """Of the last update; None where that one had no token to learn from, or its line of metrics is lost."""
    is_loss_known: bool
    """False where metrics.jsonl has no line of the last update."""
    model: Path


class SavableModel(Protocol):
    """A model with its tokenizer, as checkpoints see it: a `PolicyModel`, or a scorer."""

    note: str
    """What it is, for people."""

    @property
    def part(self) -> WriterRank:
        """Which of the processes that hold the model this is."""

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The files of a Hugging Face directory that this process writes."""

    def load_weights(self, directory: Path) -> None:
        """Copy the weights of a saved directory in place."""


@dataclass
class OfflineRun:
    """The parts of a run; `updates` counts those made, also by the run's earlier lives."""

    settings: RunConfig
    run: Run
    policy: SavableModel
    learner: Learner
    total: int
    """Updates of the whole run."""
    prefix: str
    """What the names of its metrics begin with."""
    updates: int = 0
    profile: int | None = None
    """The update to record with a profiler."""
    memory: MemoryPlanCheck | None = None
    """The memory plan, to be compared with what an update held."""

    def used(self, update: int) -> Sequence[str]:
        """The ids of the rows an update was made on, for the journal."""
        return ()

    def measure(self, update: int) -> dict[str, float]:
        """Metrics on held-out data, where they are due after this update."""
        return {}

    def score(self, values: dict[str, float]) -> tuple[float, str] | None:
        """By which the best checkpoint is chosen, with the name of its metric, where an update was measured."""
        return None


class HasId(Protocol):
    """What an update is made of: a pair, a labelled answer."""

    @property
    def id(self) -> str:
        """Of its row."""


Row = TypeVar("Row", bound=HasId)


@dataclass
class RowsRun(OfflineRun, Generic[Row]):
    """A run whose updates are made of so many rows each, in an order known beforehand, with others held out."""

    rows: list[Row] = field(kw_only=True)
    held_out: list[Row] = field(kw_only=True)
    order: list[int] = field(kw_only=True)
    """The numbers of the rows of all updates."""
    batch_size: int = field(kw_only=True)

    @property
    def kind(self) -> str:
        """What its metrics on held-out data are called after."""
        return "pairs"

    def used(self, update: int) -> Sequence[str]:
        return [self.rows[i].id for i in self.order[(update - 1) * self.batch_size : update * self.batch_size]]

    def score(self, values: dict[str, float]) -> tuple[float, str] | None:
        """`run.best_by`, or the held-out accuracy."""
        return score_by(self.settings.best_by or f"validation/{self.kind}/accuracy", values)


def validation_name(update: int) -> str:
    """A validation by its place in the run, for the display."""
    return "validation before update 1" if update == 0 else f"validation after update {update}"


def open_run(
    config: UpdateConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    ranks: Ranks,
    replaced: FolderId | None = None,
) -> Run:
    """The run directory, new or with its past, in the hands of the first process; the others follow when it is there.

    `replaced` is the folder of an old run of this name, which is moved to another name.
    """
    settings = config.run
    if not ranks.is_first:
        return FollowerRun(Path(ranks.from_first("")), settings)
    folder = RunDirectory.create(
        Path(settings.directory),
        run_name(settings.name, name, config.seed),
        dump(config),
        partial(add_missing_defaults, type(config)),
        replaced,
    )
    try:
        notes = record_inputs(folder.path, config, resolved, base)
    except BaseException:
        folder.close()
        raise
    ranks.from_first(str(folder.path))
    run = Run(folder, settings, resolved)
    for note in notes:
        run.display.note(note)
    return run


def start_training(job: OfflineRun, what: str, profile: int | None) -> bool:
    """Say what is trained, and measure before the first update; False where all updates are done. `profile`: `step_to_profile`."""
    display = job.run.display
    if job.updates >= job.total:
        display.note(f"{job.run.directory.path} is complete: all {job.total} updates are done")
        return False
    display.start(f"{what}: {job.policy.note}", job.total, job.updates)
    if job.run.directory.changes_training:
        display.note(describe_lr(job.learner.config, job.updates, job.total))
    job.profile = step_to_profile(profile, job.updates, job.total) if job.learner.ranks.is_first else None
    if job.updates == 0 and (before := job.measure(0)):
        job.run.commit(0, before, [])
    return True


def run_updates(job: OfflineRun, loop: Callable[[OnUpdate, UpdateContext], None]) -> None:
    """Updates to the end, or until the user asks to stop; each is committed, some are saved, the last one always."""
    with StopOnInterrupt(job.run.display.note) as stop:

        def after(update: int, values: dict[str, float]) -> bool:
            job.updates = update
            if job.memory is not None:
                values |= job.memory.after(job.learner.updates, values, job.run.display.note)
            if f"{job.prefix}/skipped" in values:
                job.run.display.note(f"update {update} was skipped: no finite gradient, or no token to learn from")
            measured = job.measure(update)
            job.run.commit(update, values | measured, list(job.used(update)))
            stopping = job.learner.ranks.anyone(stop.requested)  # asked once, so that a run that stops has saved
            due = update % job.settings.save_every == 0 or (bool(measured) and job.settings.keep_best)
            if stopping or update == job.total or due:
                job.run.checkpoint(update, lambda stage: snapshot(job, stage), *(job.score(measured) or (None, None)))
            if stopping or update == job.total:
                job.run.wait()
            return stopping

        def around(update: int) -> AbstractContextManager[None]:
            if update != job.profile:
                return nullcontext()
            return profiled(job.run.directory.path, f"update {update}", job.run.display.note)

        loop(after, around)


def resume(job: OfflineRun) -> None:
    """Take everything back to the newest checkpoint, if there is one."""
    checkpoint = job.learner.ranks.from_first(job.run.resume())
    if checkpoint is None:
        return
    job.policy.load_weights(checkpoint.path)
    job.learner.load(checkpoint.path)
    job.updates = int(json.loads((checkpoint.path / "trainer.json").read_text())["updates"])


def snapshot(job: OfflineRun, stage: TensorStaging) -> Snapshot:
    """A checkpoint to be: a Hugging Face directory, plus optimizer and trainer state."""
    state = job.learner.contents(stage)
    if job.policy.part.index == 0:
        state.append(BytesFile("trainer.json", json.dumps({"updates": job.updates})))
    return Snapshot(job.policy.contents(stage), state, job.policy.part)


def outcome(job: OfflineRun) -> Outcome:
    """What there is to say at the end, from what is on disk."""
    latest = job.run.checkpoints.latest()
    assert latest is not None  # training ends with a checkpoint, and a complete run has one
    is_complete = job.updates >= job.total
    last = next((row for row in read_metrics(job.run.directory.metrics) if row["step"] == job.updates), None)
    loss = None if last is None else last.get(f"{job.prefix}/loss")
    job.run.end(job.updates, is_complete)
    return Outcome(job.run.directory.path, is_complete, loss, last is not None, latest.path)
