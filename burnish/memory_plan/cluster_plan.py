"""`burnish train RECIPE --dry-run --cluster 64x8xH200`: the mesh, memory, traffic and time of a run on a cluster, as a plan on paper.

All meshes that divide the GPUs and the model are compared, and one that fits with a fast step is proposed, with the settings that make it fit.
`parallel` in the config fixes the mesh instead, and `placement.engine_tensor` the engines. What the run would refuse is refused here too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.placement import LocalPlacement, MeshSizes, Parallel, RayPlacement, check_placement_fits
from burnish.config.plugins import is_reference
from burnish.config.schema import TrainConfig, check_fp8_fits
from burnish.memory_plan.from_config import reference_kind, teacher_paths
from burnish.memory_plan.hardware import Cluster
from burnish.memory_plan.mesh_memory import (
    DeviceMemory,
    Workload,
    device_memory,
    engine_copy_bytes,
    engine_weights,
    micro_batches,
)
from burnish.memory_plan.mesh_time import StepTime, Traffic, learner_traffic, step_time, weight_push
from burnish.memory_plan.model_shapes import ModelShape, shape_of, shape_of_path
from burnish.memory_plan.planner import gib
from burnish.memory_plan.suggestions import PLAN_TOLERANCE
from burnish.models.model_support import native_settings
from burnish.training.architecture_checks import check_policy_layers
from burnish.training.parallel.ranks import check_model_divides

SHORT_SHARE = 0.25
"""The second estimate of times, and the choice of the mesh, are for answers that take this share of their maximum."""
MAX_ENGINE_GPUS = 64
MOST_GPUS = 1024
"""The largest cluster that is tried if a run does not fit."""
MOST_COMPARED = 16
"""Of the plans that fit, those with the fastest learners are compared by the time of their whole steps."""
LEAST_CACHE_SEQUENCES = 4
"""An engine must have room for so many sequences of full length."""


@dataclass(frozen=True)
class ClusterPlan:
    """A mesh of the learner, the size of an engine, and what they need."""

    cluster: Cluster
    work: Workload
    mesh: MeshSizes
    engine_gpus: int
    memory: DeviceMemory
    changes: tuple[str, ...]
    """Settings that the plan needs and that the config does not have."""

    @property
    def traffic(self) -> list[Traffic]:
        return [
            *learner_traffic(self.work, self.mesh, self.cluster),
            weight_push(self.work, self.engine_gpus, self.mesh, self.cluster),
        ]

    def time(self, answer_share: float = 1.0) -> StepTime:
        """Seconds of a step whose answers have this share of their most tokens."""
        work = replace(self.work, answer=max(1, round(self.work.answer * answer_share)))
        return step_time(work, self.mesh, self.engine_gpus, self.memory.cache, self.cluster)


def workload_of(config: TrainConfig, shape: ModelShape, base: Path | None) -> Workload:
    """The work of a step, with sequences of full length in its last rollout stage."""
    training, algorithm = config.training, config.algorithm
    last = config.rollout.all_stages()[-1]
    prompt = config.data.max_prompt_tokens
    answer = last.max_tokens * config.environment.max_turns
    longest = config.environment.max_tokens or prompt + answer
    reference = reference_kind(config, config.model.lora)
    has_old_pass = algorithm.makes_old_pass(training.mini_batches * training.epochs)
    return Workload(
        shape,
        config.model.dtype,
        training.optimizer,
        last.prompts,
        last.n,
        prompt,
        longest - prompt,
        longest,
        token_budget=training.token_budget,
        activations=training.activations,
        lora=config.model.lora,
        mini_batches=training.mini_batches,
        epochs=training.epochs,
        max_rows=config.rollout.max_rows,
        weights_in_8_bits=config.rollout.weights.name == "fp8",
        cache_in_8_bits=config.rollout.cache_dtype == "fp8",
        shares_prefixes=training.share_prefixes,
        has_server_engine=is_foreign(config),
        reference=reference,
        teacher=sum(_teacher_size(path, shape, base) for path in teacher_paths(config)),
        num_scoring_passes=has_old_pass + (reference != "none"),
        num_learners=1 if algorithm.critic is None else 2,
    )


def _teacher_size(path: str, policy: ModelShape, base: Path | None) -> int:
    """Number of parameters of a teacher; the policy's for one that an earlier stage makes."""
    return (policy if is_reference(path) else shape_of_path(path, base)).num_parameters


