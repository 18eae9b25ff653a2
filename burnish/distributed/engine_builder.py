"""Builds the engine of a run: the native ones, transformers, vLLM or SGLang, with the wrappers that a run asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.placement import RayPlacement
from burnish.config.rollout import ModelWeights, NoSpeculation, Opponents, Rollout, Speculation
from burnish.config.schema import TrainConfig
from burnish.core.engine import Engine
from burnish.inference.engine_wrappers import MismatchEngine, WeightCopyEngine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.parallel_decoder import ParallelDecoder
from burnish.inference.native.parallel_engine import ParallelEngine
from burnish.inference.opponent_engine import Opponent, OpponentEngine, copy_policy
from burnish.inference.sglang.sglang_engine import SglangEngine
from burnish.inference.transformers_engine import TransformersEngine
from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.inference.vllm.vllm_server import VllmServer
from burnish.memory_plan.kv_cache import GIB
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.policy import (
    PolicyModel,
    full_hf_tensors,
)
from burnish.models.transformers_model import TransformersPolicy
from burnish.rollout.validation import sampling_options
from burnish.training.architecture_checks import check_router


def set_expert_recording(config: TrainConfig, policy: PolicyModel) -> None:
    """Make engines on the policy record the experts of every token, if the algorithm reads them. Call it before `build_engine`."""
    check_router(config, policy.arch)
    if config.algorithm.router.engine_experts != "ignore":
        assert isinstance(policy.module, Decoder), "a policy with an architecture"
        policy.module.records_experts = True


def build_engine(policy: PolicyModel, rollout: Rollout, listener: Callable[[str, int], None] | None = None) -> Engine:
    """The engine that samples from the policy's own tensors, or from altered ones if `rollout.mismatch` is set."""
    if rollout.mismatch is None:
        return _build_engine(policy, rollout, listener)

    def make(module: nn.Module) -> Engine:
        assert isinstance(module, Decoder | TransformersPolicy), "a copy of the policy's own module"
        return _build_engine(replace(policy, module=module), rollout, listener)

    return MismatchEngine(make, policy.module, rollout.mismatch, policy.tokenizer)


def is_foreign(rollout: Rollout) -> bool:
    """Whether the engine is vLLM's or SGLang's, with weights and kernels of its own."""
    return rollout.engine in ("vllm", "sglang")


def driver_rollout(config: TrainConfig) -> Rollout:
    """The settings of the engine that the driver makes before its roles start. On Ray, other processes sample, so it needs no copies."""
    rollout = config.rollout
    if not isinstance(config.placement, RayPlacement):
        return rollout
    plain = {"weights": ModelWeights(), "speculation": NoSpeculation(), "cache_dtype": "auto"}
    if is_foreign(rollout):
        plain |= {"engine": "auto", "vllm": None, "sglang": None, "cache_gib": None}
    return rollout.model_copy(update=plain)


def engine_kind(rollout: Rollout, is_native: bool) -> str:
    """The engine that samples; UserError if it cannot run the policy. `is_native`: the policy is a native decoder."""
    kind = rollout.engine if rollout.engine != "auto" else ("native" if is_native else "transformers")
    if kind == "native" and not is_native:
        raise UserError("rollout.engine=native needs the native decoder; this model runs through transformers")
    if kind == "transformers" and rollout.exact:
        raise UserError("rollout.exact needs the native decoder; this model runs through transformers")
    if kind == "transformers" and (rollout.cache_gib is not None or rollout.cache_dtype != "auto"):
        raise UserError(
            "rollout.cache_gib and cache_dtype need the native decoder; this model runs through transformers"
        )
    if kind == "transformers" and rollout.weights.name != "model":
        raise UserError("rollout.weights=fp8 needs the native decoder; this model runs through transformers")
    if kind == "transformers" and isinstance(rollout.speculation, Speculation):
        raise UserError("rollout.speculation needs the native decoder; this model runs through transformers")
    if kind == "transformers" and is_native:
        raise UserError(
            "rollout.engine=transformers needs model.backend=transformers, so that both use the same weights"
        )
    return kind


def _build_engine(policy: PolicyModel, rollout: Rollout, listener: Callable[[str, int], None] | None) -> Engine:
    kind = engine_kind(rollout, policy.arch is not None)
    if kind == "native":
        assert isinstance(policy.module, Decoder), "checked by engine_kind"
        weight = policy.module.embedding.weight
        if rollout.exact and weight.dtype == torch.float64:
            raise UserError(
                "rollout.exact: the engine reports log-probs in float32; set model.dtype=float32 or bfloat16"
            )
        if rollout.exact:
            policy.module.exact = partial(exact_logprobs, policy.module)
        if weight.is_cuda or rollout.is_paged or policy.module.records_experts:
            return _build_paged(policy.module, rollout, policy.tokenizer.decode, listener)
        # On a CPU a dense cache is faster: its attention does not gather pages.
        return DenseEngine(policy.module, rollout.max_rows, policy.tokenizer.decode, listener)
    if kind == "vllm":
        return _build_vllm(policy, rollout, listener)
    if kind == "sglang":
        return _build_sglang(policy, rollout)
    assert isinstance(policy.module, TransformersPolicy), "checked by engine_kind"
    return TransformersEngine(policy.module, rollout.max_rows, policy.tokenizer.decode, policy.tokenizer.pad_id)


