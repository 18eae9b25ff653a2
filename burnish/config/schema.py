"""Every key of a run, with its type, its default and what it means.

The docstring under a field is its documentation: `burnish train --help` and docs/config.md print exactly these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.algorithms.losses.spec import DpoLoss, PreferenceSlot
from burnish.algorithms.spec import Algorithm
from burnish.config.consistency import check_algorithm_fits
from burnish.config.data import Data, Reward, Sources, Template
from burnish.config.errors import did_you_mean
from burnish.config.model import Model, Optimizer, check_optimizer_fits, check_trainable
from burnish.config.placement import LocalPlacement, Parallel, PlacementSlot, check_parallel_fits, check_placement_fits
from burnish.config.records import Record, named
from burnish.config.rollout import (
    Environment,
    Rollout,
    Sampling,
    check_environment_fits,
    check_mismatch_fits,
    check_source_fits,
)

Activations = Literal["keep", "selective", "recompute", "offload"]


class Training(Record):
    """How the learner uses a batch."""

    steps: int = Field(100, ge=1)
    """RL steps."""
    mini_batches: int = Field(1, ge=1)
    """Optimizer steps made of one batch and epoch; a group is never split over two."""
    epochs: int = Field(1, ge=1)
    """Passes over a batch."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch (forward and backward at once); changes memory and speed, never the gradient."""
    share_prompts: bool = True
    """Compute what the samples of a prompt begin with once for all of them, forward and backward, where that saves a twentieth of
    the tokens or more; changes speed, never the gradient."""
    grad_norms: bool = False
    """Also log the gradient's norm of every block (embedding, each layer, head) as `actor/grad_norm_<block>`."""
    activations: Activations = "keep"
    """What waits for the backward pass: `keep` all of it, `selective` only the results of matmuls and attention, `recompute` only each
    layer's input, `offload` nothing on the GPU; each needs less memory and more time than the one before, and gives the same gradient."""
    compile: bool = False
    """Run the layers through torch.compile, which takes a minute at first: the arithmetic between the matmuls in fewer passes over memory."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _keeps(self) -> Training:
        if self.compile and self.activations == "selective":
            raise ValueError(
                "training.compile chooses by itself what the cheap operations keep: set training.activations to keep, recompute or offload"
            )
        return self


class ValidationMode(Sampling):
    """One way to measure."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    n: int = Field(1, ge=1)
    """Samples of each prompt."""


class Validation(Record):
    """Measuring on held-out prompts, before training, every k steps and at the end."""

    every: int = Field(0, ge=0)
    """Steps between validations; 0 means only before and after."""
    before: bool = True
    """Whether to measure before the first step."""
    limit: int | None = Field(None, ge=1)
    """Most prompts; null means all. A generated task needs it."""
    modes: dict[str, ValidationMode] = Field(default_factory=lambda: {"greedy": ValidationMode()}, min_length=1)
    """Named ways of sampling; the first one chooses the best checkpoint (run.best_by). max_tokens unset follows rollout."""
    by: str | None = None
    """Also report the accuracy, or the mean of graded rewards, by this column of the rows."""


