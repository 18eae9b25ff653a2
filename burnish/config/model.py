"""Keys of the policy: a Hugging Face directory, or a decoder made from nothing."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from burnish.config.records import Record

# --- LoRA: which projections get an adapter, and how large.

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""The linear layers of a decoder layer by their Hugging Face names, in the order of the forward pass."""
LoraBase = Literal["dtype", "nf4", "nf4-double"]


class Lora(Record):
    """Low-rank adapters (2106.09685): each target W becomes W + scale B A, with A and B trained and W frozen."""

    rank: int = Field(16, ge=1)
    """Rows of each A and columns of each B."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' scale is alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[Projection], Field(min_length=1)] = "all-linear"
    """Which projections: all seven of every layer, or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly (rsLoRA, 2312.03732)."""
    base: LoraBase = "dtype"
    """The frozen matrices below: in model.dtype; nf4, in 4 bits with a scale for every 64 numbers (QLoRA, 2305.14314: 4.5 bits each); or
    nf4-double, whose scales are in 8 bits (4.13). A product makes one of them plain for a moment: less memory, more time."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The targets by name, in the order of the forward pass."""
        return PROJECTIONS if self.targets == "all-linear" else tuple(p for p in PROJECTIONS if p in self.targets)

    @model_validator(mode="after")
    def _once(self) -> Lora:
        if self.targets != "all-linear" and len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names a projection twice: {', '.join(self.targets)}")
        return self


class NewModel(Record):
    """A decoder made from nothing, with random weights."""

    family: Literal["llama", "qwen2", "qwen3", "mistral", "gemma3_text"] = "llama"
    """Architecture."""
    hidden_size: int = Field(128, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads; null means as many as query heads."""
    mlp_size: int = Field(336, ge=1)
    """Width of the gated MLP."""
    max_positions: int = Field(512, ge=2)
    """Longest sequence the model is declared for."""
    tied: bool = False
    """Whether the output head is the embedding matrix."""


class Model(Record):
    """The policy: a Hugging Face directory, or a new decoder."""

    path: str | None = None
    """A Hugging Face model directory (config.json, safetensors, tokenizer)."""
    new: NewModel | None = None
    """A decoder from nothing instead, with a tokenizer of the task's characters."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and of the arithmetic; bfloat16 trains with float32 master weights, float16 only samples."""
    device: str = "auto"
    """`auto` takes a GPU when there is one; or cpu, cuda, cuda:1."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Who does the forward: our decoder, or transformers for any other architecture (slower). auto picks native where the family is known."""
    lora: Lora | None = None
    """New low-rank adapters on the model, which alone are trained and saved; the critic has its own on the same frozen weights."""
    adapter: str | None = None
    """A PEFT adapter directory to start from instead, with its own rank and targets; without model.path, on the base it names."""

    @model_validator(mode="after")
    def _one(self) -> Model:
        if self.path is not None and self.new is not None:
            raise ValueError("give either model.path (a directory) or model.new (from nothing), not both")
        if self.lora is not None and self.adapter is not None:
            raise ValueError("model.adapter brings adapters with a rank and targets of their own: remove model.lora")
        given = "lora" if self.lora is not None else "adapter" if self.adapter is not None else None
        if given is not None and self.new is not None:
            raise ValueError(f"model.{given} adapts a model that has learnt something: give model.path, not model.new")
        if given is not None and self.backend == "transformers":
            raise ValueError(f"model.{given} needs the native decoder, and model.backend=transformers")
        return self


def check_trainable(model: Model) -> None:
    if model.path is None and model.new is None and model.adapter is None:
        raise ValueError("no model: give model.path (a Hugging Face directory) or model.new (from nothing)")
    if model.dtype == "float16":
        raise ValueError("model.dtype=float16 has too small a range for gradients: train in bfloat16 or float32")


# --- The optimizer and its schedule, for every learner: the policy, the critic, a supervised stage.

DEFAULT_WSD_DECAY = 0.2
"""Default of `decay`, which only wsd reads."""


class ParameterGroup(Record):
    """Parameters that are trained differently from the rest."""

    match: str = Field(min_length=1)
    """A regular expression found anywhere in the name of a parameter, Hugging Face's or ours (`embed`, `layers\\.0\\.`, `lora_b`)."""
    lr_scale: float = Field(1.0, ge=0)
    """Their learning rate, as a factor of lr; 0 keeps them as they are."""
    weight_decay: float | None = Field(None, ge=0)
    """Their weight decay, that of norms and biases too; null keeps the optimizer's, which is for matrices."""

    @model_validator(mode="after")
    def _changes(self) -> ParameterGroup:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match {self.match!r} is not a regular expression: {error}") from error
        if self.lr_scale == 1 and self.weight_decay is None:
            raise ValueError(f"the group of {self.match!r} changes nothing: give lr_scale or weight_decay")
        return self


class Optimizer(Record):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adam8bit", "muon"] = "adamw"
    """adamw; adam8bit (moments of a byte each); muon (orthogonalised momentum for the matrices of layers, adamw for the rest)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm limit."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay after warm-up; wsd (warm-up, stable, decay) stays at the peak and falls linearly at the end."""
    warmup: int | float = Field(0, ge=0)
    """Linear warm-up: a number of updates, or a fraction of all (below 1)."""
    decay: float = Field(DEFAULT_WSD_DECAY, gt=0, le=1)
    """Fraction of all updates, the last ones, in which wsd falls."""
    final: float = Field(0.0, ge=0, le=1)
    """Where linear, cosine and wsd end, as a fraction of lr."""
    precision: Literal["master", "stochastic"] = "master"
    """How a bfloat16 model keeps updates too small for it: a float32 master copy, or stochastic rounding and no copy."""
    offload: bool = False
    """Keep moments and master copies in host memory; an update brings them through the GPU piece by piece."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with a learning rate or a weight decay of their own; the first group that matches counts."""

    @model_validator(mode="after")
    def _acts(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} are decay rates: each from 0 up to, but not including, 1")
        if self.schedule == "constant" and self.final:
            raise ValueError("final has no effect on a constant schedule: set schedule to linear, cosine or wsd")
        if self.schedule != "wsd" and self.decay != DEFAULT_WSD_DECAY:
            raise ValueError(f"decay has no effect on schedule {self.schedule}: it is the falling part of wsd")
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise ValueError(f"warmup {self.warmup} is neither a whole number of updates nor a fraction below 1")
        if self.schedule == "wsd" and 0 < self.warmup < 1 and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are more than the whole run: nothing is left of wsd's peak"
            )
        return self


