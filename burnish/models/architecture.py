"""The architecture of a decoder: read from a Hugging Face config.json, and written back to one.

`model_families.py` has an entry for each supported family. A config that the native decoder does not support (another
activation, an unknown rope type) runs through `transformers_model.py`; `why_not_native` gives the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models.expert_shape import ExpertShape
from burnish.models.latent_shape import LatentShape
from burnish.models.model_families import FAMILIES, Family

if TYPE_CHECKING:
    from burnish.config.model import NewModel
    from burnish.models.vision.interfaces import VisionShape

Windows = int | None | tuple[int | None, ...]
"""Attention windows: one for all layers (None is no limit), or one per layer."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
YARN_KEYS = ("factor", "original_max_position_embeddings")
ACTIVATIONS = {"silu": ("silu", "swish"), "gelu_tanh": ("gelu_pytorch_tanh",)}
"""Gated activations of the native decoder, with their names in a config.json."""
MAX_LAYERS = 4096
"""Largest number of layers that is accepted. Published decoders have a few hundred; a damaged number would be built layer by layer."""
REQUIRED_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class Architecture:
    """All hyper-parameters of a decoder."""

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
    """Whether queries and keys are normed before their rotation, each head by itself."""
    wide_qk_norm: bool = False
    """Whether all query heads are normed as one vector, and all key heads as another (OLMoE)."""
    window: int | None = None
    """Attention window in tokens, the query's own included; None is no limit."""
    local_layers: tuple[bool, ...] | None = None
    """Which layers use the window; None means all of them."""
    local_theta: float | None = None
    """RoPE base of the local layers; None means the same as in the others."""
    activation: str = "silu"
    norm_shift: float = 0.0
    """Norms multiply by (norm_shift + weight)."""
    out_norms: bool = False
    """Whether the outputs of attention and MLP are normed before they are added to the residual."""
    query_scale: float = 1.0
    """Factor of the queries, besides 1 / sqrt(head_dim)."""
    score_softcap: float | None = None
    """Attention scores s become cap * tanh(s / cap); None leaves them."""
    logit_softcap: float | None = None
    """The output head's logits become cap * tanh(logit / cap); None leaves them."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by sqrt(hidden_size)."""
    experts: ExpertShape | None = None
    """Experts in place of the MLP of some or all layers."""
    latent: LatentShape | None = None
    """Multi-head latent attention in place of separate projections of queries, keys and values."""
    vision: VisionShape | None = None
    """The vision tower; None for a text model."""
    num_ignored_layers: int = 0
    """Layers in the files behind the last that are not loaded, such as those for multi-token prediction."""

    @property
    def windows(self) -> Windows:
        """The attention windows of the layers."""
        if self.window is None or self.local_layers is None:
            return self.window
        return tuple(self.window if is_local else None for is_local in self.local_layers)

    @property
    def attends_both_ways(self) -> bool:
        """Whether the tokens of a picture attend to each other in both directions."""
        return self.vision is not None and self.vision.attends_both_ways

    def is_local(self, layer: int) -> bool:
        """Whether a layer is a windowed layer of a model that has both kinds."""
        return self.local_layers is not None and self.local_layers[layer]

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of the MLP."""
        return self.experts is not None and self.experts.in_layer(layer)

    def dense_size(self, layer: int) -> int:
        """Width of the MLP of a layer that computes every token; 0 if the layer has only experts."""
        return self.experts.shared_size if self.experts is not None and self.has_experts(layer) else self.mlp_size

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    @property
    def active_mlp_size(self) -> float:
        """Width of the MLP that computes one token, experts included; the mean over the layers."""
        if self.experts is None:
            return self.mlp_size
        chosen = self.experts.experts_per_token * self.experts.expert_size + self.experts.shared_size
        share = self.num_expert_layers / self.num_layers
        return share * chosen + (1 - share) * self.mlp_size

    @property
    def value_dim(self) -> int:
        """Dimensions of a value head, without padding."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def attention_matrices(self) -> dict[str, int]:
        """Elements of the matrices of attention by the names of the modules, in the order of the forward pass."""
        hidden, latent = self.hidden_size, self.latent
        out = {"out": self.num_heads * self.value_dim * hidden}
        if latent is None:
            return {"qkv": hidden * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, **out}
        return {
            "qkv.latent": hidden * latent.latent_size,
            "qkv.q_up": (latent.query_rank or hidden) * self.num_heads * latent.head_dim,
            "qkv.kv_up": latent.rank * self.num_heads * (latent.nope_dim + latent.value_dim),
            **out,
        }

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied ones are counted once."""
        return self._count_parameters(None if self.experts is None else self.experts.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that compute one token: of the experts only the chosen ones."""
        return self._count_parameters(None if self.experts is None else self.experts.experts_per_token)

    def _count_parameters(self, counted_experts: int | None) -> int:
        hidden, latent = self.hidden_size, self.latent
        qkv = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim if latent is None else latent.latent_size
        attention = sum(self.attention_matrices.values()) + 2 * hidden
        attention += 0 if latent is None else (latent.query_rank or 0) + latent.rank
        attention += qkv * self.qkv_bias + hidden * self.out_bias + 2 * self.head_dim * self.qk_norm
        attention += (self.num_heads + self.num_kv_heads) * self.head_dim * self.wide_qk_norm
        attention += 2 * hidden * self.out_norms
        dense = 3 * hidden * self.mlp_size + (2 * self.mlp_size + hidden) * self.mlp_bias
        layers = self.num_layers * attention + (self.num_layers - self.num_expert_layers) * dense
        if self.experts is not None and counted_experts is not None:
            router = (hidden + self.experts.has_score_bias) * self.experts.num_experts
            width = self.experts.expert_size * counted_experts + self.experts.shared_size
            layers += self.num_expert_layers * (router + 3 * hidden * width)
        tower = 0 if self.vision is None else self.vision.num_parameters
        return layers + hidden + (1 if self.tied else 2) * self.vocab_size * hidden + tower


