"""Memory plan of a configuration on this machine: derives the input of `planner.py` from the config.

Lengths are the longest that the config allows, since real lengths are not known before the data is read.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from burnish.algorithms.terms.spec import TeacherReference, TeachersReference
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.model import Lora, Model
from burnish.config.placement import Parallel
from burnish.config.plugins import is_reference
from burnish.config.rollout import WEIGHT_FAULTS, Opponents
from burnish.config.schema import PreferConfig, Preference, RewardModel, RewardModelConfig, Sft, SftConfig, TrainConfig
from burnish.data.tasks.registry import alphabet_of
from burnish.memory_plan.kv_cache import cache_token_bytes, plan_cache
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, GIB, PROCESS_BYTES, MemoryPlan, RunSetup, plan_memory
from burnish.memory_plan.suggestions import check_plan, plan_line, plan_text
from burnish.models.architecture import (
    Architecture,
    architecture_from_hf,
    new_architecture,
    read_config,
    why_not_native,
)
from burnish.models.kernels.fp8 import FP8_SCALE_BYTES
from burnish.models.lora.peft_files import base_model_of, is_adapter, read_lora_config
from burnish.models.policy import find_directory
from burnish.models.tokenizer import EOS, PAD
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.reward_parts import JUDGE, MODEL, RewardModelOptions

AnyConfig = TrainConfig | SftConfig | PreferConfig | RewardModelConfig
DEFAULT_VLLM_CACHE = 4 * GIB
"""Size of the KV cache of vLLM in this process, unless the config sets it."""
JUDGE_CACHE_GIB = 2.0
"""Size of the KV cache of a judge on a GPU, unless its options set it."""
FAULTS_WITH_OWN_WEIGHTS = ("noise", "stale", "quantised", "never_loaded")
"""Mismatch faults whose engine has a copy of the weights."""


@dataclass(frozen=True)
class PlannedRun:
    """The memory that a run needs, and what the machine has."""

    stages: dict[str, MemoryPlan]
    """Plans by stage, in order."""
    capacity: int | None
    """Bytes of the device; None if the device is not on this machine."""
    host_capacity: int | None
    is_gpu: bool
    reason: str | None = None
    """Why there is no plan."""
    judges: int = 0
    """Bytes of the device for judges in other processes; `capacity` is without them."""

    def check(self) -> list[str]:
        """Return warnings for the user; raise if a stage cannot fit."""
        if self.capacity is None:
            return []
        found = [check_plan(made, self.capacity, self.host_capacity) for made in self.stages.values()]
        return [text for text in found if text is not None]

    @property
    def verdict(self) -> str:
        """One line on whether the run fits, if `check` returned no warning."""
        if not self.stages:
            return "memory: whether the run fits is not known"
        return "memory: the run fits" if self.capacity is not None else "memory: the device of this run is not here"

    @property
    def text(self) -> str:
        """The plan in full on a GPU, in one line on a CPU; judges in a further line."""
        judges = f"\nbeside it judges: {self.judges / GIB:.2f} GiB" if self.judges else ""
        return self._plan_text + judges

    @property
    def _plan_text(self) -> str:
        if self.reason is not None:
            return f"memory: not planned, {self.reason}"
        if not self.is_gpu:
            largest = max(self.stages.values(), key=lambda made: made.total)
            return plan_line(largest, self.capacity)
        texts = [plan_text(made, self.capacity) for made in self.stages.values()]
        if len(texts) == 1:
            return texts[0]
        return "\n".join(f"{name}: {text}" for name, text in zip(self.stages, texts, strict=True))


def plan_run(config: AnyConfig, base: Path | None) -> PlannedRun:
    """Plan the memory of a run."""
    is_gpu = is_gpu_device(config.model.device)
    capacity, host_capacity = _device_bytes(config.model.device, is_gpu), _host_bytes()
    if isinstance(config, TrainConfig) and (judges := judges_bytes(config, is_gpu, base)):
        left = None if capacity is None else max(0, capacity - judges)
        return replace(_plan_stages(config, base, is_gpu, left, host_capacity), judges=judges)
    return _plan_stages(config, base, is_gpu, capacity, host_capacity)


def _plan_stages(
    config: AnyConfig, base: Path | None, is_gpu: bool, capacity: int | None, host_capacity: int | None
) -> PlannedRun:
    more = config.reward_model.characters if isinstance(config, RewardModelConfig) else ""
    found = _architecture(config.model, _data_sources(config), config.seed, base, more)
    if isinstance(found, str):
        return PlannedRun({}, capacity, host_capacity, is_gpu, found)
    arch, lora = found
    if isinstance(config, TrainConfig) and config.placement.name != "local":
        return PlannedRun(
            {}, capacity, host_capacity, is_gpu, f"placement={config.placement.name} has the model on other processes"
        )
    if isinstance(config, SftConfig):
        setup = _sft_setup(config.model, config.sft, arch, lora, is_gpu, "sft")
        return PlannedRun(
            {"sft": _plan_setup(config, _per_process(setup, config.parallel))}, capacity, host_capacity, is_gpu
        )
    if isinstance(config, PreferConfig):
        setup = _preference_setup(config, arch, lora, is_gpu)
        return PlannedRun(
            {"preference": _plan_setup(config, _per_process(setup, config.parallel))}, capacity, host_capacity, is_gpu
        )
    if isinstance(config, RewardModelConfig):
        return PlannedRun(
            {"reward model": _plan_setup(config, _reward_model_setup(config, arch, lora, is_gpu))},
            capacity,
            host_capacity,
            is_gpu,
        )
    process = _process_architecture(config, arch, base)
    if isinstance(process, str):
        return PlannedRun({}, capacity, host_capacity, is_gpu, process)
    stages = {}
    if config.warm_start is not None:
        supervised = _sft_setup(config.model, config.warm_start, arch, lora, is_gpu, "warm_start")
        stages["warm start"] = _plan_setup(config, supervised)
    stages["training"] = _plan_setup(config, _rl_setup(config, arch, lora, process, is_gpu, capacity, base))
    return PlannedRun(stages, capacity, host_capacity, is_gpu)


def _plan_setup(config: AnyConfig, setup: RunSetup) -> MemoryPlan:
    """Plan a setup. 4-bit weights are not suggested where the config refuses them."""
    is_cut = not isinstance(config, RewardModelConfig) and config.parallel.tensor > 1
    mismatch = config.rollout.mismatch if isinstance(config, TrainConfig) else None
    is_changed = mismatch is not None and mismatch.name in WEIGHT_FAULTS
    may_quantise = config.model.adapter is None and not is_cut and not is_changed
    tower = config.model.vision or ("frozen" if config.model.new is None else "trained")
    return plan_memory(replace(setup, may_quantise=may_quantise, tower=tower))


def _data_sources(config: AnyConfig) -> list[Source]:
    if isinstance(config, SftConfig):
        return config.sft.data
    if isinstance(config, RewardModelConfig):
        return config.reward_model.data
    if isinstance(config, PreferConfig):
        return config.preference.data
    return [*config.data.train, *config.data.validation]


def _architecture(
    model: Model, sources: list[Source], seed: int, base: Path | None, characters: str = ""
) -> tuple[Architecture, Lora | None] | str:
    """The architecture of the policy and its adapters, or the reason why it is unknown.

    A new one's tokenizer has the characters of the sources and the given ones.
    """
    try:
        if model.path is None and model.adapter is None:
            made = new_policy(model, sources, seed, characters)
            return made if isinstance(made, str) else (made, None)
        lora, path = model.lora, None if model.path is None else find_directory(model.path, base, with_weights=False)
        if model.adapter is not None:
            adapter = find_directory(model.adapter, base, with_weights=False)
            lora, path = read_lora_config(adapter), path or base_model_of(adapter)
        elif path is not None and is_adapter(path):
            lora, path = read_lora_config(path), base_model_of(path)
        assert path is not None
        config = read_config(path)
        reason = why_not_native(config)
        if reason is None and model.backend != "transformers":
            return architecture_from_hf(config, str(path / "config.json")), lora
    except UserError as error:  # building the policy raises the same error later, with more context
        return str(error)
    return f"the forward pass is transformers' own ({reason or 'model.backend=transformers'})"


def new_policy(model: Model, sources: list[Source], seed: int, characters: str = "") -> Architecture | str:
    """The architecture of a new model, whose tokenizer has the characters of the sources, or the reason why it is unknown."""
    plain = [source.model_copy(update={"options": {}}) for source in sources]  # options do not change the characters
    alphabet = alphabet_of(plain, seed, characters)
    if alphabet is None or model.new is None:
        return "the characters of a new model's tokenizer are not known"
    return new_architecture(model.new, len({PAD, EOS, *alphabet}))


def _sft_setup(model: Model, stage: Sft, arch: Architecture, lora: Lora | None, is_gpu: bool, section: str) -> RunSetup:
    longest = min(stage.max_tokens, arch.max_positions)
    return RunSetup(
        arch,
        model.dtype,
        is_gpu,
        stage.optimizer,
        stage.token_budget,
        longest,
        stage.batch_size * longest,
        activations=stage.activations,
        lora=lora,
        section=section,
    )


def _preference_setup(config: PreferConfig, arch: Architecture, lora: Lora | None, is_gpu: bool) -> RunSetup:
    """Setup of preference training. A cached reference is freed before the first update."""
    alone = "off" if lora is not None and config.model.adapter is None else "copy"
    setup = _pairs_setup(config.preference, config.model.dtype, arch, lora, is_gpu)
    return replace(setup, reference=alone if config.preference.reference == "live" else "none", section="preference")


def _reward_model_setup(config: RewardModelConfig, arch: Architecture, lora: Lora | None, is_gpu: bool) -> RunSetup:
    """Setup of reward-model training: a model without output head."""
    setup = _pairs_setup(config.reward_model, config.model.dtype, replace(arch, tied=True), lora, is_gpu)
    if config.reward_model.steps is not None:  # one sequence for each row
        setup = replace(setup, update_tokens=setup.update_tokens // 2, tokens_per_row=1.0)
    return replace(setup, is_reward_model=True, section="reward_model")


def _pairs_setup(
    stage: Preference | RewardModel, dtype: str, arch: Architecture, lora: Lora | None, is_gpu: bool
) -> RunSetup:
    """Setup with two sequences for each pair, which share their prompt."""
    longest = min(stage.max_tokens, arch.max_positions)
    return RunSetup(
        arch,
        dtype,
        is_gpu,
        stage.optimizer,
        stage.token_budget,
        longest,
        2 * stage.batch_size * longest,
        activations=stage.activations,
        lora=lora,
        tokens_per_row=2.0,
    )


def _per_process(setup: RunSetup, parallel: Parallel) -> RunSetup:
    """The setup of one of the processes that the launcher started."""
    sizes = parallel.sizes(int(os.environ.get("WORLD_SIZE", "1")))
    tokens = -(-setup.update_tokens // sizes.batch_shards)
    return replace(
        setup,
        update_tokens=tokens,
        shards=sizes.shards * sizes.tensor * sizes.pipeline,
        slices=sizes.context,
        expert_ranks=sizes.expert,
    )


def _rl_setup(
    config: TrainConfig,
    arch: Architecture,
    lora: Lora | None,
    process: Architecture | None,
    is_gpu: bool,
    capacity: int | None,
    base: Path | None,
) -> RunSetup:
    training, rollout, algorithm = config.training, config.rollout, config.algorithm
    stages = rollout.all_stages()
    written = max(stage.max_tokens for stage in stages) * config.environment.max_turns
    prompt = min(config.data.max_prompt_tokens, arch.max_positions - 1)
    longest = min(config.environment.max_tokens or prompt + written, arch.max_positions)
    samples = max(stage.n for stage in stages)
    sequences = max(stage.n * stage.prompts for stage in stages)
    back = 1.0 if algorithm.replay is None else 1.0 + algorithm.replay.share
    setup = RunSetup(
        arch,
        config.model.dtype,
        is_gpu,
        training.optimizer,
        training.token_budget,
        longest,
        -(-math.ceil(sequences * back) // training.mini_batches) * longest,
        activations=training.activations,
        in_fp8=training.layers == "fp8",
        lora=lora,
        tokens_per_row=samples * longest / (prompt + samples * (longest - prompt)) if training.share_prefixes else 1.0,
        reference=reference_kind(config, lora),
        teacher=_teacher_parameters(config, arch, base),
        full_kl=algorithm.compares_vocabulary,
        critic=None if algorithm.critic is None else algorithm.critic.optimizer,
        process=None if algorithm.process is None else algorithm.process.optimizer,
        process_arch=process,
        reward_model_bytes=reward_models_bytes(config, base),
        engine_copy=_is_local_engine(config)
        and (
            rollout.engine == "vllm"
            or rollout.source.name != "sync"
            or (rollout.mismatch is not None and rollout.mismatch.name in FAULTS_WITH_OWN_WEIGHTS)
        ),
        fp8_copy=rollout.weights.name == "fp8",
        plain_copy=rollout.engine == "vllm",
        opponents=rollout.opponents.at_once if isinstance(rollout.opponents, Opponents) else 0,
        overlaps=rollout.source.name != "sync",
    )
    return replace(setup, cache=_cache_bytes(config, setup, sequences, capacity))


def reference_kind(config: TrainConfig, lora: Lora | None) -> str:
    """What a run holds of its reference: none, off (the adapters disabled), copy, ema, or teacher."""
    slot = config.algorithm.kl.reference
    if not slot.has_weights or slot.name == "policy" or slot.is_served or (slot.name == "iterate" and slot.every == 1):
        return "none"
    if slot.name == "frozen" and lora is not None and config.model.adapter is None:
        return "off"
    if teacher_paths(config):
        return "teacher"
    return "ema" if slot.name == "ema" else "copy"


def _teacher_parameters(config: TrainConfig, arch: Architecture, base: Path | None) -> int:
    """Number of parameters of all teachers; the policy's for one that an earlier stage makes; 0 for one that is unknown."""
    total = 0
    for path in teacher_paths(config):
        found = None if is_reference(path) else _architecture(Model(path=path), [], config.seed, base)
        total += arch.num_parameters if found is None else 0 if isinstance(found, str) else found[0].num_parameters
    return total


