"""The vision towers of Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631): their hyper-parameters in a config.json.

Both cut pictures of any size into patches of two frames, encode them with rotary positions of two axes, and merge squares of patches
into one token. Qwen2.5-VL attends in windows in most layers. Qwen3-VL adds learned positions, which are interpolated, and gives the
states of some layers to the first decoder layers (deep-stack).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from burnish.models.vision.axis_rotation import AxisRotation
from burnish.models.vision.tower_cost import tower_bytes

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
Grid = tuple[int, int, int]
"""Frames, rows and columns of a picture's placeholder tokens."""


@dataclass(frozen=True)
class QwenVisionShape:
    """The hyper-parameters of a Qwen vision tower."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    out_size: int
    """Width of the merged tokens: the decoder's hidden size."""
    patch_size: int
    temporal_patch_size: int
    """Frames of a patch; an image is repeated."""
    merge_size: int
    """Side of the square of patches that becomes one token."""
    rotation: AxisRotation
    image_token: int
    video_token: int
    vision_start: int
    vision_end: int
    window_size: int | None = None
    """Side of an attention window in pixels; None without windows."""
    full_layers: tuple[int, ...] = ()
    """Layers that attend to a whole frame in spite of the windows."""
    num_position_embeddings: int = 0
    """Learned positions, a square; 0 without them."""
    deep_layers: tuple[int, ...] = ()
    """Layers whose states are added to the first decoder layers."""
    activation: str = "silu"
    """Of the MLP: `silu` is gated (Qwen2.5-VL), `gelu_pytorch_tanh` is not (Qwen3-VL)."""

    @property
    def is_qwen3(self) -> bool:
        """Whether the tower is Qwen3-VL's."""
        return self.num_position_embeddings > 0

    @property
    def pixel_mean(self) -> tuple[float, float, float]:
        return HALF if self.is_qwen3 else CLIP_MEAN

    @property
    def pixel_std(self) -> tuple[float, float, float]:
        return HALF if self.is_qwen3 else CLIP_STD

    @property
    def placeholder_tokens(self) -> frozenset[int]:
        return frozenset((self.image_token, self.video_token))

    @property
    def attends_both_ways(self) -> bool:
        return False

    @property
    def num_deep_layers(self) -> int:
        return len(self.deep_layers)

    @property
    def pixels_per_token(self) -> int:
        """Pixels on the side of one placeholder token."""
        return self.patch_size * self.merge_size

    @property
    def patch_elements(self) -> int:
        """Numbers of one patch."""
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Width of the patches of one token side by side."""
        return self.hidden_size * self.merge_size**2

    @property
    def num_projector_parameters(self) -> int:
        merged = self.merged_size
        mlp = merged * merged + merged + merged * self.out_size + self.out_size
        if not self.is_qwen3:
            return mlp + self.hidden_size
        return mlp + 2 * self.hidden_size + self.num_deep_layers * (mlp + 2 * merged)

    @property
    def num_parameters(self) -> int:
        hidden, mlp = self.hidden_size, self.mlp_size
        attention = 4 * hidden * hidden + 4 * hidden
        if self.is_qwen3:
            layer = attention + 2 * hidden * mlp + mlp + hidden + 4 * hidden
            first = hidden * self.patch_elements + hidden + self.num_position_embeddings * hidden
        else:
            layer = attention + 3 * hidden * mlp + 2 * mlp + hidden + 2 * hidden
            first = hidden * self.patch_elements
        return first + self.num_layers * layer + self.num_projector_parameters

    @property
    def smallest_picture(self) -> tuple[int, Grid]:
        """Pixels of a side and grid of a picture of one token."""
        return self.pixels_per_token, (1, 1, 1)

    def tower_flops(self, grids: Sequence[Grid]) -> float:
        """Floating-point operations of a forward pass over pictures with these grids; products only, as in `flops.py`."""
        hidden, total = self.hidden_size, 0.0
        products = 3 if self.activation == "silu" else 2
        layer = 2 * (4 * hidden * hidden + products * hidden * self.mlp_size)
        projector = 2 * (self.merged_size**2 + self.merged_size * self.out_size) * (1 + self.num_deep_layers)
        for frames, rows, columns in grids:
            tokens = frames * rows * columns
            patches = tokens * self.merge_size**2
            total += patches * (2 * hidden * self.patch_elements + self.num_layers * layer) + tokens * projector
            frame_pairs = frames * (rows * columns * self.merge_size**2) ** 2
            num_full = self.num_layers if self.window_size is None else len(self.full_layers)
            pairs = num_full * frame_pairs + (self.num_layers - num_full) * self._window_pairs(frames, rows, columns)
            total += 4 * pairs * hidden
        return total

    def saved_bytes(self, num_tokens: int, element: int, recomputes: bool) -> int:
        """Bytes that a trained tower saves for pictures of this many tokens, with those of the mergers."""
        patches = num_tokens * self.merge_size**2
        sizes = self.num_layers, self.hidden_size, self.mlp_size, self.activation == "silu"
        # A merger saves its input, the normed input, the hidden layer before and after its activation.
        mergers = (1 + self.num_deep_layers) * num_tokens * 4 * self.merged_size * element
        return tower_bytes(patches, *sizes, element, recomputes) + mergers

    @property
    def window_tokens(self) -> int:
        """Placeholder tokens on the side of a window."""
        assert self.window_size is not None, "a tower with windows"
        return self.window_size // self.pixels_per_token

    def _window_pairs(self, frames: int, rows: int, columns: int) -> int:
        """Pairs of patches within windows."""
        if self.window_size is None:
            return 0

        def squares(length: int) -> int:
            whole, rest = divmod(length, self.window_tokens)
            return whole * self.window_tokens**2 + rest**2

        return frames * squares(rows) * squares(columns) * self.merge_size**4


def qwen_text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part of a config.json on its top level, as a text model has it; published Qwen2.5-VL configs are flat.

    M-RoPE is the default rotation with more positions (`_sections`).
    """
    flat = {**config, **(config.get("text_config") or {}), "model_type": config["model_type"]}
    tied = config.get("tie_word_embeddings"), (config.get("text_config") or {}).get("tie_word_embeddings")
    flat["tie_word_embeddings"] = any(tied)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(flat.get(key), dict) and "mrope" in (flat[key].get("rope_type"), flat[key].get("type")):
            flat[key] = {**flat[key], "rope_type": "default"}
    return flat