def read_config(directory: Path) -> dict[str, Any]:
    """The directory's config.json as a dictionary."""
    path = directory / "config.json"
    if not directory.is_dir():
        raise UserError(f"model directory {directory} does not exist")
    if not path.is_file():
        raise UserError(f"{directory} is not a Hugging Face model directory: it has no config.json")
    config = read_json_object(path)
    for part in (config, config.get("text_config")):
        layers = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise UserError(
                f"{path} is damaged: num_hidden_layers is {layers:,}, and no model has more than {MAX_LAYERS:,}"
            )
    _check_values(config, path)
    return config


def _check_values(config: dict[str, Any], path: Path) -> None:
    """Raise for invalid values of a supported family; `architecture_from_hf` reports missing ones."""
    family = config.get("model_type")
    if family is not None and not isinstance(family, str):
        raise UserError(f"{path}: model_type should be text, got {family!r}")
    if family not in FAMILIES:
        return
    config = dict(FAMILIES[family].text_config(config))
    for name in (*REQUIRED_SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        value = config.get(name)
        if value is not None and not (isinstance(value, int) and value > 0):
            raise UserError(f"{path}: {name} should be a whole number of 1 or more, got {value!r}")
    for name in ("rms_norm_eps", "rope_theta"):
        value = config.get(name)
        if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
            raise UserError(f"{path}: {name} should be a number above 0, got {value!r}")
    for name in ("rope_parameters", "rope_scaling"):
        if config.get(name) is not None and not isinstance(config[name], dict):
            raise UserError(f"{path}: {name} should be an object, got {config[name]!r}")


def why_not_native(config: dict[str, Any]) -> str | None:
    """Why the native decoder cannot run this config; None if it can."""
    family = config.get("model_type")
    if family not in FAMILIES:
        return f"architecture {family!r} is not one of {', '.join(FAMILIES)}"
    record = FAMILIES[family]
    config = dict(record.text_config(config))
    names = ACTIVATIONS[record.fixed.get("activation", "silu")]
    activation = config.get("hidden_activation") or config.get("hidden_act") or names[0]
    if activation not in names:
        return f"activation {activation!r} is not {names[0]}"
    if config.get("use_sliding_window"):
        return "it mixes sliding-window and full attention layers"
    if config.get("quantization_config"):
        return "its weights are quantised"
    if any(name not in config for name in REQUIRED_SIZES):
        return None  # `architecture_from_hf` reports the missing key
    reason = record.why_unsupported(config)
    if reason is not None:
        return reason
    scaling = _optional_fields(config)["rope_scaling"] or {}
    if scaling.get("rope_type", "default") not in ROPE_TYPES:
        return f"rope type {scaling['rope_type']!r} is not one of {', '.join(ROPE_TYPES)}"
    if scaling.get("rope_type") == "yarn" and not all(scaling.get(key) for key in YARN_KEYS):
        return f"its YaRN scaling gives no {' or no '.join(key for key in YARN_KEYS if not scaling.get(key))}"
    return None


def architecture_from_hf(config: dict[str, Any], where: str = "config.json") -> Architecture:
    """The architecture of a native config.json; `where` names the file in errors."""
    config = dict(FAMILIES[config["model_type"]].text_config(config))
    missing = [name for name in REQUIRED_SIZES if not isinstance(config.get(name), int)]
    if missing:
        raise UserError(f"{where} gives no number for {missing[0]!r}, which a {config['model_type']} model needs")
    heads = config["num_attention_heads"]
    return Architecture(
        family=config["model_type"],
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        mlp_size=config["intermediate_size"],
        **{"num_kv_heads": config.get("num_key_value_heads") or heads, **_optional_fields(config)},
    )


def max_positions_of(directory: Path) -> int | None:
    """The longest sequence, in tokens, that a directory's model supports; None if its config.json does not say."""
    config = read_config(directory)
    if why_not_native(config) is None:
        return architecture_from_hf(config, str(directory / "config.json")).max_positions
    positions = config.get("text_config", config).get("max_position_embeddings")
    return None if positions is None else int(positions)


def _optional_fields(config: dict[str, Any]) -> dict[str, Any]:
    """Fields of `Architecture` besides the required sizes: the common defaults, overridden by the family."""
    family = FAMILIES[config["model_type"]]
    theta, scaling = _rope(config)
    defaults = {
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "max_positions": config.get("max_position_embeddings", 2048),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling if scaling.get("rope_type", "default") != "default" else None,
        "tied": bool(config.get("tie_word_embeddings", False)),
    }
    return {**defaults, **family.read_fields(config), **family.fixed}


def new_architecture(new: NewModel, vocab_size: int) -> Architecture:
    """The architecture of a model that is created by `model.new`."""
    family = FAMILIES[new.family]
    if new.hidden_size % new.num_heads:
        raise UserError(f"model.new: hidden_size {new.hidden_size} is not a multiple of num_heads {new.num_heads}")
    kv_heads = new.num_kv_heads or new.num_heads
    if new.num_heads % kv_heads:
        raise UserError(f"model.new: num_heads {new.num_heads} is not a multiple of num_kv_heads {kv_heads}")
    fields = {
        **family.fixed,
        **family.new_model_fields(new.num_layers),
        **_new_experts(new, family),
        **_new_vision(new),
    }
    arch = Architecture(
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
        **fields,
    )
    # Mixtral and OLMoE have one size, that of their experts.
    return replace(arch, mlp_size=family.config_keys(arch).get("intermediate_size", arch.mlp_size))


def _new_vision(new: NewModel) -> dict[str, Any]:
    """The vision tower of a family that sees."""
    if FAMILIES[new.family].vision_names is None:
        return {}
    from burnish.models.vision.new_models import new_vision_shape  # text models need none of it

    return {"vision": new_vision_shape(new)}


def _new_experts(new: NewModel, family: Family) -> dict[str, Any]:
    """The experts of `model.new.experts`, if given."""
    if new.experts is None:
        return {}
    if not family.has_experts:
        raise UserError(
            f"model.new.experts: family {new.family} has no experts; remove the key, or set family=qwen3_moe"
        )
    num_experts, per_token, size = new.experts
    shape = ExpertShape(num_experts, per_token, size)
    if shape.experts_per_token > shape.num_experts:
        raise UserError(
            f"model.new.experts: {shape.experts_per_token} experts compute a token, and there are {shape.num_experts}"
        )
    return {"experts": shape}


def architecture_to_hf(arch: Architecture, dtype: str, eos_ids: tuple[int, ...], pad_id: int | None) -> dict[str, Any]:
    """A config.json that transformers loads, for a model that was created here."""
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
        "hidden_act": ACTIVATIONS[arch.activation][0],
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
    own = FAMILIES[arch.family].config_keys(arch)
    if arch.rope_scaling and "rope_parameters" not in own:
        config["rope_scaling"] = arch.rope_scaling
    return {**config, **own} if arch.vision is None else _nested_config({**config, **own})


def _nested_config(flat: dict[str, Any]) -> dict[str, Any]:
    """A config.json of an image-text model: the keys of the decoder are in `text_config`."""
    top = {"architectures", "model_type", "vision_config", "torch_dtype", "tie_word_embeddings"}
    top |= {"scale_factor", "mm_tokens_per_image"} | {
        key for key in flat if key.endswith(("_token_id", "_token_index"))
    }
    text = {
        key: value for key, value in flat.items() if key not in top or key.endswith(("bos_token_id", "eos_token_id"))
    }
    family = flat["model_type"]
    text |= {"model_type": FAMILIES[family].text_type or f"{family}_text", "pad_token_id": flat["pad_token_id"]}
    return {**{key: value for key, value in flat.items() if key in top}, "text_config": text}


def _rope(config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """RoPE base and scaling; newer configs have both in `rope_parameters`, older ones in two keys."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    return float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0), parameters
