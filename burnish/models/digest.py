"""What tells the content of one model directory from that of another, without reading all of its weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")
CHUNK, NUM_CHUNKS = 1 << 14, 64  # of a large file: read all over it, since training may leave any part as it was


def model_digest(path: Path) -> str:
    """A digest of a model directory: its configs and tokenizer, and samples from all over its weights."""
    files = sorted({file for pattern in MODEL_FILES for file in path.glob(pattern)})
    return digest(part for file in files for part in (file.name.encode(), *_samples(file)))


def digest(parts: Iterable[bytes]) -> str:
    """Of texts one after the other, each with its length: where one ends and the next begins counts too."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:16]


def _samples(path: Path) -> list[bytes]:
    size = path.stat().st_size
    if size <= CHUNK * NUM_CHUNKS:
        return [path.read_bytes()]
    with path.open("rb") as file:
        starts = [i * (size - CHUNK) // (NUM_CHUNKS - 1) for i in range(NUM_CHUNKS)]
        return [str(size).encode(), *(os.pread(file.fileno(), CHUNK, start) for start in starts)]
