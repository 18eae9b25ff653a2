"""The configs of the commands that train: `train`, `sft`, `prefer` and `reward-model`.

The docstring under a field is its documentation: `--help` and docs/config.md print it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.algorithms.losses.spec import DpoLoss, PreferenceSlot
from burnish.algorithms.spec import Algorithm
from burnish.config.consistency import check_algorithm_fits
from burnish.config.data import Data, Reward, Sources, Template
from burnish.config.environment import Environment, check_environment_fits
from burnish.config.errors import did_you_mean
from burnish.config.foreign_engines import check_servers_fit
from burnish.config.model import Model, Optimizer, check_optimizer_fits, check_trainable
from burnish.config.placement import LocalPlacement, Parallel, PlacementSlot, check_parallel_fits, check_placement_fits
from burnish.config.records import Record, as_list, name_to_record
from burnish.config.rollout import (
    Rollout,
    Sampling,
    check_mismatch_fits,
    check_opponents_fit,
    check_repeatable,
    check_source_fits,
)
from burnish.config.trackers import AnyTracker

Activations = Literal["keep", "selective", "recompute", "offload"]
Layers = Literal["plain", "compiled", "fp8"]
STEP_METRICS = ("loss", "accuracy", "ranking", "first_error", "no_error", "f1")
"""Held-out metrics of a process reward model that can choose its best checkpoint."""


class Training(Record):
    """How the learner uses a batch."""

    steps: int = Field(100, ge=1)
    """RL steps."""
    mini_batches: int = Field(1, ge=1)
    """Mini-batches per epoch over a batch; each is one optimizer step. A group is never split over two mini-batches."""
    epochs: int = Field(1, ge=1)
    """Passes over each batch."""
    token_budget: int = Field(8192, ge=1)
    """Maximum number of tokens of one micro-batch, which is one forward and backward pass; a shared prefix counts once. It changes memory
    and speed, never the gradient."""
    share_prefixes: bool = True
    """Compute prefixes that sequences of a group have in common once, forward and backward, if that saves at least 5% of the tokens: the
    prompt of all samples, the context that turns of a dialogue share, the paths of a tree. It changes speed, never the gradient."""
    grad_norms: bool = False
    """Also log the gradient norm of every block (embedding, each layer, head) as `actor/grad_norm_<block>`."""
    collapse_every: int = Field(0, ge=0)
    """Steps between measurements of whether answers still depend on their prompts (template collapse, RAGEN-2), as `collapse/...` metrics.
    Each scores 64 pairs of a prompt and an answer, without gradient. 0: never."""
    activations: Activations = "keep"
    """Activations kept for the backward pass. keep: all. selective: results of matmuls and attention. recompute: the input of each layer.
    offload: none on the GPU. Each needs less memory and more time than the one before, and gives the same gradient."""
    layers: Layers = "plain"
    """How the learner computes the decoder's layers. compiled: through torch.compile, which takes a minute at the start and fuses the operations
    between the matmuls. fp8: with all products of their linear layers, forward and backward, in 8-bit floats (e4m3) that are rounded anew in
    every pass, one scale for each row. That is faster on a GPU with such products (Ada, Hopper or later) and adds about 4% of noise to each
    product. Weights, head, attention and norms keep model.dtype. So do rollouts: the mismatch metrics show the difference."""
    deterministic: bool = False
    """Make two equal runs on a GPU equal bit for bit, and a resumed run equal to one that never stopped: sums of gradients get a fixed order,
    which takes time. On a CPU runs are equal anyway. Episodes of several turns need rollout.exact too."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _check_compile(self) -> Training:
        if self.layers == "compiled" and self.activations == "selective":
            raise ValueError(
                "training.layers=compiled selects itself which activations to keep: set training.activations to keep, recompute or offload"
            )
        return self


class ValidationMode(Sampling):
    """Sampling options of one validation mode."""

    temperature: float = Field(0.0, ge=0)
    """0 is greedy."""
    n: int = Field(1, ge=1)
    """Samples of each prompt."""


class Validation(Record):
    """Evaluation on held-out prompts: before training, every k steps and at the end."""

    every: int = Field(0, ge=0)
    """Steps between validations; 0 means only before and after training."""
    before: bool = True
    """Whether to validate before the first step."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of prompts; null means all. A generated task needs a limit."""
    modes: dict[str, ValidationMode] = Field(default_factory=lambda: {"greedy": ValidationMode()}, min_length=1)
    """Named sampling options. The first mode selects the best checkpoint (run.best_by). max_tokens defaults to that of rollout."""
    by: str | None = None
    """Also report the accuracy, or the mean of graded rewards, for each value of this column."""


