"""The memory of one learner, from its model's shape and its configuration, before anything is loaded.

Parameters and optimizer state are counted on a model of the meta device, which has shapes and no memory, by the very code
that makes them. What a forward and backward pass holds follows from formulas: `models/activation_bytes.py` for what waits, here for what
is there for a moment, at the three places where most is held:

    head     the backward pass begins: all activations, a chunk of logits, the head's gradient as a float32 sum
    layer    the last layer: all activations but the head's, its own gradients
    end      the first layer: its own activations and gradients, and the gradients of all parameters
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from burnish.config.model import Lora, Optimizer
from burnish.models.activation_bytes import ActivationEstimate
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.kernels.logprob import CHUNK_ELEMENTS
from burnish.models.lora.adapters import wrap_with_lora
from burnish.models.nf4 import dequantise_bytes, weight_bytes
from burnish.models.weight_files import on_meta_device
from burnish.training.optimizers.base_optimizer import HALF_DTYPES, MAX_PART_SIZE
from burnish.training.optimizers.base_optimizer import BaseOptimizer as MadeOptimizer
from burnish.training.optimizers.offload import num_bytes_of
from burnish.training.optimizers.update_rules import make_optimizer

LOGIT_COPIES, KL_COPIES = 3, 6
"""Chunks of logits at once where no kernel writes over them: log-probs, probabilities, slopes; the reference's as well."""
GATE_WIDTHS = {(False, True): 2, (True, True): 3, (False, False): 3, (True, False): 5}
"""Widths of the MLP that the gate's backward pass adds, by whether its result was made again, and whether on a GPU: gradients of
both sides, less the result, which is gone by then where it was kept; no kernel on a CPU, so a product and the gate again."""
UPDATE_COPIES = 5
"""float32 copies of a part that an update computes beside the state, where the state is no float32."""


_meta_models: dict[str, Decoder] = {}
"""The last two models made, those of a policy and of a process reward model: plans are compared that differ in other things."""


def meta_policy(arch: Architecture, dtype: torch.dtype, lora: Lora | None) -> Decoder:
    """The policy without its numbers; not to be changed, since whoever asks for the same one gets the same."""
    key = f"{arch} {dtype} {lora!r}"
    if key not in _meta_models:
        with on_meta_device():
            model = Decoder(arch).to(dtype)
            if lora is not None:
                wrap_with_lora(model, lora)
        if len(_meta_models) > 1:
            del _meta_models[next(iter(_meta_models))]
        _meta_models[key] = model
    return _meta_models[key]


@dataclass(frozen=True)
class LearnerPasses:
    """What a learner's passes through its model depend on, besides the model."""

    activations: str
    rows: int
    """Of the largest micro-batch, that go through the layers."""
    tokens: int
    """Of the same packing: more, where sequences share their beginnings."""
    micro_batches: int
    """Of an update."""
    longest: int
    """Tokens of a sequence."""
    full_kl: bool = False
    """Whether the loss has a KL over the whole vocabulary."""


