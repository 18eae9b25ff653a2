"""Model families that the native decoder supports, one entry of FAMILIES each.

A `Family` says how its models differ from the plain decoder (Llama without biases) and how its config.json expresses that.

Gemma 3, text only (2503.19786), alternates five windowed layers with one full layer. Further differences: separate RoPE
bases of both kinds of layers, norms with weight 1 + w, norms after attention and MLP before the residual, norms of queries
and keys, scores scaled by a number of the config instead of the head size, embeddings multiplied by sqrt(hidden_size), and
GELU in the gate.

Gemma 2 (2408.00118) alternates one windowed layer with one full layer and has one RoPE base. It has no norms of queries and keys:
attention scores and output logits are soft-capped, x -> cap * tanh(x / cap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from burnish.models.expert_shape import (
    MIXTRAL_NAMES,
    ExpertNames,
    mixtral_experts,
    mixtral_keys,
    new_expert_fields,
    olmoe_experts,
    olmoe_keys,
    olmoe_why_unsupported,
    qwen3_moe_experts,
    qwen3_moe_keys,
    qwen3_moe_why_unsupported,
    shape_problem,
)
from burnish.models.latent_shape import deepseek_config_keys, deepseek_fields, deepseek_why_unsupported
from burnish.models.vision.qwen_shape import (
    qwen3_vision,
    qwen25_vision,
    qwen_text_config,
    qwen_vision_keys,
    qwen_vision_why_unsupported,
)
from burnish.models.vision.siglip_shape import (
    SiglipShape,
    gemma3_shape,
    gemma3_text_config,
    idefics3_shape,
    idefics3_text_config,
    siglip_keys,
)
from burnish.models.vision.siglip_shape import why_unsupported as siglip_why_unsupported
from burnish.models.vision.tensor_names import GEMMA3_NAMES, IDEFICS3_NAMES, VisionNames

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture


HfConfig = Mapping[str, Any]
"""The contents of a config.json."""

LOCAL, FULL = "sliding_attention", "full_attention"
LAYER_PATTERN = 6
"""Every sixth layer of Gemma 3 is full, unless the config lists them."""
GEMMA2_PATTERN = 2
"""Every second layer of Gemma 2 is full, unless the config lists them."""
DEFAULT_WINDOW = 4096
"""Window of a Gemma config without one, as in transformers."""
NEW_MODEL_WINDOW = 512
"""Window of a new Gemma model."""
SCORE_SOFTCAP, LOGIT_SOFTCAP = 50.0, 30.0
"""Soft caps of Gemma 2."""
LOCAL_THETA, FULL_THETA = 10_000.0, 1_000_000.0


def _no_fields(_: Any) -> dict[str, Any]:
    return {}


def _supported(_: HfConfig) -> None:
    return None


def _flat(config: HfConfig) -> HfConfig:
    return config


@dataclass(frozen=True)
class Family:
    """A model family. Fields of `Architecture` have the plain decoder's defaults unless the family sets them."""

    hf_class: str
    """The transformers class that loads the family."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Architecture` with the same value in every model of the family."""
    read_fields: Callable[[HfConfig], dict[str, Any]] = _no_fields
    """Fields of `Architecture` from a config.json, besides those that all families share."""
    config_keys: Callable[[Architecture], dict[str, Any]] = _no_fields
    """Keys of the config.json of a model that was created here, besides those that all families share."""
    why_unsupported: Callable[[HfConfig], str | None] = _supported
    """Why the native decoder does not support a config.json; None if it does."""
    new_model_fields: Callable[[int], dict[str, Any]] = _no_fields
    """Fields of `Architecture` of a new model with this number of layers."""
    needs_bos: bool = False
    """Whether texts must begin with BOS even if the tokenizer's files omit it; without it such models generate nonsense."""
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    """Names of a layer's norms: ours, and Hugging Face's."""
    expert_names: ExpertNames | None = None
    """Names of the tensors of experts; None for a family without experts."""
    text_config: Callable[[HfConfig], HfConfig] = _flat
    """A config.json with the keys of the decoder on the top level; image-text models nest them."""
    vision_names: VisionNames | None = None
    """Names of the tensors of an image-text model; None for a text model."""
    text_type: str = ""
    """`model_type` of the text_config of an image-text model, if it is not the family's with `_text`."""

    @property
    def has_experts(self) -> bool:
        """Whether models of the family have experts."""
        return self.expert_names is not None


def attention_bias(config: HfConfig) -> dict[str, Any]:
    """`attention_bias` applies to all four projections. Other families ignore the key."""
    has_bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def attention_and_mlp_bias(config: HfConfig) -> dict[str, Any]:
    """Biases of attention and of the MLP."""
    return {**attention_bias(config), "mlp_bias": bool(config.get("mlp_bias", False))}


def qwen3_moe_fields(config: HfConfig) -> dict[str, Any]:
    """Experts and biases of a Qwen3-MoE config."""
    return {**qwen3_moe_experts(config), **attention_bias(config)}


