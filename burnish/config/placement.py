"""Config sections for processes: where they run (`placement`), and how they divide the training of one model (`parallel`).

On Ray, pools are named sets of places for processes, and every role works in one pool:

    placement:
      name: ray
      pools: {train: {places: 4}, more: {places: 2}, checks: {places: 2, cpus: 4, gpu: false}}
      roles: {actor: train, rollout: train, reference: more, critic: more, reward: checks}

Roles of one pool share its places and take turns: the k-th process of each is in the k-th place. Roles of different pools run at the same
time. Rewards never take turns: they are computed while engines sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

from annotated_types import Ge
from pydantic import Field, model_validator

from burnish.config.errors import UserError, did_you_mean
from burnish.config.records import Record, Slot, choice

if TYPE_CHECKING:
    from burnish.config.model import Model, Optimizer
    from burnish.config.schema import TrainConfig

Role = Literal["actor", "rollout", "reference", "critic", "reward"]
ACTOR, ROLLOUT, REFERENCE, CRITIC, REWARD = get_args(Role)
FIXED_REFERENCES = ("frozen", "teacher")
"""References whose weights never change."""


class Pool(Record):
    """Places for processes."""

    places: int = Field(1, ge=1)
    """Number of places. Each is on one machine and holds one process of every role of the pool."""
    cpus: int = Field(1, ge=1)
    """CPUs of each place, and threads of each of its processes."""
    gpu: bool = True
    """Whether each place has a GPU, if the cluster has any."""
    gpus: int = Field(1, ge=1)
    """GPUs of each place, for a server of placement.server that uses several."""


PoolAssignment = tuple[Pool, dict[str, int]]
"""A pool, and the number of processes of each role in it."""


class LocalPlacement(Slot):
    """Everything in this process. The engine samples from the learner's own tensors."""

    name: Literal["local"] = "local"


class RayPlacement(Slot):
    """Training and sampling in separate processes, which Ray starts on this machine or on the cluster of RAY_ADDRESS."""

    name: Literal["ray"] = "ray"
    workers: int = Field(1, ge=1)
    """Processes that train; `parallel` says how they divide the work."""
    engines: int = Field(1, ge=1)
    """Processes that sample. Each has a copy of the weights, unless engine_tensor says that several share one."""
    engine_tensor: int = Field(1, ge=1)
    """Processes that form one native engine and hold a part of the model each (tensor parallelism; whole experts of a mixture), for models
    larger than a GPU. Divides the number of processes that sample and the model's query heads, MLP width and experts."""
    cpus: int = Field(1, ge=1)
    """CPUs of each process, and its threads for arithmetic."""
    layout: Literal["colocated", "split"] = "colocated"
    """colocated: the k-th worker and the k-th engine take turns on the same CPUs or GPU. split: each process has its own."""
    pools: dict[str, Pool] = Field(default_factory=dict)
    """Named places for processes, instead of workers, engines, cpus and layout."""
    roles: dict[Role, str] = Field(default_factory=dict)
    """The pool of each role. A reference or a critic without a pool, or with the actor's, runs in the actor's processes. A reward without
    a pool is computed on the driver's machine."""
    server: str | None = None
    """Command with which each process that samples starts its own vLLM or SGLang server, on its GPUs: `vllm serve {model} --port {port}`.
    {model} is the model's directory and {port} a free port. null: the servers that rollout names, or vLLM in the process."""
    sync: Literal["full", "delta"] = "full"
    """What is sent to engines after a step: all weights, or only the values that changed. Both give the same bits; delta keeps a copy of the
    trained weights."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit of one call to a process. When it is exceeded, the run stops and names the process and the call. An engine is restarted
    instead."""

    @model_validator(mode="after")
    def _check_pools(self) -> RayPlacement:
        check_pools(self.pools, self.roles)
        for key in ("workers", "engines", "cpus", "layout") if self.pools else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with pools, which say how many processes there are and where")
        return self

    @property
    def pool_assignments(self) -> list[PoolAssignment]:
        """All pools with the processes of their roles. Without `pools`: one for all roles, or one for workers and one for engines."""
        if self.pools:
            pool_of = {
                role: name for role, name in self.roles.items() if role in (ACTOR, ROLLOUT) or self.is_separate(role)
            }
            return [
                (pool, {role: pool.places for role, where in pool_of.items() if where == name})
                for name, pool in self.pools.items()
            ]
        sizes = {ACTOR: self.workers, ROLLOUT: self.engines}
        if self.layout == "colocated":
            return [(Pool(places=max(sizes.values()), cpus=self.cpus), sizes)]
        return [(Pool(places=size, cpus=self.cpus), {role: size}) for role, size in sizes.items()]

    def is_separate(self, role: Role) -> bool:
        """Whether a role has its own processes: a reference or a critic outside the actor's pool, or a reward with a pool."""
        pool = self.roles.get(role)
        return pool is not None and (role == REWARD or pool != self.roles[ACTOR])

    def size(self, role: str) -> int:
        """Number of processes of a role that has its own."""
        return next(sizes[role] for _, sizes in self.pool_assignments if role in sizes)

    def cpus_of(self, role: str) -> int:
        """CPUs of each process of a role."""
        return next(pool.cpus for pool, sizes in self.pool_assignments if role in sizes)

    def share_pool(self, one: str, other: str) -> bool:
        """Whether the processes of two roles share places."""
        return any(one in sizes and other in sizes for _, sizes in self.pool_assignments)


