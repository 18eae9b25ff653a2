"""SHA-256 of files, for manifests that others can check with their own tools."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sums(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Names and checksums of files, as a manifest holds them: without their folders, which may be other ones tomorrow."""
    return [{"file": path.name, "sha256": sha256(path)} for path in paths]