def window_field(config: HfConfig) -> dict[str, Any]:
    """One attention window for all layers."""
    return {"window": config.get("sliding_window")}


def window_key(arch: Architecture) -> dict[str, Any]:
    """The key of `window_field`."""
    return {"sliding_window": arch.window}


def gemma_layer_types(config: HfConfig) -> list[str]:
    """`sliding_attention` or `full_attention` of every layer."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    pattern = GEMMA2_PATTERN if config["model_type"] == "gemma2" else LAYER_PATTERN
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or pattern
    return [FULL if (index + 1) % pattern == 0 else LOCAL for index in range(config["num_hidden_layers"])]


def gemma3_rope(config: HfConfig, kind: str) -> dict[str, Any]:
    """RoPE parameters of a layer type; older configs have two base frequencies, and scaling of the full layers only."""
    nested = config.get("rope_parameters") or {}
    if kind in nested:
        return dict(nested[kind])
    if kind == LOCAL:
        return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    scaling = dict(config.get("rope_scaling") or nested or {})
    scaling["rope_type"] = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    return {"rope_theta": config.get("rope_theta", FULL_THETA), **scaling}


def gemma_why_unsupported(config: HfConfig) -> str | None:
    """Why the native decoder does not support the layers of a Gemma config."""
    if config.get("use_bidirectional_attention"):
        return "it has use_bidirectional_attention"
    if config.get("attention_bias"):
        return "its attention has biases"
    kinds = gemma_layer_types(config)
    unknown = sorted(set(kinds) - {LOCAL, FULL})
    if unknown:
        return f"it has layers of type {unknown[0]!r}"
    if len(kinds) != config["num_hidden_layers"]:
        return f"layer_types lists {len(kinds)} layers, and there are {config['num_hidden_layers']}"
    return None


def gemma3_why_unsupported(config: HfConfig) -> str | None:
    """Why the native decoder does not support a Gemma 3 config."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(key):
            return f"it has {key}"
    reason = gemma_why_unsupported(config)
    if reason is not None:
        return reason
    if gemma3_rope(config, LOCAL).get("rope_type", "default") != "default":
        return "the rotation of its sliding layers is scaled"
    return None


def gemma_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of `Architecture` that Gemma 2 and 3 have in common."""
    head_dim = config.get("head_dim") or 256
    return {
        "head_dim": head_dim,
        "window": config.get("sliding_window") or DEFAULT_WINDOW,
        "local_layers": tuple(kind == LOCAL for kind in gemma_layer_types(config)),
        "query_scale": (head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5,
        "tied": bool(config.get("tie_word_embeddings", True)),
    }


def gemma2_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of `Architecture` from a Gemma 2 config. A cap that is null is off; one that is missing has the published value."""
    return {
        **gemma_fields(config),
        "score_softcap": config.get("attn_logit_softcapping", SCORE_SOFTCAP),
        "logit_softcap": config.get("final_logit_softcapping", LOGIT_SOFTCAP),
        "max_positions": config.get("max_position_embeddings", 8192),
    }


def gemma3_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of `Architecture` from a Gemma 3 config."""
    full = gemma3_rope(config, FULL)
    return {
        **gemma_fields(config),
        "rope_theta": float(full["rope_theta"]),
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "local_theta": float(gemma3_rope(config, LOCAL)["rope_theta"]),
        "max_positions": config.get("max_position_embeddings", 131_072),
    }


def gemma_config_keys(arch: Architecture) -> dict[str, Any]:
    """Keys that Gemma 2 and 3 have in common."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": arch.window,
        "layer_types": [LOCAL if is_local else FULL for is_local in arch.local_layers or ()],
        "query_pre_attn_scalar": round(arch.head_dim / arch.query_scale**2),
    }


def gemma2_config_keys(arch: Architecture) -> dict[str, Any]:
    """Keys of a Gemma 2 config."""
    return {
        **gemma_config_keys(arch),
        "attn_logit_softcapping": arch.score_softcap,
        "final_logit_softcapping": arch.logit_softcap,
    }


def gemma3_config_keys(arch: Architecture) -> dict[str, Any]:
    """Keys of a Gemma 3 config."""
    full_rope = {"rope_type": "default", **(arch.rope_scaling or {}), "rope_theta": arch.rope_theta}
    return {
        **gemma_config_keys(arch),
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": arch.local_theta},
            FULL: full_rope,
        },
    }


def gemma2_new_model_fields(num_layers: int) -> dict[str, Any]:
    """Fields of a new Gemma 2 model: the published pattern, with the last layer always full."""
    local = tuple((index + 1) % GEMMA2_PATTERN != 0 and index + 1 < num_layers for index in range(num_layers))
    caps = {"score_softcap": SCORE_SOFTCAP, "logit_softcap": LOGIT_SOFTCAP}
    return {"local_layers": local, "window": NEW_MODEL_WINDOW, **caps}


