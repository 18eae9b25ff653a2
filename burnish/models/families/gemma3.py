"""Gemma 3, text only (Gemma team 2025, 2503.19786): five layers that see a window to one that sees everything.

What differs from the plain decoder: layers of two kinds with rotations of their own; norms that multiply by 1 + weight; a
norm behind attention and behind the MLP too, before the residual; normed queries and keys; scores scaled by a number of
the config instead of the head size; an embedding multiplied by the root of the width; GELU in the gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.models.families.family import Config, Family

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture

LOCAL, FULL = "sliding_attention", "full_attention"
PATTERN = 6  # every sixth layer is full, where the config does not list them
WINDOW = 4096  # transformers' default
LOCAL_THETA, FULL_THETA = 10_000.0, 1_000_000.0
NEW_WINDOW = 512  # of a model made from nothing


def layer_kinds(config: Config) -> list[str]:
    """The kind of every layer."""
    kinds = config.get("layer_types")
    if kinds is not None:
        return list(kinds)
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or PATTERN
    return [FULL if (index + 1) % pattern == 0 else LOCAL for index in range(config["num_hidden_layers"])]


def rope(config: Config, kind: str) -> dict[str, Any]:
    """The rotation of a kind of layer; older configs have two base frequencies, and scaling for the full layers alone."""
    nested = config.get("rope_parameters") or {}
    if kind in nested:
        return dict(nested[kind])
    if kind == LOCAL:
        return {"rope_type": "default", "rope_theta": config.get("rope_local_base_freq", LOCAL_THETA)}
    scaling = dict(config.get("rope_scaling") or nested or {})
    scaling["rope_type"] = scaling.get("rope_type") or scaling.pop("type", None) or "default"
    return {"rope_theta": config.get("rope_theta", FULL_THETA), **scaling}


def refuse(config: Config) -> str | None:
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
    if rope(config, LOCAL).get("rope_type", "default") != "default":
        return "the rotation of its sliding layers is scaled"
    return None


def read(config: Config) -> dict[str, Any]:
    """The fields that follow from the config."""
    kinds, full = layer_kinds(config), rope(config, FULL)
    head_dim = config.get("head_dim") or 256
    return {
        "head_dim": head_dim,
        "rope_theta": float(full["rope_theta"]),
        "rope_scaling": full if full.get("rope_type", "default") != "default" else None,
        "local_theta": float(rope(config, LOCAL)["rope_theta"]),
        "window": config.get("sliding_window") or WINDOW,
        "local_layers": tuple(kind == LOCAL for kind in kinds),
        "query_scale": (head_dim / config.get("query_pre_attn_scalar", 256)) ** 0.5,
        "tied": bool(config.get("tie_word_embeddings", True)),
        "max_positions": config.get("max_position_embeddings", 131_072),
    }


def write(arch: Architecture) -> dict[str, Any]:
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


def invent(num_layers: int) -> dict[str, Any]:
    """A new model of so many layers: the published pattern, of which at least the last layer is full."""
    local = tuple((index + 1) % PATTERN != 0 and index + 1 < num_layers for index in range(num_layers))
    return {"local_layers": local, "window": NEW_WINDOW, "local_theta": LOCAL_THETA, "rope_theta": FULL_THETA}


GEMMA3 = Family(
    "Gemma3ForCausalLM",
    fixed={"qk_norm": True, "out_norms": True, "norm_shift": 1.0, "activation": "gelu_tanh", "scaled_embedding": True},
    read=read,
    write=write,
    refuse=refuse,
    invent=invent,
    needs_bos=True,
    norms={
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
)
