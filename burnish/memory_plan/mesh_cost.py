"""Memory, traffic and time of a training step on a mesh of GPUs, by formulas.

The learner's processes form a mesh (`config.placement.MeshSizes`). Parameters are sharded over data, context
and expert (FSDP2), routed experts over `expert` first. The engines have the same GPUs in turns (colocated), in groups that hold a copy of
the weights each. The memory of a process is that of `learner_bytes.py` for the part of the model that it computes, which was measured on
one GPU. Time is work divided by a share of the hardware's peak; these shares were measured on one H200. Traffic between GPUs is counted, and
its time follows from the bandwidths of links: it was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from burnish.config.model import Lora, Optimizer
from burnish.config.placement import MeshSizes
from burnish.memory_plan.hardware import Cluster
from burnish.memory_plan.learner_bytes import LearnerFootprint, LearnerPasses, learner_footprint, meta_policy
from burnish.memory_plan.model_shapes import ModelShape
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, MemoryPart
from burnish.models.architecture import Architecture
from burnish.models.flops import causal_pairs
from burnish.models.kernels.fp8 import FP8_SCALE_BYTES

PASS_SHARE = 0.506
"""Of the peak FLOP/s in forward and backward passes: 0.47 to 0.57 in `bench/results/learner-h200.json`."""
EXPERT_PASS_SHARE = 0.165
"""The same for products of routed experts, with the sorting of their rows: Qwen3-30B-A3B's shape with adapters, row f there."""
DECODE_SHARE, BANDWIDTH_SHARE = 0.62, 0.85
"""Of the peak FLOP/s and of the memory bandwidth in decode steps."""
PRODUCT_SPEED_8_BITS = 1.55
"""Speed of an engine's products in 8 bits beside bfloat16, where operations limit them."""
KEY_BYTES_8_BITS = 1.4
"""Bytes that take as long to read as a number of an 8-bit cache with its scale: attention takes 0.7 of its time in bfloat16."""
OPTIMIZER_SHARE = 0.4
"""Of the memory bandwidth in an optimizer step."""
OPTIMIZER_BYTES = {"adamw": 42, "adam8bit": 160, "muon": 42}
"""Bytes that an optimizer step reads and writes for each parameter, norm and clipping included; 8-bit moments are unpacked in parts. For muon
its matrix products are not counted."""
NF4_BYTES = {"nf4": 4.5 / 8, "nf4-double": 4.13 / 8}
"""Bytes of a number in 4 bits with its share of the scales."""
HOST_BANDWIDTH = 55e9
"""Bytes per second between a GPU and host memory in one direction, for optimizer state that is kept there."""
LAYER_OVERHEAD_S = 14e-6
"""Seconds of a layer's small kernels in a decode step."""
QUANTISATION_S, QUANTISATION_ROW_S = 8e-6, 12e-9
"""Seconds of a layer's quantisation of activations in a decode step with 8-bit weights, and those of each row."""
STEP_OVERHEAD_S = 0.2
"""Seconds of a step in which the engine's cache is freed and mapped again, and rollouts are packed."""
OVERLAP_SHARE = 0.8
"""Of the traffic that runs beside computation: how much of it is hidden, as long as the computation lasts. Assumed, not measured."""
COLLECTIVE_LATENCY_S = 15e-6
"""Seconds of a small collective operation."""


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
    shares_prefixes: bool = True
    reference: str = "none"
    """none, off or copy, as in `planner.RunSetup`."""
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
        MemoryPart("reference", one.weights if work.reference == "copy" else 0),
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
    return 0 if cluster.num_gpus == 1 else work.shape.num_parameters * work.element // engine_gpus


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
    one = _cached_footprint(arch, work.dtype, work.lora, work.optimizer, passes).per_process(mesh.shards)
    common, routed = stage_sizes(shape, mesh)
    own = (common + routed * mesh.expert) / mesh.shards  # experts are sharded over the other processes alone
    scale = own / (arch.num_parameters / mesh.shards)
    weights = int(own * work.element)
    if work.lora is not None:
        adapters, of_equivalent = _adapter_size(shape, work.lora), _adapter_size(shape, work.lora, as_dense=True)
        scale = adapters / of_equivalent
        if work.lora.base != "dtype":  # 4-bit matrices are not sharded
            ends = _end_size(shape, mesh)
            weights = int((common - ends + routed) * NF4_BYTES[work.lora.base]) + ends // mesh.shards * work.element
        weights += adapters // (mesh.pipeline * mesh.shards) * work.element
    scaled: dict[str, Any] = {
        name: int(getattr(one, name) * scale) for name in ("master", "moments", "on_host", "sums", "gradients")
    }
    return replace(one, weights=weights, **scaled)