def check_optimizer_fits(optimizer: Optimizer, where: str, dtype: str, device: str) -> None:
    """Refuse what would have no effect on a model of this type on this device."""
    if optimizer.precision == "stochastic" and dtype != "bfloat16":
        raise ValueError(
            f"{where}.precision=stochastic rounds weights to bfloat16, but model.dtype={dtype} needs no rounding: "
            "set model.dtype=bfloat16 or leave precision at master"
        )
    if optimizer.offload and device == "cpu":
        raise ValueError(f"{where}.offload has no effect with model.device=cpu: host memory is all there is")


# --- The critic: a copy of the policy's backbone with a scalar head, and how it is trained.


class Critic(Record):
    """A learned value of every token: a copy of the policy's backbone with a scalar head."""

    warmup_steps: int = Field(0, ge=0)
    """First steps that train the critic alone, on Monte-Carlo returns (value pre-training of VC-PPO and VAPO)."""
    updates: int = Field(1, ge=1)
    """Critic steps for each mini-batch, before the policy's."""
    clip: float | None = Field(0.5, gt=0)
    """A value may move this far from the one the batch was prepared with before its loss is clipped; null is off."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


# --- The implicit process reward model: a second language model, and how it is trained on outcomes.


class ProcessModel(Record):
    """A language model trained on which answers were right; beta times its log-ratio to its own start is the reward of a token."""

    path: str | None = None
    """The model directory it starts from, with the policy's tokenizer; null starts from the weights RL starts from."""
    beta: float = Field(0.05, gt=0)
    """What the log-ratio to the frozen start is multiplied by: the reward of a token, and summed over an answer the log-odds of being right."""
    loss: Literal["cross_entropy", "contrast"] = "cross_entropy"
    """Of an answer's log-odds against its outcome, or against the mean log-odds of the group's answers of the other outcome."""
    update: Literal["before", "after"] = "before"
    """Whether it learns a batch's outcomes before it rewards the batch's tokens, or after (one forward pass less)."""
    mini_batches: int = Field(1, ge=1)
    """Its optimizer steps for each batch; a group is never split over two."""
    optimizer: Optimizer = Optimizer(lr=1e-6, clip_norm=10.0)
    """The optimizer and its schedule."""