def plan_cluster(config: TrainConfig, base: Path | None, cluster: Cluster) -> ClusterPlan:
    """The fastest plan that fits; UserError with the nearest one if none does, or with what the plan does not cover."""
    work = workload_of(config, shape_of(config, base), base)
    check_covered(config, cluster, work.shape)
    candidates = _candidates(config, work, cluster)
    if not candidates:
        raise UserError(
            f"no mesh of {_plural(cluster.num_gpus)} divides {work.shape.name} and the {work.sequences // work.mini_batches} sequences of a "
            "mini-batch: use fewer GPUs, or more rollout.prompts"
        )
    sizes = engine_sizes(config, work.shape, cluster)
    seconds = [(_learner_seconds(changed, mesh, cluster), changed, mesh) for changed, mesh in candidates]
    fitting: list[ClusterPlan] = []
    nearest: ClusterPlan | None = None
    for _, changed, mesh in sorted(seconds, key=lambda one: one[0]):
        found = _with_engine(changed, mesh, cluster, work, sizes)
        if found is None:
            continue
        if found.memory.total <= _room(cluster):
            fitting.append(found)
        elif nearest is None or found.memory.total < nearest.memory.total:
            nearest = found
        if len(fitting) == MOST_COMPARED:
            break
    if fitting:
        return _with_engine_key(min(fitting, key=lambda plan: plan.time(SHORT_SHARE).total), config)
    remedy = _remedy(config, work, cluster)
    if nearest is None:
        raise UserError(
            f"{work.shape.name} has no room on {cluster.text}, which is {_plural(cluster.num_gpus)} of {gib(cluster.gpu.memory)}: "
            f"{_least_of_engine(work, max(sizes))}, beside the learner's weights, master copies and moments; {remedy}"
        )
    raise UserError(
        f"this run does not fit on {cluster.text}: at least {gib(nearest.memory.total)} of {gib(cluster.gpu.memory)} on a GPU\n"
        f"{plan_report(_with_engine_key(nearest, config))}\n{remedy}; training.optimizer.offload=true, or a smaller training.token_budget need less on each"
    )


def _least_of_engine(work: Workload, size: int) -> str:
    """What the largest engine needs, in words."""
    weights = engine_copy_bytes(work)
    cache = LEAST_CACHE_SEQUENCES * work.cached_sequence_bytes
    parts = f"its weights are {gib(weights)} and {LEAST_CACHE_SEQUENCES} sequences of {work.longest:,} tokens in the KV cache {gib(cache)}"
    if size == 1:
        return parts
    return f"{parts}, of which each GPU of an engine of {size} has {gib(weights // size + cache // work.shape.cache_parts(size))}"


def _plural(num_gpus: int) -> str:
    return "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"


# --- what a config allows ----------------------------------------------------------------------------------------------------


def check_covered(config: TrainConfig, cluster: Cluster, shape: ModelShape) -> None:
    """Refuse a placement that the plan does not cover, and a run that the model does not allow or that cannot be on several GPUs."""
    check_policy_layers(config, shape.arch, config.model.lora)
    for need, advice in native_settings(config) if shape.arch is None else ():
        raise UserError(f"{need} needs the native decoder, and {shape.name} does not run on it: {advice}")
    placement, num = config.placement, cluster.num_gpus
    turns = "the plan has a worker and an engine process on each GPU, which take turns"
    if config.rollout.source.name != "sync":
        raise UserError(f"--cluster does not plan rollout.source={config.rollout.source.name}: {turns}; set it to sync")
    if isinstance(placement, RayPlacement):
        if placement.pools:
            raise UserError(f"--cluster does not plan placement.pools: {turns}; leave pools and roles out")
        if placement.layout == "split":
            raise UserError(f"--cluster does not plan placement.layout=split: {turns}; set it to colocated")
        for key in ("workers", "engines"):
            if getattr(placement, key) not in (1, num):  # 1 is the default
                raise UserError(
                    f"placement.{key}={getattr(placement, key)}, but {cluster.text} is {_plural(num)}: {turns}; set it to {num}, or plan "
                    "another cluster"
                )
    if config.parallel.offload:
        raise UserError(
            "--cluster does not plan parallel.offload: set it to false; training.optimizer.offload=true is planned"
        )
    if num > 1 and (problem := config_conflict(_placed(config, cluster, Parallel()), shape)) is not None:
        raise UserError(f"this run cannot have a worker and an engine process on each GPU of {cluster.text}: {problem}")


