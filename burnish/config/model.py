"""Config sections for models and optimizers: the policy, LoRA, the critic and the process reward model."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.records import Record

Projection = Literal[
    "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
]  # fmt: skip
ALL_PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""The linear layers of decoder layers of all families by their Hugging Face names; the first four are those of latent attention."""
PROJECTIONS = ALL_PROJECTIONS[4:]
"""The linear layers of a decoder layer by their Hugging Face names, in the order of the forward pass."""
LoraBase = Literal["dtype", "nf4", "nf4-double"]
Vision = Literal["frozen", "projector", "trained"]
DEFAULT_WSD_DECAY = 0.2
"""Default of `Optimizer.decay`, which only the wsd schedule reads."""


class Lora(Record):
    """Low-rank adapters (2106.09685): each target W becomes W + scale B A, with A and B trained and W frozen."""

    rank: int = Field(16, ge=1)
    """Rows of each A and columns of each B."""
    alpha: float = Field(32.0, gt=0)
    """The scale of the adapters is alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[Projection], Field(min_length=1)] = "all-linear"
    """Which projections: all of every layer, or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. DeepSeek-V3 has
    q_a_proj, q_b_proj, kv_a_proj_with_mqa and kv_b_proj in place of the first three."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly (rsLoRA, 2312.03732)."""
    base: LoraBase = "dtype"
    """Format of the frozen matrices. dtype: model.dtype. nf4: 4 bits with one scale for every 64 values (QLoRA, 2305.14314; 4.5 bits per
    value). nf4-double: the scales are stored in 8 bits too (4.13 bits per value). Each matmul dequantizes one matrix: less memory, more time."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The targets by name, in the order of the forward pass."""
        return (
            ALL_PROJECTIONS if self.targets == "all-linear" else tuple(p for p in ALL_PROJECTIONS if p in self.targets)
        )

    @model_validator(mode="after")
    def _check_targets(self) -> Lora:
        if self.targets != "all-linear" and len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names a projection twice: {', '.join(self.targets)}")
        return self


def _as_pair(value: Any) -> Any:
    """A list of YAML as a tuple, which strict types take."""
    return tuple(value) if isinstance(value, list) else value


class NewModel(Record):
    """A new decoder with random weights."""

    family: Literal[
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "olmoe", "qwen3_vl"
    ] = "llama"
    """Architecture. qwen3_moe, mixtral and olmoe have experts. qwen3_vl sees: it has a small vision tower with half of hidden_size and as many
    layers and heads, which makes one token of every 16 x 16 pixels."""
    hidden_size: int = Field(128, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads. null: as many as query heads."""
    mlp_size: int = Field(336, ge=1)
    """Width of the gated MLP."""
    experts: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=3, max_length=3)] | None = None
    """Experts in place of the MLP of every layer, as three numbers: experts, experts that compute a token, and the width of one expert's gated
    MLP. null: [8, 2, 168] in a family with experts. [16, 2, 168] has the arithmetic of a dense model with mlp_size 336 and the parameters of one with 2688."""
    max_positions: int = Field(512, ge=2)
    """Maximum number of tokens of a sequence."""
    tied: bool = False
    """Whether the output head is the embedding matrix."""


class Model(Record):
    """The policy: a Hugging Face directory, or a new decoder."""

    path: str | None = None
    """A Hugging Face model directory (config.json, safetensors, tokenizer), or an id of the hub: org/name or org/name@revision, which is read from
    the Hugging Face cache or downloaded to it. A local directory of that name wins. The run records the commit."""
    new: NewModel | None = None
    """Make a new decoder with random weights instead. Its tokenizer has the characters of the task."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and of the arithmetic. bfloat16 trains with float32 master weights; float16 can only sample."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:1."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Implementation of the forward pass: native (our decoder), or transformers for any other architecture (slower). auto: native if the
    model family is known."""
    lora: Lora | None = None
    """New low-rank adapters. Only the adapters are trained and saved. The critic has its own adapters on the same frozen weights."""
    adapter: str | None = None
    """A PEFT adapter directory to start from instead, with its own rank and targets. Without model.path, the base model that it names is loaded."""
    vision: Vision | None = None
    """What of a vision tower is trained: nothing, only its projector to the decoder, or all of it. null: nothing of a model from a directory, all
    of a new one. While it is frozen, the features of an image are computed once for sampling and training."""
    image_pixels: Annotated[tuple[int, int], BeforeValidator(_as_pair)] | None = None
    """Fewest and most pixels of an image after it is resized, as two numbers. Most bounds its tokens: an image of Qwen2.5-VL has one token for
    28 x 28 pixels. null: the limits of the model's own image processor."""

    @model_validator(mode="after")
    def _check_pixels(self) -> Model:
        if self.image_pixels is not None and not 1 <= self.image_pixels[0] <= self.image_pixels[1]:
            raise ValueError(
                f"model.image_pixels={list(self.image_pixels)} should be the fewest and the most pixels, such as [3136, 501760]"
            )
        return self

    @model_validator(mode="after")
    def _check_one_source(self) -> Model:
        if self.path is not None and self.new is not None:
            raise ValueError("give either model.path (a directory) or model.new (a new decoder), not both")
        if self.lora is not None and self.adapter is not None:
            raise ValueError("model.adapter has its own rank and targets: remove model.lora")
        given = "lora" if self.lora is not None else "adapter" if self.adapter is not None else None
        if given is not None and self.new is not None:
            raise ValueError(f"model.{given} adapts a trained model: give model.path, not model.new")
        if given is not None and self.backend == "transformers":
            raise ValueError(f"model.{given} needs the native decoder, but model.backend=transformers")
        return self


def check_trainable(model: Model) -> None:
    """Refuse a model that is not given or that cannot be trained."""
    if model.path is None and model.new is None and model.adapter is None:
        raise ValueError("no model: give model.path (a Hugging Face directory) or model.new (a new decoder)")
    if model.dtype == "float16":
        raise ValueError("the range of model.dtype=float16 is too small for gradients: train in bfloat16 or float32")


class ParameterGroup(Record):
    """Parameters with their own learning rate or weight decay."""

    match: str = Field(min_length=1)
    """A regular expression, searched in the Hugging Face and in the native names of parameters (`embed`, `layers\\.0\\.`, `lora_b`)."""
    lr_scale: float = Field(1.0, ge=0)
    """Factor of lr for these parameters; 0 freezes them."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay of these parameters, norms and biases included. null: the optimizer's, which applies to matrices only."""

    @model_validator(mode="after")
    def _check_effect(self) -> ParameterGroup:
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
    """adamw; adam8bit (moments in 8 bits); muon (orthogonalised momentum for the matrices of layers, adamw for the rest)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices."""
    clip_norm: float = Field(1.0, gt=0)
    """Limit of the global gradient norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up. wsd (warm-up, stable, decay) stays at the peak and decays linearly at the end."""
    warmup: int | float = Field(0, ge=0)
    """Linear warm-up: a number of updates, or a fraction of all updates (below 1). Update k of W has the rate lr * k / W, so the first has
    lr / W, not 0."""
    decay: float = Field(DEFAULT_WSD_DECAY, gt=0, le=1)
    """Length of the final decay of wsd, as a fraction of all updates."""
    final: float = Field(0.0, ge=0, le=1)
    """Final learning rate of linear, cosine and wsd, as a fraction of lr."""
    precision: Literal["master", "stochastic"] = "master"
    """How a bfloat16 model keeps updates that are smaller than its rounding: a float32 master copy, or stochastic rounding without a copy."""
    offload: bool = False
    """Keep moments and master copies in host memory. An update moves them through the GPU in pieces."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with their own learning rate or weight decay. The first group that matches applies."""

    @model_validator(mode="after")
    def _check_effect(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} are decay rates: each must be at least 0 and below 1")
        if self.schedule == "constant" and self.final:
            raise ValueError("final has no effect on a constant schedule: set schedule to linear, cosine or wsd")
        if self.schedule != "wsd" and self.decay != DEFAULT_WSD_DECAY:
            raise ValueError(f"decay has no effect on schedule {self.schedule}: it is the length of the decay of wsd")
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise ValueError(f"warmup {self.warmup} is neither a whole number of updates nor a fraction below 1")
        if self.schedule == "wsd" and 0 < self.warmup < 1 and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} add up to more than 1: wsd would never reach its peak"
            )
        return self


