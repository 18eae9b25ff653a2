"""The code that all runs on a fixed data set share: run directory, updates in order, checkpoints, resuming.

`burnish sft`, `burnish prefer` and `burnish reward-model` pass in a loop that makes updates and calls back after each. This module commits
them, saves checkpoints, and stops when the user asks.
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
"""Called after every update with its number and metrics. Returning True ends the training."""
OnOpen = Callable[[Run], None]
"""Called with the run once its directory exists, before anything is trained."""
UpdateContext = Callable[[int], AbstractContextManager[None]]
"""Returns the context manager of an update, by its number."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    directory: Path
    is_complete: bool
    loss: float | None
    """Loss of the last update; None if it had no token to learn from or its metrics are lost."""
    is_loss_known: bool
    """False if metrics.jsonl has no line for the last update."""
    model: Path


class SavableModel(Protocol):
    """A model with its tokenizer, as checkpoints save it: a `PolicyModel` or a scorer."""

    note: str
    """A description for the user."""

    @property
    def part(self) -> WriterRank:
        """Which shard of the model this process holds."""

    def contents(self, stage: TensorStaging) -> list[Content]:
        """The files of the Hugging Face directory that this process writes."""

    def load_weights(self, directory: Path) -> None:
        """Load the weights of a saved directory in place."""


@dataclass
class OfflineRun:
    """The parts of a run. `updates` counts all updates made, also before a resume."""

    settings: RunConfig
    run: Run
    policy: SavableModel
    learner: Learner
    total: int
    """Number of updates of the whole run."""
    prefix: str
    """Prefix of its metric names."""
    updates: int = 0
    profile: int | None = None
    """The update to record with a profiler."""
    memory: MemoryPlanCheck | None = None
    """Compares the memory plan with the measured peak."""

    def used(self, update: int) -> Sequence[str]:
        """The ids of the rows of an update, for the journal."""
        return ()

    def measure(self, update: int) -> dict[str, float]:
        """Held-out metrics, if they are due after this update."""
        return {}

    def score(self, values: dict[str, float]) -> tuple[float, str] | None:
        """The score that chooses the best checkpoint, with the name of its metric; None if it was not measured."""
        return None


class HasId(Protocol):
    """A row of the data: a pair or a labelled answer."""

    @property
    def id(self) -> str:
        """The id of the row."""


Row = TypeVar("Row", bound=HasId)


@dataclass
class RowsRun(OfflineRun, Generic[Row]):
    """A run whose updates take `batch_size` rows each in a fixed order, with other rows held out."""

    rows: list[Row] = field(kw_only=True)
    held_out: list[Row] = field(kw_only=True)
    order: list[int] = field(kw_only=True)
    """Indices of the rows of all updates."""
    batch_size: int = field(kw_only=True)

    @property
    def kind(self) -> str:
        """The name in its held-out metrics."""
        return "pairs"

    def used(self, update: int) -> Sequence[str]:
        return [self.rows[i].id for i in self.order[(update - 1) * self.batch_size : update * self.batch_size]]

    def score(self, values: dict[str, float]) -> tuple[float, str] | None:
        """`run.best_by`, or the held-out accuracy."""
        return score_by(self.settings.best_by or f"validation/{self.kind}/accuracy", values)


def validation_name(update: int) -> str:
    """The name of a validation for the display."""
    return "validation before update 1" if update == 0 else f"validation after update {update}"


def open_run(
    config: UpdateConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    ranks: Ranks,
    replaced: FolderId | None = None,
    on_open: OnOpen | None = None,
) -> Run:
    """Open the run directory, new or existing. The first process owns it; the others follow once it exists.

    `replaced` is the folder of an old run of this name, which is moved to another name. The owner calls `on_open`.
    """
    settings = config.run
    if not ranks.is_first:
        return FollowerRun(Path(ranks.broadcast_from_first("")), settings)
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
    ranks.broadcast_from_first(str(folder.path))
    run = Run(folder, settings, resolved)
    for note in notes:
        run.display.note(note)
    if on_open is not None:
        try:
            on_open(run)
        except BaseException:
            run.close()
            raise
    return run


def start_training(session: OfflineRun, what: str, profile: int | None) -> bool:
    """Announce the run and measure before the first update. Returns False if all updates are done. `profile`: see `step_to_profile`."""
    display = session.run.display
    if session.updates >= session.total:
        display.note(f"{session.run.directory.path} is complete: all {session.total} updates are done")
        return False
    display.start(f"{what}: {session.policy.note}", session.total, session.updates)
    if session.run.directory.changes_training:
        display.note(describe_lr(session.learner.config, session.updates, session.total))
    session.profile = (
        step_to_profile(profile, session.updates, session.total) if session.learner.ranks.is_first else None
    )
    if session.updates == 0 and (before := session.measure(0)):
        session.run.commit(0, before, [])
    return True


def run_updates(session: OfflineRun, loop: Callable[[OnUpdate, UpdateContext], None]) -> None:
    """Run updates to the end or until the user asks to stop. Each is committed; the last one is always saved."""
    with StopOnInterrupt(session.run.display.note) as stop:

        def after(update: int, values: dict[str, float]) -> bool:
            session.updates = update
            if session.memory is not None:
                values |= session.memory.after(session.learner.updates, values, session.run.display.note)
            if f"{session.prefix}/skipped" in values:
                session.run.display.note(f"update {update} was skipped: no finite gradient, or no token to learn from")
            measured = session.measure(update)
            session.run.commit(update, values | measured, list(session.used(update)))
            is_asked = stop.requested or session.run.stop_requested
            stopping = session.learner.ranks.any_process(is_asked)  # read once, so that a run that stops has saved
            due = update % session.settings.save_every == 0 or (bool(measured) and session.settings.keep_best)
            if stopping or update == session.total or due:
                session.run.checkpoint(
                    update, lambda stage: snapshot(session, stage), *(session.score(measured) or (None, None))
                )
            if stopping or update == session.total:
                session.run.wait()
            return stopping

        def around(update: int) -> AbstractContextManager[None]:
            if update != session.profile:
                return nullcontext()
            return profiled(session.run.directory.path, f"update {update}", session.run.display.note)

        loop(after, around)


def resume(session: OfflineRun) -> None:
    """Restore the newest checkpoint, if there is one."""
    checkpoint = session.learner.ranks.broadcast_from_first(session.run.resume())
    if checkpoint is None:
        return
    session.policy.load_weights(checkpoint.path)
    session.learner.load(checkpoint.path)
    session.updates = int(json.loads((checkpoint.path / "trainer.json").read_text())["updates"])


def snapshot(session: OfflineRun, stage: TensorStaging) -> Snapshot:
    """The contents of a checkpoint: a Hugging Face directory, plus optimizer and trainer state."""
    state = session.learner.contents(stage)
    if session.policy.part.index == 0:
        state.append(BytesFile("trainer.json", json.dumps({"updates": session.updates})))
    return Snapshot(session.policy.contents(stage), state, session.policy.part)


def outcome(session: OfflineRun) -> Outcome:
    """The result of the run, from what is on disk."""
    latest = session.run.checkpoints.latest()
    assert latest is not None  # training ends with a checkpoint, and a complete run has one
    is_complete = session.updates >= session.total
    last = next((row for row in read_metrics(session.run.directory.metrics) if row["step"] == session.updates), None)
    loss = None if last is None else last.get(f"{session.prefix}/loss")
    session.run.end(session.updates, is_complete)
    return Outcome(session.run.directory.path, is_complete, loss, last is not None, latest.path)
