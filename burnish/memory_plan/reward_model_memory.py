"""What models of the reward take of the policy's device: scorers in its process, judges in processes of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from burnish.config.plugins import is_reference
from burnish.config.schema import TrainConfig
from burnish.memory_plan.planner import CONTEXT, GIB, PROCESS
from burnish.models.architecture import from_hf, read_config, why_not_native
from burnish.models.lora.directory import base_of, is_adapter
from burnish.models.policy import find_directory
from burnish.rewards.judge.options import JudgeOptions
from burnish.rewards.reward_parts import JUDGE, MODEL, ScorerOptions

# --- burnish.memory_plan.reward_model_memory

GPU_CACHE_GIB = 2.0
"""Of a judge on a GPU, unless its options say another size."""


def scorers_bytes(config: TrainConfig, base: Path | None) -> int:
    """The weights of reward models in the policy's process and on its device. One that a stage will make is not counted."""
    total = 0
    for index, part in enumerate(config.reward.parts):
        if part.name == MODEL:
            options = ScorerOptions.of(part.options, f"reward.parts[{index}] (model)")
            if not is_reference(options.path) and _place(options.device) == _place(config.model.device):
                directory = find_directory(options.path, base)
                whole = base_of(directory) if is_adapter(directory) else directory
                total += _weights(whole, options.dtype, has_head=False)
    return total


def judges_bytes(config: TrainConfig, is_gpu: bool, base: Path | None) -> int:
    """What judges that are model directories take of the policy's device: weights, cache, and what a process takes before it has any.
    One that a stage will make is not counted."""
    total = 0
    for index, part in enumerate(config.reward.parts):
        if part.name != JUDGE:
            continue
        options = JudgeOptions.of(part.options, f"reward.parts[{index}] (judge)")
        if options.path is None or is_reference(options.path) or _place(options.device) != _place(config.model.device):
            continue
        directory = find_directory(options.path, base)
        cache = options.cache_gib if options.cache_gib is not None else (GPU_CACHE_GIB if is_gpu else 0.0)
        total += _weights(directory, options.dtype) + int(cache * GIB) + (CONTEXT if is_gpu else PROCESS)
    return total


def _weights(directory: Path, dtype: str, has_head: bool = True) -> int:
    """Bytes of a model: by its architecture, or by its files where that is not ours."""
    config = read_config(directory)
    if why_not_native(config) is None:
        arch = from_hf(config, str(directory / "config.json"))
        arch = arch if has_head else replace(arch, tied=True)
        return arch.num_parameters * getattr(torch, dtype).itemsize
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def on_gpu(device: str) -> bool:
    """Whether a device of a config is a GPU here."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _place(device: str) -> int | None:
    """Which GPU; None is the CPU."""
    return int(device.partition(":")[2] or 0) if on_gpu(device) else None