def check_optimizer_fits(optimizer: Optimizer, where: str, dtype: str, device: str) -> None:
    """Refuse options that have no effect on a model of this dtype on this device."""
    if optimizer.precision == "stochastic" and dtype != "bfloat16":
        raise ValueError(
            f"{where}.precision=stochastic rounds weights to bfloat16, but model.dtype={dtype} needs no rounding: "
            "set model.dtype=bfloat16 or leave precision at master"
        )
    if optimizer.offload and device == "cpu":
        raise ValueError(f"{where}.offload has no effect with model.device=cpu: everything is in host memory")


class Critic(Record):
    """A learned value of every token: a copy of the policy's backbone with a scalar head."""

    warmup_steps: int = Field(0, ge=0)
    """Number of first steps that train only the critic, on Monte-Carlo returns (value pre-training of VC-PPO and VAPO)."""
    updates: int = Field(1, ge=1)
    """Critic updates for each mini-batch, before the policy's update."""
    clip: float | None = Field(0.5, gt=0)
    """Limit of how far a value may move from its value before the first update on the batch; beyond it the loss is clipped. null: no limit."""
    optimizer: Optimizer = Optimizer(lr=1e-5)
    """The optimizer and its schedule."""


class ProcessModel(Record):
    """An implicit process reward model: a language model trained on outcomes. The reward of a token is beta times its log-ratio to the frozen start."""

    path: str | None = None
    """The model directory it starts from, with the policy's tokenizer. null: the initial weights of the policy."""
    beta: float = Field(0.05, gt=0)
    """Factor of the log-ratio to the frozen start. The product is the reward of a token; its sum over an answer is the log-odds of being right."""
    loss: Literal["cross_entropy", "contrast"] = "cross_entropy"
    """cross_entropy: between the log-odds of an answer and its outcome. contrast: between the log-odds of an answer and the mean log-odds
    of the answers of its group with the other outcome."""
    update: Literal["before", "after"] = "before"
    """Whether it is trained on the outcomes of a batch before it rewards the tokens of the batch, or after (one forward pass less)."""
    mini_batches: int = Field(1, ge=1)
    """Its optimizer steps for each batch. A group is never split over two."""
    optimizer: Optimizer = Optimizer(lr=1e-6, clip_norm=10.0)
    """The optimizer and its schedule."""