class Sft(Record):
    """Supervised training on prompt/completion rows or messages, with loss only on what the assistant says."""

    data: Sources = Field(default_factory=list)
    """Rows with `prompt` and `completion` (text or messages), `messages`, or `text`; a task gives its demonstrations."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(128, ge=1)
    """Sequences an update."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sequence."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with longer rows: leave them out (counted) or stop. They are never cut in silence."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch."""
    activations: Activations = "keep"
    """What waits for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


class Run(Record):
    """Where a run lives and what it keeps."""

    directory: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """This run's folder in it; null names it after the recipe and the seed."""
    save_every: int = Field(25, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    save: Literal["background", "wait"] = "background"
    """background: a checkpoint is copied to host memory and written while training goes on; wait: training stands still, no memory is needed."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints kept, besides the best one (of each metric, where best_by has changed)."""
    keep_best: bool = True
    """Save at every validation too, so that the best policy measured is kept; false saves only every save_every steps."""
    best_by: str | None = None
    """The metric that says which checkpoint is best, such as validation/greedy/reward_mean; with a leading minus (-validation/greedy/length_mean)
    the lowest is best. null: the held-out accuracy of the first mode, or its reward_mean where rewards are graded and there is no accuracy."""
    samples_every: int = Field(10, ge=1)
    """Steps between tables of samples."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Also send metrics there (extra: track)."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for arithmetic; null leaves torch's choice."""


VALIDATION_METRICS = (
    "accuracy",
    "reward_mean",
    "length_mean",
    "truncated",
    "failed",
    "turns_mean",
    "process_accuracy",
    "process_ranking",
)
"""What a validation of a policy may measure, in each of its modes."""


def check_best_by(best_by: str | None, kinds: Sequence[str], measured: Sequence[str]) -> None:
    """Refuse a `run.best_by` that no validation of the run has; `kinds` are what its metrics are called after."""
    if best_by is None:
        return
    if not kinds:
        raise ValueError(f"run.best_by={best_by} has no effect: this run measures nothing on held-out data")
    sign = "-" if best_by.startswith("-") else ""
    first, kind, name = [*best_by.removeprefix("-").split("/", 2), "", ""][:3]
    if first != "validation" or kind not in kinds or name.split("/")[0] not in measured:
        known = [f"{sign}validation/{kind}/{name}" for kind in kinds for name in measured]
        raise ValueError(
            f"run.best_by={best_by}: no such metric{did_you_mean(best_by, known)}; expected validation/A/B with A of "
            f"{', '.join(kinds)} and B of {', '.join(measured)}, and a leading minus where the lowest is best"
        )


class TrainConfig(Record):
    """`burnish train`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The policy."""
    data: Data = Data()
    """Prompts."""
    environment: Annotated[Environment, BeforeValidator(named)] = Environment()
    """What answers a completion."""
    reward: Reward = Reward()
    """What is rewarded."""
    rollout: Rollout = Rollout()
    """Sampling for training."""
    algorithm: Algorithm = Algorithm()
    """One choice per slot, or a preset's name."""
    training: Training = Training()
    """How the learner uses a batch."""
    validation: Validation = Validation()
    """Measuring."""
    warm_start: Sft | None = None
    """A supervised stage before RL; its result is checkpoint 0."""
    placement: PlacementSlot = LocalPlacement()
    """Where the processes of the run are."""
    parallel: Parallel = Parallel()
    """How `placement.workers` processes divide the work of training."""

    @model_validator(mode="after")
    def _combinations(self) -> TrainConfig:
        check_trainable(self.model)
        check_placement_fits(self)
        check_source_fits(self)
        check_mismatch_fits(self.rollout, self.model)
        for where, section in (
            ("training", self.training),
            ("warm_start", self.warm_start),
            ("algorithm.critic", self.algorithm.critic),
            ("algorithm.process", self.algorithm.process),
        ):
            if section is not None:
                check_optimizer_fits(section.optimizer, f"{where}.optimizer", self.model.dtype, self.model.device)
        if not self.data.train:
            raise ValueError("no training prompts: give data.train (a file, a task or a plug-in)")
        check_algorithm_fits(self)
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature is 0: greedy samples of a prompt are all alike, so nothing can be learnt"
            )
        fewest = min(stage.prompts for stage in self.rollout.all_stages())
        if self.training.mini_batches > fewest:
            raise ValueError(
                f"training.mini_batches={self.training.mini_batches} but there are only rollout.prompts={fewest} groups to divide"
            )
        check_environment_fits(self)
        measuring = [k for k in ("every", "limit", "by") if getattr(self.validation, k)]
        if measuring and not self.data.validation:
            raise ValueError(f"validation.{measuring[0]} has no effect without held-out prompts: give data.validation")
        if not self.run.keep_best and not self.validation.every:
            raise ValueError(
                "run.keep_best=false has no effect without validation.every: no policy but the last is measured"
            )
        check_best_by(self.run.best_by, list(self.validation.modes) if self.data.validation else [], VALIDATION_METRICS)
        for source in self.data.validation:
            if source.task is not None and self.validation.limit is None and source.limit is None:
                raise ValueError("a generated task has no end: set validation.limit (or the source's limit)")
        return self


class SftConfig(Record):
    """`burnish sft`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The model to train."""
    template: Template = Template()
    """How messages become text."""
    sft: Sft = Sft()
    """Data and optimisation."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts divide the work."""

    @model_validator(mode="after")
    def _combinations(self) -> SftConfig:
        check_trainable(self.model)
        check_parallel_fits(self.parallel, self.model, self.sft.optimizer, self.sft.activations)
        check_optimizer_fits(self.sft.optimizer, "sft.optimizer", self.model.dtype, self.model.device)
        if not self.run.keep_best:
            raise ValueError("run.keep_best=false has no effect on sft, which measures no policy between its updates")
        check_best_by(self.run.best_by, [], ())
        if not self.sft.data:
            raise ValueError("no data: give sft.data (a file, a task or a plug-in)")
        return self


# --- The keys of `burnish prefer`: data, loss and optimisation on preferences.