PlacementSlot: Any = choice(LocalPlacement, RayPlacement, plugin=False)
Placement = LocalPlacement | RayPlacement


AtLeastOne = Annotated[int, Ge(1)]


class MeshSizes(NamedTuple):
    """The sizes of a learner's mesh of processes, outermost dimension first. Ranks are numbered with `tensor` fastest."""

    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1
    replicate: int = 1
    """Copies of the sharded model among the `data` processes (HSDP)."""

    @property
    def processes(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.context * self.expert * self.tensor

    @property
    def batch_shards(self) -> int:
        """Parts of a mini-batch. Processes with different experts have different sequences too."""
        return self.data * self.expert

    @property
    def shards(self) -> int:
        """Parts of a stage's dense parameters before tensor parallelism divides them: FSDP shards over data, context and expert."""
        return self.data // self.replicate * self.context * self.expert


FORMER_PARALLEL_KEYS = {
    "shard": "is now parallel.data, the number of processes with different sequences; [copies, shards] stands for replicate and shard",
    "replicate": "is now part of parallel.data: [copies, shards]",
    "sequence": "is now parallel.context",
}
"""Keys of `parallel` that were renamed, and what a user of them must write."""


class Parallel(Record):
    """How several processes train one model. Their number is pipeline x data x context x expert x tensor."""

    pipeline: int = Field(1, ge=1)
    """Stages of layers, each on its own processes, which pass hidden states on (pipeline parallelism)."""
    data: AtLeastOne | tuple[AtLeastOne, AtLeastOne] | None = None
    """Processes that train on different sequences and hold a shard of every parameter each (FSDP2). A list [copies, shards] makes several
    copies of the model, each sharded over so many processes (HSDP). null: all remaining processes."""
    context: int = Field(1, ge=1)
    """Processes that split the tokens of the same micro-batches, for long sequences. Attention exchanges heads (Ulysses) if their number
    divides the key/value heads, and gathers keys otherwise. Parameters are sharded over them too."""
    expert: int = Field(1, ge=1)
    """Processes that divide the experts of every layer. Must divide their number. All other layers treat them like `data`: they have
    different sequences."""
    tensor: int = Field(1, ge=1)
    """Processes that split the heads and the MLP, or each expert, of every layer. Must divide the model's heads and their widths."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and move each layer to the GPU when it is needed."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_former_keys(cls, given: Any) -> Any:
        for key, change in FORMER_PARALLEL_KEYS.items():
            if isinstance(given, dict) and key in given:
                raise ValueError(f"parallel.{key} {change}")
        return given

    def sizes(self, num_processes: int) -> MeshSizes:
        """The mesh of this number of processes."""
        others = self.pipeline * self.context * self.expert * self.tensor
        copies, shards = self.data if isinstance(self.data, tuple) else (1, self.data)
        data = max(1, num_processes // others) if shards is None else copies * shards
        if others * data != num_processes:
            wanted = (
                f"pipeline={self.pipeline} x data={data if self.data else 'the rest'} x context={self.context} x expert={self.expert} x "
                f"tensor={self.tensor}"
            )
            raise UserError(
                f"parallel: {wanted} does not make {num_processes} processes; their number is torchrun's --nproc-per-node times --nnodes, "
                "or placement.workers"
            )
        return MeshSizes(self.pipeline, data, self.context, self.expert, self.tensor, copies)


def has_remote_rewards(placement: Placement) -> bool:
    """Whether rewards are computed in processes of Ray."""
    return isinstance(placement, RayPlacement) and placement.is_separate(REWARD)


def describe_processes(placement: RayPlacement) -> str:
    """The processes of a run in words."""
    if placement.pools:
        return _describe_pools(placement.pools, placement.roles)
    counts = ((placement.workers, "worker"), (placement.engines, "engine"), (placement.cpus, "CPU"))
    workers, engines, cpus = (_plural(number, what) for number, what in counts)
    if placement.engine_tensor > 1:
        num_engines = _plural(placement.engines // placement.engine_tensor, "engine")
        engines = f"{num_engines} of {placement.engine_tensor} processes"
    return f"{workers} and {engines}, {placement.layout}, {cpus} each"


def _describe_pools(pools: dict[str, Pool], roles: dict[Role, str]) -> str:
    texts = []
    for name, pool in pools.items():
        pool_roles = ", ".join(role for role, where in roles.items() if where == name)
        texts.append(f"pool {name} for {pool_roles}: {_plural(pool.places, 'place')} of {_plural(pool.cpus, 'CPU')}")
    return "; ".join(texts)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def check_pools(pools: dict[str, Pool], roles: dict[Role, str]) -> None:
    """Refuse roles without a pool, pools without a role, and several GPUs for roles that use one."""
    for role, pool in roles.items():
        if pool not in pools:
            known = ", ".join(pools) or "none"
            raise ValueError(f"roles.{role}={pool}: there is no such pool{did_you_mean(pool, pools)} (pools: {known})")
    for role, verb in ((ACTOR, "train"), (ROLLOUT, "sample")):
        if pools and role not in roles:
            raise ValueError(f"with pools, roles.{role} must name the pool of the processes that {verb}")
    unused = [name for name in pools if name not in roles.values()]
    if unused:
        raise ValueError(f"pools.{unused[0]} has no effect: no role works there")
    for name, places in pools.items():
        if places.gpus > 1 and (
            not places.gpu or [role for role, where in roles.items() if where == name] != [ROLLOUT]
        ):
            raise ValueError(
                f"pools.{name}.gpus={places.gpus}: only a pool of the rollout alone, with gpu=true, has several GPUs a place"
            )


def _check_gpus(config: TrainConfig, placement: RayPlacement) -> None:
    """Refuse GPUs for only one of actor and engines, except where engines are servers elsewhere; and GPUs that nothing uses."""
    pools, roles = placement.pools, placement.roles
    if not pools:
        return
    actor, rollout = pools[roles[ACTOR]], pools[roles[ROLLOUT]]
    if rollout.gpus > 1 and placement.server is None:
        raise ValueError(
            f"placement.pools.{roles[ROLLOUT]}.gpus={rollout.gpus} is for servers of placement.server; processes of the native engine have "
            "one GPU each (placement.engine_tensor)"
        )
    if not actor.gpu and rollout.gpu:
        raise ValueError(f"pools.{roles[ACTOR]}.gpu=false leaves the actor without a GPU while engines have some")
    is_elsewhere = config.rollout.engine in ("vllm", "sglang") and placement.server is None
    if actor.gpu and not rollout.gpu and not is_elsewhere:
        raise ValueError(f"pools.{roles[ROLLOUT]}.gpu=false leaves engines without a GPU while the actor has some")


def check_parallel_fits(parallel: Parallel, model: Model, optimizer: Optimizer, activations: str) -> None:
    """Refuse what cannot be split, and options that have no effect."""
    for key in ("pipeline", "context", "expert", "tensor") if model.backend == "transformers" else ():
        if getattr(parallel, key) > 1:
            raise ValueError(f"parallel.{key} needs the native decoder, but model.backend=transformers")
    if parallel.tensor > 1 and model.lora is not None and model.lora.base != "dtype":
        raise ValueError(
            f"parallel.tensor cannot split matrices in 4 bits (model.lora.base={model.lora.base}): use parallel.data, or base=dtype"
        )
    for key in ("tensor", "expert") if activations == "selective" else ():
        if getattr(parallel, key) > 1:
            raise ValueError(
                f"activations=selective does not work with tensors that parallel.{key} splits: use recompute or keep"
            )
    if parallel.offload and model.device == "cpu":
        raise ValueError("parallel.offload has no effect with model.device=cpu: everything is in host memory")
    if parallel.offload and optimizer.offload:
        raise ValueError(
            "optimizer.offload has no effect with parallel.offload, which keeps the optimizer's state on the CPU too"
        )


def check_placement_fits(config: TrainConfig) -> None:
    """Refuse what cannot run on the placement, and options that have no effect."""
    placement, parallel = config.placement, config.parallel
    if isinstance(placement, LocalPlacement):
        if parallel != Parallel():
            raise ValueError(
                "parallel has no effect with placement=local, which trains in one process: set placement=ray and placement.workers"
            )
        return
    _check_roles(config, placement)
    trained = [role for role in (ACTOR, REFERENCE, CRITIC) if role == ACTOR or placement.is_separate(role)]
    for role in trained:
        where = f"placement.pools.{placement.roles[role]}.places" if placement.pools else "placement.workers"
        try:
            parallel.sizes(placement.size(role))
        except UserError as error:
            raise ValueError(f"{where}={placement.size(role)}: {error}") from error
    for optimizer in (
        config.training.optimizer,
        *([config.algorithm.critic.optimizer] if config.algorithm.critic else []),
        *([config.algorithm.process.optimizer] if config.algorithm.process else []),
    ):
        check_parallel_fits(parallel, config.model, optimizer, config.training.activations)
    _check_gpus(config, placement)
    _check_engine_ranks(config, placement)
    if config.rollout.mismatch is not None:
        raise ValueError("rollout.mismatch needs placement=local: it changes the learner's own tensors")
    for part in config.reward.parts:
        if part.name == "model" and part.options.get("device") != "cpu" and not placement.is_separate(REWARD):
            raise ValueError(
                "reward part model runs in the driver's process, but placement=ray gives the GPUs to the workers: set its "
                "options.device to cpu, name a pool for it in placement.roles.reward, or set placement=local"
            )
        if part.name == "judge" and part.options.get("path") and part.options.get("device", "auto") == "auto":
            raise ValueError(
                "reward part judge runs its model on the driver's machine, but placement=ray gives the GPUs to the workers: set its "
                "options.device to cpu, or to a GPU that Ray does not have (cuda:1)"
            )
    if config.rollout.exact:
        raise ValueError("rollout.exact needs placement=local: engine and learner must compute in one process")
    if config.model.device.startswith("cuda:"):
        raise ValueError(f"model.device={config.model.device}: Ray gives each process its GPU; write cuda")
    most_processes = max(placement.size(role) for role in trained)
    if most_processes > 1 and config.training.layers == "compiled":
        raise ValueError(
            "training.layers=compiled needs placement.workers=1, or one place in the pools of actor and critic"
        )


def _check_engine_ranks(config: TrainConfig, placement: RayPlacement) -> None:
    """Refuse engines of several processes where the processes or the model cannot be divided."""
    size, num_processes = placement.engine_tensor, placement.size(ROLLOUT)
    if size == 1:
        return
    if num_processes % size:
        where = f"placement.pools.{placement.roles[ROLLOUT]}.places" if placement.pools else "placement.engines"
        raise ValueError(f"placement.engine_tensor={size} does not divide {where}={num_processes}")
    if config.rollout.engine in ("vllm", "sglang"):
        raise ValueError(
            f"placement.engine_tensor divides the native engine, but rollout.engine={config.rollout.engine}: give its server several GPUs "
            "(placement.pools) and its own option in placement.server"
        )
    if config.rollout.weights.name != "model":
        raise ValueError(
            "rollout.weights=fp8 is for engines of one process: set placement.engine_tensor=1 or rollout.weights=model"
        )
    if config.model.backend == "transformers" or config.rollout.engine == "transformers":
        raise ValueError("placement.engine_tensor needs the native decoder, but the model runs through transformers")
    if config.model.lora is not None and config.model.lora.base != "dtype":
        raise ValueError(
            f"placement.engine_tensor cannot split matrices in 4 bits (model.lora.base={config.model.lora.base}): use base=dtype"
        )


def _check_roles(config: TrainConfig, placement: RayPlacement) -> None:
    """Refuse a pool for a role that the run does not have, and a reference that must be with the actor."""
    algorithm, reference = config.algorithm, config.algorithm.kl.reference
    if getattr(reference, "url", None) is not None:
        raise ValueError(
            "algorithm.kl.reference.url is asked by the learner's process: set placement=local, or path instead"
        )
    if reference.name == "teachers" or algorithm.kl.context.name != "prompt":
        raise ValueError(
            "several teachers and algorithm.kl.context read columns that are not sent to workers: set placement=local, or use one teacher"
        )
    if algorithm.loss.name == "gold":
        raise ValueError(
            "loss gold reads columns that are not sent to workers: set placement=local, or use a teacher with the policy's tokenizer"
        )
    if REFERENCE in placement.roles and not reference.has_weights:
        raise ValueError(f"placement.roles.reference has no effect: algorithm.kl.reference is {reference.name}")
    if CRITIC in placement.roles and algorithm.critic is None:
        raise ValueError("placement.roles.critic has no effect: the algorithm has no critic")
    if placement.is_separate(REWARD) and all(part.name == "judge" for part in config.reward.parts):
        raise ValueError(
            "placement.roles.reward has no effect: every part of the reward is a judge, which the driver calls; remove the role and its pool"
        )
    if placement.pools and config.model.device.startswith("cuda") and not placement.pools[placement.roles[ACTOR]].gpu:
        raise ValueError(
            f"model.device={config.model.device}, but placement.pools.{placement.roles[ACTOR]}.gpu=false leaves actor and engines without "
            "a GPU: set model.device=cpu, or leave gpu=false out"
        )
    if placement.is_separate(REFERENCE):
        if reference.name not in FIXED_REFERENCES:
            raise ValueError(
                f"algorithm.kl.reference={reference.name} follows the policy's weights, so it must be in the actor's processes: put "
                f"placement.roles.reference in the actor's pool, or use {' or '.join(FIXED_REFERENCES)}"
            )
        if algorithm.compares_vocabulary:
            raise ValueError(
                "algorithm.kl.loss.estimator=full (or loss divergence) compares whole distributions during the policy's update: put "
                "placement.roles.reference in the actor's pool, or use another estimator"
            )
