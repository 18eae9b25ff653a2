"""One run that trains a reward model, from start to end or from where it was: updates, measurements, checkpoints."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from burnish.config.data import Source
from burnish.config.preference import RewardModelConfig
from burnish.data.preference_pairs import LeftOut, Pair, Reading, load_pairs
from burnish.distributed.roles import build_policy
from burnish.memory_plan.from_config import planned
from burnish.models.activation_checkpointing import set_activations
from burnish.models.heads import STATISTICS, ScoreModel, new_scorer
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.contents import Blob, Content, Part, part_of
from burnish.run.checkpoint.saving import Stage
from burnish.run.durable_files import FolderId
from burnish.run.metrics import check_trackers
from burnish.trainers import offline_run, reward_model
from burnish.trainers.offline_run import Outcome, RowsJob, validation_name
from burnish.trainers.performance import MemoryWatch
from burnish.trainers.reward_model import Measured
from burnish.training.learner import Learner
from burnish.training.parallel.ranks import SOLO


@dataclass
class SavedScorer:
    """A scorer with its tokenizer and what was measured of it: what a checkpoint holds."""

    module: ScoreModel
    tokenizer: Tokenizer
    source: Path | None
    """The directory its layers came from."""
    note: str
    measured: Measured | None = None

    @property
    def part(self) -> Part:
        return part_of(self.module.parameters())

    def contents(self, stage: Stage) -> list[Content]:
        """A Hugging Face directory for sequence classification (with adapters: what PEFT saves of one), with where its scores lie."""
        files = self.module.contents(stage, self.source, self.tokenizer)
        if self.measured is not None:
            files.append(Blob(STATISTICS, json.dumps(asdict(self.measured), indent=1)))
        return files

    def load_weights(self, directory: Path) -> None:
        """Weights in place, and what was measured of them."""
        self.module.load_weights(directory)
        self.measured = read_measured(directory)


def read_measured(directory: Path) -> Measured | None:
    """How the scorer of a directory does on the held-out pairs of its run, if it had any."""
    statistics = directory / STATISTICS
    return Measured(**json.loads(statistics.read_text())) if statistics.is_file() else None


@dataclass
class ScorerJob(RowsJob[Pair]):
    """A run that trains a scorer; what of it is measured, and when."""

    config: RewardModelConfig = field(kw_only=True)
    scorer: SavedScorer = field(kw_only=True)

    def measure(self, update: int) -> dict[str, float]:
        """On the held-out pairs: before the first update, every so many, with every checkpoint, and after the last."""
        every, save_every = self.config.reward_model.held_out_every, self.settings.save_every
        due = update in (0, self.total) or update % save_every == 0 or (every and update % every == 0)
        if not self.held_out or not due:
            return {}
        self.run.display.phase("measuring on held-out pairs", of=validation_name(update))
        self.scorer.measured = reward_model.measure(
            self.learner, self.held_out, self.scorer.tokenizer.pad_id, self.config.reward_model
        )
        return self.scorer.measured.values


def execute(
    config: RewardModelConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
) -> Outcome:
    """Train as far as it is not done. What can be wrong with model and data is found before the run directory is made.

    `profile` is the update to record with a profiler, or `NEXT`; `replaced` an old run's folder, as `open_run` takes it.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    stage = config.reward_model
    # Only for the alphabet of a new model's tokenizer, which no option changes; a task refuses those of its pairs.
    plain = [source.model_copy(update={"options": {}}) for source in stage.data]
    memory = planned(config, base)
    warnings = memory.check()
    policy = build_policy(config.model, plain, config.seed, base)
    pairs, left_out = load(config, policy, base, stage.data, "train")
    held_out, _ = load(config, policy, base, stage.held_out, "test")
    scorer = SavedScorer(new_scorer(policy.module, config.seed), policy.tokenizer, policy.source, policy.note)
    del policy  # and with it the output head
    set_activations(scorer.module, stage.activations)
    learner = Learner(scorer.module, stage.optimizer, stage.updates, stage.token_budget)
    with offline_run.open_run(config, resolved, base, name, SOLO, replaced) as run:
        order = reward_model.pair_order(len(pairs), config.seed, stage.updates * stage.batch_size)
        job = ScorerJob(
            config.run, run, scorer, learner, stage.updates, "reward_model", memory=MemoryWatch(memory, "reward model"),
            config=config, scorer=scorer, rows=pairs, held_out=held_out, order=order, batch_size=stage.batch_size,
        )  # fmt: skip
        for text in [memory.text, *warnings, *left_out.notes]:
            run.display.note(text)
        offline_run.resume(job)
        train(job, profile)
        return offline_run.outcome(job)


def load(
    config: RewardModelConfig, policy: PolicyModel, base: Path, sources: list[Source], split: str
) -> tuple[list[Pair], LeftOut]:
    """The pairs that fit `max_tokens` and the model's positions, and what was left out."""
    stage = config.reward_model
    if not sources:
        return [], LeftOut()
    longest = min(stage.max_tokens, policy.max_positions or stage.max_tokens)
    reading = Reading(policy.tokenizer, config.template, longest, stage.overlong, base, config.seed)
    return load_pairs(sources, reading, split)


def train(job: ScorerJob, profile: int | None) -> None:
    """What is left of the updates, with a measurement before the first one."""
    if not offline_run.begin(job, f"reward model on {len(job.rows):,} pairs", profile):
        return
    stage, pad_id = job.config.reward_model, job.scorer.tokenizer.pad_id
    offline_run.train(
        job,
        lambda after, around: reward_model.train(
            job.learner, job.rows, pad_id, stage, job.order, after, job.updates, around
        ),
    )
