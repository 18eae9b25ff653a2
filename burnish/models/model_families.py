"""What a family is: how it differs from the plain decoder, and how its config.json says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture


HfConfig = Mapping[str, Any]
"""A config.json."""


def _no_fields(_: Any) -> dict[str, Any]:
    return {}


def _supported(_: HfConfig) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """One row of the table. All fields of `Architecture` have the plain decoder's value unless a family says otherwise."""

    hf_class: str
    """The class of transformers that loads it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Architecture` that are the same in every model of the family."""
    read: Callable[[HfConfig], dict[str, Any]] = _no_fields
    """Fields of `Architecture` that follow from a config.json, besides the sizes that all families name alike."""
    write: Callable[[Architecture], dict[str, Any]] = _no_fields
    """Keys of a config.json for a model that did not come from one, besides those that all families name alike."""
    refuse: Callable[[HfConfig], str | None] = _supported
    """Why a config.json asks for something the decoder does not do; None where it does not."""
    invent: Callable[[int], dict[str, Any]] = _no_fields
    """Fields of `Architecture` for a new model of so many layers."""
    needs_bos: bool = False
    """Whether it writes nonsense after a text without its BOS token, so that one is put there even where a tokenizer's files
    forget it."""
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    """The layer's norms by our names, with theirs."""


# --- What the families that are nearly Llama read from their config.json.


def attention_bias(config: HfConfig) -> dict[str, Any]:
    """`attention_bias` is of all four projections. The classes of other families have no such option, and ignore the key."""
    has_bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def attention_and_mlp_bias(config: HfConfig) -> dict[str, Any]:
    """Those of attention, and those of the MLP."""
    return {**attention_bias(config), "mlp_bias": bool(config.get("mlp_bias", False))}


class WindowFields:
    """One window in all layers."""

    @staticmethod
    def read(config: HfConfig) -> dict[str, Any]:
        return {"window": config.get("sliding_window")}

    @staticmethod
    def write(arch: Architecture) -> dict[str, Any]:
        return {"sliding_window": arch.window}


# --- Gemma 3, text only (Gemma team 2025, 2503.19786): five layers that see a window to one that sees everything.
#
# What differs from the plain decoder: layers of two kinds with rotations of their own; norms that multiply by 1 + weight; a
# norm behind attention and behind the MLP too, before the residual; normed queries and keys; scores scaled by a number of
# the config instead of the head size; an embedding multiplied by the root of the width; GELU in the gate.

LOCAL, FULL = "sliding_attention", "full_attention"
LAYER_PATTERN = 6  # every sixth layer is full, where the config does not list them
DEFAULT_WINDOW = 4096  # transformers' default
LOCAL_THETA, FULL_THETA = 10_000.0, 1_000_000.0
NEW_MODEL_WINDOW = 512  # of a model made from nothing


def layer_kinds(config: HfConfig) -> list[str]:
    """The kind of every layer."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or LAYER_PATTERN
    return [FULL if (index + 1) % pattern == 0 else LOCAL for index in range(config["num_hidden_layers"])]


def rope_parameters(config: HfConfig, kind: str) -> dict[str, Any]:
    """The rotation of a kind of layer; older configs have two base frequencies, and scaling for the full layers alone."""
    nested = config.get("rope_parameters") or {}
    if kind in nested:
        return dict(nested[kind])
    if kind == LOCAL:
        return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    scaling = dict(config.get("rope_scaling") or nested or {})
    scaling["rope_type"] = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    return {"rope_theta": config.get("rope_theta", FULL_THETA), **scaling}


def why_unsupported(config: HfConfig) -> str | None:
    """What Gemma 3's config may ask for that the decoder does not do."""
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if config.get(key):
            return f"it has {key}"
    if config.get("attention_bias"):
        return "its attention has biases"
    unknown = sorted(set(layer_kinds(config)) - {LOCAL, FULL})
    if unknown:
        return f"it has layers of the kind {unknown[0]!r}"
    if len(layer_kinds(config)) != config["num_hidden_layers"]:
        return f"layer_types lists {len(layer_kinds(config))} layers, and there are {config['num_hidden_layers']}"
    if rope_parameters(config, LOCAL).get("rope_type", "default") != "default":
        return "the rotation of its sliding layers is scaled"
    return None


def read_fields(config: HfConfig) -> dict[str, Any]:
    """The fields that follow from the config."""
    kinds, full = layer_kinds(config), rope_parameters(config, FULL)
    head_dim = config.get("head_dim") or 256
    return {
        "head_dim": head_dim,
        "rope_theta": float(full["rope_theta"]),
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "local_theta": float(rope_parameters(config, LOCAL)["rope_theta"]),
        "window": config.get("sliding_window") or DEFAULT_WINDOW,
        "local_layers": tuple(kind == LOCAL for kind in kinds),
        "query_scale": (head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "max_positions": config.get("max_position_embeddings", 131_072),
    }


def write_config(arch: Architecture) -> dict[str, Any]:
    """The keys that say so."""
    local = arch.local_layers or ()
    full_rope = {"rope_type": "default", **(arch.rope_scaling or {}), "rope_theta": arch.rope_theta}
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": arch.window,
        "layer_types": [LOCAL if is_local else FULL for is_local in local],
        "query_pre_attn_scalar": round(arch.head_dim / arch.query_scale**2),
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": arch.local_theta},
            FULL: full_rope,
        },
    }


def new_model_fields(num_layers: int) -> dict[str, Any]:
    """A new model of so many layers: the published pattern, of which at least the last layer is full."""
    local = tuple((index + 1) % LAYER_PATTERN != 0 and index + 1 < num_layers for index in range(num_layers))
    return {"local_layers": local, "window": NEW_MODEL_WINDOW, "local_theta": LOCAL_THETA, "rope_theta": FULL_THETA}


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    fixed={"qk_norm": True, "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True},
    read=read_fields,
    write=write_config,
    refuse=why_unsupported,
    invent=new_model_fields,
    needs_bos=True,
    norms={
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)


# --- The families our decoder covers: one row each.
#
# A family that is Llama with a flag or two is all in its row. One that differs in more has a file beside this one, which
# says how its config.json is read and written, what of it is not covered, and what its tensors are called.

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", read=attention_and_mlp_bias),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, read=attention_bias),
    "mistral": Family("MistralForCausalLM", read=WindowFields.read, write=WindowFields.write),
    "gemma3_text": GEMMA3,
}
