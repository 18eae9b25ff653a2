"""What a decoder looks like: read from a Hugging Face config.json, written back to one.

`FAMILIES` is the table of what differs between the families our decoder covers. A config that asks for something
the decoder does not do (another activation, an unknown rope type) is not native: `why_not_native` says why, and
such a model goes through `models/hf.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.schema import NewModel
from burnish.config.text import read_json_object


@dataclass(frozen=True)
class Family:
    """What a family fixes."""

    hf_class: str
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: bool = False


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
    "mistral": Family("MistralForCausalLM", sliding_window=True),
}
ROPE_TYPES = ("default", "linear", "llama3")
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Architecture:
    """All numbers of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    window: int | None = None

    @property
    def num_parameters(self) -> int:
        """Parameters of the decoder, each shared one counted once."""
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        layer = self.hidden_size * (qkv + self.num_heads * self.head_dim + 3 * self.mlp_size) + 2 * self.hidden_size
        layer += qkv * self.qkv_bias + self.hidden_size * self.out_bias + 2 * self.head_dim * self.qk_norm
        layer += (2 * self.mlp_size + self.hidden_size) * self.mlp_bias
        return self.num_layers * layer + self.hidden_size + (1 if self.tied else 2) * self.vocab_size * self.hidden_size


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json as a dictionary."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if not path.is_file():
        raise UserError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    return read_json_object(path)


def why_not_native(config: dict[str, Any]) -> str | None:
    """Why our decoder cannot run this config, or None when it can."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"architecture {family!r} is not one of {', '.join(FAMILIES)}"
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        return f"activation {config['hidden_act']!r} is not silu"
    if _rope(config)[1].get("rope_type", "default") not in ROPE_TYPES:
        return f"rope type {_rope(config)[1]['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}"
    if config.get("use_sliding_window"):
        return "it mixes sliding-window and full attention layers"
    if config.get("quantization_config"):
        return "its weights are quantised"
    return None


def from_hf(config: dict[str, Any], where: str = "config.json") -> Architecture:
    """The architecture of a native config.json; `where` names the file in errors."""
    missing = [name for name in SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise UserError(f"{where} gives no number for {missing[0]!r}, which a {config['model_type']} model needs")
    family = FAMILIES[config["model_type"]]
    heads = config["num_attention_heads"]
    theta, scaling = _rope(config)
    # The other families' classes in transformers have no such option, and ignore the key.
    attention_bias = bool(config.get("attention_bias", False)) and config["model_type"] in ("llama", "qwen3")
    return Architecture(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp_size=config["intermediate_size"],
        max_positions=config.get("max_position_embeddings", 2048),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling if scaling.get("rope_type", "default") != "default" else None,
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or attention_bias,
        out_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and config["model_type"] == "llama",
        qk_norm=family.qk_norm,
        window=config.get("sliding_window") if family.sliding_window else None,
    )


def from_nothing(new: NewModel, vocab_size: int) -> Architecture:
    """The architecture of `model.new`."""
    family = FAMILIES[new.family]
    if new.hidden_size % new.num_heads:
        raise UserError(f"model.new: hidden_size {new.hidden_size} is not a multiple of num_heads {new.num_heads}")
    kv_heads = new.num_kv_heads or new.num_heads
    if new.num_heads % kv_heads:
        raise UserError(f"model.new: num_heads {new.num_heads} is not a multiple of num_kv_heads {kv_heads}")
    return Architecture(
        family=new.family,
        vocab_size=vocab_size,
        hidden_size=new.hidden_size,
        num_layers=new.num_layers,
        num_heads=new.num_heads,
        num_kv_heads=kv_heads,
        head_dim=new.hidden_size // new.num_heads,
        mlp_size=new.mlp_size,
        max_positions=new.max_positions,
        tied=new.tied,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
    )


def to_hf(arch: Architecture, dtype: str, eos_ids: tuple[int, ...], pad_id: int | None) -> dict[str, Any]:
    """A config.json that transformers loads, for a model that did not come from one."""
    config: dict[str, Any] = {
        "architectures": [FAMILIES[arch.family].hf_class],
        "model_type": arch.family,
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.mlp_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_positions,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": arch.tied,
        "attention_bias": arch.out_bias,
        "mlp_bias": arch.mlp_bias,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": list(eos_ids) if len(eos_ids) != 1 else eos_ids[0],
        "pad_token_id": pad_id,
    }
    if FAMILIES[arch.family].sliding_window:
        config["sliding_window"] = arch.window
    if arch.rope_scaling:
        config["rope_scaling"] = arch.rope_scaling
    return config


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base frequency and scaling; newer configs keep both in `rope_parameters`, older ones in two keys."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0), parameters
