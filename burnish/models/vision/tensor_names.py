"""`VisionNames`: what the tensors of an image-text model are called in its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    parts: Mapping[str, str] = field(default_factory=dict)
    """Prefixes of our tower's parameters that have a prefix of their own in files."""

    def tower_name(self, name: str) -> str:
        """The file's name of a parameter of our tower."""
        for prefix, theirs in self.parts.items():
            if name.startswith(prefix):
                return theirs + name.removeprefix(prefix)
        return self.tower + name

    def published(self, name: str) -> str:
        """The published name of a tensor in any file of the family."""
        for prefix, meant in self.aliases.items():
            if name.startswith(prefix):
                return meant + name.removeprefix(prefix)
        return name


IDEFICS3_NAMES = VisionNames(
    "model.text_model.",
    "model.",
    parts={"encoder.": "model.vision_model.", "connector.": "model.connector.modality_projection."},
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
    parts={"encoder.": "vision_tower.vision_model.", "connector.": "multi_modal_projector."},
)