def _sections(config: Mapping[str, Any], default: tuple[int, int, int]) -> tuple[int, int, int]:
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    first, second, third = rope.get("mrope_section") or default
    return int(first), int(second), int(third)


def _common_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    vision = config["vision_config"]
    return {
        "hidden_size": vision["hidden_size"],
        "num_layers": vision["depth"],
        "num_heads": vision["num_heads"],
        "mlp_size": vision["intermediate_size"],
        "out_size": vision["out_hidden_size"],
        "temporal_patch_size": vision.get("temporal_patch_size", 2),
        "merge_size": vision.get("spatial_merge_size", 2),
        "image_token": config.get("image_token_id", 151655),
        "video_token": config.get("video_token_id", 151656),
        "vision_start": config.get("vision_start_token_id", 151652),
        "vision_end": config.get("vision_end_token_id", 151653),
    }


def qwen25_vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Architecture.vision` of a Qwen2.5-VL config.json, and the biases of its decoder."""
    vision = config["vision_config"]
    rotation = AxisRotation(_sections(config, (16, 24, 24)), tokens_per_second=vision.get("tokens_per_second", 4))
    shape = QwenVisionShape(
        **_common_fields(config),
        patch_size=vision.get("patch_size", 14),
        rotation=rotation,
        window_size=vision.get("window_size", 112),
        full_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        activation=vision.get("hidden_act", "silu"),
    )
    return {"vision": shape}


def qwen3_vision(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Architecture.vision` of a Qwen3-VL config.json, and the biases of its decoder."""
    vision = config["vision_config"]
    shape = QwenVisionShape(
        **_common_fields(config),
        patch_size=vision.get("patch_size", 16),
        rotation=AxisRotation(_sections(config, (24, 20, 20)), is_interleaved=True),
        num_position_embeddings=vision.get("num_position_embeddings", 2304),
        deep_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
        activation=vision.get("hidden_act", "gelu_pytorch_tanh"),
    )
    has_bias = bool(qwen_text_config(config).get("attention_bias", False))
    return {"vision": shape, "qkv_bias": has_bias, "out_bias": has_bias}


REQUIRED = ("hidden_size", "depth", "num_heads", "intermediate_size", "out_hidden_size")


def qwen_vision_why_unsupported(config: Mapping[str, Any]) -> str | None:
    """Why the native tower does not support a config.json; None if it does."""
    vision = config.get("vision_config") or {}
    missing = [name for name in REQUIRED if not isinstance(vision.get(name), int)]
    if missing:
        return f"its vision_config gives no number for {missing[0]!r}"
    is_qwen25 = config["model_type"] == "qwen2_5_vl"
    expected = "silu" if is_qwen25 else "gelu_pytorch_tanh"
    if vision.get("hidden_act", expected) != expected:
        return f"the activation of its vision tower is {vision['hidden_act']!r}, not {expected}"
    text = qwen_text_config(config)
    if vision["out_hidden_size"] != text["hidden_size"]:
        return f"its vision tower gives {vision['out_hidden_size']} numbers a token, and the decoder reads {text['hidden_size']}"
    shape = (qwen25_vision if is_qwen25 else qwen3_vision)(config)["vision"]
    head_dim = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if sum(shape.rotation.sections) * 2 != head_dim:
        return (
            f"its mrope_section {list(shape.rotation.sections)} does not fill half of {head_dim} dimensions of a head"
        )
    if shape.num_deep_layers >= text["num_hidden_layers"]:
        return f"it adds {shape.num_deep_layers} deep-stack features to {text['num_hidden_layers']} decoder layers"
    return None


def qwen_vision_keys(arch: Architecture) -> dict[str, Any]:
    """The keys of a config.json besides the text part, which `vision_families.py` nests."""
    shape = arch.vision
    assert isinstance(shape, QwenVisionShape)
    vision: dict[str, Any] = {
        "model_type": f"{arch.family}_vision",
        "depth": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "hidden_act": shape.activation,
        "intermediate_size": shape.mlp_size,
        "num_heads": shape.num_heads,
        "in_channels": 3,
        "patch_size": shape.patch_size,
        "spatial_merge_size": shape.merge_size,
        "temporal_patch_size": shape.temporal_patch_size,
        "out_hidden_size": shape.out_size,
    }
    if shape.is_qwen3:
        vision |= {
            "num_position_embeddings": shape.num_position_embeddings,
            "deepstack_visual_indexes": list(shape.deep_layers),
        }
    else:
        vision |= {
            "window_size": shape.window_size,
            "fullatt_block_indexes": list(shape.full_layers),
            "tokens_per_second": shape.rotation.tokens_per_second,
        }
    rope = {
        "rope_type": "default",
        **(arch.rope_scaling or {}),
        "rope_theta": arch.rope_theta,
        "mrope_section": list(shape.rotation.sections),
    }
    return {
        "vision_config": vision,
        "rope_parameters": rope | ({"mrope_interleaved": True} if shape.is_qwen3 else {}),
        "image_token_id": shape.image_token,
        "video_token_id": shape.video_token,
        "vision_start_token_id": shape.vision_start,
        "vision_end_token_id": shape.vision_end,
    }
