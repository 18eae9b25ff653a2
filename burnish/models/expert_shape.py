"""The shape of a mixture of experts: how many experts, how large, in which layers, and how a token chooses among them.

Families differ in the router. Mixtral (2401.04088) and Qwen3-MoE (2505.09388) normalise the probabilities of the chosen
experts, OLMoE (2409.02060) does not. DeepSeek-V3 (2412.19437) scores by a sigmoid, adds a bias to the scores for the choice
only, and chooses among the experts of the best groups. The functions below read and write the config.json of the families
with experts; `model_families.py` has their entries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture

MAX_EXPERTS = 1 << 14
"""Largest number of experts that is accepted. Published models have a few hundred; a damaged number would be allocated."""


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a decoder, and how a token chooses among them."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Width of the gated MLP of one expert."""
    layers: tuple[bool, ...] | None = None
    """Which layers have experts; the others have a dense MLP. None means all of them."""
    normalised: bool = True
    """Whether the weights of the chosen experts are divided by their sum."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts, from the router's logits."""
    has_score_bias: bool = False
    """Whether a bias for each expert is added to the scores for the choice, but not for the weights (DeepSeek-V3)."""
    num_groups: int = 1
    """Groups of neighbouring experts. A group's score is the sum of its two best scores."""
    chosen_groups: int = 1
    """A token chooses among the experts of this number of best groups."""
    weight_scale: float = 1.0
    """Factor of the weights."""
    shared_size: int = 0
    """Width of a gated MLP beside the experts that computes every token (the shared experts of DeepSeek-V3); 0 is none."""

    def in_layer(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.layers is None or self.layers[layer]


NEW_MODEL_EXPERTS = ExpertShape(num_experts=8, experts_per_token=2, expert_size=168)
"""Experts of a new model that does not say."""


def new_expert_fields(_: int) -> dict[str, Any]:
    """Fields of a new model with experts in every layer."""
    return {"experts": NEW_MODEL_EXPERTS}


@dataclass(frozen=True)
class ExpertNames:
    """Names of a layer's expert tensors in published checkpoints; `{}` is the number of an expert."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    module: str = "mlp"
    """Name of the experts in transformers' modules, which have stacked tensors `experts.gate_up_proj` [experts, 2 * size, hidden]
    and `experts.down_proj`, and the router `gate`."""
    shared: str = "mlp.shared_experts"
    """The MLP that computes every token, in a family that has one."""


MIXTRAL_NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def shape_problem(config: Mapping[str, Any]) -> str | None:
    """Why the numbers of experts in a config.json cannot be; None if they can."""
    num_experts, chosen = _num_experts(config), config.get("num_experts_per_tok")
    for name, value in (("num_experts", num_experts), ("num_experts_per_tok", chosen)):
        if not isinstance(value, int) or not 0 < value <= MAX_EXPERTS:
            return f"{name} is {value!r}, not a number from 1 to {MAX_EXPERTS:,}"
    assert isinstance(num_experts, int)
    assert isinstance(chosen, int)
    return f"a token has {chosen} experts, and there are {num_experts}" if chosen > num_experts else None


def _num_experts(config: Mapping[str, Any]) -> Any:
    """Three names are in use: older configs of Qwen3-MoE and OLMoE have the first, Mixtral and newer ones the second, DeepSeek the third."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((config[name] for name in names if config.get(name) is not None), None)


def qwen3_moe_why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the native decoder does not support a Qwen3-MoE config."""
    if _num_experts(config) == 0:
        return None  # every layer is dense
    if not isinstance(config.get("moe_intermediate_size"), int):
        return "it gives no number for 'moe_intermediate_size'"
    step = config.get("decoder_sparse_step", 1)
    if not isinstance(step, int) or step < 1:
        return f"decoder_sparse_step is {step!r}, not a number of 1 or more"
    return shape_problem(config)


def qwen3_moe_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a Qwen3-MoE config. Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it."""
    if _num_experts(config) == 0:
        return {"experts": None}
    num_layers, step = config["num_hidden_layers"], config.get("decoder_sparse_step", 1)
    dense = set(config.get("mlp_only_layers") or ())
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers))
    shape = ExpertShape(
        _num_experts(config),
        config["num_experts_per_tok"],
        config["moe_intermediate_size"],
        None if all(layers) else layers,
        normalised=bool(config.get("norm_topk_prob", False)),
    )
    return {"experts": shape if any(layers) else None}