def teacher_paths(config: TrainConfig) -> list[str]:
    """The models of all teachers that the run loads."""
    slot = config.algorithm.kl.reference
    if isinstance(slot, TeachersReference):
        return list(slot.directories.values())
    return [slot.path] if isinstance(slot, TeacherReference) and slot.path is not None else []


def _process_architecture(config: TrainConfig, arch: Architecture, base: Path | None) -> Architecture | str | None:
    """The architecture of a process reward model with weights of its own, or the reason why it is unknown; None without one.

    One that an earlier stage makes has the policy's.
    """
    process = config.algorithm.process
    if process is None or process.path is None:
        return None
    if is_reference(process.path):
        return arch
    found = _architecture(Model(path=process.path), [], config.seed, base)
    return f"algorithm.process.path={process.path}: {found}" if isinstance(found, str) else found[0]


HELD_WHILE_SAMPLING = (
    "weights", "reference", "teacher", "engine's weights", "engine's fp8 matrices", "opponents", "reward models"
)  # fmt: skip
"""Parts of a plan that are there when the engine makes its cache."""


def _cache_bytes(config: TrainConfig, setup: RunSetup, sequences: int, capacity: int | None) -> int:
    """Bytes of the engine's KV cache: as configured, or for all rows at their longest, at most a share of a GPU."""
    arch, rollout = setup.arch, config.rollout
    if not _is_local_engine(config):
        return 0
    size = None if rollout.cache_gib is None else int(rollout.cache_gib * GIB)
    if rollout.engine == "vllm":
        return size or DEFAULT_VLLM_CACHE
    element, scale = (1, FP8_SCALE_BYTES) if rollout.cache_dtype == "fp8" else (getattr(torch, setup.dtype).itemsize, 0)
    is_dense = not setup.on_gpu and not rollout.is_paged
    token = cache_token_bytes(arch, element, scale, is_expanded=rollout.exact or is_dense)
    if is_dense:
        return min(rollout.max_rows, sequences) * setup.longest * token
    held = [part.bytes for part in plan_memory(setup).resident if part.name in HELD_WHILE_SAMPLING]
    free = None if capacity is None else max(0, capacity - CUDA_CONTEXT_BYTES - sum(held))
    return plan_cache(
        token_bytes=token,
        max_rows=rollout.max_rows,
        longest=setup.longest,
        free_bytes=free,
        cache_bytes=size,
        num_contexts=sequences if config.environment.max_turns > 1 else 0,
    ).bytes


