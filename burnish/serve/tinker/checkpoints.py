"""Checkpoints of the training API on disk: `tinker://MODEL/weights/NAME` is a folder with weights, AdamW's state and a description.

    ROOT/MODEL/weights/NAME            PEFT or Hugging Face directory, optimizer.safetensors, checkpoint.json
    ROOT/MODEL/sampler_weights/NAME    the same without the optimizer

A folder is written under a temporary name and renamed. Any adapter folder loads in `peft`, and any other in `transformers`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from burnish.config.model import Lora
from burnish.run.checkpoint.snapshot import Content, write_contents
from burnish.run.durable_files import atomic_directory
from burnish.serve.tinker.requests import BadRequest

SCHEME = "tinker://"
FILE = "checkpoint.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+=-]{0,199}")
Folder = Literal["weights", "sampler_weights"]
TYPES: dict[str, str] = {"weights": "training", "sampler_weights": "sampler"}
"""The client's name of each kind of checkpoint."""


@dataclass(frozen=True)
class ModelDescription:
    """What a model is: its base and its adapters. `train_unembed` is what the client asked for."""

    base_model: str
    lora: dict[str, Any] | None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def adapters(self) -> Lora | None:
        """The adapters; None if all weights are trained."""
        return None if self.lora is None else Lora.model_validate(self.lora)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk."""

    model_id: str
    folder: str
    name: str
    directory: Path
    model: ModelDescription
    time: str
    expires_at: str | None
    user_metadata: dict[str, str] | None

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"{SCHEME}{self.model_id}/{self.folder}/{self.name}"

    @property
    def is_expired(self) -> bool:
        return self.expires_at is not None and datetime.fromisoformat(self.expires_at) < datetime.now(UTC)

    def to_json(self) -> dict[str, Any]:
        """The checkpoint as clients read it."""
        size = sum(file.stat().st_size for file in self.directory.iterdir() if file.is_file())
        return {
            "checkpoint_id": f"{self.folder}/{self.name}",
            "checkpoint_type": TYPES[self.folder],
            "time": self.time,
            "tinker_path": self.path,
            "size_bytes": size,
            "public": False,
            "user_metadata": self.user_metadata,
            "expires_at": self.expires_at,
        }


def saved_at(directory: Path) -> str | None:
    """When the checkpoint in a folder was saved; None if there is none any more."""
    try:
        found: str = json.loads((directory / FILE).read_text())["time"]
    except FileNotFoundError:
        return None
    return found


class CheckpointStore:
    """The checkpoints below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(
        self,
        model_id: str,
        folder: Folder,
        name: str,
        contents: Iterable[Content],
        model: ModelDescription,
        ttl_seconds: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
        overwrite: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint. One that exists is replaced only with `overwrite`, or if it has expired."""
        directory = self._directory(model_id, folder, name)
        if directory.exists() and not overwrite and not self._read(directory).is_expired:
            raise BadRequest(
                f"{SCHEME}{model_id}/{folder}/{name} exists already; choose another name, or set overwrite"
            )
        now = datetime.now(UTC)
        described = {
            "model": asdict(model),
            "time": now.isoformat(),
            "expires_at": None if ttl_seconds is None else (now + timedelta(seconds=ttl_seconds)).isoformat(),
            "user_metadata": None if user_metadata is None else dict(user_metadata),
        }
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(directory, replace=True) as temporary:
            write_contents(temporary, contents)
            (temporary / FILE).write_text(json.dumps(described, indent=1))
        return self._read(directory)

    def find(self, path: str) -> Checkpoint:
        """The checkpoint of a path; BadRequest if there is none."""
        parts = path.removeprefix(SCHEME).split("/")
        if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in TYPES:
            raise BadRequest(
                f"{path!r} is no checkpoint path; expected {SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME"
            )
        directory = self._directory(*parts)
        if not (directory / FILE).is_file():
            near = [found.path for found in self.of(parts[0])]
            hint = f"; this model has {', '.join(near[-3:])}" if near else ""
            raise BadRequest(f"there is no checkpoint {path} below {self.root}{hint}")
        found = self._read(directory)
        if found.is_expired:
            raise BadRequest(f"the checkpoint {path} expired at {found.expires_at}")
        return found

    def of(self, model_id: str) -> list[Checkpoint]:
        """The checkpoints of a model that have not expired, the oldest first."""
        if not NAME.fullmatch(model_id):
            return []
        return sorted(
            (one for one in self._all([self.root / model_id]) if not one.is_expired), key=lambda one: one.time
        )

    def all(self) -> list[Checkpoint]:
        """All checkpoints that have not expired, the oldest first."""
        folders = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        return sorted((one for one in self._all(folders) if not one.is_expired), key=lambda one: one.time)

    def delete(self, path: str) -> None:
        """Delete a checkpoint."""
        shutil.rmtree(self.find(path).directory)

    def delete_expired(self) -> list[str]:
        """Delete the checkpoints whose time is over; returns their paths."""
        folders = [path for path in self.root.iterdir() if path.is_dir()] if self.root.is_dir() else []
        expired = [one for one in self._all(folders) if one.is_expired]
        for one in expired:
            shutil.rmtree(one.directory)
        return [one.path for one in expired]

    def _all(self, folders: Iterable[Path]) -> Iterator[Checkpoint]:
        for folder in folders:
            for kind in TYPES:
                for file in (folder / kind).glob(f"*/{FILE}"):
                    if not NAME.fullmatch(file.parent.name):  # the temporary folder of a writer
                        continue
                    try:
                        found = self._read(file.parent)
                    except FileNotFoundError:  # deleted or replaced meanwhile
                        continue
                    yield found

    def _directory(self, model_id: str, folder: str, name: str) -> Path:
        for part in (model_id, name):
            if not NAME.fullmatch(part):
                raise BadRequest(
                    f"{part!r} is no name of a checkpoint: use letters, digits and . _ - : + =, at most 200, the first a letter or digit"
                )
        return self.root / model_id / folder / name

    def _read(self, directory: Path) -> Checkpoint:
        described = json.loads((directory / FILE).read_text())
        return Checkpoint(
            directory.parent.parent.name,
            directory.parent.name,
            directory.name,
            directory,
            ModelDescription(**described["model"]),
            described["time"],
            described["expires_at"],
            described["user_metadata"],
        )
