"""What the training API's server knows of its clients: sessions, models and samplers, and the checks of new ones."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from burnish.config.model import PROJECTIONS, Lora, Projection
from burnish.serve.tinker.checkpoints import ModelDescription
from burnish.serve.tinker.futures import RequestOrder
from burnish.serve.tinker.requests import BadRequest, LoraOptions, OptimizerOptions
from burnish.serve.tinker.sampler import SamplerWeights
from burnish.serve.tinker.training_model import TrainingModel

LORA_ALPHA = 32.0
"""The alpha that tinker-cookbook's learning rates assume: the scale of an adapter is 32 / rank."""
ATTENTION: tuple[Projection, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MAX_SNAPSHOTS = 16
"""Most unnamed sampler weights of a model. They are in host memory, and a client never says that it needs one no longer."""
NO_UNEMBEDDING = (
    "this server trains adapters on the attention and MLP projections; train_unembed=True adds none on the unembedding"
)


class NotFound(Exception):
    """A session, model or sampler that this server does not have."""


@dataclass
class Session:
    """A client."""

    id: str
    last_seen: float
    user_metadata: dict[str, Any]
    display_name: str | None
    model_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)


@dataclass
class ModelEntry:
    """A model of a session. `model` is None until the worker has made it."""

    id: str
    session_id: str
    description: ModelDescription
    order: RequestOrder
    model: TrainingModel | None = None
    snapshots: deque[str] = field(default_factory=deque)
    """Ids of the unnamed sampler weights, the oldest first."""
    last_request: float = field(default_factory=time.time)

    def require(self) -> TrainingModel:
        """The model; BadRequest if its creation failed."""
        if self.model is None:
            raise BadRequest(f"the model {self.id} could not be created, so it cannot be used")
        return self.model


@dataclass
class SamplerEntry:
    """Weights that a client samples from."""

    weights: SamplerWeights
    path: str | None = None
    """The checkpoint; None for unnamed weights and for the base model."""
    saved_at: str | None = None
    """When the checkpoint was saved: a newer one may have the same path."""
    num_clients: int = 1


def check_optimizer(asked: OptimizerOptions) -> None:
    """Refuse optimizers other than AdamW."""
    if asked.type != "adamw":
        raise BadRequest(f"the optimizer {asked.type} is not served here; this server has adamw")


def lora_of(asked: LoraOptions) -> Lora:
    """The adapters that a client asks for."""
    targets = [name for name in PROJECTIONS if (asked.train_attn if name in ATTENTION else asked.train_mlp)]
    if not targets:
        raise BadRequest(f"train_attn and train_mlp are both false, and {NO_UNEMBEDDING}")
    return Lora(
        rank=asked.rank, alpha=LORA_ALPHA, targets="all-linear" if len(targets) == len(PROJECTIONS) else targets
    )