def gemma3_new_model_fields(num_layers: int) -> dict[str, Any]:
    """Fields of a new Gemma 3 model: the published pattern, with the last layer always full."""
    local = tuple((index + 1) % LAYER_PATTERN != 0 and index + 1 < num_layers for index in range(num_layers))
    return {"local_layers": local, "window": NEW_MODEL_WINDOW, "local_theta": LOCAL_THETA, "rope_theta": FULL_THETA}


def gemma3_vision_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of `Architecture` from a Gemma 3 config with a vision tower."""
    vision = {"vision": gemma3_shape(config)} if config.get("vision_config") else {}
    return {**gemma3_fields(config), **vision}


def gemma3_vision_keys(arch: Architecture) -> dict[str, Any]:
    """Keys of a Gemma 3 config with a vision tower."""
    return {**gemma3_config_keys(arch), **vision_keys(arch)}


def gemma3_vision_why_unsupported(config: HfConfig) -> str | None:
    """Why the native decoder does not support a Gemma 3 config with a vision tower."""
    return gemma3_why_unsupported(config) or (siglip_why_unsupported(config) if config.get("vision_config") else None)


def idefics3_fields(config: HfConfig) -> dict[str, Any]:
    """Fields of `Architecture` from a config of Idefics3 or SmolVLM, whose decoder is a Llama."""
    return {**attention_and_mlp_bias(config), "vision": idefics3_shape(config)}


def vision_keys(arch: Architecture) -> dict[str, Any]:
    """Keys of a config with a SigLIP tower, besides those of the decoder."""
    assert isinstance(arch.vision, SiglipShape), f"a {arch.family} model has a SigLIP tower"
    return siglip_keys(arch.vision)


GEMMA_FIXED = {"out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True}
GEMMA_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
GEMMA2 = Family(
    "Gemma2ForCausalLM",
    fixed=GEMMA_FIXED,
    read_fields=gemma2_fields,
    config_keys=gemma2_config_keys,
    why_unsupported=gemma_why_unsupported,
    new_model_fields=gemma2_new_model_fields,
    needs_bos=True,
    norms=GEMMA_NORMS,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    fixed={**GEMMA_FIXED, "qk_norm": True},
    read_fields=gemma3_fields,
    config_keys=gemma3_config_keys,
    why_unsupported=gemma3_why_unsupported,
    new_model_fields=gemma3_new_model_fields,
    needs_bos=True,
    norms=GEMMA_NORMS,
)


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", read_fields=attention_and_mlp_bias),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, read_fields=attention_bias),
    "mistral": Family("MistralForCausalLM", read_fields=window_field, config_keys=window_key),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        read_fields=deepseek_fields,
        config_keys=deepseek_config_keys,
        why_unsupported=deepseek_why_unsupported,
        expert_names=ExpertNames(),
    ),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {"qk_norm": True},
        read_fields=qwen3_moe_fields,
        config_keys=qwen3_moe_keys,
        why_unsupported=qwen3_moe_why_unsupported,
        new_model_fields=new_expert_fields,
        expert_names=ExpertNames(),
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        read_fields=mixtral_experts,
        config_keys=mixtral_keys,
        why_unsupported=shape_problem,
        new_model_fields=new_expert_fields,
        expert_names=MIXTRAL_NAMES,
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {"wide_qk_norm": True},
        read_fields=olmoe_experts,
        config_keys=olmoe_keys,
        why_unsupported=olmoe_why_unsupported,
        new_model_fields=new_expert_fields,
        expert_names=ExpertNames(),
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        {"qkv_bias": True},
        read_fields=qwen25_vision,
        config_keys=qwen_vision_keys,
        why_unsupported=qwen_vision_why_unsupported,
        text_config=qwen_text_config,
        vision_names=VisionNames("model.", "visual.", {"model.language_model.": "model.", "model.visual.": "visual."}),
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        {"qk_norm": True},
        read_fields=qwen3_vision,
        config_keys=qwen_vision_keys,
        why_unsupported=qwen_vision_why_unsupported,
        text_config=qwen_text_config,
        vision_names=VisionNames("model.language_model.", "model.visual."),
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        read_fields=idefics3_fields,
        config_keys=vision_keys,
        why_unsupported=siglip_why_unsupported,
        text_config=idefics3_text_config,
        vision_names=IDEFICS3_NAMES,
        text_type="llama",
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        read_fields=idefics3_fields,
        config_keys=vision_keys,
        why_unsupported=siglip_why_unsupported,
        text_config=idefics3_text_config,
        vision_names=IDEFICS3_NAMES,
        text_type="llama",
    ),
    "gemma3": replace(
        GEMMA3,
        hf_class="Gemma3ForConditionalGeneration",
        read_fields=gemma3_vision_fields,
        config_keys=gemma3_vision_keys,
        why_unsupported=gemma3_vision_why_unsupported,
        text_config=gemma3_text_config,
        vision_names=GEMMA3_NAMES,
    ),
}