def _adapter_size(shape: ModelShape, lora: Lora, as_dense: bool = False) -> int:
    """Parameters of the adapters of all layers; `as_dense` of the dense decoder that computes as much, whose MLPs have one each."""
    heads, kv_heads = (num * shape.head_dim for num in (shape.num_heads, shape.num_kv_heads))
    widths = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads, "o_proj": heads}
    attention = sum(shape.hidden_size + widths[name] for name in lora.projections if name in widths)
    of_mlp = sum(name in lora.projections for name in ("gate_proj", "up_proj", "down_proj"))
    dense, sparse = shape.num_layers - shape.num_expert_layers, shape.num_expert_layers
    mlps = [(shape.num_layers, shape.active_mlp_size)] if as_dense else [(dense, shape.mlp_size)]
    if not as_dense and sparse:
        mlps += [(sparse * shape.num_experts, shape.expert_size), (sparse * (shape.shared_size > 0), shape.shared_size)]
    in_mlps = sum(number * of_mlp * (shape.hidden_size + width) for number, width in mlps)
    return lora.rank * (shape.num_layers * attention + in_mlps)


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


# --- traffic -----------------------------------------------------------------------------------------------------------------


class Traffic(NamedTuple):
    """Bytes that one GPU sends in a step for one purpose, and their seconds."""

    name: str
    bytes: float
    seconds: float
    overlaps: bool = False
    """Whether it runs beside computation."""


