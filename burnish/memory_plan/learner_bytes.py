"""Memory of one learner, from the shape of its model and its configuration.

Parameters and optimizer state are counted on the meta device by the code that also makes the real ones. The memory of a forward
and backward pass follows from formulas: `models/activation_bytes.py` has the stored activations. This file has the temporary
memory at the three places with the largest sum:

    head     the backward pass starts: all activations, a chunk of logits, the head's gradient as a float32 sum
    layer    the last layer: all activations but the head's, its own gradients
    end      the first layer: its own activations and gradients, and the gradients of all parameters
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from burnish.config.model import Lora, Optimizer, Vision
from burnish.models.activation_bytes import ActivationEstimate
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.kernels.cpu.c_library import c_kernels_expected
from burnish.models.kernels.half_products import has_bfloat16_products
from burnish.models.kernels.logprob import CHUNK_ELEMENTS, KERNEL_CHUNK_ELEMENTS
from burnish.models.lora.adapters import wrap_with_lora
from burnish.models.nf4 import dequantise_bytes, weight_bytes
from burnish.models.policy import choose_trained_vision
from burnish.models.vision.training import trained_part
from burnish.models.weight_files import on_meta_device
from burnish.training.optimizers.base_optimizer import HALF_DTYPES, MAX_PART_SIZE
from burnish.training.optimizers.base_optimizer import BaseOptimizer as MadeOptimizer
from burnish.training.optimizers.offload import num_bytes_of
from burnish.training.optimizers.update_rules import make_optimizer

LOGIT_COPIES, KL_COPIES = 3, 6
"""Chunks of logits at the same time if no kernel works in place: log-probs, probabilities, gradients; with a full KL the reference's too."""
SOFTCAP_COPIES = 2
"""Wide chunks of logits that a soft cap of half types makes: the slope of the cap and its product with the gradient."""
GATE_WIDTHS = {(False, True): 2, (True, True): 3, (False, False): 3, (True, False): 5}
"""Temporary tensors of MLP width in the gate's backward pass, by (result recomputed, on a GPU). There are the gradients of both
sides, less the result if it was kept, since it is freed by then. Without a kernel (CPU) there are a product and the gate as well."""
FP8_COPIES = {True: 2, False: 14}
"""Bytes of a number of a gradient that is multiplied in 8 bits, by whether it is on a GPU: rows and columns; elsewhere in float32 too."""
UPDATE_COPIES = 5
"""float32 copies of a part during an update with state that is not float32."""


_meta_models: dict[str, Decoder] = {}
"""The last two meta models, as of a policy and a process reward model. Plans that differ in other settings reuse them."""


def meta_policy(arch: Architecture, dtype: torch.dtype, lora: Lora | None, tower: Vision = "frozen") -> Decoder:
    """The policy on the meta device; `tower` is what is trained of a vision tower. It is cached: do not change it."""
    key = f"{arch} {dtype} {lora!r} {tower}"
    if key not in _meta_models:
        with on_meta_device():
            model = Decoder(arch).to(dtype)
            if lora is not None:
                wrap_with_lora(model, lora)
            choose_trained_vision(model, tower)
        if len(_meta_models) > 1:
            del _meta_models[next(iter(_meta_models))]
        _meta_models[key] = model
    return _meta_models[key]


@dataclass(frozen=True)
class LearnerPasses:
    """The settings of a learner's passes that determine their memory."""

    activations: str
    rows: int
    """Rows of the largest micro-batch that go through the layers."""
    tokens: int
    """Tokens of that micro-batch: more than rows if sequences share prefixes."""
    micro_batches: int
    """Micro-batches of an update."""
    longest: int
    """Most tokens of a sequence."""
    full_kl: bool = False
    """Whether the loss has a KL over the whole vocabulary."""
    in_fp8: bool = False
    """Whether the linear layers multiply in 8 bits."""