def config_conflict(config: TrainConfig, shape: ModelShape) -> str | None:
    """Why a run with another placement or mesh would be refused; None if it would not. The checks are those of a run."""
    try:
        check_placement_fits(config)
        if config.training.layers == "fp8":
            check_fp8_fits(config)
        check_policy_layers(config, shape.arch, config.model.lora)
    except (ValueError, UserError) as error:  # validators of a config raise ValueError
        return str(error)
    return None


def _placed(
    config: TrainConfig, cluster: Cluster, parallel: Parallel, engine_gpus: int = 1, activations: str | None = None
) -> TrainConfig:
    """The config with a worker and an engine process on each GPU. It is not validated."""
    ray = config.placement if isinstance(config.placement, RayPlacement) else RayPlacement()
    num = {"workers": cluster.num_gpus, "engines": cluster.num_gpus, "engine_tensor": engine_gpus}
    training = config.training.model_copy(update={} if activations is None else {"activations": activations})
    return config.model_copy(
        update={"placement": ray.model_copy(update=num), "parallel": parallel, "training": training}
    )


def _candidates(config: TrainConfig, work: Workload, cluster: Cluster) -> list[tuple[Workload, MeshSizes]]:
    """The meshes to compare, with each activation policy; raise if the config's own mesh cannot train the model."""
    if config.parallel == Parallel():
        meshes = list(possible_meshes(work, cluster))
    else:
        meshes = [config.parallel.sizes(cluster.num_gpus)]
        problem = config_conflict(_placed(config, cluster, config.parallel), work.shape)
        if cluster.num_gpus > 1 and problem is not None:
            raise UserError(problem)
    return [
        (replace(work, activations=policy), mesh)
        for policy in _policies(work.activations)
        for mesh in meshes
        if mesh == MeshSizes()
        or config_conflict(_placed(config, cluster, parallel_of(mesh), activations=policy), work.shape) is None
    ]


def engine_sizes(config: TrainConfig, shape: ModelShape, cluster: Cluster) -> list[int]:
    """The numbers of GPUs that an engine may have, ascending: that of the config, or all that divide the GPUs and the model."""
    fixed, num = getattr(config.placement, "engine_tensor", 1), cluster.num_gpus
    sizes = [size for size in _divisors(min(MAX_ENGINE_GPUS, num)) if num % size == 0]
    if is_foreign(config):  # its servers divide the model by themselves
        return [size for size in sizes if shape.num_heads % size == 0]
    if fixed > 1:
        if num % fixed:
            raise UserError(f"placement.engine_tensor={fixed} does not divide the {_plural(num)} of {cluster.text}")
        problem = config_conflict(_placed(config, cluster, Parallel(), engine_gpus=fixed), shape)
        if problem is not None:
            raise UserError(problem)
        return [fixed]
    if shape.arch is None:  # it samples through transformers
        return [1]
    return [
        size
        for size in sizes
        if size == 1 or config_conflict(_placed(config, cluster, Parallel(), engine_gpus=size), shape) is None
    ]


def is_foreign(config: TrainConfig) -> bool:
    """Whether engines are servers, which have options of their own in place of `placement.engine_tensor`."""
    return config.rollout.engine in ("vllm", "sglang")


def _with_engine_key(plan: ClusterPlan, config: TrainConfig) -> ClusterPlan:
    """The plan, which names the key that makes its engines if the config does not."""
    if is_foreign(config) or plan.engine_gpus == getattr(config.placement, "engine_tensor", 1):
        return plan
    return replace(plan, changes=(f"placement.engine_tensor={plan.engine_gpus}", *plan.changes))


def _remedy(config: TrainConfig, work: Workload, cluster: Cluster) -> str:
    """What a user can do if no plan fits: leave out what the config fixes, or take more GPUs."""
    free = config.model_copy(update={"placement": LocalPlacement(), "parallel": Parallel()})
    work = replace(work, activations=_policies(work.activations)[-1])  # which needs least
    for larger in _larger_clusters(cluster):
        # The learner's state is least where all GPUs share it.
        least = device_memory(work, MeshSizes(data=larger.num_gpus), larger.num_gpus, larger).resident
        if sum(part.bytes for part in least) > _room(larger) or (larger == cluster and free == config):
            continue
        sizes = engine_sizes(free, work.shape, larger)
        for changed, mesh in _candidates(free, work, larger):
            found = _with_engine(changed, mesh, larger, work, sizes) if mesh.replicate == 1 else None
            if found is not None and found.memory.total <= _room(larger):
                if larger == cluster:
                    return (
                        "without parallel and placement.engine_tensor in the config it fits, and the plan proposes them"
                    )
                return f"the smallest cluster tried that has room is {larger.text} ({_plural(larger.num_gpus)})"
    return f"no cluster of up to {MOST_GPUS} {cluster.gpu.name} that was tried has room"


