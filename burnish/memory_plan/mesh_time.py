"""Traffic and time of a training step on a mesh of GPUs, by formulas.

Time is work divided by a share of the hardware's peak; these shares were measured on one H200 (`bench/plan_accuracy.py` compares them with the
measurements). Traffic between GPUs is counted, and its time follows from the bandwidths of links: it was not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from burnish.config.placement import MeshSizes
from burnish.memory_plan.hardware import Cluster
from burnish.memory_plan.mesh_memory import Workload, micro_batches, stage_sizes
from burnish.memory_plan.model_shapes import ModelShape
from burnish.models.flops import causal_pairs

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
HOST_BANDWIDTH = 55e9
"""Bytes per second between a GPU and host memory in one direction, for optimizer state that is kept there."""
TORCH_EXPERT_SHARE, TORCH_EXPERT_S = 0.6, 70e-6
"""Experts in decode steps without our kernels (adapters, 4 bits, engines of several GPUs): share of the memory bandwidth of torch's grouped product,
and seconds of a layer's choice of experts and sorting. Layers of 30B-A3B in `bench/results/expert_kernels-h200.json` are met to 6% from 16 to 1,024 rows."""
ADAPTER_S = 8.4e-6
"""Seconds of the two small products of one adapter in a decode step: what the rollout of `32B-lora` takes beyond that of the model."""
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
    small = shape.num_layers * (LAYER_OVERHEAD_S + work.num_adapters * ADAPTER_S)
    if work.weights_in_8_bits:
        faster = peak * PRODUCT_SPEED_8_BITS
        layers = max(shape.common_size / bandwidth, 2.0 * rows * shape.common_size / faster)
        head = max(shape.embedding_size * element / bandwidth, 2.0 * rows * shape.embedding_size / peak)
        products = layers + head
        small += shape.num_layers * (QUANTISATION_S + QUANTISATION_ROW_S * rows)
    else:
        common = shape.common_size + shape.embedding_size
        products = max(common * element / bandwidth, 2.0 * rows * common / peak)
    if shape.num_experts:
        # Their matrices are read once, and the products of their few rows are not hidden behind that (docs/experts.md has both).
        share = BANDWIDTH_SHARE
        if engine_gpus > 1 or work.adapts_experts:
            share, small = TORCH_EXPERT_SHARE, small + shape.num_expert_layers * TORCH_EXPERT_S
        chosen = 1 - (1 - shape.experts_per_token / shape.num_experts) ** rows  # share of experts that some row chooses
        read = shape.num_expert_layers * shape.routed_size * chosen * element
        products += read / (gpu.bandwidth * share * engine_gpus)
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
