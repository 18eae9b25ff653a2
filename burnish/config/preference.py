"""The keys of `burnish prefer`: data, loss and optimisation on preferences."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from burnish.algorithms.losses.spec import DpoLoss, PreferenceSlot
from burnish.config.data import Sources, Template
from burnish.config.model import Model, Optimizer, check_optimizer_fits, check_trainable
from burnish.config.placement import Parallel, check_parallel_fits
from burnish.config.records import Record
from burnish.config.schema import Activations, Run, check_best_by


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