@dataclass(frozen=True)
class LearnerFootprint:
    """Bytes of a learner, by part."""

    weights: int
    master: int
    moments: int
    on_host: int
    """Of master copies and moments, what rests in host memory instead."""
    sums: int
    """The gradients of an update, as they add up."""
    gradients: int
    """Those of one backward pass, where they do not go into sums that are there already."""
    activations: int
    head: int
    layer: int
    end: int
    update: int
    """For a moment in an update."""
    is_accumulated: bool
    """Whether an update has several backward passes, so that all but the first find sums."""
    whole: int
    """Of the weights, what no processes divide: matrices in 4 bits."""

    @property
    def resident(self) -> int:
        """There all the time, once the first update was made."""
        return self.weights + self.master + self.moments - self.on_host

    @property
    def transient(self) -> int:
        """For a moment at the worst place of the backward pass, besides activations that wait."""
        return max(self.head, self.layer, self.end + self.gradients - self.activations)

    @property
    def passing(self) -> int:
        """The most that a backward pass holds besides what is resident."""
        return self.sums * self.is_accumulated + self.activations + self.transient

    @property
    def learning(self) -> int:
        """The most that an update holds besides what is resident."""
        return max(self.passing, self.sums + self.update)

    def cut(self, shards: int) -> LearnerFootprint:
        """Of one of several processes that hold a piece of every parameter each."""
        parts = ("weights", "master", "moments", "on_host", "sums", "gradients")
        pieces = {name: getattr(self, name) // shards for name in parts}
        return replace(self, **pieces | {"weights": self.whole + (self.weights - self.whole) // shards})


def learner_footprint(
    model: nn.Module, optimizer: Optimizer, learning: LearnerPasses, on_gpu: bool
) -> LearnerFootprint:
    """Of a learner of a policy, a critic or a scorer on the meta device."""
    decoder = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    assert isinstance(decoder, Decoder), "other models have shapes that only transformers knows"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = make_optimizer(model, trained, optimizer)
    layouts = [made.layout(name) for name in trained]
    master = sum(num_bytes_of(spec) for layout in layouts for key, spec in layout.items() if key == "master")
    state = sum(num_bytes_of(spec) for layout in layouts for spec in layout.values())
    passing = _pass_bytes(model, decoder, learning, on_gpu)
    return LearnerFootprint(
        weights=weight_bytes(model),
        whole=weight_bytes(model) - sum(p.nbytes for p in model.parameters()),
        master=master,
        moments=state - master,
        on_host=state if optimizer.offload and on_gpu else 0,
        sums=sum(p.numel() * max(4, p.itemsize) for p in trained.values()),
        gradients=sum(p.nbytes for p in trained.values() if p.dtype in HALF_DTYPES or learning.micro_batches == 1),
        update=_update_bytes(made, optimizer, state),
        is_accumulated=learning.micro_batches > 1,
        **passing,
    )


def _pass_bytes(model: nn.Module, decoder: Decoder, learning: LearnerPasses, on_gpu: bool) -> dict[str, int]:
    """Activations, and the most that is there for a moment at the three places."""
    arch, weight = decoder.arch, decoder.embedding.weight
    element, rows, tokens = weight.itemsize, learning.rows, learning.tokens
    forward = ActivationEstimate(arch, element, on_gpu, decoder.lora, tokens > rows, learning.longest)
    policy = learning.activations
    states = rows * arch.hidden_size * element  # one tensor of hidden states
    activations = forward.layers(policy).of(rows, tokens) + forward.outside_layers().of(rows, tokens) + states
    again = forward.recomputed(policy).of(rows, tokens)
    layer = (
        again
        + rows
        * (GATE_WIDTHS[policy == "selective", on_gpu or forward.in_c] * arch.mlp_size + arch.hidden_size)
        * element
    )
    # A matrix in 4 bits is plain for a moment, when the gate's gradients are not there.
    layer = max(layer, again + rows * (arch.mlp_size + arch.hidden_size) * element + dequantise_bytes(decoder, on_gpu))
    to_come = sum(
        p.nbytes for p in decoder.layers[0].parameters() if p.requires_grad
    )  # of the gradients of all parameters
    end = max(_embedding_gradient(decoder), layer + forward.layer(policy).of(rows, tokens) - to_come)
    if isinstance(model, ScoreModel):  # of the last states it reads one row a sequence
        return {"activations": activations - states, "head": 2 * states, "layer": layer, "end": end}
    if isinstance(model, ValueModel):
        return {"activations": activations, "head": 2 * states * (4 // element or 1), "layer": layer, "end": end}
    head, gradient = _head_bytes(decoder, learning, on_gpu)
    if weight.dtype not in HALF_DTYPES and learning.micro_batches > 1:
        gradient = 0  # it has gone into the sum
    return {"activations": activations, "head": head + states, "layer": layer + gradient, "end": end}


def _head_bytes(decoder: Decoder, learning: LearnerPasses, on_gpu: bool) -> tuple[int, int]:
    """What the output head's backward holds, and what it leaves: the gradient of its weight."""
    weight = decoder.head_weight
    wide = max(4, weight.itemsize)
    rows = max(1, CHUNK_ELEMENTS["cuda" if on_gpu else "cpu"] // weight.shape[0])
    chunk = min(learning.tokens, rows) * weight.shape[0]
    if on_gpu and not learning.full_kl:
        logits = chunk * weight.itemsize
        before = logits  # that of the last chunk is there until the next one's is made
    else:
        logits = chunk * wide * (KL_COPIES if learning.full_kl else LOGIT_COPIES)
        before = 2 * chunk * wide
    before = before if learning.tokens > rows else 0
    if not weight.requires_grad:
        return logits + before, 0
    gradient = weight.numel() * weight.itemsize
    return logits + weight.numel() * wide + max(before, gradient), gradient


def _embedding_gradient(decoder: Decoder) -> int:
    """The gradient of an embedding is made whole, and then added to that of the head it is tied to."""
    weight = decoder.embedding.weight
    return weight.nbytes if weight.requires_grad and decoder.head is None else 0


def _update_bytes(made: MadeOptimizer, optimizer: Optimizer, state: int) -> int:
    """Buffers for state from the host, and what is computed in float32 beside state that is not."""
    sizes = [p.numel() for p in made.parameters.values()]
    matrices = [p.numel() for name, p in made.parameters.items() if made.is_whole(name)]  # a part each
    part, batch = (
        min(max(sizes), MAX_PART_SIZE),
        min(sum(sizes), MAX_PART_SIZE),
    )  # of one parameter; of what is worked on at once
    if matrices:
        batch = max(batch, *matrices)
    held = 12 * max(matrices, default=0)
    if optimizer.name == "adam8bit":
        held += UPDATE_COPIES * part * 4
    if optimizer.precision == "stochastic":
        held += 2 * batch * 4
    return held + (2 * batch * state // sum(sizes) if optimizer.offload else 0)
