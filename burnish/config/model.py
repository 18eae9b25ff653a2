"""Keys of the policy: a Hugging Face directory, or a decoder made from nothing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from burnish.config.lora import Lora
from burnish.config.slots import Record


class NewModel(Record):
    """A decoder made from nothing, with random weights."""

    family: Literal["llama", "qwen2", "qwen3", "mistral", "gemma3_text"] = "llama"
    """Architecture."""
    hidden_size: int = Field(128, ge=1)
    """Width of the residual stream."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads; null means as many as query heads."""
    mlp_size: int = Field(336, ge=1)
    """Width of the gated MLP."""
    max_positions: int = Field(512, ge=2)
    """Longest sequence the model is declared for."""
    tied: bool = False
    """Whether the output head is the embedding matrix."""


class Model(Record):
    """The policy: a Hugging Face directory, or a new decoder."""

    path: str | None = None
    """A Hugging Face model directory (config.json, safetensors, tokenizer)."""
    new: NewModel | None = None
    """A decoder from nothing instead, with a tokenizer of the task's characters."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """Type of the parameters and of the arithmetic; bfloat16 trains with float32 master weights, float16 only samples."""
    device: str = "auto"
    """`auto` takes a GPU when there is one; or cpu, cuda, cuda:1."""
    backend: Literal["auto", "native", "transformers"] = "auto"
    """Who does the forward: our decoder, or transformers for any other architecture (slower). auto picks native where the family is known."""
    lora: Lora | None = None
    """New low-rank adapters on the model, which alone are trained and saved; the critic has its own on the same frozen weights."""
    adapter: str | None = None
    """A PEFT adapter directory to start from instead, with its own rank and targets; without model.path, on the base it names."""

    @model_validator(mode="after")
    def _one(self) -> Model:
        if self.path is not None and self.new is not None:
            raise ValueError("give either model.path (a directory) or model.new (from nothing), not both")
        if self.lora is not None and self.adapter is not None:
            raise ValueError("model.adapter brings adapters with a rank and targets of their own: remove model.lora")
        given = "lora" if self.lora is not None else "adapter" if self.adapter is not None else None
        if given is not None and self.new is not None:
            raise ValueError(f"model.{given} adapts a model that has learnt something: give model.path, not model.new")
        if given is not None and self.backend == "transformers":
            raise ValueError(f"model.{given} needs the native decoder, and model.backend=transformers")
        return self


def check_trainable(model: Model) -> None:
    if model.path is None and model.new is None and model.adapter is None:
        raise ValueError("no model: give model.path (a Hugging Face directory) or model.new (from nothing)")
    if model.dtype == "float16":
        raise ValueError("model.dtype=float16 has too small a range for gradients: train in bfloat16 or float32")
