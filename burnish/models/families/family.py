"""What a family is: how it differs from the plain decoder, and how its config.json says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.models.architecture import Architecture


Config = Mapping[str, Any]
"""A config.json."""


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _covered(_: Config) -> None:
    return None


@dataclass(frozen=True)
class Family:
    """One row of the table. All fields of `Architecture` have the plain decoder's value unless a family says otherwise."""

    hf_class: str
    """The class of transformers that loads it."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Architecture` that are the same in every model of the family."""
    read: Callable[[Config], dict[str, Any]] = _nothing
    """Fields of `Architecture` that follow from a config.json, besides the sizes that all families name alike."""
    write: Callable[[Architecture], dict[str, Any]] = _nothing
    """Keys of a config.json for a model that did not come from one, besides those that all families name alike."""
    refuse: Callable[[Config], str | None] = _covered
    """Why a config.json asks for something the decoder does not do; None where it does not."""
    invent: Callable[[int], dict[str, Any]] = _nothing
    """Fields of `Architecture` for a new model of so many layers."""
    needs_bos: bool = False
    """Whether it writes nonsense after a text without its BOS token, so that one is put there even where a tokenizer's files
    forget it."""
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    """The layer's norms by our names, with theirs."""


# --- What the families that are nearly Llama read from their config.json.


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
