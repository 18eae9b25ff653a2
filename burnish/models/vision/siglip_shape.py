"""The hyper-parameters of SigLIP towers, read from the config.json of Idefics3, SmolVLM and Gemma 3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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
"""What a vision_config without a key means, as in transformers. Published configs leave out many keys."""


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

    def tower_flops(self, grids: Sequence[tuple[int, int, int]]) -> float:
        """Floating-point operations of a forward pass over pictures with these grids of placeholder tokens."""
        hidden = self.hidden_size
        in_matrices = 3 * self.patch_size**2 * hidden + self.num_layers * (4 * hidden**2 + 2 * hidden * self.mlp_size)
        patches = (self.image_size // self.patch_size) ** 2
        attention = 4 * patches**2 * hidden * self.num_layers
        projector = 2 * self.tokens_per_side**2 * self.num_projector_parameters
        return float(len(grids) * (2 * patches * in_matrices + attention + projector))


def idefics3_shape(config: Mapping[str, Any]) -> SiglipShape:
    """The tower of an Idefics3 or SmolVLM config.json."""
    return SiglipShape(
        **_encoder_fields(config, IDEFICS3_DEFAULTS),
        out_size=config["text_config"]["hidden_size"],
        merge=config.get("scale_factor", 2),
        connector="shuffle",
        placeholder_tokens=frozenset({config.get("image_token_id", 128_257)}),
    )


def gemma3_shape(config: Mapping[str, Any], out_size: int) -> SiglipShape:
    """The tower of a Gemma 3 config.json with a vision_config, for a decoder of hidden size `out_size`."""
    encoder = _encoder_fields(config, GEMMA3_DEFAULTS)
    tokens_per_side = math.isqrt(config.get("mm_tokens_per_image", 256))
    return SiglipShape(
        **encoder,
        out_size=out_size,
        merge=encoder["image_size"] // encoder["patch_size"] // tokens_per_side,
        connector="mean",
        placeholder_tokens=frozenset({config.get("image_token_index", 262_144)}),
        attends_both_ways=True,
    )


def why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why this module does not support the tower of a config.json; None if it does."""
    vision = config.get("vision_config") or {}
    if vision.get("hidden_act", ACTIVATION) != ACTIVATION:
        return f"its vision tower has the activation {vision['hidden_act']}, not {ACTIVATION}"
    if vision.get("num_channels", 3) != 3:
        return f"its vision tower reads {vision['num_channels']} channels, not 3"
    if vision.get("vision_use_head"):
        return "its vision tower has a pooling head"
    shape = gemma3_shape(config, 1) if config["model_type"] == "gemma3" else idefics3_shape(config)
    if shape.image_size % shape.patch_size or shape.merge < 1 or (shape.image_size // shape.patch_size) % shape.merge:
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