def qwen3_moe_keys(arch: Architecture) -> dict[str, Any]:
    """The keys of `qwen3_moe_experts`."""
    shape = arch.experts
    if shape is None:
        return {"num_experts": 0}
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": shape.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(arch.num_layers) if not shape.in_layer(i)],
    }


def mixtral_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a Mixtral config; all layers have them, and the window of all layers is optional."""
    shape = ExpertShape(_num_experts(config), config["num_experts_per_tok"], config["intermediate_size"])
    return {"experts": shape, "window": config.get("sliding_window")}


def mixtral_keys(arch: Architecture) -> dict[str, Any]:
    """The keys of `mixtral_experts`."""
    shape = arch.experts
    assert shape is not None, "a Mixtral model has experts"
    return {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "intermediate_size": shape.expert_size,
        "sliding_window": arch.window,
    }


def olmoe_why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the native decoder does not support an OLMoE config."""
    return "it has clip_qkv" if config.get("clip_qkv") is not None else shape_problem(config)


def olmoe_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of an OLMoE config; all layers have them."""
    has_bias = bool(config.get("attention_bias", False))
    shape = ExpertShape(
        _num_experts(config),
        config["num_experts_per_tok"],
        config["intermediate_size"],
        normalised=bool(config.get("norm_topk_prob", False)),
    )
    return {
        "experts": shape,
        "qkv_bias": has_bias,
        "out_bias": has_bias,
        "norm_eps": config.get("rms_norm_eps", 1e-5),
    }


def olmoe_keys(arch: Architecture) -> dict[str, Any]:
    """The keys of `olmoe_experts`."""
    shape = arch.experts
    assert shape is not None, "an OLMoE model has experts"
    return {
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "intermediate_size": shape.expert_size,
        "norm_topk_prob": shape.normalised,
    }


def deepseek_why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the native decoder does not support the experts of a DeepSeek-V3 config."""
    if not deepseek_experts(config):
        return None
    shape: ExpertShape = deepseek_experts(config)["experts"]
    groups, chosen, num_experts = shape.num_groups, shape.chosen_groups, shape.num_experts
    if isinstance(num_experts, int) and (num_experts % groups or (groups > 1 and num_experts < 2 * groups)):
        return f"its {num_experts} experts are not {groups} groups of two or more"
    if chosen > groups:
        return f"a token chooses {chosen} groups of experts, and there are {groups}"
    return shape_problem(config)


def deepseek_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Experts of a DeepSeek-V3 config; the first `first_k_dense_replace` layers are dense. Missing keys have transformers' defaults, and
    null is none of something."""
    num_layers, dense = config["num_hidden_layers"], config.get("first_k_dense_replace", 3) or 0
    if dense >= num_layers:
        return {}
    size = config.get("moe_intermediate_size", 2048)
    shape = ExpertShape(
        config.get("n_routed_experts", 256),
        config.get("num_experts_per_tok", 8),
        size,
        None if not dense else tuple(layer >= dense for layer in range(num_layers)),
        normalised=bool(config.get("norm_topk_prob", True)),
        scoring="sigmoid",
        has_score_bias=True,
        num_groups=config.get("n_group", 8) or 1,
        chosen_groups=config.get("topk_group", 4) or 1,
        weight_scale=config.get("routed_scaling_factor", 2.5),
        shared_size=size * (config.get("n_shared_experts", 1) or 0),
    )
    return {"experts": shape}


def deepseek_keys(arch: Architecture) -> dict[str, Any]:
    """The keys of `deepseek_experts`."""
    shape = arch.experts
    if shape is None:
        return {"first_k_dense_replace": arch.num_layers}
    return {
        "first_k_dense_replace": arch.num_layers - arch.num_expert_layers,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": shape.normalised,
        "n_group": shape.num_groups,
        "topk_group": shape.chosen_groups,
        "routed_scaling_factor": shape.weight_scale,
        "n_shared_experts": shape.shared_size // shape.expert_size,
    }
