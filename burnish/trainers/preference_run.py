"""One preference run from start to end, or from where it was: reference, updates, measurements, checkpoints."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import PreferenceLoss
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.preference import PreferConfig
from burnish.core.batch import Batch
from burnish.data.preference_pairs import LeftOut, Reading, load_labelled, load_pairs
from burnish.distributed.roles import build_policy
from burnish.memory_plan.from_config import planned
from burnish.models.activation_checkpointing import set_activations
from burnish.models.policy import PolicyModel, pick_device
from burnish.run.durable_files import FolderId, atomic_write
from burnish.run.metrics import check_trackers
from burnish.run.run import Run
from burnish.trainers import offline_run, preference
from burnish.trainers.offline_run import Outcome, RowsJob, validation_name
from burnish.trainers.performance import MemoryWatch
from burnish.trainers.preference import References, Unit, mean_logprobs, pack_units
from burnish.training.learner import Learner
from burnish.training.parallel.distribute import distribute, join
from burnish.training.parallel.ranks import Ranks
from burnish.training.reference import Reference

# --- The reference's log-probs, computed once before training and kept in the run directory.
#
# A run computes them with the model as it starts, so that no second one is ever held. They are saved chunk by chunk:
# a kill loses at most one chunk, and a run that goes on reads the rest, the same bits. Each file knows the tokens it was made
# from; data that has changed since is an error.

CHUNK = 512
"""Units in a file."""
FOLDER = "reference"


def cached_means(run: Run, name: str, learner: Learner, units: Sequence[Unit], loss: PreferenceLoss) -> Tensor:
    """[U, 2] float64 mean log-prob of each answer under the weights the learner has now, or had when the run began."""
    found = []
    folder = run.directory.path / FOLDER
    for start in range(0, len(units), CHUNK):
        part = units[start : start + CHUNK]
        path = folder / f"{name}-{start:08d}.safetensors"
        # One process looks: another might see a file that was not there a moment ago, and they would wait for each other.
        values = learner.ranks.from_first(_read(path, part) if learner.ranks.is_first else None)
        if values is None and path.is_file():
            run.display.note(f"{path} is damaged: its log-probs are computed again")
        if values is None:
            run.display.phase(f"reference log-probs of {name} {start:,}/{len(units):,}")
            batch = pack_units(part, loss).to(learner.device)
            values = mean_logprobs(learner.logprobs, learner, batch).view(-1, 2).cpu()
            if learner.ranks.is_first:
                _write(path, part, values)
        found.append(values)
    return torch.cat(found)


def _fingerprint(units: Sequence[Unit]) -> str:
    """What identifies the tokens of some units, and which of them are the answers'."""
    digest = hashlib.sha256()
    for unit in units:
        digest.update(repr((unit.first.tokens, unit.first.mask, unit.second.tokens, unit.second.mask)).encode())
    return digest.hexdigest()


def _read(path: Path, units: Sequence[Unit]) -> Tensor | None:
    """What a file holds; None where it is missing or damaged, and is made again with the same weights."""
    if not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            known, values = (file.metadata() or {}).get("tokens", ""), file.get_tensor("means")
    except (SafetensorError, OSError):
        return None
    tokens, _, crc = known.partition(" ")
    if crc != _checksum(tokens, values):
        return None
    if tokens != _fingerprint(units):
        raise UserError(
            f"{path} was computed from other rows: the data (or the tokenizer) has changed since this run began. "
            "Put the old data back, or give the run another run.name"
        )
    return values


def _checksum(tokens: str, values: Tensor) -> str:
    return f"{zlib.crc32(values.numpy().tobytes(), zlib.crc32(tokens.encode())):08x}"


def _write(path: Path, units: Sequence[Unit], values: Tensor) -> None:
    from safetensors.torch import save

    path.parent.mkdir(exist_ok=True)
    tokens = _fingerprint(units)
    # One entry, because the library writes several in any order, and equal runs shall have equal files.
    atomic_write(path, save({"means": values.contiguous()}, {"tokens": f"{tokens} {_checksum(tokens, values)}"}))


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
    with offline_run.open_run(config, resolved, base, name, ranks, replaced) as run:
        job = PreferenceJob(
            config.run, run, policy, learner, stage.updates, "preference", memory=MemoryWatch(memory, "preference"),
            config=config, loss=loss, rows=units, held_out=held_out, batch_size=stage.batch_size,
            order=preference.unit_order(len(units), stage, config.seed),
        )  # fmt: skip
        for text in [memory.text, *warnings, *left_out.notes]:
            run.display.note(text)
        job.references = make_references(job, live)  # the weights are still those the run started from
        offline_run.resume(job)
        train(job, profile)
        return offline_run.outcome(job) if ranks.is_first else None


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
    if not offline_run.begin(job, f"{job.loss.name} on {len(job.rows):,} {job.kind}", profile):
        return
    offline_run.train(
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
