"""Reward models (`burnish reward-model`): the learner with a Bradley-Terry loss on pairs of a chosen and a rejected answer.

With `reward_model.steps` it is a process reward model: the learner with a cross-entropy loss on the values of single steps
(`step_scores.py`). An `Objective` is all that differs between the two.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import RewardModelLoss, StepValueLoss
from burnish.algorithms.losses.policy_loss import Loss
from burnish.algorithms.losses.preference_losses import bradley_terry
from burnish.config.data import Source
from burnish.config.schema import RewardModel, RewardModelConfig, StepValues
from burnish.core.batch import Batch
from burnish.core.random_keys import permutation
from burnish.core.segments import offsets_from_lengths
from burnish.data.preference_pairs import EncodingOptions, PreferencePair, load_pairs
from burnish.data.step_values import SteppedAnswer, load_stepped_answers
from burnish.distributed.roles import build_policy
from burnish.memory_plan.from_config import PlannedRun, plan_run
from burnish.models.activation_checkpointing import set_activations
from burnish.models.answer_steps import delimiter_file, stored_delimiter
from burnish.models.heads import SCORE_STATISTICS_FILE, ScoreModel, new_score_model, score_positions
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Content, WriterRank, writer_rank_of
from burnish.run.durable_files import FolderId
from burnish.run.run import Run
from burnish.run.trackers.tracker_process import check_trackers
from burnish.trainers import offline_run
from burnish.trainers.offline_run import OnOpen, OnUpdate, Outcome, Row, RowsRun, UpdateContext, validation_name
from burnish.trainers.performance import MemoryPlanCheck, learner_metrics
from burnish.trainers.step_scores import StepMeasurements, measure_steps, pack_steps
from burnish.training.learner import Learner
from burnish.training.meter import reset_peak_memory
from burnish.training.parallel.ranks import SOLO

MEASURE_CHUNK = 256
"""Pairs per forward pass of a measurement."""


def pack_pairs(pairs: Sequence[PreferencePair], pad_id: int) -> Batch:
    """Pairs as a batch of twice as many sequences, chosen before rejected. The masks mark the token at which each is scored.

    Sequence columns: `group_ids` (the pair), `chosen`, `margin`, `weight` (1 / pairs).
    """
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    tokens = torch.tensor([token for answer in answers for token in answer.tokens])
    offsets = offsets_from_lengths(torch.tensor([len(answer.tokens) for answer in answers]))
    mask = torch.zeros(tokens.shape, dtype=torch.bool)
    mask[score_positions(tokens, offsets, pad_id)] = True
    batch = Batch(
        tokens=tokens,
        offsets=offsets,
        token={"action_mask": mask, "loss_mask": mask},
        sequence={
            "group_ids": torch.arange(len(pairs)).repeat_interleave(2),
            "chosen": torch.tensor([True, False]).repeat(len(pairs)),
            "margin": torch.tensor([pair.margin for pair in pairs], dtype=torch.float64).repeat_interleave(2),
            "weight": torch.full((2 * len(pairs),), 1 / len(pairs), dtype=torch.float64),
        },
    )
    return batch.with_pictures([answer.pictures for answer in answers])


def train(
    learner: Learner,
    rows: Sequence[Row],
    objective: Objective[Row],
    config: RewardModel,
    order: Sequence[int],
    on_update: OnUpdate,
    start: int = 0,
    around: UpdateContext = lambda update: nullcontext(),
) -> None:
    """Run updates `start`+1 to `config.updates`, each on the next `batch_size` rows of the order.

    `around` returns the context manager of an update, by its number.
    """
    for update in range(start, config.updates):
        started = time.perf_counter()
        reset_peak_memory(learner.device)
        chosen = [rows[i] for i in order[update * config.batch_size : (update + 1) * config.batch_size]]
        batch = objective.pack(chosen).to(learner.device)
        with around(update + 1):
            learning = time.perf_counter()
            result = learner.update(batch, objective.loss, columns=False)
            speed = learner_metrics([learner], learning)
        values = {f"reward_model/{name}": value for name, value in result.stats.items()} | speed
        if result.skipped:
            values["reward_model/skipped"] = 1.0
        values["time/step_s"] = time.perf_counter() - started
        values["time/tokens_per_s"] = batch.num_tokens / values["time/step_s"]
        if on_update(update + 1, values):
            return


def row_order(size: int, seed: int, num_draws: int) -> list[int]:
    """Indices of the rows to train on: seeded epochs, each in a new order."""
    epochs = (permutation(size, seed, "reward-model", epoch) for epoch in range(-(-num_draws // size)))
    return list(itertools.chain.from_iterable(epochs))[:num_draws]


@dataclass(frozen=True)
class PairMeasurements:
    """Accuracy of a scorer on held-out pairs, and the distribution of its scores."""

    accuracy: float
    """Share of pairs whose chosen answer has the higher score."""
    margin: float
    """Mean of chosen minus rejected score."""
    loss: float
    mean: float
    """Mean of all scores."""
    std: float
    pairs: int

    @property
    def values(self) -> dict[str, float]:
        """The measurements as metrics."""
        named = {"accuracy": self.accuracy, "margin": self.margin, "loss": self.loss}
        named |= {"score_mean": self.mean, "score_std": self.std}
        return {f"validation/pairs/{name}": value for name, value in named.items()}

    @property
    def lines(self) -> list[str]:
        """What a command prints at its end."""
        return [
            f"held-out pairs: {self.accuracy:.1%} of {self.pairs:,} in the right order, margin {self.margin:.3f}",
            f"scores: mean {self.mean:.3f}, standard deviation {self.std:.3f}",
        ]


Measurements = PairMeasurements | StepMeasurements


def measure(
    learner: Learner, pairs: Sequence[PreferencePair], pad_id: int, config: RewardModel, chunk: int = MEASURE_CHUNK
) -> PairMeasurements:
    """Score pairs without gradient; the loss is the training loss."""
    found: list[Tensor] = []
    for at in range(0, len(pairs), chunk):
        batch = pack_pairs(pairs[at : at + chunk], pad_id).to(learner.device)
        values = learner.outputs(batch, frozenset({"value"}))["value"][batch.loss_mask]
        found.append(values.double().view(-1, 2).cpu())
    scores = torch.cat(found)  # [P, 2] chosen, rejected
    differences = scores[:, 0] - scores[:, 1]
    margins = torch.tensor([pair.margin + config.margin for pair in pairs], dtype=torch.float64)
    terms = bradley_terry(scores[:, 0], scores[:, 1], margins)
    return PairMeasurements(
        accuracy=float((differences > 0).double().mean()),
        margin=float(differences.mean()),
        loss=float((terms + config.centre * scores.sum(1).square()).mean()),
        mean=float(scores.mean()),
        std=math.sqrt(float(scores.var(correction=0))),
        pairs=len(pairs),
    )


@dataclass
class ScorerCheckpoint:
    """A scorer with its tokenizer and its measurements, as a checkpoint holds it."""

    module: ScoreModel
    tokenizer: Tokenizer
    source: Path | None
    """The directory of its base model."""
    note: str
    steps: StepValues | None = None
    """How it scores steps; None for a scorer of whole answers."""
    measured: Measurements | None = None

    @property
    def part(self) -> WriterRank:
        return writer_rank_of(self.module)

    def contents(self, stage: TensorStaging) -> list[Content]:
        """A Hugging Face directory for sequence classification (with adapters: PEFT's files), with measurements and delimiter."""
        files = self.module.contents(stage, self.source, self.tokenizer)
        if self.steps is not None:
            files.append(delimiter_file(self.steps.delimiter))
        if self.measured is not None:
            files.append(BytesFile(SCORE_STATISTICS_FILE, json.dumps(asdict(self.measured), indent=1)))
        return files

    def load_weights(self, directory: Path) -> None:
        """Load the weights in place, and their measurements."""
        self.module.load_weights(directory)
        self.measured = read_measurements(directory)


def read_measurements(directory: Path) -> Measurements | None:
    """The held-out measurements of the scorer in a directory, if it has any."""
    statistics = directory / SCORE_STATISTICS_FILE
    if not statistics.is_file():
        return None
    values = json.loads(statistics.read_text())
    return PairMeasurements(**values) if stored_delimiter(directory) is None else StepMeasurements(**values)


# --- what it learns from -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective(Generic[Row]):
    """Pairs or steps: how the rows of a reward model are loaded, packed, learnt and measured."""

    what: str
    """The rows in words."""
    load: Callable[[list[Source], str], tuple[list[Row], list[str]]]
    """Loads the rows of sources, of a split for tasks; with one sentence per reason why rows were left out."""
    pack: Callable[[Sequence[Row]], Batch]
    loss: Loss
    measure: Callable[[Learner, Sequence[Row]], Measurements]


def pair_objective(stage: RewardModel, reading: EncodingOptions) -> Objective[PreferencePair]:
    """Learn which of two answers is better."""
    pad_id = reading.tokenizer.pad_id

    def load(sources: list[Source], split: str) -> tuple[list[PreferencePair], list[str]]:
        pairs, left_out = load_pairs(sources, reading, split)
        return pairs, left_out.notes

    return Objective(
        "pairs",
        load,
        lambda pairs: pack_pairs(pairs, pad_id),
        RewardModelLoss(stage.margin, stage.centre),
        lambda learner, pairs: measure(learner, pairs, pad_id, stage),
    )


def step_objective(steps: StepValues, reading: EncodingOptions) -> Objective[SteppedAnswer]:
    """Learn the values of the steps of answers."""

    def load(sources: list[Source], split: str) -> tuple[list[SteppedAnswer], list[str]]:
        answers, left_out = load_stepped_answers(sources, reading, steps, split)
        return answers, left_out.notes

    return Objective("answers with values of steps", load, pack_steps, StepValueLoss(), measure_steps)


# --- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class RewardModelRun(RowsRun[Row]):
    """A reward-model run: what is measured, and when."""

    config: RewardModelConfig = field(kw_only=True)
    scorer: ScorerCheckpoint = field(kw_only=True)
    objective: Objective[Row] = field(kw_only=True)

    @property
    def kind(self) -> str:
        return self.config.reward_model.kind

    def measure(self, update: int) -> dict[str, float]:
        """Held-out metrics before the first update, every `held_out_every` updates, with every checkpoint, and after the last."""
        every, save_every = self.config.reward_model.held_out_every, self.settings.save_every
        due = update in (0, self.total) or update % save_every == 0 or (every and update % every == 0)
        if not self.held_out or not due:
            return {}
        self.run.display.phase(f"measuring on held-out {self.kind}", of=validation_name(update))
        self.scorer.measured = self.objective.measure(self.learner, self.held_out)
        return self.scorer.measured.values


def execute(
    config: RewardModelConfig,
    resolved: dict[str, Any],
    base: Path,
    name: str,
    profile: int | None = None,
    replaced: FolderId | None = None,
    on_open: OnOpen | None = None,
) -> Outcome:
    """One reward-model run from start to end, or resumed. Mistakes in model and data are found before the run directory is created.

    `profile` is the update to record with a profiler, or `NEXT_STEP`; `replaced` and `on_open` are those of `open_run`.
    """
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    check_trackers(config.run.trackers)
    stage = config.reward_model
    # Read only for the alphabet of a new model's tokenizer. Options do not change it, and tasks refuse those of rows here.
    plain = [source.model_copy(update={"options": {}}) for source in stage.data]
    memory = plan_run(config, base)
    warnings = memory.check()
    policy = build_policy(config.model, plain, config.seed, base, characters=stage.characters)
    longest = min(stage.max_tokens, policy.max_positions or stage.max_tokens)
    reading = EncodingOptions(policy.tokenizer, config.template, longest, stage.overlong, base, config.seed)
    module = new_score_model(policy.module, config.seed)
    scorer = ScorerCheckpoint(module, policy.tokenizer, policy.source, policy.note, stage.steps)
    del policy  # frees the output head
    opened = partial(offline_run.open_run, config, resolved, base, name, SOLO, replaced, on_open)
    if stage.steps is None:
        return _run(config, scorer, pair_objective(stage, reading), memory, warnings, opened, profile)
    return _run(config, scorer, step_objective(stage.steps, reading), memory, warnings, opened, profile)


def _run(
    config: RewardModelConfig,
    scorer: ScorerCheckpoint,
    objective: Objective[Row],
    memory: PlannedRun,
    warnings: list[str],
    open_run: Callable[[], Run],
    profile: int | None,
) -> Outcome:
    """Load the rows, open the run, and train."""
    stage = config.reward_model
    rows, notes = objective.load(stage.data, "train")
    held_out, more = objective.load(stage.held_out, "test") if stage.held_out else ([], [])
    notes += [f"held out: {note}" for note in more]
    set_activations(scorer.module, stage.activations)
    learner = Learner(scorer.module, stage.optimizer, stage.updates, stage.token_budget)
    with open_run() as run:
        order = row_order(len(rows), config.seed, stage.updates * stage.batch_size)
        session = RewardModelRun(
            config.run, run, scorer, learner, stage.updates, "reward_model", memory=MemoryPlanCheck(memory, "reward model"),
            config=config, scorer=scorer, objective=objective, rows=rows, held_out=held_out, order=order, batch_size=stage.batch_size,
        )  # fmt: skip
        for text in [memory.text, *warnings, *notes]:
            run.display.note(text)
        offline_run.resume(session)
        _train_remaining(session, profile)
        return offline_run.outcome(session)


def _train_remaining(session: RewardModelRun[Row], profile: int | None) -> None:
    """Run the remaining updates, with a measurement before the first one."""
    what = f"reward model on {len(session.rows):,} {session.objective.what}"
    if not offline_run.start_training(session, what, profile):
        return
    stage = session.config.reward_model
    offline_run.run_updates(
        session,
        lambda after, around: train(
            session.learner, session.rows, session.objective, stage, session.order, after, session.updates, around
        ),
    )
