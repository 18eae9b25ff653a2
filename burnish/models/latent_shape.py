"""The shape of multi-head latent attention (DeepSeek-V2, 2405.04434), and how DeepSeek-V3's config.json (2412.19437) expresses it.

Keys and values of all heads come from one compressed vector of a token, the latent. A head has `nope_dim` dimensions without rotation,
and `rope_dim` with. The rotated part of the keys is one vector for all heads. YaRN (2309.00071) scales the frequencies, and DeepSeek
multiplies the scores by the square of its `mscale_all_dim` factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.models.expert_shape import deepseek_experts, deepseek_keys
from burnish.models.expert_shape import deepseek_why_unsupported as experts_problem

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture

DEEPSEEK_DEFAULTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128}
"""Values of a config.json without these keys, as in transformers."""
DEFAULT_QUERY_RANK = 1536
HEADS_PER_PROGRAM = 16
"""Query heads of one program of the decode kernel over latents (`kernels/triton/latent_decode.py`)."""


@dataclass(frozen=True)
class LatentShape:
    """The sizes of multi-head latent attention."""

    query_rank: int | None
    """Width of the queries' own latent; None if queries are projected from the hidden state."""
    rank: int
    """Width of the latent of keys and values."""
    nope_dim: int
    """Dimensions of a query or key head that are not rotated."""
    rope_dim: int
    """Dimensions of a query or key head that are rotated."""
    value_dim: int
    """Dimensions of a value head."""
    interleaved: bool = True
    """Whether the rotated pairs are neighbours in the weights; otherwise a pair is half of `rope_dim` apart."""

    @property
    def head_dim(self) -> int:
        """Dimensions of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_size(self) -> int:
        """Width of everything that is projected down from the hidden state."""
        return (self.query_rank or 0) + self.rank + self.rope_dim


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor by which YaRN multiplies rotated queries and keys."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def deepseek_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Architecture` from a DeepSeek-V3 config."""
    sizes = {key: config.get(key) or default for key, default in DEEPSEEK_DEFAULTS.items()}
    latent = LatentShape(
        query_rank=config.get("q_lora_rank", DEFAULT_QUERY_RANK),
        rank=sizes["kv_lora_rank"],
        nope_dim=sizes["qk_nope_head_dim"],
        rope_dim=sizes["qk_rope_head_dim"],
        value_dim=sizes["v_head_dim"],
        interleaved=bool(config.get("rope_interleave", True)),
    )
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    mscale = scaling.get("mscale_all_dim") or 0.0
    return {
        **deepseek_experts(config),
        "latent": latent,
        "head_dim": latent.head_dim,
        "num_kv_heads": config["num_attention_heads"],
        "qkv_bias": bool(config.get("attention_bias", False)),
        "out_bias": bool(config.get("attention_bias", False)),
        "query_scale": yarn_factor(scaling["factor"], mscale) ** 2 if mscale and scaling.get("factor") else 1.0,
        "max_positions": config.get("max_position_embeddings", 4096),
        "num_ignored_layers": config.get("num_nextn_predict_layers") or config.get("num_mtp_layers") or 0,
    }


def deepseek_why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the native decoder does not support a DeepSeek-V3 config."""
    latent = deepseek_fields(config)["latent"]
    if latent.nope_dim % 2 or latent.rope_dim % 2:
        return f"its heads have {latent.nope_dim} dimensions and {latent.rope_dim} rotated ones, and both must be even"
    if latent.value_dim > latent.head_dim:
        return f"its value heads ({latent.value_dim}) are wider than its key heads ({latent.head_dim})"
    return experts_problem(config)


def deepseek_config_keys(arch: Architecture) -> dict[str, Any]:
    """Keys of a DeepSeek-V3 config."""
    latent = arch.latent
    assert latent is not None
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rope_dim,
        "rope_interleave": latent.interleaved,
        "num_nextn_predict_layers": arch.num_ignored_layers,
        **deepseek_keys(arch),
    }