def _build_vllm(policy: PolicyModel, rollout: Rollout, listener: Callable[[str, int], None] | None) -> Engine:
    options = rollout.vllm or Vllm()
    if options.url is None:
        return VllmEngine(policy, options, rollout.max_rows, rollout.cache_gib, listener)
    if listener is not None:
        raise UserError(
            "a vLLM server answers whole completions, so its tokens cannot be streamed: remove rollout.vllm.url"
        )
    return VllmServer(policy, options, rollout.max_rows)


def _build_sglang(policy: PolicyModel, rollout: Rollout) -> Engine:
    assert rollout.sglang is not None, "checked with the config"
    module = policy.module
    vocab_size = (
        module.arch.vocab_size if isinstance(module, Decoder) else module.inner.get_input_embeddings().num_embeddings
    )
    engine = SglangEngine(
        rollout.sglang.urls,
        vocab_size,
        rollout.max_rows,
        policy.tokenizer.decode,
        rollout.sglang.timeout_s,
        rollout.sglang.weights_dir,
        weights=partial(full_hf_tensors, policy),
    )
    engine.check_options(sampling_options(rollout, ()), "rollout")
    return engine


def _build_paged(
    model: Decoder, rollout: Rollout, decode: Callable[[list[int]], str], listener: Callable[[str, int], None] | None
) -> PagedEngine:
    _check_cache_dtype(rollout, model.embedding.weight)
    quantised, size = rollout.cache_dtype == "fp8", _cache_bytes(rollout)
    return PagedEngine(
        model,
        rollout.max_rows,
        decode,
        listener,
        exact=rollout.exact,
        cache_bytes=size,
        quantised=quantised,
        weights=rollout.weights.name,
        speculation=rollout.speculation if isinstance(rollout.speculation, Speculation) else None,
    )


def _cache_bytes(rollout: Rollout) -> int | None:
    return None if rollout.cache_gib is None else int(rollout.cache_gib * GIB)


def _check_cache_dtype(rollout: Rollout, weight: Tensor) -> None:
    """Refuse an 8-bit cache on a GPU without 8-bit floats."""
    if rollout.cache_dtype == "fp8" and weight.is_cuda and torch.cuda.get_device_capability(weight.device) < (8, 9):
        name = torch.cuda.get_device_name(weight.device)
        raise UserError(
            f"rollout.cache_dtype=fp8 needs a GPU that computes with 8-bit floats (Ada, Hopper or later), and this is a {name}"
        )


def build_parallel_engine(
    model: ParallelDecoder, rollout: Rollout, decode: Callable[[list[int]], str]
) -> ParallelEngine:
    """The leader of an engine of several ranks."""
    if rollout.weights.name != "model":
        raise UserError(
            "rollout.weights=fp8 is for engines of one process: set placement.engine_tensor=1 or rollout.weights=model"
        )
    if rollout.cache_dtype == "fp8" and model.arch.qkv_bias:
        raise UserError(
            "rollout.cache_dtype=fp8: keys of this model have a bias, which may be too large for 8 bits, and an engine of several ranks has all "
            "layers in 8 bits: set placement.engine_tensor=1 or rollout.cache_dtype=auto"
        )
    _check_cache_dtype(rollout, model.embedding.weight)
    return ParallelEngine(
        model,
        rollout.max_rows,
        decode,
        cache_bytes=_cache_bytes(rollout),
        quantised=rollout.cache_dtype == "fp8",
        speculation=rollout.speculation if isinstance(rollout.speculation, Speculation) else None,
    )


def engine_with_own_weights(engine: Engine, policy: PolicyModel, rollout: Rollout) -> Engine:
    """The engine for a source that samples while the learner trains. An engine that shares the policy's tensors gets a copy.

    On a GPU the sampling thread and the learner launch kernels to the same stream, so the device works on them in turns.
    """
    if not isinstance(engine, DenseEngine | PagedEngine | TransformersEngine):
        return engine  # a server has its own weights
    device = next(policy.module.parameters()).device
    if device.index:  # the current device of a new thread is the first one
        raise UserError(
            f"rollout.source={rollout.source.name} samples in a thread of its own, which works on the first GPU: set model.device=cuda "
            f"and start the run with CUDA_VISIBLE_DEVICES={device.index}"
        )
    return WeightCopyEngine(lambda module: _build_engine(replace(policy, module=module), rollout, None), policy.module)


def build_opponents(policy: PolicyModel, rollout: Rollout) -> list[Opponent]:
    """Engines on copies of the policy, for the earlier weights that play against it. Call it before the learner is built."""
    num = rollout.opponents.at_once if isinstance(rollout.opponents, Opponents) else 0
    copies = [copy_policy(policy) for _ in range(num)]
    return [Opponent(one, _build_engine(one, rollout, None)) for one in copies]


def find_paged_engine(engine: Engine) -> PagedEngine | None:
    """The paged engine, itself or inside a wrapper; None if there is none."""
    inner = engine.policy if isinstance(engine, OpponentEngine) else engine
    inner = inner.engine if isinstance(inner, MismatchEngine | WeightCopyEngine) else inner
    return inner if isinstance(inner, PagedEngine) else None
