"""Tiny random transformers models saved as Hugging Face directories, the reference for everything in burnish/models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

COMMON = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
# With head size 8 the four wavelengths are 6, 63, 628 and 6283: Llama 3's rule keeps one, blends one, stretches two.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Two windowed layers and one full layer; scores are scaled by another number than the head size.
GEMMA3 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 24,
}
# Small caps, so that they change the scores and the logits of a tiny model.
GEMMA2 = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "sliding_window": 5,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 3.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
    "beta_slow": 1,
}
# All layers are dense, and value heads are narrower than key heads.
DEEPSEEK = {
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.8},
}
# One dense layer, then experts in four groups of which a token chooses two, and a shared MLP of two experts' width.
DEEPSEEK_EXPERTS = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
}
GEMMA3_LINEAR = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MIXTRAL = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "sliding_window": None}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-moe": ("DeepseekV3", DEEPSEEK | DEEPSEEK_EXPERTS),
    "deepseek-plain": (
        "DeepseekV3",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "rope_interleave": False,
            "attention_bias": True,
            "rope_parameters": None,
            "v_head_dim": 18,
        },
    ),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma3": ("Gemma3Text", GEMMA3),
    # The first layer is dense; two of six experts compute a token.
    "qwen3-moe": ("Qwen3Moe", MOE | {"num_hidden_layers": 3, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3-moe-sparse": ("Qwen3Moe", MOE | {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "mixtral": ("Mixtral", MIXTRAL),
    "olmoe": ("Olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 20}),
    "gemma3-linear": ("Gemma3Text", GEMMA3 | {"rope_parameters": GEMMA3_LINEAR, "query_pre_attn_scalar": 16}),
}

OTHER_COMMON: dict[str, Any] = {"vocab_size": 61, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
OTHER_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", OTHER_SIZES),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        OTHER_SIZES | {"head_dim": 8, "num_key_value_heads": 2, "sliding_window": 4},
    ),
}

TinyModel = Callable[..., tuple[Any, Path]]


def randomise(model: Any, seed: int = 0, std: float = 0.2) -> None:
    """Random weights, biases and norm scales, large enough that logits are far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = std * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(noise + (1.0 if "norm" in name or "ln_" in name else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(std * torch.randn(buffer.shape, generator=generator, dtype=torch.float64))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """`tiny_model(variant, tied, dtype)`: a transformers model and the directory it was saved to, created once."""
    made: dict[tuple[str, bool, torch.dtype], tuple[Any, Path]] = {}

    def build(variant: str, tied: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Any, Path]:
        if (variant, tied, dtype) not in made:
            family, options = VARIANTS[variant]
            config = getattr(transformers, f"{family}Config")(**(COMMON | {"tie_word_embeddings": tied} | options))
            config._attn_implementation = "eager"
            config._experts_implementation = "eager"
            model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval()
            randomise(model)
            directory = tmp_path_factory.mktemp(f"{variant}-{'tied' if tied else 'untied'}")
            model.save_pretrained(directory)
            made[variant, tied, dtype] = (model, directory)
        return made[variant, tied, dtype]

    return build


@pytest.fixture(scope="session")
def tiny_other() -> Callable[..., Any]:
    """`tiny_other(name)`: a model of an architecture that the native decoder does not support."""

    def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
        config, model, options = OTHERS[name]
        made: Any = getattr(transformers, model)(getattr(transformers, config)(**OTHER_COMMON, **options))
        randomise(made)
        return made.to(dtype).eval()

    return build


@pytest.fixture(scope="session")
def packed() -> Callable[..., tuple[Tensor, Tensor]]:
    """`packed(lengths, vocab)`: random packed tokens and their boundaries."""

    def build(lengths: list[int], vocab: int = 61, seed: int = 0) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(0, vocab, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
        return tokens, torch.tensor([0, *lengths]).cumsum(0)

    return build