def _larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster itself, and those of more of its GPUs: first more in a machine, then more machines, in steps of a third or a half."""
    yield cluster
    per_machine, machines = cluster.gpus_per_machine, cluster.machines
    while machines == 1 and per_machine < 8:
        per_machine = min(8, 2 * per_machine)
        yield Cluster(1, per_machine, cluster.gpu)
    for steps in range(2, 2 * MOST_GPUS.bit_length()):
        count = 2 ** (steps // 2) * (3 if steps % 2 else 2) // 2
        if machines < count and count * per_machine <= MOST_GPUS:
            yield Cluster(count, per_machine, cluster.gpu)


def parallel_of(mesh: MeshSizes) -> Parallel:
    """The section of the config that makes this mesh."""
    data = mesh.data if mesh.replicate == 1 else (mesh.replicate, mesh.data // mesh.replicate)
    return Parallel(pipeline=mesh.pipeline, data=data, context=mesh.context, expert=mesh.expert, tensor=mesh.tensor)


def _policies(configured: str) -> list[str]:
    """Activation policies to try: the configured one, and those that need less memory."""
    order = ["keep", "selective", "recompute", "offload"]
    return [configured, *(policy for policy in order[order.index(configured) + 1 : 3])]


def _room(cluster: Cluster) -> int:
    return int(cluster.gpu.memory * (1 - PLAN_TOLERANCE))


def _learner_seconds(work: Workload, mesh: MeshSizes, cluster: Cluster) -> float:
    usual = replace(work, answer=max(1, round(work.answer * SHORT_SHARE)))  # answers are rarely as long as they may be
    made = step_time(usual, mesh, cluster.num_gpus, cluster.gpu.memory, cluster)
    dimensions = sum(size > 1 for size in mesh)
    return (made.scoring + made.update) * (1 + 0.002 * dimensions)  # of two equals the simpler one


def possible_meshes(work: Workload, cluster: Cluster) -> Iterator[MeshSizes]:
    """All meshes of the cluster's GPUs that divide the model and the batch."""
    num, sequences = cluster.num_gpus, work.sequences // work.mini_batches
    for tensor in _divisors(min(cluster.gpus_per_machine, num)):
        for expert in _divisors(num // tensor):
            if not divides_model(work, Parallel(tensor=tensor, expert=expert)):
                continue
            for context in _divisors(num // tensor // expert):
                if not divides_model(work, Parallel(tensor=tensor, context=context)):
                    continue
                for pipeline in _divisors(num // tensor // expert // context):
                    data = num // tensor // expert // context // pipeline
                    if data * expert > sequences or not divides_model(work, Parallel(pipeline=pipeline)):
                        continue
                    for copies in _divisors(data):
                        yield MeshSizes(pipeline, data, context, expert, tensor, copies)


def divides_model(work: Workload, parallel: Parallel) -> bool:
    """Whether processes can divide the model so, by the check of a run."""
    if work.shape.arch is None:  # transformers' own layers are only sharded
        return parallel == Parallel()
    try:
        check_model_divides(work.shape.arch, parallel, work.lora)
    except UserError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    """Divisors of a number of GPUs, of which there are few: numbers of GPUs are powers of two, or nearly."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _with_engine(
    work: Workload, mesh: MeshSizes, cluster: Cluster, configured: Workload, sizes: list[int]
) -> ClusterPlan | None:
    """The plan with that of the engine sizes that samples fastest beside this learner; None if none has room for its weights."""
    plans: list[tuple[float, float, ClusterPlan]] = []
    alone = device_memory(work, mesh, 1, cluster)
    without = sum(part.bytes for part in alone.resident) - engine_weights(work, 1, cluster)
    if alone.total - engine_weights(work, 1, cluster) > _room(cluster):
        sizes = sizes[-1:]  # the learner alone does not fit
    for size in sizes:
        if without + engine_weights(work, size, cluster) >= cluster.gpu.memory:
            continue
        memory = device_memory(work, mesh, size, cluster)
        cache = memory.cache * work.shape.cache_parts(size)
        if cache < LEAST_CACHE_SEQUENCES * work.cached_sequence_bytes and cluster.num_gpus > 1:
            continue
        changes = [f"training.activations={work.activations}"] if work.activations != configured.activations else []
        plan = ClusterPlan(cluster, work, mesh, size, memory, tuple(changes))
        # An engine whose weights leave the learner no room is no plan, however fast it samples.
        plans.append((max(0, memory.total - _room(cluster)), plan.time(SHORT_SHARE).rollout, plan))
    return min(plans, key=lambda found: found[:2])[2] if plans else None


# --- the report --------------------------------------------------------------------------------------------------------------


def plan_report(plan: ClusterPlan) -> str:
    """The plan as text."""
    shape, mesh, cluster, work = plan.work.shape, plan.mesh, plan.cluster, plan.work
    active = f", {shape.num_active_parameters / 1e9:.1f}B for one token" if shape.num_experts else ""
    count = micro_batches(work, mesh)
    data = str(mesh.data) if mesh.replicate == 1 else f"[{mesh.replicate}, {mesh.data // mesh.replicate}]"
    sizes = f"pipeline: {mesh.pipeline}, data: {data}, context: {mesh.context}, expert: {mesh.expert}, tensor: {mesh.tensor}"
    lines = [
        f"plan on paper for {cluster.text} ({cluster.num_gpus} GPUs): {shape.name}, {shape.num_parameters / 1e9:.1f}B parameters{active}",
        f"learner: parallel={{{sizes}}}; {mesh.batch_shards} parts of a mini-batch, {count} micro-batches each",
        f"engines: {cluster.num_gpus // plan.engine_gpus} of {_plural(plan.engine_gpus)}, on the same GPUs in turns",
        *(f"with {change}" for change in plan.changes),
        "",
        f"memory of a GPU: {gib(plan.memory.total)} of {gib(cluster.gpu.memory)} during an update",
        *_table([(part.name, gib(part.bytes), part.note) for part in (*plan.memory.resident, *plan.memory.update)]),
        f"  {gib(plan.memory.cache)} are left for the KV cache while engines sample: {_cache_text(plan)}",
        *([f"  and {gib(plan.memory.host)} of host memory"] if plan.memory.host else []),
        "",
        "traffic of a GPU in a step, answers of full length",
        *(
            _table([(one.name, _size(one.bytes), _traffic_note(one)) for one in plan.traffic if one.bytes])
            or ["  none"]
        ),
        "",
        "estimated seconds of a step, without rewards",
        *_time_lines(plan),
        "",
        "how: passes at 50%, decode products at 62% of the peak FLOP/s, memory at 85% of its bandwidth, as measured on one H200; passes of "
        "experts at 16%, as measured there with adapters on 30B-A3B; "
        "traffic at the bandwidths of NVLink and of one adapter a GPU, 80% of what can overlap hidden behind passes. Nothing on this page was measured on several GPUs.",
    ]
    return "\n".join(lines)


def _time_lines(plan: ClusterPlan) -> list[str]:
    whole, short = plan.time(), plan.time(SHORT_SHARE)
    long = plan.work.answer
    head = ("", f"answers of {long:,}", f"of {round(long * SHORT_SHARE):,} tokens")
    rows = [
        ("rollout", whole.rollout, short.rollout),
        ("log-probs", whole.scoring, short.scoring),
        ("update", whole.update, short.update),
        ("weights to engines", whole.sync, short.sync),
        ("step", whole.total, short.total),
    ]
    lines = [f"  {head[0]:<20}{head[1]:>20}{head[2]:>20}"]
    lines += [f"  {name:<20}{a:>20,.1f}{b:>20,.1f}" for name, a, b in rows]
    if plan.mesh.pipeline > 1:
        lines.append(f"  a stage of the pipeline waits {whole.bubble:.0%} of its passes")
    return lines


def _cache_text(plan: ClusterPlan) -> str:
    work = plan.work
    cache = plan.memory.cache * work.shape.cache_parts(plan.engine_gpus)
    return f"{cache // work.cached_sequence_bytes:,} sequences of {work.longest:,} tokens an engine"


def _traffic_note(one: Traffic) -> str:
    return f"{one.seconds:,.1f} s" + (", 80% of it behind computation" if one.overlaps else "")


def _size(number: float) -> str:
    return (
        f"{number / 1e12:,.1f} TB"
        if number >= 1e12
        else f"{number / 1e9:,.1f} GB"
        if number >= 1e8
        else f"{number / 1e6:,.1f} MB"
    )


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    width = max((len(name) for name, _, _ in rows), default=0)
    return [f"  {name:<{width}}  {size:>9}  {note}".rstrip() for name, size, note in rows]
