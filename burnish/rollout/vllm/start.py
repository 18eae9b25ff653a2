"""Starting vLLM in this process: its arguments, what it must not change of the process, and a first token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from burnish.config.errors import UserError
from burnish.config.vllm import Vllm
from burnish.models.policy import PolicyModel
from burnish.rollout.vllm.check import Library
from burnish.rollout.vllm.weights import room_for, write_base, write_config

GIB = 1 << 30
CACHE_GIB = 4.0
"""Size of the cache where nothing says another."""
BASE = "base"
"""Folder of the weights below adapters."""
LEAST_SHARE = 0.01
"""Share of memory that vLLM wants to find free at its start; what it takes is the weights and the cache."""


def arguments(
    policy: PolicyModel, options: Vllm, max_rows: int, cache_gib: float | None, folder: Path, can_sleep: bool
) -> dict[str, Any]:
    """What vLLM is started with.

    A policy whose adapters alone are trained starts from its directory, whose weights stay, or from one in `folder` where those
    below the adapters are other numbers; any other from its config.json, written to `folder`, with no weights.
    """
    first = next(policy.module.parameters())
    dtype = str(first.dtype).removeprefix("torch.") if options.dtype == "auto" else options.dtype
    if dtype == "float64":
        raise UserError("vLLM does not compute in float64: set model.dtype=float32, or rollout.vllm.dtype=float32")
    if first.device.index not in (None, 0):
        raise UserError(
            f"model.device={first.device}, and vLLM in this process takes the first GPU: set model.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={first.device.index}"
        )
    if policy.lora is None:
        write_config(policy, folder)
        source: dict[str, Any] = {"model": str(folder), "load_format": "dummy"}
    else:
        rank, directory = room_for(policy.lora.rank), policy.source
        if not policy.is_plain_below:
            directory = folder / BASE
            write_base(policy, directory)
        source = {"model": str(directory), "enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
        source["lora_target_modules"] = list(
            policy.lora.projections
        )  # with an output head among them it scores no prompts
    return source | {
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "seed": 0,
        "max_model_len": options.max_model_len,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": int((CACHE_GIB if cache_gib is None else cache_gib) * GIB),
        "gpu_memory_utilization": LEAST_SHARE,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "enforce_eager": options.enforce_eager,
        "generation_config": "vllm",  # no temperature or penalty of the model's own
        "disable_log_stats": True,
        "enable_sleep_mode": can_sleep,
    }


def start(library: Library, given: dict[str, Any]) -> Any:
    """vLLM's engine. On a CPU it takes `torch.set_num_threads` away from the whole process, which gets it back."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UserError(
            "vLLM in this process makes a process group of its own, and there is one: give a server in rollout.vllm.url"
        )
    set_num_threads = torch.set_num_threads
    try:
        return library.LLMEngine.from_engine_args(library.EngineArgs(**given))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"vLLM {library.version} does not start: {error} (its cache is rollout.cache_gib, its longest sequence rollout.vllm.max_model_len)"
        ) from error
    finally:
        torch.set_num_threads = set_num_threads


def stop(llm: Any) -> None:
    """Give everything back, the process group too. vLLM's groups are the process's: a second engine would lose its own with the
    first one's."""
    llm.engine_core.shutdown()