class Preference(Record):
    """Training on answers of which one is preferred, or that are labelled good or bad."""

    loss: PreferenceSlot = DpoLoss()
    """What is minimised: dpo, ipo, simpo, orpo on pairs, kto on labelled answers."""
    data: Sources = Field(default_factory=list)
    """Rows with `prompt`, `chosen` and `rejected` (text or messages), or whole conversations without a prompt; for kto also `prompt`,
    `completion` and `label`. A task gives pairs that its checker judged."""
    held_out: Sources = Field(default_factory=list)
    """Rows of the same kind to measure on, never trained on."""
    held_out_every: int = Field(0, ge=0)
    """Updates between measurements on `held_out`; 0 means only before the first update and at the end."""
    reference: Literal["cached", "live"] = "cached"
    """cached: its log-probs are computed once before training and kept in the run directory, and no second model is held. live: it is
    asked in every update, a copy of the model (with adapters: the model without them)."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Pairs, or labelled answers, an update."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sequence, prompt and answer together."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with rows that have a longer one: leave them out (counted) or stop. They are never cut in silence."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch; changes memory and speed, never the gradient."""
    activations: Activations = "keep"
    """What waits for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-6)
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _has_effect(self) -> Preference:
        if self.reference == "live" and "reference" not in self.loss.needs:
            raise ValueError(f"reference=live has no effect: loss {self.loss.name} compares with no reference")
        if self.loss.name == "kto" and self.batch_size < 2:
            raise ValueError("loss kto compares with the other answers of a batch: set batch_size to 2 or more")
        if self.held_out_every and not self.held_out:
            raise ValueError("held_out_every has no effect without preference.held_out")
        return self


class PreferConfig(Record):
    """`burnish prefer`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The model to train; as it is at the start it is also the reference."""
    template: Template = Template()
    """How messages become text."""
    preference: Preference = Preference()
    """Data, loss and optimisation."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts divide the work."""

    @model_validator(mode="after")
    def _combinations(self) -> PreferConfig:
        stage = self.preference
        check_trainable(self.model)
        check_parallel_fits(self.parallel, self.model, stage.optimizer, stage.activations)
        check_optimizer_fits(stage.optimizer, "preference.optimizer", self.model.dtype, self.model.device)
        if not self.run.keep_best and not stage.held_out_every:
            raise ValueError(
                "run.keep_best=false has no effect without preference.held_out_every: no model but the last is measured"
            )
        kind = "answers" if stage.loss.name == "kto" else "pairs"
        check_best_by(self.run.best_by, [kind] if stage.held_out else [], ("accuracy", "margin", "loss"))
        if not stage.data:
            raise ValueError("no data: give preference.data (a file, a task or a plug-in)")
        return self


# --- The configuration of `burnish reward-model`.


class RewardModel(Record):
    """Training a scorer on pairs of answers (Bradley-Terry)."""

    data: Sources = Field(default_factory=list)
    """Rows with `prompt`, `chosen` and `rejected` (text or messages), and perhaps `margin`; a task gives pairs of its own."""
    held_out: Sources = Field(default_factory=list)
    """Pairs to measure on, never trained on."""
    held_out_every: int = Field(0, ge=0)
    """Updates between measurements on `held_out`; 0 means only before the first update, with every checkpoint and at the end."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Pairs an update."""
    margin: float = Field(0.0, ge=0)
    """By how much a chosen answer's score must be ahead, besides the row's own `margin` where it has one."""
    centre: float = Field(0.0, ge=0)
    """Coefficient of (chosen score + rejected score)^2, which keeps scores around 0; without it only differences are learnt."""
    max_tokens: int = Field(2048, ge=2)
    """Longest sequence, prompt and answer."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with pairs that have a longer one: leave them out (counted) or stop."""
    token_budget: int = Field(8192, ge=1)
    """Most tokens of one micro-batch; a pair may be divided over two, the gradient is the same."""
    activations: Activations = "keep"
    """What waits for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


class RewardModelConfig(Record):
    """`burnish reward-model`."""

    seed: int = Field(0, ge=0)
    """All randomness follows from it."""
    run: Run = Run()
    """Where a run lives and what it keeps."""
    model: Model = Model()
    """The model whose layers the scorer starts from."""
    template: Template = Template()
    """How messages become text."""
    reward_model: RewardModel = RewardModel()
    """Data and optimisation."""

    @model_validator(mode="after")
    def _combinations(self) -> RewardModelConfig:
        check_trainable(self.model)
        stage = self.reward_model
        check_optimizer_fits(stage.optimizer, "reward_model.optimizer", self.model.dtype, self.model.device)
        if not stage.data:
            raise ValueError("no data: give reward_model.data (a file of pairs, a task or a plug-in)")
        if self.model.backend == "transformers":
            raise ValueError("a reward model needs the native decoder, and model.backend=transformers")
        if stage.held_out_every and not stage.held_out:
            raise ValueError("reward_model.held_out_every has no effect without reward_model.held_out")
        if not self.run.keep_best and not stage.held_out_every:
            raise ValueError("run.keep_best=false has no effect without reward_model.held_out_every")
        check_best_by(self.run.best_by, ["pairs"] if stage.held_out else [], ("accuracy", "margin", "loss"))
        return self
