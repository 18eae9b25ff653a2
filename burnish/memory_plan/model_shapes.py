"""Sizes of a model that plans of clusters need: from its config.json alone, or from a table of published models.

Plans must also cover models that are not on this machine and families that the native decoder does not run. So a shape is read from
the keys of a Hugging Face config, dense or with experts, with grouped-query or multi-head latent attention (DeepSeek-V3, 2412.19437).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.schema import TrainConfig
from burnish.memory_plan.from_config import new_policy
from burnish.memory_plan.kv_cache import cache_token_bytes, num_cache_ranks
from burnish.models.architecture import (
    Architecture,
    architecture_from_hf,
    new_architecture,
    read_config,
    why_not_native,
)
from burnish.models.policy import find_directory

NEW_VOCABULARY = 1024
"""Tokens of a new model whose characters are not known before its data is read."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder. Matrices are counted exactly; the scales of norms are left out."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a head. With latent attention the mean of that of keys and of values, which gives the same products."""
    attention_size: int
    """Parameters of a layer's attention."""
    kv_size: int
    """Numbers of one token in the KV cache of a layer."""
    mlp_size: int
    """Width of the MLP of layers without experts."""
    tied: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    """Width of one expert."""
    shared_size: int = 0
    """Width of the experts that compute every token."""
    num_dense_layers: int = 0
    """Layers without experts, if the others have some."""
    tower_size: int = 0
    """Parameters of a vision tower with its projector."""
    is_latent: bool = False
    """Whether attention is multi-head latent attention."""
    arch: Architecture | None = None
    """The architecture, which the checks of a run read; None for a model that runs through transformers."""

    def cache_parts(self, size: int) -> int:
        """Parts into which the ranks of an engine divide the KV cache. With fewer key/value heads than ranks, several have the same one.

        Blocks of latents are divided among neighbours; heads that other ranks have read the same latents.
        """
        return num_cache_ranks(size) if self.is_latent else min(size, self.num_kv_heads)

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def routed_size(self) -> int:
        """Parameters of all routed experts of a layer."""
        return 3 * self.hidden_size * self.expert_size * self.num_experts

    @property
    def common_size(self) -> int:
        """Parameters of all layers that are no routed experts."""
        dense = 3 * self.hidden_size * self.mlp_size * (self.num_layers - self.num_expert_layers)
        beside = (
            3 * self.hidden_size * self.shared_size + self.hidden_size * self.num_experts
        ) * self.num_expert_layers
        return self.num_layers * self.attention_size + dense + beside

    @property
    def num_parameters(self) -> int:
        """Number of parameters; a tied embedding counts once."""
        layers = self.common_size + self.num_expert_layers * self.routed_size
        return layers + self.embedding_size * (2 - self.tied) + self.tower_size

    @property
    def embedding_size(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def active_size(self) -> int:
        """Parameters of the layers that compute one token."""
        return self.common_size + self.active_routed_size

    @property
    def active_routed_size(self) -> int:
        """Parameters of the routed experts that compute one token, over all layers."""
        return self.num_expert_layers * 3 * self.hidden_size * self.expert_size * self.experts_per_token

    @property
    def num_active_parameters(self) -> int:
        """Parameters that compute one token, embedding and head included."""
        return self.active_size + self.embedding_size * (2 - self.tied)

    @property
    def active_mlp_size(self) -> int:
        """Width of the MLP that computes one token, as a mean over the layers."""
        chosen = (self.experts_per_token * self.expert_size + self.shared_size) * self.num_expert_layers
        return round((chosen + self.mlp_size * (self.num_layers - self.num_expert_layers)) / self.num_layers)

    def equivalent(self, num_layers: int, tensor: int) -> Architecture:
        """A dense decoder that computes as much as one process of `tensor` does for some of the layers, with the whole head."""
        kv_heads = max(1, self.num_kv_heads // tensor)
        heads = max(kv_heads, -(-self.num_heads // tensor) // kv_heads * kv_heads)
        return Architecture(
            "llama", self.vocab_size, self.hidden_size, num_layers, heads, kv_heads, self.head_dim,
            max(1, self.active_mlp_size // tensor), max_positions=1 << 20, tied=self.tied,
        )  # fmt: skip


def shape_of(config: TrainConfig, base: Path | None) -> ModelShape:
    """The shape of a config's policy: a new one, that of its directory, or a published one of that name."""
    model = config.model
    if model.new is not None:
        made = new_policy(model, [*config.data.train, *config.data.validation], config.seed)
        arch = new_architecture(model.new, NEW_VOCABULARY) if isinstance(made, str) else made
        return shape_of_architecture(arch, "a new model")
    path = model.path or model.adapter
    if path is None:
        raise UserError(
            "no model: give model.path (a Hugging Face directory, or the name of a published model) or model.new"
        )
    found = shape_of_path(path, base)
    return replace(found, arch=None) if model.backend == "transformers" else found


def shape_of_path(path: str, base: Path | None) -> ModelShape:
    """The shape of a model directory, or of a published model of that name."""
    is_here = any((root / path / "config.json").is_file() for root in (Path(), base or Path()))
    if not is_here and (known := published_shape(path)) is not None:
        return known  # nothing is downloaded for a plan
    return shape_from_hf(read_config(find_directory(path, base, with_weights=False)), path)


def shape_from_hf(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a config.json describes."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}  # it is trained converted
    if why_not_native(plain) is None:
        return shape_of_architecture(architecture_from_hf(plain, name), name)
    tied = bool(config.get("tie_word_embeddings") or (config.get("text_config") or {}).get("tie_word_embeddings"))
    config = config.get("text_config") or config
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        layers, vocab, mlp = (int(config[key]) for key in ("num_hidden_layers", "vocab_size", "intermediate_size"))
    except KeyError as error:
        raise UserError(f"{name}: config.json has no {error.args[0]}, so the run cannot be planned") from error
    kv_heads = int(config.get("num_key_value_heads") or heads)
    latent = config.get("kv_lora_rank")
    if latent:
        head_dim, attention, kv_size = _latent_attention(config, hidden, heads)
        kv_heads = heads
    else:
        head_dim = int(config.get("head_dim") or hidden // heads)
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        kv_size = 2 * kv_heads * head_dim
    return ModelShape(
        name, hidden, layers, vocab, heads, kv_heads, head_dim, attention, kv_size, mlp,
        tied, **_experts(config, layers), is_latent=bool(latent),
    )  # fmt: skip


def shape_of_architecture(arch: Architecture, name: str) -> ModelShape:
    """The shape of a model that runs on the native decoder."""
    experts: dict[str, Any] = {}
    if arch.experts is not None:
        one = arch.experts
        experts = {
            "num_experts": one.num_experts, "experts_per_token": one.experts_per_token, "expert_size": one.expert_size,
            "shared_size": one.shared_size, "num_dense_layers": arch.num_layers - arch.num_expert_layers,
        }  # fmt: skip
    attention, kv_size = sum(arch.attention_matrices.values()), cache_token_bytes(arch, 1) // arch.num_layers
    return ModelShape(
        name, arch.hidden_size, arch.num_layers, arch.vocab_size, arch.num_heads, arch.num_kv_heads,
        (arch.head_dim + arch.value_dim) // 2, attention, kv_size, arch.mlp_size, arch.tied, **experts,
        tower_size=0 if arch.vision is None else arch.vision.num_parameters, is_latent=arch.latent is not None, arch=arch,
    )  # fmt: skip


def _latent_attention(config: dict[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """Head width, parameters of a layer and cached numbers of a token, with multi-head latent attention.

    The native engine caches the latent and the rotated key that all heads share (`models/kernels/latent_ops.py`).
    """
    latent, rope, nope, value = (
        int(config[key]) for key in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    rank = config.get("q_lora_rank")
    queries = heads * (nope + rope)
    of_queries = hidden * queries if not rank else int(rank) * (hidden + queries)
    of_keys = hidden * (latent + rope) + latent * heads * (nope + value)
    return (nope + rope + value) // 2, of_queries + of_keys + heads * value * hidden, latent + rope


def _experts(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The expert fields of a shape; none for a dense model."""
    names = ("n_routed_experts", "num_experts", "num_local_experts")
    number = next((int(config[name]) for name in names if config.get(name)), 0)
    if not number:
        return {}
    size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or 0) or int(config.get("n_shared_experts") or 0) * size
    every = int(config.get("decoder_sparse_step") or config.get("moe_layer_freq") or 1)
    dense = int(config.get("first_k_dense_replace") or 0) + len(config.get("mlp_only_layers") or ())
    return {
        "num_experts": number, "experts_per_token": int(config["num_experts_per_tok"]), "expert_size": size, "shared_size": shared,
        "num_dense_layers": min(layers, dense + (layers - dense) * (every - 1) // every),
    }  # fmt: skip


# --- published models ----------------------------------------------------------------------------------------------------

_DENSE_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)
_DENSE: dict[str, tuple[str | int, ...]] = {
    r"Qwen2\.5(-Coder|-Math)?-0\.5B": ("qwen2", 896, 24, 14, 2, 4864, 151936),
    r"(Qwen2\.5(-Coder|-Math)?|Distill-Qwen)-1\.5B": ("qwen2", 1536, 28, 12, 2, 8960, 151936),
    r"Qwen2\.5(-Coder)?-3B": ("qwen2", 2048, 36, 16, 2, 11008, 151936),
    r"(Qwen2\.5(-Coder|-Math)?|Distill-Qwen)-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064),
    r"(Qwen2\.5(-Coder)?|Distill-Qwen)-14B": ("qwen2", 5120, 48, 40, 8, 13824, 152064),
    r"(Qwen2\.5(-Coder)?|Distill-Qwen)-32B": ("qwen2", 5120, 64, 40, 8, 27648, 152064),
    r"Qwen2\.5(-Math)?-72B": ("qwen2", 8192, 80, 64, 8, 29568, 152064),
    r"Qwen3-0\.6B": ("qwen3", 1024, 28, 16, 8, 3072, 151936),
    r"Qwen3-1\.7B": ("qwen3", 2048, 28, 16, 8, 6144, 151936),
    r"Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 9728, 151936),
    r"Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 151936),
    r"Qwen3-14B": ("qwen3", 5120, 40, 40, 8, 17408, 151936),
    r"Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 25600, 151936),
    r"Llama-3(\.1)?-8B|Distill-Llama-8B": ("llama", 4096, 32, 32, 8, 14336, 128256),
    r"Llama-3(\.1|\.3)?-70B|Distill-Llama-70B": ("llama", 8192, 80, 64, 8, 28672, 128256),
    r"Llama-3\.2-1B": ("llama", 2048, 16, 32, 8, 8192, 128256),
    r"Llama-3\.2-3B": ("llama", 3072, 28, 24, 8, 8192, 128256),
    r"Mistral-7B": ("mistral", 4096, 32, 32, 8, 14336, 32768),
}  # fmt: skip
_TIED = r"-(0\.5B|0\.6B|1B|1\.5B|1\.7B|3B|4B)"
"""Published models of these sizes tie their output head."""
_EXPERTS: dict[str, dict[str, Any]] = {
    r"Qwen3-30B-A3B": {
        **dict(zip(_DENSE_KEYS, ("qwen3_moe", 2048, 48, 32, 4, 6144, 151936), strict=True)), "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    r"Qwen3-235B-A22B": {
        **dict(zip(_DENSE_KEYS, ("qwen3_moe", 4096, 94, 64, 4, 12288, 151936), strict=True)), "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536,
    },
    r"Mixtral-8x7B": {
        **dict(zip(_DENSE_KEYS, ("mixtral", 4096, 32, 32, 8, 14336, 32000), strict=True)), "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    r"DeepSeek-(V3|R1)": {
        **dict(zip(_DENSE_KEYS, ("deepseek_v3", 7168, 61, 128, 128, 18432, 129280), strict=True)), "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    },
}  # fmt: skip
"""DeepSeek-V3 is without its module for the prediction of further tokens, which RL does not train."""


def published_shape(path: str) -> ModelShape | None:
    """The shape of the published model that a path or hub id names; None for any other."""
    name = path.partition("@")[0].rstrip("/").rpartition("/")[2]
    for pattern, sizes in _DENSE.items():
        if re.search(rf"({pattern})(?![\d.])", name, re.IGNORECASE):
            config: dict[str, Any] = dict(zip(_DENSE_KEYS, sizes, strict=True))
            is_tied = re.search(_TIED + r"(?![\d.])", name) is not None and "Distill" not in name
            head_dim = 128 if name.startswith("Qwen3") else None
            return shape_from_hf({**config, "tie_word_embeddings": is_tied, "head_dim": head_dim}, name)
    for pattern, config in _EXPERTS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return shape_from_hf(config, name)
    return None