class Sft(Record):
    """Supervised training on prompt/completion rows or messages, with loss on the assistant's tokens only."""

    data: Sources = Field(default_factory=list)
    """Rows with `prompt` and `completion` (text or messages), `messages`, or `text`. A task generates demonstrations."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(128, ge=1)
    """Sequences per update."""
    max_tokens: int = Field(2048, ge=2)
    """Maximum number of tokens of a sequence."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with longer rows: filter drops and counts them, error stops the run. They are never truncated silently."""
    token_budget: int = Field(8192, ge=1)
    """Maximum number of tokens of one micro-batch."""
    activations: Activations = "keep"
    """Activations kept for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


class Run(Record):
    """The run directory, checkpoints and trackers."""

    directory: str = "runs"
    """Folder of all runs."""
    name: str | None = None
    """Folder of this run in `directory`. null: named after the recipe and the seed."""
    save_every: int = Field(25, ge=1)
    """Steps between checkpoints. The last step is always saved."""
    save: Literal["background", "wait"] = "background"
    """background: copy a checkpoint to host memory and write it while training continues. wait: write it before training continues, without
    the extra memory."""
    keep_last: int = Field(2, ge=1)
    """Number of latest checkpoints to keep, in addition to the best one (of each metric, if best_by has changed)."""
    keep_best: bool = True
    """Save at every validation too, so that the best policy is kept. false: save only every save_every steps."""
    best_by: str | None = None
    """The metric that selects the best checkpoint, such as validation/greedy/reward_mean. With a leading minus (-validation/greedy/length_mean)
    the lowest value is best. null: the held-out accuracy of the first mode, or its reward_mean if rewards are graded and there is no accuracy."""
    samples_every: int = Field(10, ge=1)
    """Steps between saved tables of samples."""
    trackers: Annotated[list[AnyTracker], BeforeValidator(as_list)] = Field(default_factory=list)
    """Also send metrics, config, samples and report to these trackers, each with the options of its section (docs/trackers.md)."""
    threads: int | None = Field(None, ge=1)
    """CPU threads for arithmetic. null: torch's default."""


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
"""Metrics that a validation of a policy may have, in each of its modes."""


def check_best_by(best_by: str | None, modes: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a `run.best_by` that is not a metric `validation/MODE/NAME` of the run, with MODE in `modes` and NAME in `names`."""
    if best_by is None:
        return
    if not modes:
        raise ValueError(f"run.best_by={best_by} has no effect: this run has no held-out data")
    sign = "-" if best_by.startswith("-") else ""
    first, mode, name = [*best_by.removeprefix("-").split("/", 2), "", ""][:3]
    if first != "validation" or mode not in modes or name.split("/")[0] not in names:
        known = [f"{sign}validation/{mode}/{name}" for mode in modes for name in names]
        raise ValueError(
            f"run.best_by={best_by}: no such metric{did_you_mean(best_by, known)}; expected validation/A/B with A of "
            f"{', '.join(modes)} and B of {', '.join(names)}, and a leading minus where the lowest is best"
        )


class TrainConfig(Record):
    """`burnish train`."""

    seed: int = Field(0, ge=0)
    """Seed of all randomness."""
    run: Run = Run()
    """The run directory, checkpoints and trackers."""
    model: Model = Model()
    """The policy."""
    data: Data = Data()
    """Prompts."""
    environment: Annotated[Environment, BeforeValidator(name_to_record)] = Environment()
    """The environment that responds to completions."""
    reward: Reward = Reward()
    """The reward function."""
    rollout: Rollout = Rollout()
    """Sampling for training."""
    algorithm: Algorithm = Algorithm()
    """One choice per slot, or a preset's name."""
    training: Training = Training()
    """How the learner uses a batch."""
    validation: Validation = Validation()
    """Evaluation on held-out prompts."""
    warm_start: Sft | None = None
    """A supervised stage before RL; its result is checkpoint 0."""
    placement: PlacementSlot = LocalPlacement()
    """Where the processes of the run are started."""
    parallel: Parallel = Parallel()
    """How `placement.workers` processes train one model."""

    @model_validator(mode="after")
    def _combinations(self) -> TrainConfig:
        check_trainable(self.model)
        check_placement_fits(self)
        check_servers_fit(self)
        check_source_fits(self)
        check_repeatable(self)
        check_opponents_fit(self)
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
                "rollout.temperature is 0: greedy samples of a prompt are identical, so nothing can be learnt"
            )
        fewest = min(stage.prompts for stage in self.rollout.all_stages())
        if self.training.mini_batches > fewest:
            raise ValueError(
                f"training.mini_batches={self.training.mini_batches} but there are only rollout.prompts={fewest} groups to split"
            )
        check_environment_fits(self)
        if self.training.layers == "fp8":
            check_fp8_fits(self)
        validation_keys = [k for k in ("every", "limit", "by") if getattr(self.validation, k)]
        if validation_keys and not self.data.validation:
            raise ValueError(
                f"validation.{validation_keys[0]} has no effect without held-out prompts: give data.validation"
            )
        if not self.run.keep_best and not self.validation.every:
            raise ValueError(
                "run.keep_best=false has no effect without validation.every: only the last policy is validated"
            )
        check_best_by(self.run.best_by, list(self.validation.modes) if self.data.validation else [], VALIDATION_METRICS)
        for source in self.data.validation:
            if source.task is not None and self.validation.limit is None and source.limit is None:
                raise ValueError("a generated task has no last row: set validation.limit (or the source's limit)")
        return self


