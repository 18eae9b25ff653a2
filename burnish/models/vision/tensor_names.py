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

    def tower_name(self, name: str) -> str:
        """The file's name of a parameter of our tower."""
        return self.tower + name

    def published(self, name: str) -> str:
        """The published name of a tensor in any file of the family."""
        for prefix, meant in self.aliases.items():
            if name.startswith(prefix):
                return meant + name.removeprefix(prefix)
        return name