def learner_traffic(work: Workload, mesh: MeshSizes, cluster: Cluster) -> list[Traffic]:
    """Traffic of the passes and updates of a step, for each GPU."""
    shape, element = work.shape, work.element
    updates = work.mini_batches * work.epochs
    twice = 2 if work.activations in ("recompute", "offload") else 1
    layers = shape.num_layers / mesh.pipeline
    tokens = work.rows / (mesh.batch_shards * mesh.context)  # of one process in a pass over the batch
    passes = work.num_scoring_passes + work.epochs * (1 + twice)  # forward; a backward has as much traffic again
    state = tokens * shape.hidden_size * element
    common, routed = stage_sizes(shape, mesh)
    gathers = updates * micro_batches(work, mesh) * 2 + work.num_scoring_passes * work.mini_batches * micro_batches(
        work, mesh
    )
    others = mesh.data // mesh.replicate * mesh.context
    gathered = gathers * element * (common * (1 - 1 / mesh.shards) + routed * (1 - 1 / others))
    reduced = updates * micro_batches(work, mesh) * 4 * (common * (1 - 1 / mesh.shards) + routed * (1 - 1 / others))
    if work.lora is not None:
        reduced = 0.0
    sharded = cluster.ring_bandwidth(mesh.shards, mesh.tensor)
    stride = mesh.tensor * mesh.expert * mesh.context * (mesh.data // mesh.replicate)
    copied = 2 * updates * 4 * (common + routed) / max(1, mesh.shards) * (1 - 1 / mesh.replicate)
    split = (
        2 * 2 * passes * layers * state * (1 - 1 / mesh.tensor)
    )  # two all-reduces a layer, each sends its bytes twice
    sliced = passes * layers * tokens * element * _context_width(shape, mesh)
    expert_layers = shape.num_expert_layers / mesh.pipeline
    # The ranks of a tensor-parallel group have columns of every expert, and each sends whole rows.
    routed_bytes = 2 * passes * expert_layers * state * shape.experts_per_token * (1 - 1 / mesh.expert)
    passed = passes * state * (mesh.pipeline > 1)
    found = [
        Traffic("weights gathered (FSDP)", gathered, gathered / sharded, overlaps=True),
        Traffic("gradients reduce-scattered", reduced, reduced / sharded, overlaps=True),
        Traffic("gradients of copies (HSDP)", copied, copied / cluster.ring_bandwidth(mesh.replicate, stride), overlaps=True),
        Traffic("tensor parallel all-reduce", split, split / cluster.ring_bandwidth(mesh.tensor, 1)),
        Traffic("context parallel all-to-all", sliced, sliced / cluster.exchange_bandwidth(mesh.context, mesh.tensor * mesh.expert)),
        Traffic("expert all-to-all", routed_bytes, routed_bytes / cluster.exchange_bandwidth(mesh.expert, mesh.tensor)),
        Traffic("pipeline", passed, passed / cluster.ring_bandwidth(mesh.pipeline, cluster.num_gpus // mesh.pipeline), overlaps=True),
    ]  # fmt: skip
    return [replace_learners(one, work.num_learners) for one in found if one.bytes >= 1]


def _context_width(shape: ModelShape, mesh: MeshSizes) -> float:
    """Numbers that a process sends for each of its tokens in a layer's context parallelism."""
    keys, queries = (num * shape.head_dim / mesh.tensor for num in (shape.num_kv_heads, shape.num_heads))
    if shape.num_kv_heads // mesh.tensor % mesh.context:
        return 2 * keys * (mesh.context - 1)  # keys and values go to all others
    return 2 * (queries + keys) * (1 - 1 / mesh.context)  # heads are exchanged before and after attention (Ulysses)


def replace_learners(one: Traffic, num: int) -> Traffic:
    return one._replace(bytes=one.bytes * num, seconds=one.seconds * num)


def weight_push(work: Workload, engine_gpus: int, mesh: MeshSizes, cluster: Cluster) -> Traffic:
    """New weights for the engines: each GPU receives its part of a copy, less the share that it holds as a learner."""
    size = work.shape.num_parameters * work.element
    if work.lora is not None or cluster.num_gpus == 1:
        return Traffic("weights to engines", 0.0, 0.0)  # the engine reads the learner's own tensors, or small adapters
    held = size / (mesh.pipeline * mesh.tensor * mesh.shards)
    moved = max(0.0, size / engine_gpus - held / max(1, engine_gpus))
    bandwidth = cluster.gpu.link if cluster.machines == 1 else cluster.gpu.network
    return Traffic("weights to engines", moved, moved / bandwidth)


# --- time --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, without rewards and data."""

    rollout: float
    scoring: float
    update: float
    sync: float
    bubble: float
    """Share of the passes in which a stage of the pipeline waits."""

    @property
    def total(self) -> float:
        return self.rollout + self.scoring + self.update + self.sync


def step_time(work: Workload, mesh: MeshSizes, engine_gpus: int, cache: int, cluster: Cluster) -> StepTime:
    """Seconds of a step whose answers all have `work.answer` tokens."""
    rate = cluster.num_gpus * cluster.gpu.half_flops * PASS_SHARE
    count = micro_batches(work, mesh)
    bubble = (mesh.pipeline - 1) / (count + mesh.pipeline - 1)
    again = (mesh.tensor - 1) * work.head_flops  # every rank of a tensor-parallel group computes all logits
    slower = (
        PASS_SHARE / EXPERT_PASS_SHARE - 1
    )  # what an operation of a routed expert takes beyond one of another product
    scoring = work.num_scoring_passes * (work.forward_flops + again + slower * work.expert_forward_flops) / rate
    head_passes = 3 if work.lora is not None else 4  # forward, backward, and logits that are computed twice
    passed = work.update_flops + head_passes * again + slower * work.expert_update_flops
    update = work.num_learners * work.epochs * passed / rate
    traffic = learner_traffic(work, mesh, cluster)
    hidden = sum(one.seconds for one in traffic if one.overlaps)
    exposed = sum(one.seconds for one in traffic if not one.overlaps)
    covered = min(scoring + update, OVERLAP_SHARE * hidden)
    passes = (scoring + update + hidden - covered + exposed) / (1 - bubble)
    scoring_share = scoring / (scoring + update)
    optimizer = _optimizer_seconds(work, mesh, cluster)
    rollout = STEP_OVERHEAD_S + rollout_seconds(work, engine_gpus, cache, cluster)
    sync = weight_push(work, engine_gpus, mesh, cluster).seconds
    return StepTime(rollout, passes * scoring_share, passes * (1 - scoring_share) + optimizer, sync, bubble)


def _optimizer_seconds(work: Workload, mesh: MeshSizes, cluster: Cluster) -> float:
    if work.lora is not None:
        return 0.0
    common, routed = stage_sizes(work.shape, mesh)
    own = (common + routed * mesh.expert) / mesh.shards
    updates = work.mini_batches * work.epochs * work.num_learners
    if work.optimizer.offload:
        return updates * own * 12 / HOST_BANDWIDTH  # master copies and moments come and go at the same time
    return updates * own * OPTIMIZER_BYTES[work.optimizer.name] / (cluster.gpu.bandwidth * OPTIMIZER_SHARE)


def rollout_seconds(work: Workload, engine_gpus: int, cache: int, cluster: Cluster) -> float:
    """Seconds of prefill and decode. Each engine has its part of the sequences, in waves of as many as its cache holds on average."""
    engines = max(1, cluster.num_gpus // engine_gpus)
    sequences = -(-work.sequences // engines)
    mean_length = work.prompt + work.answer / 2
    token_bytes = work.cached_token_bytes
    room = max(1, int(cache * work.shape.cache_parts(engine_gpus) / (token_bytes * mean_length))) if cache else 1
    rows = max(1, min(work.max_rows, sequences, room))
    groups = max(1, sequences // work.samples if sequences >= work.samples else 1)
    pairs = 4.0 * causal_pairs(work.prompt) * work.shape.num_layers * work.shape.num_heads * work.shape.head_dim
    others = groups * (2.0 * work.prompt * (work.shape.active_size - work.shape.active_routed_size) + pairs)
    experts = groups * 2.0 * work.prompt * work.shape.active_routed_size
    faster = PRODUCT_SPEED_8_BITS if work.weights_in_8_bits else 1.0
    prefill_s = (others / PASS_SHARE / faster + experts / EXPERT_PASS_SHARE) / (engine_gpus * cluster.gpu.half_flops)
    waves = sequences / rows
    return prefill_s + waves * work.answer * decode_step_seconds(work, rows, mean_length, engine_gpus, cluster)


def decode_step_seconds(work: Workload, rows: int, length: float, engine_gpus: int, cluster: Cluster) -> float:
    """Seconds of one decode step of `rows` sequences of a mean `length` on `engine_gpus` GPUs that split every layer."""
    shape, gpu, element = work.shape, cluster.gpu, work.element
    bandwidth = gpu.bandwidth * BANDWIDTH_SHARE * engine_gpus
    peak = gpu.half_flops * DECODE_SHARE * engine_gpus
    small = shape.num_layers * LAYER_OVERHEAD_S
    if work.weights_in_8_bits:
        faster = peak * PRODUCT_SPEED_8_BITS
        layers = max(shape.common_size / bandwidth, 2.0 * rows * shape.common_size / faster)
        head = max(shape.embedding_size * element / bandwidth, 2.0 * rows * shape.embedding_size / peak)
        products = layers + head
        small += shape.num_layers * (QUANTISATION_S + QUANTISATION_ROW_S * rows)
    else:
        read = shape.common_size + shape.embedding_size
        products = max(read * element / bandwidth, 2.0 * rows * read / peak)
    if shape.num_experts:
        # Their matrices are read once, and the products of their few rows are not hidden behind that (docs/experts.md has both).
        chosen = 1 - (1 - shape.experts_per_token / shape.num_experts) ** rows  # share of experts that some row chooses
        products += shape.num_expert_layers * shape.routed_size * chosen * element / bandwidth
        products += 2.0 * rows * shape.active_routed_size / peak
    cached, parts = rows * length * shape.kv_size * shape.num_layers, shape.cache_parts(engine_gpus)
    key_bytes = cached * (KEY_BYTES_8_BITS if work.cache_in_8_bits else element)
    keys = key_bytes / (gpu.bandwidth * BANDWIDTH_SHARE * parts)
    if shape.is_latent:  # every head multiplies the whole latent, as a key and as a value
        keys = max(keys, 4.0 * cached * shape.num_heads / (gpu.half_flops * DECODE_SHARE * engine_gpus))
    if shape.is_latent and parts > 1:  # queries and results of the ranks that divide the cache
        moved = 2 * rows * shape.num_heads / engine_gpus * shape.kv_size * element * (parts - 1)
        small += shape.num_layers * (3 * COLLECTIVE_LATENCY_S + moved / cluster.ring_bandwidth(parts, 1))
    if engine_gpus > 1:
        sent = 2 * 2 * rows * shape.hidden_size * element * (1 - 1 / engine_gpus)
        small += shape.num_layers * (2 * COLLECTIVE_LATENCY_S + sent / cluster.ring_bandwidth(engine_gpus, 1))
    return products + keys + small
