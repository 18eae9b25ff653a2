"""`VisionNames`: what the tensors of an image-text model are called in its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOWER_MODULES = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
"""Modules of transformers that a tower and its projector are in."""
TOWER = "vision."
"""Before the names of a vision tower's parameters in our decoder. Ranks that divide a model have the tower whole."""


@dataclass(frozen=True)
class VisionNames:
    """Prefixes of the tensors in the published files of a family."""

    decoder: str
    """Before `layers.0...`; `model.` in a text model."""
    tower: str
    """Before the names of our tower's parameters."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other prefixes in files, such as those of transformers' modules, and what they stand for."""
    head: str = "lm_head.weight"
    decoder_module: str = "model.language_model."
    """The path of the decoder among transformers' modules, which adapters are named after."""
    tower_module: str = "model.visual."
    whole_modules: tuple[str, ...] = ("model.visual",)
    """transformers' modules that have the tower and its projector."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of our tower's parameters that have a prefix of their own in files."""
    module_parts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of our tower's modules that have a path of their own among transformers' modules."""

    def tower_name(self, name: str) -> str:
        """The file's name of a parameter of our tower."""
        return _renamed(name, self.parts) or self.tower + name

    def tower_module_name(self, name: str) -> str:
        """The path of a module or parameter of our tower among transformers' modules."""
        return _renamed(name, self.module_parts) or self.tower_module + name

    def published(self, name: str) -> str:
        """The published name of a tensor in any file of the family."""
        return _renamed(name, self.aliases) or name


def _renamed(name: str, prefixes: Mapping[str, str]) -> str | None:
    """A name, of a module or a parameter, with the first of the prefixes that it has replaced; None if it has none."""
    dotted = f"{name}."
    for prefix, other in prefixes.items():
        if dotted.startswith(prefix):
            return (other + dotted.removeprefix(prefix)).removesuffix(".")
    return None


IDEFICS3_PARTS = {"encoder.": "model.vision_model.", "connector.": "model.connector.modality_projection."}
IDEFICS3_NAMES = VisionNames(
    "model.text_model.",
    "model.",
    decoder_module="model.text_model.",
    whole_modules=("model.vision_model", "model.connector"),
    parts=IDEFICS3_PARTS,
    module_parts=IDEFICS3_PARTS,
)
GEMMA3_NAMES = VisionNames(
    "language_model.model.",
    "",
    {
        "model.language_model.": "language_model.model.",
        "model.vision_tower.vision_model.": "vision_tower.vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        # transformers 5 writes the tower without its inner module.
        "vision_tower.embeddings.": "vision_tower.vision_model.embeddings.",
        "vision_tower.encoder.": "vision_tower.vision_model.encoder.",
        "vision_tower.post_layernorm.": "vision_tower.vision_model.post_layernorm.",
    },
    head="language_model.lm_head.weight",
    whole_modules=("model.vision_tower", "model.multi_modal_projector"),
    parts={"encoder.": "vision_tower.vision_model.", "connector.": "multi_modal_projector."},
    module_parts={"encoder.": "model.vision_tower.", "connector.": "model.multi_modal_projector."},
)