def check_fp8_fits(config: TrainConfig) -> None:
    """Refuse what cannot train with 8-bit products."""
    hint = "set training.layers=plain"
    if config.rollout.exact:
        raise ValueError(
            f"rollout.exact computes every token as the engine does, which training.layers=fp8 rounds: {hint}"
        )
    if config.model.backend == "transformers":
        raise ValueError(f"training.layers=fp8 needs the native decoder, but model.backend=transformers: {hint}")
    if config.parallel.tensor > 1:
        raise ValueError(
            f"training.layers=fp8 rounds whole rows, which parallel.tensor splits: use parallel.data, or {hint}"
        )


class SftConfig(Record):
    """`burnish sft`."""

    seed: int = Field(0, ge=0)
    """Seed of all randomness."""
    run: Run = Run()
    """The run directory, checkpoints and trackers."""
    model: Model = Model()
    """The model to train."""
    template: Template = Template()
    """How messages become text."""
    sft: Sft = Sft()
    """Data and optimisation."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts train one model."""

    @model_validator(mode="after")
    def _combinations(self) -> SftConfig:
        check_trainable(self.model)
        check_parallel_fits(self.parallel, self.model, self.sft.optimizer, self.sft.activations)
        check_optimizer_fits(self.sft.optimizer, "sft.optimizer", self.model.dtype, self.model.device)
        if not self.run.keep_best:
            raise ValueError("run.keep_best=false has no effect on sft, which has no validation")
        check_best_by(self.run.best_by, [], ())
        if not self.sft.data:
            raise ValueError("no data: give sft.data (a file, a task or a plug-in)")
        return self


# --- The keys of `burnish prefer`: data, loss and optimisation on preferences.


class Preference(Record):
    """Training on preferred and rejected answers, or on answers labelled good or bad."""

    loss: PreferenceSlot = DpoLoss()
    """The loss: dpo, ipo, simpo or orpo on pairs, kto on labelled answers."""
    data: Sources = Field(default_factory=list)
    """Rows with `prompt`, `chosen` and `rejected` (text or messages), or whole conversations without a prompt. kto also takes `prompt`,
    `completion` and `label`. A task generates pairs that its checker has judged."""
    held_out: Sources = Field(default_factory=list)
    """Held-out rows of the same format, for evaluation only."""
    held_out_every: int = Field(0, ge=0)
    """Updates between evaluations on `held_out`; 0 means only before the first update and at the end."""
    reference: Literal["cached", "live"] = "cached"
    """cached: reference log-probs are computed once before training and saved in the run directory, so no second model is in memory. live:
    they are computed in every update, by a copy of the model (with adapters: by the model without them)."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Pairs, or labelled answers, per update."""
    max_tokens: int = Field(2048, ge=2)
    """Maximum number of tokens of a prompt and its answer together."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with rows that have a longer sequence: filter drops and counts them, error stops the run. They are never truncated silently."""
    token_budget: int = Field(8192, ge=1)
    """Maximum number of tokens of one micro-batch. It changes memory and speed, never the gradient."""
    activations: Activations = "keep"
    """Activations kept for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-6)
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _check_effect(self) -> Preference:
        if self.reference == "live" and "reference" not in self.loss.needs:
            raise ValueError(f"reference=live has no effect: loss {self.loss.name} uses no reference")
        if self.loss.name == "kto" and self.batch_size < 2:
            raise ValueError("loss kto compares with the other answers of a batch: set batch_size to 2 or more")
        if self.held_out_every and not self.held_out:
            raise ValueError("held_out_every has no effect without preference.held_out")
        return self


class PreferConfig(Record):
    """`burnish prefer`."""

    seed: int = Field(0, ge=0)
    """Seed of all randomness."""
    run: Run = Run()
    """The run directory, checkpoints and trackers."""
    model: Model = Model()
    """The model to train. Its initial weights are also the reference."""
    template: Template = Template()
    """How messages become text."""
    preference: Preference = Preference()
    """Data, loss and optimisation."""
    parallel: Parallel = Parallel()
    """How the processes that torchrun starts train one model."""

    @model_validator(mode="after")
    def _combinations(self) -> PreferConfig:
        stage = self.preference
        check_trainable(self.model)
        check_parallel_fits(self.parallel, self.model, stage.optimizer, stage.activations)
        check_optimizer_fits(stage.optimizer, "preference.optimizer", self.model.dtype, self.model.device)
        if not self.run.keep_best and not stage.held_out_every:
            raise ValueError(
                "run.keep_best=false has no effect without preference.held_out_every: only the last model is evaluated"
            )
        kind = "answers" if stage.loss.name == "kto" else "pairs"
        check_best_by(self.run.best_by, [kind] if stage.held_out else [], ("accuracy", "margin", "loss"))
        if not stage.data:
            raise ValueError("no data: give preference.data (a file, a task or a plug-in)")
        return self


class StepValues(Record):
    """Training a process reward model on the values of single steps (Lightman et al., 2305.20050; Math-Shepherd, 2312.08935)."""

    delimiter: str = Field("\n\n", min_length=1)
    """The text between the steps of an answer, or the name of a special token. The model's directory names it, and its readers use it."""
    neutral: float | None = Field(1.0, ge=0, le=1)
    """The value of a step with PRM800K's rating 0; null gives it no label. 1 is the paper's choice (2305.20050)."""
    tag: str = Field("ки", min_length=1)
    """The mark of Math-Shepherd at the end of a step, in the column `input`. The column `label` has + or - in its place."""


