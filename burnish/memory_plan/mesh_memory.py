"""The work of a training step, and the memory of a process on a mesh of GPUs, by formulas.

The learner's processes form a mesh (`config.placement.MeshSizes`). Parameters are sharded over data, context
and expert (FSDP2), routed experts over `expert` first. The engines have the same GPUs in turns (colocated), in groups that hold a copy of
the weights each. The memory of a process is that of `learner_bytes.py` for the part of the model that it computes, which was measured on
one GPU. `mesh_time.py` has traffic and time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from burnish.config.model import Lora, Optimizer, Projection
from burnish.config.placement import MeshSizes
from burnish.memory_plan.hardware import Cluster
from burnish.memory_plan.learner_bytes import LearnerFootprint, LearnerPasses, learner_footprint, meta_policy
from burnish.memory_plan.model_shapes import ModelShape
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, MemoryPart, reference_bytes
from burnish.models.architecture import Architecture
from burnish.models.flops import causal_pairs
from burnish.models.kernels.fp8 import FP8_SCALE_BYTES

MLP_PROJECTIONS = frozenset(("gate_proj", "up_proj", "down_proj"))
NF4_BYTES = {"nf4": 4.5 / 8, "nf4-double": 4.13 / 8}
"""Bytes of a number in 4 bits with its share of the scales."""


@dataclass(frozen=True)
class Workload:
    """What a step does. Lengths are the longest for memory; times take `answer` tokens of every sample."""

    shape: ModelShape
    dtype: str
    optimizer: Optimizer
    prompts: int
    samples: int
    """Samples of each prompt."""
    prompt: int
    """Tokens of a prompt."""
    answer: int
    """Tokens of an answer."""
    longest: int
    """Most tokens of a sequence."""
    token_budget: int = 8192
    activations: str = "keep"
    lora: Lora | None = None
    mini_batches: int = 1
    epochs: int = 1
    max_rows: int = 256
    weights_in_8_bits: bool = False
    """Whether the engine multiplies by 8-bit copies of the layers' matrices."""
    cache_in_8_bits: bool = False
    has_server_engine: bool = False
    """Whether vLLM or SGLang samples, which has a copy of its own in the model's type."""
    shares_prefixes: bool = True
    reference: str = "none"
    """none, off, copy, ema or teacher, as in `planner.RunSetup`."""
    teacher: int = 0
    """Number of parameters of all teachers."""
    num_scoring_passes: int = 0
    """Forward passes over the batch before the updates: old log-probs, reference log-probs."""
    num_learners: int = 1
    """Policy, and critic if there is one."""

    @property
    def element(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def cached_token_bytes(self) -> float:
        """Bytes of a token in the KV cache of all layers."""
        size, shape = float(self.element), self.shape
        if self.cache_in_8_bits:
            size = 1 + FP8_SCALE_BYTES / (shape.kv_size if shape.is_latent else shape.head_dim)
        return shape.kv_size * shape.num_layers * size

    @property
    def cached_sequence_bytes(self) -> int:
        """Bytes of a sequence of full length in the KV cache of all layers."""
        return math.ceil(self.cached_token_bytes * self.longest)

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def rows(self) -> int:
        """Tokens that a pass over the batch computes: a shared prompt counts once."""
        reading = self.prompts * self.prompt * (1 if self.shares_prefixes else self.samples)
        return reading + self.sequences * self.answer

    @property
    def forward_flops(self) -> float:
        """Operations of a forward pass over the batch, with logits of the answers."""
        return 2.0 * self.rows * self.shape.active_size + 2 * self._pair_product + self.head_flops

    @property
    def update_flops(self) -> float:
        """Operations of forward and backward, with what is computed twice: scores, logits, and layers if they are recomputed."""
        layers = 2.0 * self.rows * self.shape.active_size
        again = self._pair_product + self.head_flops
        if self.is_recomputed:
            # A layer is recomputed up to the input of its last product.
            last = 2.0 * self.rows * self.shape.num_layers * self.shape.hidden_size * self.shape.active_mlp_size
            again += layers - last + 2 * self._pair_product
        # Frozen weights below adapters have no gradient of their own.
        backward = (1 if self.lora is not None else 2) * (layers + self.head_flops) + 4 * self._pair_product
        return self.forward_flops + backward + again

    @property
    def is_recomputed(self) -> bool:
        """Whether a backward computes the layers again."""
        return self.activations in ("recompute", "offload")

    @property
    def num_adapters(self) -> int:
        """Projections of a layer that have an adapter."""
        if self.lora is None:
            return 0
        return (8 if self.shape.is_latent else 7) if self.lora.targets == "all-linear" else len(self.lora.targets)

    @property
    def adapts_experts(self) -> bool:
        """Whether the matrices of experts have adapters or are in 4 bits."""
        return self.lora is not None and (
            self.lora.base != "dtype" or not MLP_PROJECTIONS.isdisjoint(self.lora.projections)
        )

    @property
    def expert_forward_flops(self) -> float:
        """Operations of the routed experts in a forward pass over the batch. `forward_flops` has them too."""
        return 2.0 * self.rows * self.shape.active_routed_size

    @property
    def expert_update_flops(self) -> float:
        """Operations of the routed experts in forward and backward. `update_flops` has them too."""
        passes = 2 if self.lora is not None else 3
        return self.expert_forward_flops * (passes + (2 / 3 if self.is_recomputed else 0))  # all but the last product

    @property
    def _pair_product(self) -> float:
        """Operations of one product over all visible pairs of queries and keys."""
        before, whole = causal_pairs(self.prompt), causal_pairs(self.prompt + self.answer)
        shared = self.prompts * (1 if self.shares_prefixes else self.samples) * before
        pairs = shared + self.sequences * (whole - before)
        return 2.0 * pairs * self.shape.num_layers * self.shape.num_heads * self.shape.head_dim

    @property
    def head_flops(self) -> float:
        """Operations of the logits of all answers."""
        return 2.0 * self.sequences * self.answer * self.shape.embedding_size


# --- memory ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceMemory:
    """Parts of the memory of the fullest GPU."""

    resident: list[MemoryPart]
    update: list[MemoryPart]
    """Further parts during an update."""
    cache: int
    """Bytes that are left for the KV cache while the engine samples."""
    host: int

    @property
    def total(self) -> int:
        """Bytes at the peak of an update."""
        return sum(part.bytes for part in (*self.resident, *self.update))


def stage_sizes(shape: ModelShape, mesh: MeshSizes) -> tuple[int, int]:
    """Parameters of the largest stage on one process, gathered: of common matrices, and of its routed experts."""
    share = -(-shape.num_layers // mesh.pipeline) / shape.num_layers
    common = shape.common_size * share / mesh.tensor + _end_size(shape, mesh)
    routed = shape.num_expert_layers * shape.routed_size * share / (mesh.tensor * mesh.expert)
    return int(common), int(routed)


def _end_size(shape: ModelShape, mesh: MeshSizes) -> int:
    """Parameters of embedding and head on the fullest stage. Tensor parallelism does not divide them."""
    return shape.embedding_size * (2 - shape.tied if mesh.pipeline == 1 else 1)


def micro_batches(work: Workload, mesh: MeshSizes) -> int:
    """Micro-batches of one process in an update."""
    tokens = work.rows / work.mini_batches / mesh.batch_shards
    return max(1, -(-int(tokens) // max(work.token_budget * mesh.context, work.prompt + work.answer)))


def device_memory(work: Workload, mesh: MeshSizes, engine_gpus: int, cluster: Cluster) -> DeviceMemory:
    """The memory of one process of the mesh, with the engine's weights beside the learner."""
    shape, count = work.shape, micro_batches(work, mesh)
    one = _footprint(work, mesh, count)
    in_flight = min(mesh.pipeline, count)  # of the first stage, with one forward and one backward in turn (1F1B)
    context = MemoryPart("context", CUDA_CONTEXT_BYTES, "CUDA, libraries, kernels")
    on_device = 0 if one.on_host else 1
    state = [
        MemoryPart("weights", one.weights),
        MemoryPart("master copies and moments", (one.master + one.moments) * on_device),
        MemoryPart(
            "reference", _reference_bytes(work, one, mesh), "of a teacher" if work.reference == "teacher" else ""
        ),
        MemoryPart("critic", one.resident * (work.num_learners - 1), "weights, master copies, moments"),
        MemoryPart("engine's weights", engine_weights(work, engine_gpus, cluster), f"a copy on {engine_gpus} GPUs"),
        MemoryPart(
            "engine's fp8 matrices", shape.common_size * work.weights_in_8_bits, "8-bit copies of the layers' matrices"
        ),
        context,
    ]
    common, routed = stage_sizes(shape, mesh)
    layers = -(-shape.num_layers // mesh.pipeline)
    ends = _end_size(shape, mesh)
    layer = (common - ends + routed) // layers
    gathered = (2 * layer + ends) * work.element if mesh.shards > 1 else 0
    # FSDP copies a layer's gradients to float32 before it reduces them.
    reduced = layer * (work.element + 4) if mesh.shards > 1 and work.lora is None else 0
    passes = [
        MemoryPart("gradient sums", one.sums * one.is_accumulated),
        MemoryPart(
            "activations",
            one.activations * in_flight,
            f"{in_flight} x {layers} layers of a micro-batch, {work.activations}",
        ),
        MemoryPart(
            "gathered weights", gathered, f"two layers, embedding and head, of {mesh.shards} shards" if gathered else ""
        ),
        MemoryPart("gradients to reduce", reduced, "one layer, in the model's type and in float32" if reduced else ""),
        MemoryPart("a layer's pass, logits", one.transient),
        MemoryPart("rows of experts", _expert_row_bytes(work, mesh), "a row for each chosen expert of a token"),
    ]
    step = [MemoryPart("gradient sums", one.sums), MemoryPart("update", one.update)]
    update = max(passes, step, key=lambda parts: sum(part.bytes for part in parts))
    resident = [part for part in state if part.bytes]
    left = cluster.gpu.memory - sum(part.bytes for part in resident)
    return DeviceMemory(resident, [part for part in update if part.bytes], max(0, left), one.on_host)


def _expert_row_bytes(work: Workload, mesh: MeshSizes) -> int:
    """Hidden states of a micro-batch with a row for each chosen expert, while one layer computes.

    They are the experts' inputs and input gradients (as in `learner_bytes.py`), and with expert parallelism those of both ends of the
    exchange, if tokens choose experts evenly.
    """
    copies = 2 if mesh.expert == 1 else 4
    row = work.shape.experts_per_token * work.shape.hidden_size * work.element
    return copies * _micro_batch_rows(work, mesh) * row


def engine_weights(work: Workload, engine_gpus: int, cluster: Cluster) -> int:
    """Bytes of the engine's own weights on a GPU. A single process samples from the learner's tensors."""
    return 0 if cluster.num_gpus == 1 else engine_copy_bytes(work) // engine_gpus


def engine_copy_bytes(work: Workload) -> int:
    """Bytes of the weights that an engine holds. The native engine has frozen matrices in the learner's 4 bits."""
    shape = work.shape
    if work.lora is None or work.has_server_engine:
        return shape.num_parameters * work.element
    layers = shape.common_size + shape.num_expert_layers * shape.routed_size
    others = shape.num_parameters - layers + _adapter_size(shape, work.lora)
    return _frozen_layer_bytes(work, layers) + others * work.element


def _frozen_layer_bytes(work: Workload, size: float) -> int:
    """Bytes of `size` parameters of layers below adapters."""
    assert work.lora is not None, "weights are frozen below adapters alone"
    return int(size * (work.element if work.lora.base == "dtype" else NF4_BYTES[work.lora.base]))


def _reference_bytes(work: Workload, one: LearnerFootprint, mesh: MeshSizes) -> int:
    """Bytes of the reference's weights on one process."""
    parts = mesh.pipeline * mesh.tensor * mesh.shards
    return reference_bytes(work.reference, one, work.dtype, work.lora, work.teacher * work.element // parts)


def _micro_batch_rows(work: Workload, mesh: MeshSizes) -> int:
    """Rows of the largest micro-batch on one process."""
    share = work.rows // (work.mini_batches * mesh.batch_shards)
    return -(-max(min(work.token_budget * mesh.context, share), work.longest) // mesh.context)


def _footprint(work: Workload, mesh: MeshSizes, count: int) -> LearnerFootprint:
    """The learner of one process: passes of a dense decoder that computes as much, state of the parameters that it holds."""
    shape = work.shape
    arch = shape.equivalent(-(-shape.num_layers // mesh.pipeline), mesh.tensor)
    rows = _micro_batch_rows(work, mesh)
    passes = LearnerPasses(work.activations, rows, rows, count, work.longest)
    lora = None if work.lora is None else dense_targets(work.lora)
    one = _cached_footprint(arch, work.dtype, lora, work.optimizer, passes).per_process(mesh.shards)
    common, routed = stage_sizes(shape, mesh)
    own = (common + routed * mesh.expert) / mesh.shards  # experts are sharded over the other processes alone
    scale = own / (arch.num_parameters / mesh.shards)
    weights = int(own * work.element)
    if work.lora is not None:
        adapters = _adapter_size(shape, work.lora)
        scale = adapters / _num_adapted(shape.equivalent(shape.num_layers, 1), dense_targets(work.lora))
        if work.lora.base != "dtype":  # 4-bit matrices are not sharded
            ends = _end_size(shape, mesh)
            weights = _frozen_layer_bytes(work, common - ends + routed) + ends // mesh.shards * work.element
        weights += adapters // (mesh.pipeline * mesh.shards) * work.element
    scaled: dict[str, Any] = {
        name: int(getattr(one, name) * scale) for name in ("master", "moments", "on_host", "sums", "gradients")
    }
    return replace(one, weights=weights, **scaled)


OF_LATENT_ATTENTION: dict[Projection, Projection] = {
    "q_a_proj": "q_proj",
    "q_b_proj": "q_proj",
    "kv_a_proj_with_mqa": "k_proj",
    "kv_b_proj": "v_proj",
}
"""The projections of latent attention, and those that a dense decoder has in their place."""


def dense_targets(lora: Lora) -> Lora:
    """The adapters of a dense decoder that computes as much."""
    if lora.targets == "all-linear":
        return lora
    return lora.model_copy(update={"targets": list(dict.fromkeys(OF_LATENT_ATTENTION.get(n, n) for n in lora.targets))})


def _adapter_size(shape: ModelShape, lora: Lora) -> int:
    """Parameters of the adapters of all layers."""
    assert shape.arch is not None, "models that run through transformers have no adapters"
    return _num_adapted(shape.arch, lora)


_adapted: dict[str, int] = {}
"""Numbers of adapters by their inputs."""


def _num_adapted(arch: Architecture, lora: Lora) -> int:
    """Parameters of the adapters of an architecture, as they are made."""
    key = f"{arch} {lora!r}"
    if key not in _adapted:
        model = meta_policy(arch, torch.bfloat16, lora)
        _adapted[key] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return _adapted[key]


_footprints: dict[str, LearnerFootprint] = {}
"""Footprints by their inputs: a search over meshes asks for the same ones many times."""


def _cached_footprint(
    arch: Architecture, dtype: str, lora: Lora | None, optimizer: Optimizer, passes: LearnerPasses
) -> LearnerFootprint:
    passes = replace(passes, micro_batches=min(passes.micro_batches, 2))  # more than one make no difference
    key = f"{arch} {dtype} {lora!r} {optimizer!r} {passes}"
    if key not in _footprints:
        _footprints[key] = learner_footprint(meta_policy(arch, getattr(torch, dtype), lora), optimizer, passes, True)
    return _footprints[key]
