"""What a config asks of the policy's layers that its architecture does not allow, found before anything starts.

A run, its dry run and plans of clusters (`memory_plan/cluster_plan.py`) call the same checks. `models/model_support.py` has what a
family does not support at all.
"""

from __future__ import annotations

from burnish.algorithms.terms.spec import Router
from burnish.config.errors import UserError
from burnish.config.foreign_engines import is_vllm_in_process
from burnish.config.model import Lora
from burnish.config.placement import RayPlacement
from burnish.config.schema import TrainConfig
from burnish.models.architecture import Architecture
from burnish.models.fp8_layers import check_fp8_architecture
from burnish.models.layer_products import check_fp8_copies
from burnish.models.tensor_shards import check_engine_divisible
from burnish.training.parallel.ranks import check_model_divides


def check_policy_layers(config: TrainConfig, arch: Architecture | None, lora: Lora | None) -> None:
    """Refuse what the policy's layers cannot do: routing, products in 8 bits, and the division over processes of learner and engines.

    `arch` is None for a model that runs through transformers, `lora` are the adapters of the policy.
    """
    check_router(config, arch)
    if arch is None:
        return  # `model_support.py` refuses what needs the native decoder
    is_quantised = lora is not None and lora.base != "dtype"
    if config.training.layers == "fp8":
        check_fp8_architecture(arch, is_quantised)
    if config.rollout.weights.name == "fp8":
        check_fp8_copies(arch, is_quantised)
    placement = config.placement
    if isinstance(placement, RayPlacement):
        check_model_divides(arch, config.parallel, lora)
        if placement.engine_tensor > 1:
            check_engine_divisible(arch, placement.engine_tensor)


def check_router(config: TrainConfig, arch: Architecture | None) -> None:
    """Refuse `algorithm.router` for a model without experts, and recorded experts from an engine that does not record them."""
    router = config.algorithm.router
    if router == Router():
        return
    if arch is None:
        raise UserError(
            "algorithm.router needs the native decoder, and this model runs through transformers: remove the section"
        )
    if arch.experts is None:
        raise UserError("algorithm.router is set, and the model has no experts: remove the section")
    is_recorded = config.rollout.engine in ("auto", "native") or is_vllm_in_process(config)
    if router.engine_experts != "ignore" and not is_recorded:
        raise UserError(
            f"algorithm.router.engine_experts={router.engine_experts} needs an engine that gives the experts of every token: "
            "set rollout.engine=native, or vllm without a server"
        )