def _is_local_engine(config: TrainConfig) -> bool:
    """Whether the engine runs in this process, not on a server."""
    rollout = config.rollout
    return rollout.engine != "sglang" and not (rollout.vllm is not None and rollout.vllm.url is not None)


# --- reward models and judges on the policy's device -------------------------------------------------------------------


def reward_models_bytes(config: TrainConfig, base: Path | None) -> int:
    """Bytes of reward models in the policy's process on its device. A model that an earlier stage makes is not counted."""
    total = 0
    for index, part in enumerate(config.reward.parts):
        if part.name == MODEL:
            options = RewardModelOptions.of(part.options, f"reward.parts[{index}] (model)")
            if not is_reference(options.path) and _gpu_index(options.device) == _gpu_index(config.model.device):
                directory = find_directory(options.path, base, with_weights=False)
                whole = base_model_of(directory) if is_adapter(directory) else directory
                total += _model_bytes(whole, options.dtype, has_head=False)
    return total


def judges_bytes(config: TrainConfig, is_gpu: bool, base: Path | None) -> int:
    """Bytes of local judges on the policy's device: weights, KV cache, and the process itself. A model that an earlier stage makes
    is not counted."""
    total = 0
    for index, part in enumerate(config.reward.parts):
        if part.name != JUDGE:
            continue
        options = JudgeOptions.of(part.options, f"reward.parts[{index}] (judge)")
        if (
            options.path is None
            or is_reference(options.path)
            or _gpu_index(options.device) != _gpu_index(config.model.device)
        ):
            continue
        directory = find_directory(options.path, base, with_weights=False)
        cache = options.cache_gib if options.cache_gib is not None else (JUDGE_CACHE_GIB if is_gpu else 0.0)
        total += (
            _model_bytes(directory, options.dtype)
            + int(cache * GIB)
            + (CUDA_CONTEXT_BYTES if is_gpu else PROCESS_BYTES)
        )
    return total


def _model_bytes(directory: Path, dtype: str, has_head: bool = True) -> int:
    """Bytes of a model, from its architecture if it is native, else from its files."""
    config = read_config(directory)
    if why_not_native(config) is None:
        arch = architecture_from_hf(config, str(directory / "config.json"))
        arch = arch if has_head else replace(arch, tied=True)
        return arch.num_parameters * getattr(torch, dtype).itemsize
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def is_gpu_device(device: str) -> bool:
    """Whether a device of a config is a GPU on this machine."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _gpu_index(device: str) -> int | None:
    """Index of the GPU; None for the CPU."""
    return int(device.partition(":")[2] or 0) if is_gpu_device(device) else None


# --- the machine -------------------------------------------------------------------------------------------------------


def _device_bytes(device: str, is_gpu: bool) -> int | None:
    """Bytes of the device that are free for a run."""
    if not is_gpu:
        return _host_bytes()
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(torch.device("cuda" if device == "auto" else device))
    return int(min(total, free + CUDA_CONTEXT_BYTES))  # the query itself creates a CUDA context


def _host_bytes() -> int | None:
    """Memory of the machine, or of the container."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdecimal() else total
