"""The hyper-parameters of SigLIP towers in the config.json of Idefics3, SmolVLM and Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from burnish.models.vision.tower_cost import tower_bytes

if TYPE_CHECKING:
    from burnish.models.vision.axis_rotation import AxisRotation

ACTIVATION = "gelu_pytorch_tanh"
IDEFICS3_DEFAULTS = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
GEMMA3_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
LLAMA_DEFAULTS = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
GEMMA3_TEXT_DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""What a vision_config or a text_config without a key means, as in transformers. Published configs leave out many keys."""


@dataclass(frozen=True)
class SiglipShape:
    """The hyper-parameters of a SigLIP tower and its projector."""

    hidden_size: int
    mlp_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    out_size: int
    """Hidden size of the decoder."""
    merge: int
    """A square of this many patches in each direction becomes one token."""
    connector: Literal["shuffle", "mean"]
    placeholder_tokens: frozenset[int]
    norm_eps: float = 1e-6
    image_marks: tuple[int, int] | None = None
    """Tokens that begin and end an image (Gemma 3)."""
    attends_both_ways: bool = False
    """Whether the decoder lets the tokens of a picture attend to each other in both directions (Gemma 3)."""

    @property
    def rotation(self) -> AxisRotation | None:
        return None

    @property
    def num_deep_layers(self) -> int:
        return 0

    @property
    def tokens_per_side(self) -> int:
        """Rows and columns of tokens of a picture of `image_size`."""
        return self.image_size // self.patch_size // self.merge

    @property
    def num_projector_parameters(self) -> int:
        if self.connector == "shuffle":
            return self.hidden_size * self.merge**2 * self.out_size
        return self.hidden_size * (self.out_size + 1)

    @property
    def num_parameters(self) -> int:
        hidden, norm = self.hidden_size, 2 * self.hidden_size
        positions = (self.image_size // self.patch_size) ** 2
        layer = 4 * (hidden + 1) * hidden + 2 * hidden * self.mlp_size + self.mlp_size + hidden + 2 * norm
        embeddings = (3 * self.patch_size**2 + 1 + positions) * hidden
        return embeddings + self.num_layers * layer + norm + self.num_projector_parameters

    @property
    def smallest_picture(self) -> tuple[int, tuple[int, int, int]]:
        """Pixels of a side and grid of a picture, all of which have one size."""
        return self.image_size, (1, self.tokens_per_side, self.tokens_per_side)

    def saved_bytes(self, num_tokens: int, element: int, recomputes: bool) -> int:
        """Bytes that a trained tower saves for pictures of this many tokens."""
        patches = -(-num_tokens // self.tokens_per_side**2) * (self.image_size // self.patch_size) ** 2
        sizes = self.num_layers, self.hidden_size, self.mlp_size
        return tower_bytes(patches, *sizes, is_gated=False, element=element, recomputes=recomputes)

    def tower_flops(self, grids: Sequence[tuple[int, int, int]]) -> float:
        """Floating-point operations of a forward pass over pictures with these grids of placeholder tokens."""
        hidden = self.hidden_size
        in_matrices = 3 * self.patch_size**2 * hidden + self.num_layers * (4 * hidden**2 + 2 * hidden * self.mlp_size)
        patches = (self.image_size // self.patch_size) ** 2
        attention = 4 * patches**2 * hidden * self.num_layers
        projector = 2 * self.tokens_per_side**2 * self.num_projector_parameters
        return float(len(grids) * (2 * patches * in_matrices + attention + projector))


def idefics3_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of Idefics3 or SmolVLM with the keys of the decoder on its top level."""
    text = {**LLAMA_DEFAULTS, **(config.get("text_config") or {})}
    top = {key: config[key] for key in ("vision_config", "image_token_id", "scale_factor") if key in config}
    tied = bool(config.get("tie_word_embeddings", False))
    return {**text, **top, "model_type": config["model_type"], "tie_word_embeddings": tied, "text_config": text}


def gemma3_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of Gemma 3 with the keys of the decoder on its top level."""
    text = {**GEMMA3_TEXT_DEFAULTS, **(config.get("text_config") or {})}
    tied = bool(config.get("tie_word_embeddings", True))
    return {**config, **text, "model_type": config["model_type"], "tie_word_embeddings": tied, "text_config": text}


def idefics3_shape(config: Mapping[str, Any]) -> SiglipShape:
    """The tower of a config.json of Idefics3 or SmolVLM."""
    return SiglipShape(
        **_encoder_fields(config, IDEFICS3_DEFAULTS),
        out_size=idefics3_text_config(config)["hidden_size"],
        merge=config.get("scale_factor", 2),
        connector="shuffle",
        placeholder_tokens=frozenset({config.get("image_token_id", 128_257)}),
    )


def gemma3_shape(config: Mapping[str, Any]) -> SiglipShape:
    """The tower of a config.json of Gemma 3."""
    encoder = _encoder_fields(config, GEMMA3_DEFAULTS)
    tokens_per_side = math.isqrt(config.get("mm_tokens_per_image", 256))
    return SiglipShape(
        **encoder,
        out_size=gemma3_text_config(config)["hidden_size"],
        merge=encoder["image_size"] // encoder["patch_size"] // tokens_per_side,
        connector="mean",
        placeholder_tokens=frozenset({config.get("image_token_index", 262_144)}),
        image_marks=(config.get("boi_token_index", 255_999), config.get("eoi_token_index", 256_000)),
        attends_both_ways=True,
    )


def siglip_keys(shape: SiglipShape) -> dict[str, Any]:
    """The keys of a config.json besides those of the decoder."""
    vision: dict[str, Any] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "image_size": shape.image_size,
        "patch_size": shape.patch_size,
        "layer_norm_eps": shape.norm_eps,
        "hidden_act": ACTIVATION,
    }
    (placeholder,) = shape.placeholder_tokens
    if shape.connector == "shuffle":
        return {"vision_config": vision, "scale_factor": shape.merge, "image_token_id": placeholder}
    assert shape.image_marks is not None, "Gemma 3 has tokens around an image"
    return {
        "vision_config": {**vision, "model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": shape.tokens_per_side**2,
        "image_token_index": placeholder,
        "boi_token_index": shape.image_marks[0],
        "eoi_token_index": shape.image_marks[1],
    }


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why this module does not support the tower of a config.json; None if it does."""
    vision = config.get("vision_config") or {}
    is_gemma3 = config["model_type"] == "gemma3"
    decoder, expected = (config.get("text_config") or {}).get("model_type"), "gemma3_text" if is_gemma3 else "llama"
    if decoder not in (None, expected):
        return f"its decoder is {decoder!r}, not {expected}"
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION:
        return f"its vision tower has the activation {vision['hidden_act']}, not {ACTIVATION}"
    if vision.get("num_channels", 3) != 3:
        return f"its vision tower reads {vision['num_channels']} channels, not 3"
    if vision.get("vision_use_head"):
        return "its vision tower has a pooling head"
    shape = gemma3_shape(config) if is_gemma3 else idefics3_shape(config)
    if shape.merge < 1 or shape.tokens_per_side * shape.merge * shape.patch_size != shape.image_size:
        return (
            f"its images of {shape.image_size} pixels are not whole squares of {shape.merge} x {shape.merge} patches "
            f"of {shape.patch_size} pixels"
        )
    return None


def _encoder_fields(config: Mapping[str, Any], defaults: Mapping[str, int]) -> dict[str, Any]:
    vision = {**defaults, **(config.get("vision_config") or {})}
    return {
        "hidden_size": vision["hidden_size"],
        "mlp_size": vision["intermediate_size"],
        "num_layers": vision["num_hidden_layers"],
        "num_heads": vision["num_attention_heads"],
        "image_size": vision["image_size"],
        "patch_size": vision["patch_size"],
        "norm_eps": vision.get("layer_norm_eps", 1e-6),
    }
