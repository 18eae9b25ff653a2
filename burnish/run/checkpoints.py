"""Checkpoints: which exist, which are whole, which stay.

A checkpoint is a folder `step-000050`, written under a temporary name and renamed. Its manifest `burnish.json`, written
last, holds the step, the score, and the size and CRC-32 of every file, so a damaged one is found before it is loaded.
The newest `keep_last` and the best stay; the others go, and only after the new one is on disk. `index.json` says the
same for people and other tools; the manifests are what counts.
"""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.files import atomic_directory, atomic_write, remove

MANIFEST = "burnish.json"
CHUNK = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder, the step it was taken after, and its validation score where it has one."""

    path: Path
    step: int
    score: float | None


def file_crc(path: Path) -> int:
    """CRC-32 of a file's content, read in pieces."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


def damage(path: Path, contents: bool = True) -> str | None:
    """Why a checkpoint cannot be used, or None. Without `contents` only names and sizes are compared, which is quick."""
    manifest = _manifest(path)
    if manifest is None:
        return f"{MANIFEST} is missing or unreadable"
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["size"]:
            return f"{name} has {file.stat().st_size} bytes instead of {entry['size']}"
        if contents and file_crc(file) != entry["crc32"]:
            return f"{name} has another checksum than when it was written"
    return None


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The highest score; of equals the earlier, which needed less training."""
    scored = [c for c in checkpoints if c.score is not None]
    return max(scored, key=lambda c: (c.score, -c.step), default=None)


def print_to_stderr(text: str) -> None:
    """Where notes go when nobody else takes them."""
    print(text, file=sys.stderr, flush=True)


class Checkpoints:
    """The checkpoints of one run. `report` takes a sentence about each damaged checkpoint that is passed over."""

    def __init__(self, folder: Path, keep_last: int, report: Callable[[str], None] = print_to_stderr) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.report = report

    def write(self, step: int, writer: Callable[[Path], None], score: float | None = None) -> Path:
        """Let `writer` fill a folder, make it the checkpoint of `step`, then prune. Returns its path.

        Checkpoints of later steps go too: a run that writes step 40 has turned back from them.
        """
        path = self.folder / f"step-{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if score is not None and not math.isfinite(score):
            score = None
        with atomic_directory(path, replace=True) as temporary:
            writer(temporary)
            files = sorted(f for f in temporary.rglob("*") if f.is_file())
            listed = {str(f.relative_to(temporary)): {"size": f.stat().st_size, "crc32": file_crc(f)} for f in files}
            manifest = {"step": step, "score": score, "files": listed}
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1))
        kept = self._kept(step)
        self._write_index(kept)
        for folder in self._folders():
            if folder not in [c.path for c in kept]:
                remove(folder)
        return path

    def all(self) -> list[Checkpoint]:
        """Every checkpoint with a readable manifest, oldest first; contents are not checked."""
        found = []
        for path in self._folders():
            if manifest := _manifest(path):
                found.append(Checkpoint(path, manifest["step"], manifest["score"]))
        return found

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, or None where none was ever written.

        A damaged one is reported and the one before is taken; if all are damaged that is a `UserError`.
        """
        reasons = []
        for path in reversed(self._folders()):
            reason = damage(path)
            if reason is None:
                return next(c for c in self.all() if c.path == path)
            reasons.append(f"{path}: {reason}")
            self.report(f"checkpoint {path} is damaged ({reason}); trying the one before")
        if reasons:
            listed = "\n  ".join(reasons)
            raise UserError(
                f"no checkpoint of this run can be used:\n  {listed}\nrestore one from a copy, or delete {self.folder.parent} to start over"
            )
        return None

    def best(self) -> Checkpoint | None:
        """The whole checkpoint with the highest score, or None where none has a score."""
        candidates = self.all()
        while (best := best_of(candidates)) is not None:
            reason = damage(best.path)
            if reason is None:
                return best
            self.report(f"checkpoint {best.path} is damaged ({reason}); trying the next best")
            candidates.remove(best)
        return None

    def _kept(self, step: int) -> list[Checkpoint]:
        usable = [c for c in self.all() if c.step <= step and damage(c.path, contents=False) is None]
        best = best_of(usable)
        return [c for c in usable if c in usable[-self.keep_last :] or c == best]

    def _write_index(self, kept: list[Checkpoint]) -> None:
        best = best_of(kept)
        rows = [{"step": c.step, "score": c.score, "folder": c.path.name} for c in kept]
        index = {"checkpoints": rows, "latest": kept[-1].step, "best": best.step if best else None}
        atomic_write(self.folder / "index.json", json.dumps(index, indent=1) + "\n")

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if p.is_dir() and re.fullmatch(r"step-\d{6,}", p.name)]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and {"step", "score", "files"} <= manifest.keys() else None