class RewardModel(Record):
    """Training a reward model on pairs of answers (Bradley-Terry), or on the values of their steps."""

    data: Sources = Field(default_factory=list)
    """Rows with `prompt`, `chosen` and `rejected` (text or messages), and optionally `margin`. A task generates pairs. With `steps`: rows with
    `prompt`, `steps` and `values`, or in the form of Math-Shepherd, PRM800K or TRL."""
    steps: StepValues | None = None
    """Learn a score of every step, as the log-odds that the answer is right so far, from rows with values of steps; null learns from pairs."""
    held_out: Sources = Field(default_factory=list)
    """Held-out rows, for evaluation only."""
    held_out_every: int = Field(0, ge=0)
    """Updates between evaluations on `held_out`; 0 means only before the first update, with every checkpoint and at the end."""
    updates: int = Field(250, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(64, ge=1)
    """Rows per update: pairs, or answers with values of steps."""
    margin: float = Field(0.0, ge=0)
    """Margin between the scores of the chosen and the rejected answer, added to the `margin` of the row if it has one. For pairs."""
    centre: float = Field(0.0, ge=0)
    """Coefficient of (chosen score + rejected score)^2, which centres scores around 0. Without it only differences are learnt. For pairs."""
    max_tokens: int = Field(2048, ge=2)
    """Maximum number of tokens of a prompt and its answer together."""
    overlong: Literal["filter", "error"] = "filter"
    """What to do with rows that have a longer sequence: filter drops and counts them, error stops the run."""
    token_budget: int = Field(8192, ge=1)
    """Maximum number of tokens of one micro-batch. A pair may be split over two; the gradient is the same."""
    activations: Activations = "keep"
    """Activations kept for the backward pass: keep, selective, recompute or offload, as in training.activations."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""

    @model_validator(mode="after")
    def _check_effect(self) -> RewardModel:
        if self.steps is not None and (self.margin or self.centre):
            key = "margin" if self.margin else "centre"
            raise ValueError(
                f"reward_model.{key} has no effect with reward_model.steps, whose rows are no pairs: remove it"
            )
        return self

    @property
    def kind(self) -> Literal["pairs", "steps"]:
        """What it is trained on, as its held-out metrics name it."""
        return "pairs" if self.steps is None else "steps"

    @property
    def characters(self) -> str:
        """The characters that a new model's tokenizer needs besides those of the data."""
        return "" if self.steps is None else self.steps.delimiter


class RewardModelConfig(Record):
    """`burnish reward-model`."""

    seed: int = Field(0, ge=0)
    """Seed of all randomness."""
    run: Run = Run()
    """The run directory, checkpoints and trackers."""
    model: Model = Model()
    """The model whose layers the reward model starts from."""
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
            raise ValueError(
                f"no data: give reward_model.data (a file of {'pairs' if stage.steps is None else 'answers with values of steps'}, a task or a plug-in)"
            )
        if self.model.backend == "transformers":
            raise ValueError("a reward model needs the native decoder, but model.backend=transformers")
        if stage.held_out_every and not stage.held_out:
            raise ValueError("reward_model.held_out_every has no effect without reward_model.held_out")
        if not self.run.keep_best and not stage.held_out_every:
            raise ValueError("run.keep_best=false has no effect without reward_model.held_out_every")
        names = ("accuracy", "margin", "loss") if stage.steps is None else STEP_METRICS
        check_best_by(self.run.best_by, [stage.kind] if stage.held_out else [], names)
        return self