@dataclass(frozen=True)
class LearnerFootprint:
    """Bytes of a learner by part."""

    weights: int
    master: int
    moments: int
    on_host: int
    """The part of master copies and moments that is in host memory."""
    sums: int
    """Accumulated gradients of an update."""
    gradients: int
    """Gradients of one backward pass that are not added to existing sums in place."""
    activations: int
    head: int
    layer: int
    end: int
    update: int
    """Temporary memory of the optimizer step."""
    is_accumulated: bool
    """Whether an update has several backward passes, so that later ones add to sums."""
    whole: int
    """Weights that are not sharded: 4-bit matrices."""

    @property
    def resident(self) -> int:
        """Memory that is always there after the first update."""
        return self.weights + self.master + self.moments - self.on_host

    @property
    def transient(self) -> int:
        """Temporary memory at the worst place of the backward pass, besides stored activations."""
        return max(self.head, self.layer, self.end + self.gradients - self.activations)

    @property
    def backward_peak(self) -> int:
        """Peak of a backward pass besides the resident memory."""
        return self.sums * self.is_accumulated + self.activations + self.transient

    @property
    def update_peak(self) -> int:
        """Peak of an update besides the resident memory."""
        return max(self.backward_peak, self.sums + self.update)

    def per_process(self, shards: int) -> LearnerFootprint:
        """The footprint of one of `shards` processes that share each parameter."""
        parts = ("weights", "master", "moments", "on_host", "sums", "gradients")
        pieces = {name: getattr(self, name) // shards for name in parts}
        return replace(self, **pieces | {"weights": self.whole + (self.weights - self.whole) // shards})


def learner_footprint(model: nn.Module, optimizer: Optimizer, passes: LearnerPasses, on_gpu: bool) -> LearnerFootprint:
    """The footprint of a learner of a policy, a critic or a reward model on the meta device."""
    decoder = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    assert isinstance(decoder, Decoder), "only native decoders can be planned"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    made = make_optimizer(model, trained, optimizer)
    layouts = [made.layout(name) for name in trained]
    master = sum(num_bytes_of(spec) for layout in layouts for key, spec in layout.items() if key == "master")
    state = sum(num_bytes_of(spec) for layout in layouts for spec in layout.values())
    pass_bytes = _pass_bytes(model, decoder, passes, on_gpu)
    return LearnerFootprint(
        weights=weight_bytes(model),
        whole=weight_bytes(model) - sum(p.nbytes for p in model.parameters()),
        master=master,
        moments=state - master,
        on_host=state if optimizer.offload and on_gpu else 0,
        sums=sum(p.numel() * max(4, p.itemsize) for p in trained.values()),
        gradients=sum(p.nbytes for p in trained.values() if p.dtype in HALF_DTYPES or passes.micro_batches == 1),
        update=_update_bytes(made, optimizer, state),
        is_accumulated=passes.micro_batches > 1,
        **pass_bytes,
    )


def _pass_bytes(model: nn.Module, decoder: Decoder, passes: LearnerPasses, on_gpu: bool) -> dict[str, int]:
    """Stored activations, and the temporary memory at the three places."""
    arch, weight = decoder.arch, decoder.embedding.weight
    element, rows, tokens = weight.itemsize, passes.rows, passes.tokens
    forward = ActivationEstimate(arch, element, on_gpu, decoder.lora, tokens > rows, passes.longest, passes.in_fp8)
    policy = passes.activations
    states = rows * arch.hidden_size * element  # one tensor of hidden states
    activations = forward.layers(policy).of(rows, tokens) + forward.outside_layers().of(rows, tokens) + states
    if arch.vision is not None and trained_part(decoder) == "trained":  # if all tokens were of pictures
        activations += arch.vision.saved_bytes(rows, element, policy != "keep")
    again = forward.recomputed(policy).of(rows, tokens)
    mlp_size, sorted_rows = arch.mlp_size, 0
    if arch.experts is not None:
        shape = arch.experts
        mlp_size = max(arch.mlp_size, shape.experts_per_token * shape.expert_size + shape.shared_size)
        # Inputs and input gradients of the experts, one row for each chosen expert.
        sorted_rows = 2 * arch.experts.experts_per_token * arch.hidden_size
    gate = GATE_WIDTHS[policy == "selective", on_gpu or forward.in_c] * mlp_size
    layer = again + rows * (max(gate, 2 * mlp_size + sorted_rows) + arch.hidden_size) * element
    if passes.in_fp8:  # the gradient of gate and up and its 8-bit forms, and those of the matrix
        small = 2 * mlp_size * FP8_COPIES[on_gpu] * (rows + arch.hidden_size)
        layer = max(layer, again + rows * (2 * mlp_size + arch.hidden_size) * element + small)
    # A 4-bit matrix is dequantised for a moment, when the gate's gradients are freed.
    freed = rows * (mlp_size + sorted_rows + arch.hidden_size) * element
    layer = max(layer, again + freed + dequantise_bytes(decoder, on_gpu))
    # Of the gradients of all parameters.
    to_come = sum(p.nbytes for p in decoder.layers[0].parameters() if p.requires_grad)
    end = max(_embedding_gradient(decoder), layer + forward.layer(policy).of(rows, tokens) - to_come)
    if isinstance(model, ScoreModel):  # it reads one row of the last states for each sequence
        return {"activations": activations - states, "head": 2 * states, "layer": layer, "end": end}
    if isinstance(model, ValueModel):
        return {"activations": activations, "head": 2 * states * (4 // element or 1), "layer": layer, "end": end}
    head, gradient = _head_bytes(decoder, passes, on_gpu)
    if weight.dtype not in HALF_DTYPES and passes.micro_batches > 1:
        gradient = 0  # added to the sum
    return {"activations": activations, "head": head + states, "layer": layer + gradient, "end": end}


def _head_bytes(decoder: Decoder, passes: LearnerPasses, on_gpu: bool) -> tuple[int, int]:
    """Memory of the output head's backward pass, and of the weight gradient that it leaves."""
    weight = decoder.head_weight
    wide = max(4, weight.itemsize)
    in_c = not on_gpu and weight.dtype != torch.float16 and c_kernels_expected()
    has_kernels = (on_gpu or in_c) and not passes.full_kl
    elements = (KERNEL_CHUNK_ELEMENTS if has_kernels else CHUNK_ELEMENTS)["cuda" if on_gpu else "cpu"]
    rows = max(1, elements // weight.shape[0])
    chunk = min(passes.tokens, rows) * weight.shape[0]
    is_widened = not on_gpu and weight.dtype == torch.bfloat16 and not has_bfloat16_products()
    if has_kernels:
        logits, before = chunk * (wide if is_widened else weight.itemsize), 0
        if decoder.arch.logit_softcap is not None:
            logits += chunk * wide * (SOFTCAP_COPIES if logits < chunk * wide else 1)
    else:  # the last chunk is freed after the next one is made
        logits = chunk * wide * (KL_COPIES if passes.full_kl else LOGIT_COPIES)
        before = 2 * chunk * wide if passes.tokens > rows else 0
    head = weight.numel() * wide if is_widened else 0
    if not weight.requires_grad:
        return head + logits + before, 0
    gradient = weight.numel() * weight.itemsize
    makes_product = weight.dtype in HALF_DTYPES and not is_widened  # the others add to the sum in place
    product = gradient if makes_product else 0
    return head + logits + weight.numel() * wide + max(before, product), gradient


def _embedding_gradient(decoder: Decoder) -> int:
    """Gradient of a tied embedding: it is made as a whole, then added to that of the head."""
    weight = decoder.embedding.weight
    return weight.nbytes if weight.requires_grad and decoder.head is None else 0


def _update_bytes(made: MadeOptimizer, optimizer: Optimizer, state: int) -> int:
    """Temporary memory of an update: buffers for offloaded state, and float32 copies of state in other types."""
    sizes = [p.numel() for p in made.parameters.values()]
    matrices = [p.numel() for name, p in made.parameters.items() if made.is_whole(name)]  # each is one part
    part, batch = (
        min(max(sizes), MAX_PART_SIZE),
        min(sum(sizes), MAX_PART_SIZE),
    )  # of one parameter; of one step
    if matrices:
        batch = max(batch, *matrices)
    size = 12 * max(matrices, default=0)
    if optimizer.name == "adam8bit":
        size += UPDATE_COPIES * part * 4
    if optimizer.precision == "stochastic":
        size += 2 * batch * 4
    return size + (2 * batch * state // sum(sizes) if optimizer.offload else 0)
