"""`FeatureCache`: the features of pictures, computed once and used by every pass until the tower's weights change.

All samples of a group show the same pictures, and so do the later turns of a dialogue. While the tower is frozen, the learner reads the
features that the engine computed, since both have the same module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from burnish.core.pictures import Picture
from burnish.models.vision.interfaces import ImageFeatures, VisionTower, join_features

MAX_BYTES = 1 << 30
"""Memory of the cached features; the least recently used are dropped first."""
TOKENS_PER_CALL = 4096
"""Placeholder tokens of the pictures that one call of the tower computes, unless one picture has more."""


@dataclass(frozen=True)
class _Entry:
    features: ImageFeatures
    is_alone: bool
    """Whether the tower computed this picture by itself."""

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.features.embeddings, *self.features.deep))


class FeatureCache:
    """The features of pictures by their keys, of one tower. They have no gradient."""

    def __init__(self, tower: VisionTower, hidden_size: int, max_bytes: int = MAX_BYTES) -> None:
        self.tower, self.hidden_size, self.max_bytes = tower, hidden_size, max_bytes
        self.num_bytes = 0
        self.num_computed = 0
        """Pictures that the tower has computed."""
        self._entries: dict[int, _Entry] = {}  # the least recently used first
        self._weights: list[tuple[int, int]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> FeatureCache:
        """An empty cache of the tower's copy, whose weights may become others."""
        return FeatureCache(copy.deepcopy(self.tower, memo), self.hidden_size, self.max_bytes)

    def __len__(self) -> int:
        return len(self._entries)

    def features(self, pictures: Sequence[Picture], one_by_one: bool = False) -> ImageFeatures:
        """The features of pictures in their order.

        With `one_by_one` the tower computes every picture by itself, so that no bit depends on the others (exact mode).
        """
        self._drop_stale()
        if not pictures:
            return ImageFeatures(next(self.tower.parameters()).new_empty(0, self.hidden_size).detach())
        parts = {picture.key: self._entries.pop(picture.key, None) for picture in pictures}
        missing = {p.key: p for p in pictures if (e := parts[p.key]) is None or (one_by_one and not e.is_alone)}
        # Not in inference mode, whose tensors a backward pass cannot save: the learner reads these too.
        with torch.inference_mode(False), torch.no_grad():
            for together in _calls(list(missing.values()), one_by_one):
                for picture, found in zip(together, self._computed(together), strict=True):
                    parts[picture.key] = _Entry(found, one_by_one)
        entries = {key: entry for key, entry in parts.items() if entry is not None}
        self._entries |= entries
        self._evict()
        return join_features([entries[picture.key].features for picture in pictures])

    def clear(self) -> None:
        """Drop all features, as new weights of the tower require."""
        self._entries.clear()
        self.num_bytes = 0

    def _computed(self, pictures: Sequence[Picture]) -> Iterator[ImageFeatures]:
        self.num_computed += len(pictures)
        features: ImageFeatures = self.tower(pictures)
        if len(pictures) == 1:
            yield features
            return
        sizes = [picture.num_tokens for picture in pictures]
        split = [features.embeddings.split(sizes), *(deep.split(sizes) for deep in features.deep)]
        for embeddings, *deep in zip(*split, strict=True):  # copies: a view would keep the memory of all pictures
            yield ImageFeatures(embeddings.clone(), tuple(x.clone() for x in deep))

    def _evict(self) -> None:
        self.num_bytes = sum(entry.num_bytes for entry in self._entries.values())
        for key in list(self._entries):
            if self.num_bytes <= self.max_bytes:
                return
            self.num_bytes -= self._entries.pop(key).num_bytes

    def _drop_stale(self) -> None:
        """Drop the features if a weight of the tower was written or replaced since."""
        # Tensors of inference mode have no version counter. Engines on such weights call `clear` when they load new ones.
        weights = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self.tower.parameters()]
        if weights != self._weights:
            self.clear()
            self._weights = weights


def _calls(pictures: Sequence[Picture], one_by_one: bool) -> Iterator[list[Picture]]:
    """The pictures that the tower computes together."""
    together: list[Picture] = []
    for picture in pictures:
        size = sum(p.num_tokens for p in together) + picture.num_tokens
        if together and (one_by_one or size > TOKENS_PER_CALL):
            yield together
            together = []
        together.append(picture)
    if together:
        yield together
