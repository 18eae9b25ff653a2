"""Peak memory of a run by part and phase, computed before anything is loaded.

The phases are sampling (with the engine's KV cache) and the updates of the policy, the critic or the process reward model.
Resident parts are there in all of them: weights, master copies, moments, a reference. The KV cache is freed during updates, unless
the engine samples meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from burnish.config.model import Lora, Optimizer, Vision
from burnish.memory_plan.learner_bytes import LearnerFootprint, LearnerPasses, learner_footprint, meta_policy
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel, new_score_model
from burnish.models.layer_products import fp8_copy_bytes
from burnish.models.nf4 import weight_bytes
from burnish.models.vision.feature_cache import MAX_BYTES as MAX_FEATURE_BYTES

GIB = 2**30
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
"""Memory of a CUDA context, its libraries and compiled kernels, outside of torch's allocator."""
PROCESS_BYTES = int(0.45 * GIB)
"""Memory of a process with torch before it has a model."""
SAMPLING, POLICY, CRITIC = "sampling", "the policy learns", "the critic learns"
PROCESS_MODEL, SCORER = "the process reward model learns", "the reward model learns"
"""Names of the phases."""


@dataclass(frozen=True)
class RunSetup:
    """Everything that determines the memory of a run."""

    arch: Architecture
    dtype: str
    on_gpu: bool
    optimizer: Optimizer
    token_budget: int
    longest: int
    """Most tokens of a sequence."""
    update_tokens: int
    """Most tokens of an update."""
    activations: str = "keep"
    in_fp8: bool = False
    """Whether the linear layers multiply in 8 bits."""
    lora: Lora | None = None
    tower: Vision = "frozen"
    """What of a vision tower is trained."""
    is_reward_model: bool = False
    """Whether a reward model is trained: a scalar head in place of the output head."""
    tokens_per_row: float = 1.0
    """Most tokens of a packed batch for each computed row: above 1 if samples share their prompt."""
    reference: str = "none"
    """none, off (the policy without its adapter), copy, ema, or teacher."""
    teacher: int = 0
    """Number of parameters of a teacher."""
    full_kl: bool = False
    critic: Optimizer | None = None
    process: Optimizer | None = None
    """Optimizer of a process reward model."""
    process_arch: Architecture | None = None
    """Architecture of a process reward model with its own weights; None for a copy of the policy."""
    reward_model_bytes: int = 0
    """Bytes of reward models in this process."""
    cache: int = 0
    """Bytes of the engine's KV cache."""
    overlaps: bool = False
    """Whether the engine samples during updates, so that its cache stays. Otherwise the cache is freed then."""
    engine_copy: bool = False
    """Whether the engine has a copy of the weights."""
    fp8_copy: bool = False
    """Whether the engine has copies of the layers' matrices in 8 bits."""
    plain_copy: bool = False
    """Whether that copy is unquantised even if the policy's weights are in 4 bits."""
    opponents: int = 0
    """Copies of the policy that play earlier weights; with adapters they share the frozen weights."""
    section: str = "training"
    """Section of the config with the learner's keys."""
    may_quantise: bool = True
    """Whether the config allows base weights in 4 bits."""
    shards: int = 1
    """Processes that share each parameter."""
    slices: int = 1
    """Processes among them that share the tokens of a micro-batch."""
    expert_ranks: int = 1
    """Processes among them that divide the experts of a layer, and never gather those of the others."""

    @property
    def rows(self) -> int:
        """Rows of the largest micro-batch."""
        return -(-max(min(self.token_budget, self.update_tokens), self.longest) // self.slices)

    @property
    def passes(self) -> LearnerPasses:
        """The forward and backward passes of an update."""
        tokens = int(self.rows * self.tokens_per_row)
        num_micro_batches = -(-self.update_tokens // self.token_budget)
        return LearnerPasses(
            self.activations,
            self.rows,
            tokens,
            num_micro_batches,
            self.longest,
            self.full_kl,
            self.in_fp8,
        )


@dataclass(frozen=True)
class MemoryPart:
    """A named part of the memory."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Resident parts, and the further parts of each phase."""

    setup: RunSetup
    resident: list[MemoryPart]
    phases: dict[str, list[MemoryPart]]
    first: dict[str, int]
    """Bytes of each phase in the first update, before the optimizer has state."""
    outside: MemoryPart
    """Memory outside of torch's allocator."""
    host: int = 0
    """Bytes of host memory that a run on a GPU needs."""

    @property
    def phase(self) -> str:
        """The phase with the most memory."""
        return max(self.phases, key=lambda name: sum(part.bytes for part in self.phases[name]))

    @property
    def parts(self) -> list[MemoryPart]:
        """All parts at the peak."""
        return [*self.resident, *self.phases[self.phase], self.outside]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(part.bytes for part in self.parts)

    def learners_peak(self, updates: int) -> int:
        """Peak of torch's allocations during the first `updates` updates."""
        learning = [name for name in self.phases if name != SAMPLING]
        most = max(sum(part.bytes for part in self.phases[name]) for name in learning)
        later = sum(part.bytes for part in self.resident) + most
        return later if updates > 1 else max(self.first[name] for name in learning)


def plan_memory(setup: RunSetup) -> MemoryPlan:
    """Plan the memory of a run."""
    dtype = getattr(torch, setup.dtype)
    model = meta_policy(setup.arch, dtype, setup.lora, setup.tower)
    learned = new_score_model(model, seed=0) if setup.is_reward_model else model
    actor = learner_footprint(learned, setup.optimizer, setup.passes, setup.on_gpu).per_process(setup.shards)
    learners = {SCORER if setup.is_reward_model else POLICY: actor}
    weights = weight_bytes(learned)
    others = [*_gathered_parts(setup, model), *_reference_parts(setup, actor)]
    if setup.engine_copy:
        own = setup.arch.num_parameters * dtype.itemsize if setup.plain_copy else weights
        others.append(MemoryPart("engine's weights", own, "the sampler has its own"))
    if setup.fp8_copy:
        others.append(
            MemoryPart("engine's fp8 matrices", fp8_copy_bytes(model), "8-bit copies of the layers' matrices")
        )
    if setup.opponents:
        own = weights if setup.lora is None else sum(p.nbytes for p in model.parameters() if p.requires_grad)
        others.append(MemoryPart("opponents", setup.opponents * own, "copies of the policy for earlier weights"))
    if setup.reward_model_bytes:
        others.append(MemoryPart("reward models", setup.reward_model_bytes, "weights, in this process"))
    if setup.critic is not None:
        critic = learners[CRITIC] = _further_learner(setup, ValueModel(model), setup.critic, shares_policy=True)
        others.append(MemoryPart("critic", critic.resident, "weights, master copies, moments"))
    if setup.process is not None:
        arch = setup.process_arch
        process_model = model if arch is None else meta_policy(arch, dtype, setup.lora)
        process = _further_learner(setup, process_model, setup.process, shares_policy=arch is None)
        learners[PROCESS_MODEL] = process
        start = 0 if setup.lora is not None else process.weights
        others.append(
            MemoryPart("process reward model", process.resident + start, "weights, copies, moments; its start")
        )
    if setup.cache and setup.overlaps:
        others.append(MemoryPart("KV cache", setup.cache, "stays, since sampling and updates overlap"))
    if setup.arch.vision is not None:
        others.append(
            MemoryPart("image features", MAX_FEATURE_BYTES, "at most, computed once for sampling and training")
        )
    resident = [*_state_parts(setup, actor), *others]
    phases = {name: _learning_parts(setup, name, learners) for name in learners}
    if setup.cache and not setup.overlaps:
        phases[SAMPLING] = [MemoryPart("KV cache", setup.cache, "freed while the learners work")]
    before = sum(part.bytes for part in others) + weights
    first = {
        name: before + _first_update_bytes(one) + _other_gradients(name, learners) for name, one in learners.items()
    }
    outside = (
        MemoryPart("context", CUDA_CONTEXT_BYTES, "CUDA, libraries, kernels")
        if setup.on_gpu
        else MemoryPart("process", PROCESS_BYTES, "torch")
    )
    return MemoryPlan(setup, resident, phases, first, outside, sum(one.on_host for one in learners.values()))


def _further_learner(setup: RunSetup, model: nn.Module, optimizer: Optimizer, shares_policy: bool) -> LearnerFootprint:
    """The footprint of a critic or process reward model. With adapters it may share the policy's frozen weights."""
    found = learner_footprint(model, optimizer, replace(setup.passes, full_kl=False), setup.on_gpu)
    if setup.lora is not None and shares_policy:
        own = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        found = replace(found, weights=own, whole=0)
    return found.per_process(setup.shards)


def _first_update_bytes(one: LearnerFootprint) -> int:
    """Bytes of the first update besides weights. Optimizer state is allocated after activations are freed."""
    return max(one.backward_peak, one.sums + one.update + one.resident - one.weights)


def _other_gradients(name: str, learners: dict[str, LearnerFootprint]) -> int:
    """Gradients of the other learners, which stay until their next update."""
    return sum(one.sums for other, one in learners.items() if other != name)


def _state_parts(setup: RunSetup, one: LearnerFootprint) -> list[MemoryPart]:
    quantised = "" if setup.lora is None or setup.lora.base == "dtype" else f", the layers' in {setup.lora.base}"
    found = [
        MemoryPart("weights", one.weights, f"{setup.arch.num_parameters:,} parameters in {setup.dtype}{quantised}")
    ]
    for name, size, note in (
        ("master copies", one.master, "float32"),
        ("moments", one.moments, setup.optimizer.name),
    ):
        elsewhere = f", {gib(size)} in host memory" if one.on_host else ""
        found += [MemoryPart(name, 0 if one.on_host else size, note + elsewhere)] if size else []
    return found


def _learning_parts(setup: RunSetup, name: str, learners: dict[str, LearnerFootprint]) -> list[MemoryPart]:
    one = learners[name]
    passes = setup.passes
    found = []
    if one.backward_peak >= one.sums + one.update:
        tokens = f"{passes.rows:,} tokens" if passes.tokens == passes.rows else f"{passes.rows:,} rows"
        found.append(MemoryPart("gradient sums", one.sums * one.is_accumulated))
        arch = setup.process_arch if name == PROCESS_MODEL and setup.process_arch is not None else setup.arch
        found.append(
            MemoryPart("activations", one.activations, f"{tokens} x {arch.num_layers} layers, {setup.activations}")
        )
        found.append(MemoryPart(_transient_name(one), one.transient))
    else:
        found += [
            MemoryPart("gradient sums", one.sums),
            MemoryPart("update", one.update, "state copied from the host and back"),
        ]
    found.append(MemoryPart("other gradients", _other_gradients(name, learners), "of the learner that worked before"))
    return [part for part in found if part.bytes]


def _transient_name(one: LearnerFootprint) -> str:
    if one.transient == one.head:
        return "logits, head"
    return "a layer's pass" if one.transient == one.layer else "gradients"


def _gathered_parts(setup: RunSetup, model: Decoder) -> list[MemoryPart]:
    """Gathered weights of sharded parameters: two layers at a time, embedding and head all the time."""
    if setup.shards == 1:
        return []
    layers = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    rest = sum(p.nbytes for p in model.parameters()) - sum(layers)
    elsewhere = [_expert_bytes(layer) * (setup.expert_ranks - 1) // setup.expert_ranks for layer in model.layers]
    layer = max(size - others for size, others in zip(layers, elsewhere, strict=True))
    parts = [MemoryPart("gathered weights", 2 * layer + rest, f"of {setup.shards} processes")]
    if setup.arch.num_kv_heads % setup.slices:
        parts.append(MemoryPart("gathered keys", _gathered_key_bytes(setup), f"of {setup.slices} processes"))
    return parts


def _gathered_key_bytes(setup: RunSetup) -> int:
    """Keys and values of all processes in the backward pass of a layer (`training/parallel/context_parallel.py`).

    They are there as gathered, as copied for the chunks, and as their gradients: of a piece, and as a sum in float32.
    """
    rows, size = setup.rows * setup.slices, getattr(torch, setup.dtype).itemsize
    return 2 * rows * setup.arch.num_kv_heads * setup.arch.head_dim * (3 * size + max(size, 4))


def _expert_bytes(layer: nn.Module) -> int:
    """Bytes of a layer's experts, without their router."""
    return sum(p.nbytes for name, p in layer.named_parameters() if name.startswith(("experts.gate_up", "experts.down")))


def _reference_parts(setup: RunSetup, actor: LearnerFootprint) -> list[MemoryPart]:
    teacher = setup.teacher * getattr(torch, setup.dtype).itemsize // setup.shards
    size = reference_bytes(setup.reference, actor, setup.dtype, setup.lora, teacher)
    if setup.reference in ("none", "off"):
        return []
    if setup.reference == "teacher":
        return [MemoryPart("teacher", size, f"{setup.teacher:,} parameters")]
    has_average = setup.reference == "ema" and setup.dtype != "float32"
    return [MemoryPart("reference", size, "a copy and its float32 average" if has_average else "a copy")]


def reference_bytes(kind: str, actor: LearnerFootprint, dtype: str, lora: Lora | None, teacher: int) -> int:
    """Bytes of a reference's weights on one process, by its kind; `teacher` are those of a teacher."""
    if kind in ("none", "off"):
        return 0
    if kind == "teacher":
        return teacher
    size = actor.weights if lora is None else actor.gradients or actor.sums
    return size + actor.sums if kind == "ema" and dtype != "float32" else size


def gib(size: int) -> str:
    """Format bytes as `61.2 GiB`, or in MiB below half a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"
