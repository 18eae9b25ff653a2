"""One preference run from start to end, or from where it was: reference, updates, measurements, checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.preference import PreferenceLoss
from burnish.config.data import Source
from burnish.config.preference import PreferConfig
from burnish.controller.memory import planned
from burnish.controller.roles import build_policy
from burnish.core.batch import Batch
from burnish.data.pairs import LeftOut, Reading, load_labelled, load_pairs
from burnish.models.activations import set_activations
from burnish.models.policy import PolicyModel, pick_device
from burnish.run.files import FolderId
from burnish.run.trackers import check_trackers
from burnish.trainers import preference, updates
from burnish.trainers.cached_reference import cached_means
from burnish.trainers.memory import MemoryWatch
from burnish.trainers.preference import References, Unit
from burnish.trainers.updates import Outcome, RowsJob, validation_name
from burnish.training.learner import Learner
from burnish.training.parallel.distribute import distribute
from burnish.training.parallel.join import join
from burnish.training.parallel.ranks import Ranks
from burnish.training.reference import Reference


@dataclass
class PreferenceJob(RowsJob[Unit]):
    """A run on preferences; what of it is measured, and when."""

    config: PreferConfig = field(kw_only=True)
    loss: PreferenceLoss = field(kw_only=True)
    references: dict[str, References | None] = field(default_factory=dict, kw_only=True)
    """Of `train` and `held_out`."""

    @property
    def kind(self) -> str:
        return "pairs" if self.loss.is_paired else "answers"

    def measure(self, update: int) -> dict[str, float]:
        """On the held-out rows: before the first update, every so many, and after the last."""
        every = self.config.preference.held_out_every
        if not self.held_out or not (update in (0, self.total) or (every and update % every == 0)):
            return {}
        self.run.display.phase("measuring on held-out rows", of=validation_name(update))
        found = preference.measure(self.learner, self.held_out, self.loss, self.references["held_out"])
        return {f"validation/{self.kind}/{name}": value for name, value in found.items()}


def execute(
    config: PreferConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
) -> Outcome | None:
    """Train as far as it is not done. What can be wrong with model and data is found before the run directory is made.

    `profile` is the update to record with a profiler, or `NEXT`; `replaced` an old run's folder, as `open_run` takes it. Of several processes all do the same, each on its share of
    every batch; the first one owns the run, and has the outcome.
    """
    stage = config.preference
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    # Only for the alphabet of a new model's tokenizer, which no option changes; a task refuses those of its preferences.
    plain = [source.model_copy(update={"options": {}}) for source in stage.data]
    ranks = join(config.parallel, pick_device(config.model.device).type == "cuda")
    where = config.model if ranks.weights is None else config.model.model_copy(update={"device": "cpu"})
    memory = planned(config, base)
    warnings = memory.check()
    policy = build_policy(where, plain, config.seed, base)
    loss = PreferenceLoss(stage.loss.name, stage.loss.model_dump(exclude={"name"}))
    units, left_out = load(config, stage.data, loss, policy, base, "train")
    held_out, _ = load(config, stage.held_out, loss, policy, base, "test")
    live = live_reference(config, policy, ranks)
    set_activations(policy.module, stage.activations)
    distribute(policy.module, ranks, config.parallel.offload)
    learner = Learner(policy.module, stage.optimizer, stage.updates, stage.token_budget, ranks=ranks)
    with updates.open_run(config, resolved, base, name, ranks, replaced) as run:
        job = PreferenceJob(
            config.run, run, policy, learner, stage.updates, "preference", memory=MemoryWatch(memory, "preference"),
            config=config, loss=loss, rows=units, held_out=held_out, batch_size=stage.batch_size,
            order=preference.unit_order(len(units), stage, config.seed),
        )  # fmt: skip
        for text in [memory.text, *warnings, *left_out.notes]:
            run.display.note(text)
        job.references = make_references(job, live)  # the weights are still those the run started from
        updates.resume(job)
        train(job, profile)
        return updates.outcome(job) if ranks.is_first else None


def load(
    config: PreferConfig, sources: list[Source], loss: PreferenceLoss, policy: PolicyModel, base: Path, split: str
) -> tuple[list[Unit], LeftOut]:
    """The units that fit `preference.max_tokens` and the model's positions, and what was left out."""
    stage = config.preference
    if not sources:
        return [], LeftOut()
    longest = min(stage.max_tokens, policy.max_positions or stage.max_tokens)
    reading = Reading(policy.tokenizer, config.template, longest, stage.overlong, base, config.seed)
    if loss.is_paired:
        pairs, left_out = load_pairs(sources, reading, split)
        return preference.units_of_pairs(pairs), left_out
    answers, left_out = load_labelled(sources, reading, split)
    return preference.units_of_labelled(answers, longest), left_out


def live_reference(config: PreferConfig, policy: PolicyModel, ranks: Ranks) -> Reference | None:
    """The model as it is now, where it is asked in every update; to be called before it is divided among ranks."""
    if config.preference.reference != "live":
        return None
    return Reference(policy.module, config.preference.token_budget, 1.0, ranks)


def make_references(job: PreferenceJob, live: Reference | None) -> dict[str, References | None]:
    """Who says what the reference thinks of the rows trained on, and of those held out."""
    if "reference" not in job.config.preference.loss.needs:
        return {"train": None, "held_out": None}
    if live is not None:
        return dict.fromkeys(("train", "held_out"), _asked(live, job.learner))
    tables = {"train": job.rows, "held_out": job.held_out}
    return {
        name: _looked_up(cached_means(job.run, name, job.learner, units, job.loss)) if units else None
        for name, units in tables.items()
    }


def _asked(live: Reference, learner: Learner) -> References:
    def ask(rows: Sequence[int], batch: Batch) -> Tensor:
        return preference.mean_logprobs(live.logprobs, learner, batch)

    return ask


def _looked_up(means: Tensor) -> References:
    def look(rows: Sequence[int], batch: Batch) -> Tensor:
        return means[torch.tensor(rows)].view(-1)

    return look


def train(job: PreferenceJob, profile: int | None) -> None:
    """What is left of the updates, with a measurement before the first one."""
    if not updates.begin(job, f"{job.loss.name} on {len(job.rows):,} {job.kind}", profile):
        return
    updates.train(
        job,
        lambda after, around: preference.train(
            job.learner,
            job.rows,
            job.loss,
            job.config.preference,
            job.order,
            job.references["train"],
            after,
            job.updates,
            around,
        ),
    )
