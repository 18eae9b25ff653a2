"""Where a run's memory goes, before anything is loaded.

A run holds most in one of its phases: while it samples (the engine's cache), while the policy learns, while the critic or
the process reward model does. What is resident is there in all of them: weights, master copies and moments, a reference. The engine's cache is given
back while the learners work.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from burnish.config.model import Lora, Optimizer
from burnish.memory_plan.learner_bytes import LearnerFootprint, LearnerPasses, learner_footprint, meta_policy
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel, new_score_model
from burnish.models.nf4 import weight_bytes

GIB = 2**30
CUDA_CONTEXT_BYTES = int(0.75 * GIB)
"""What a CUDA context, its libraries and compiled kernels take beside torch's own allocations."""
PROCESS_BYTES = int(0.45 * GIB)
"""What a process with torch in it takes on a CPU before it has a model."""
SAMPLING, POLICY, CRITIC = "sampling", "the policy learns", "the critic learns"
PROCESS_MODEL, SCORER = "the process reward model learns", "the reward model learns"
"""The phases of a run."""


@dataclass(frozen=True)
class RunSetup:
    """All that a run's memory follows from."""

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
    lora: Lora | None = None
    scores: bool = False
    """Whether it is a scorer that learns: a scalar head in place of the output head."""
    spread: float = 1.0
    """Tokens of a packing for each row that is computed, at most: above 1 where samples share their prompt."""
    reference: str = "none"
    """none, off (the policy without its adapter), copy, ema, or teacher."""
    teacher: int = 0
    """Parameters of a teacher."""
    full_kl: bool = False
    critic: Optimizer | None = None
    process: Optimizer | None = None
    """Of a process reward model."""
    process_arch: Architecture | None = None
    """Of one with weights of its own; None is a copy of the policy."""
    scorers: int = 0
    """Bytes of reward models that score in this process."""
    cache: int = 0
    """Bytes of the engine's cache, which sleeps while the learners work."""
    engine_copy: bool = False
    """Whether the engine has weights of its own."""
    plain_copy: bool = False
    """Whether those are plain, also where the policy's are in 4 bits."""
    section: str = "training"
    """Where in the configuration the learner's keys are."""
    may_quantise: bool = True
    """Whether the configuration lets the weights below adapters be in 4 bits."""
    shards: int = 1
    """Processes that hold a piece of every parameter each."""
    slices: int = 1
    """Those of them that cut the tokens of a micro-batch among them."""

    @property
    def rows(self) -> int:
        """Of the largest micro-batch."""
        return -(-max(min(self.token_budget, self.update_tokens), self.longest) // self.slices)

    @property
    def learning(self) -> LearnerPasses:
        """The passes of an update."""
        tokens = int(self.rows * self.spread)
        number = -(-self.update_tokens // self.token_budget)
        return LearnerPasses(self.activations, self.rows, tokens, number, self.longest, self.full_kl)


@dataclass(frozen=True)
class MemoryPart:
    """Bytes under a name, and what they are."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class MemoryPlan:
    """Parts that are there all the time, and those of each phase."""

    setup: RunSetup
    resident: list[MemoryPart]
    phases: dict[str, list[MemoryPart]]
    first: dict[str, int]
    """Bytes of each phase in the first update, before the optimizer has state."""
    outside: MemoryPart
    """What torch's allocator does not know of."""
    host: int = 0
    """Bytes of host memory that a GPU's run asks for."""

    @property
    def phase(self) -> str:
        """The one that holds most."""
        return max(self.phases, key=lambda name: sum(part.bytes for part in self.phases[name]))

    @property
    def parts(self) -> list[MemoryPart]:
        """All that is there at the peak."""
        return [*self.resident, *self.phases[self.phase], self.outside]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(part.bytes for part in self.parts)

    def learners_peak(self, updates: int) -> int:
        """Bytes that torch allocates at the peak of a learner's work when so many updates have been made, from the first on."""
        learning = [name for name in self.phases if name != SAMPLING]
        most = max(sum(part.bytes for part in self.phases[name]) for name in learning)
        later = sum(part.bytes for part in self.resident) + most
        return later if updates > 1 else max(self.first[name] for name in learning)


def plan_memory(setup: RunSetup) -> MemoryPlan:
    """The plan of a run."""
    dtype = getattr(torch, setup.dtype)
    model = meta_policy(setup.arch, dtype, setup.lora)
    learned = new_score_model(model, seed=0) if setup.scores else model
    actor = learner_footprint(learned, setup.optimizer, setup.learning, setup.on_gpu).cut(setup.shards)
    learners = {SCORER if setup.scores else POLICY: actor}
    weights = weight_bytes(learned)
    others = [*_gathered_parts(setup, model), *_reference_parts(setup, actor)]
    if setup.engine_copy:
        own = setup.arch.num_parameters * dtype.itemsize if setup.plain_copy else weights
        others.append(MemoryPart("engine's weights", own, "a sampler with a fault has its own"))
    if setup.scorers:
        others.append(MemoryPart("reward models", setup.scorers, "weights, in this process"))
    if setup.critic is not None:
        critic_model = ValueModel(model)
        critic = learner_footprint(critic_model, setup.critic, replace(setup.learning, full_kl=False), setup.on_gpu)
        if setup.lora is not None:  # the frozen weights are the policy's
            own = sum(p.nbytes for p in critic_model.parameters() if p.requires_grad)
            critic = replace(critic, weights=own, whole=0)
        critic = critic.cut(setup.shards)
        learners[CRITIC] = critic
        others.append(MemoryPart("critic", critic.resident, "weights, master copies, moments"))
    if setup.process is not None:
        shape = setup.process_arch
        judge = model if shape is None else meta_policy(shape, dtype, setup.lora)
        process = learner_footprint(judge, setup.process, replace(setup.learning, full_kl=False), setup.on_gpu)
        if setup.lora is not None and shape is None:  # the frozen weights are the policy's
            own = sum(p.nbytes for p in judge.parameters() if p.requires_grad)
            process = replace(process, weights=own, whole=0)
        process = process.cut(setup.shards)
        learners[PROCESS_MODEL] = process
        start = 0 if setup.lora is not None else process.weights
        others.append(
            MemoryPart("process reward model", process.resident + start, "weights, copies, moments; its start")
        )
    resident = [*_state_parts(setup, actor), *others]
    phases = {name: _learning_parts(setup, name, learners) for name in learners}
    if setup.cache:
        phases[SAMPLING] = [MemoryPart("KV cache", setup.cache, "given back while the learners work")]
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


def _first_update_bytes(one: LearnerFootprint) -> int:
    """Of a first update besides weights: the state is made when activations are gone."""
    return max(one.passing, one.sums + one.update + one.resident - one.weights)


def _other_gradients(name: str, learners: dict[str, LearnerFootprint]) -> int:
    """The gradients of the other learner, which stay until its next update."""
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
    learning = setup.learning
    found = []
    if one.passing >= one.sums + one.update:
        tokens = f"{learning.rows:,} tokens" if learning.tokens == learning.rows else f"{learning.rows:,} rows"
        found.append(MemoryPart("gradient sums", one.sums * one.is_accumulated))
        arch = setup.process_arch if name == PROCESS_MODEL and setup.process_arch is not None else setup.arch
        found.append(
            MemoryPart("activations", one.activations, f"{tokens} x {arch.num_layers} layers, {setup.activations}")
        )
        found.append(MemoryPart(_transient_name(one), one.transient))
    else:
        found += [
            MemoryPart("gradient sums", one.sums),
            MemoryPart("update", one.update, "state on its way from the host and back"),
        ]
    found.append(MemoryPart("other gradients", _other_gradients(name, learners), "of the learner that worked before"))
    return [part for part in found if part.bytes]


def _transient_name(one: LearnerFootprint) -> str:
    if one.transient == one.head:
        return "logits, head"
    return "a layer's pass" if one.transient == one.layer else "gradients"


def _gathered_parts(setup: RunSetup, model: Decoder) -> list[MemoryPart]:
    """What is in pieces is put together for its turn: two layers at once, embedding and head all the time."""
    if setup.shards == 1:
        return []
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    rest = sum(p.nbytes for p in model.parameters()) - layer * len(model.layers)
    return [MemoryPart("gathered weights", 2 * layer + rest, f"of {setup.shards} processes")]


def _reference_parts(setup: RunSetup, actor: LearnerFootprint) -> list[MemoryPart]:
    if setup.reference in ("none", "off"):
        return []
    if setup.reference == "teacher":
        size = setup.teacher * getattr(torch, setup.dtype).itemsize // setup.shards
        return [MemoryPart("teacher", size, f"{setup.teacher:,} parameters")]
    held = actor.weights if setup.lora is None else actor.gradients or actor.sums
    if setup.reference == "ema" and setup.dtype != "float32":
        return [MemoryPart("reference", held + actor.sums, "a copy and its float32 average")]
    return [MemoryPart("reference", held, "a copy")]


def gib(size: int) -> str:
    """`61.2 GiB`, or MiB where that says more."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 2 else f"{size / 2**20:.0f} MiB"
