"""What the families that are nearly Llama read from their config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from burnish.models.families.base import Config

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture


def attention_bias(config: Config) -> dict[str, Any]:
    """`attention_bias` is of all four projections. The classes of other families have no such option, and ignore the key."""
    has_bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": has_bias, "out_bias": has_bias}


def biases(config: Config) -> dict[str, Any]:
    """Those of attention, and those of the MLP."""
    return {**attention_bias(config), "mlp_bias": bool(config.get("mlp_bias", False))}


class window:
    """One window in all layers."""

    @staticmethod
    def read(config: Config) -> dict[str, Any]:
        return {"window": config.get("sliding_window")}

    @staticmethod
    def write(arch: Architecture) -> dict[str, Any]:
        return {"sliding_window": arch.window}
