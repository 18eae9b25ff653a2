"""The reference's log-probs, computed once before training and kept in the run directory.

A run computes them with the model as it starts, so that no second one is ever held. They are saved chunk by chunk:
a kill loses at most one chunk, and a run that goes on reads the rest, the same bits. Each file knows the tokens it was made
from; data that has changed since is an error.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from burnish.algorithms.preference import PreferenceLoss
from burnish.config.errors import UserError
from burnish.run.files import atomic_write
from burnish.run.run import Run
from burnish.trainers.preference import Unit, mean_logprobs, pack_units
from burnish.training.learner import Learner

CHUNK = 512
"""Units in a file."""
FOLDER = "reference"


def cached_means(run: Run, name: str, learner: Learner, units: Sequence[Unit], loss: PreferenceLoss) -> Tensor:
    """[U, 2] float64 mean log-prob of each answer under the weights the learner has now, or had when the run began."""
    found = []
    folder = run.directory.path / FOLDER
    for start in range(0, len(units), CHUNK):
        part = units[start : start + CHUNK]
        path = folder / f"{name}-{start:08d}.safetensors"
        # One process looks: another might see a file that was not there a moment ago, and they would wait for each other.
        values = learner.ranks.from_first(_read(path, part) if learner.ranks.is_first else None)
        if values is None and path.is_file():
            run.display.note(f"{path} is damaged: its log-probs are computed again")
        if values is None:
            run.display.phase(f"reference log-probs of {name} {start:,}/{len(units):,}")
            batch = pack_units(part, loss).to(learner.device)
            values = mean_logprobs(learner.logprobs, learner, batch).view(-1, 2).cpu()
            if learner.ranks.is_first:
                _write(path, part, values)
        found.append(values)
    return torch.cat(found)


def _fingerprint(units: Sequence[Unit]) -> str:
    """What identifies the tokens of some units, and which of them are the answers'."""
    digest = hashlib.sha256()
    for unit in units:
        digest.update(repr((unit.first.tokens, unit.first.mask, unit.second.tokens, unit.second.mask)).encode())
    return digest.hexdigest()


def _read(path: Path, units: Sequence[Unit]) -> Tensor | None:
    """What a file holds; None where it is missing or damaged, and is made again with the same weights."""
    if not path.is_file():
        return None
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            known, values = (file.metadata() or {}).get("tokens", ""), file.get_tensor("means")
    except (SafetensorError, OSError):
        return None
    tokens, _, crc = known.partition(" ")
    if crc != _checksum(tokens, values):
        return None
    if tokens != _fingerprint(units):
        raise UserError(
            f"{path} was computed from other rows: the data (or the tokenizer) has changed since this run began. "
            "Put the old data back, or give the run another run.name"
        )
    return values


def _checksum(tokens: str, values: Tensor) -> str:
    return f"{zlib.crc32(values.numpy().tobytes(), zlib.crc32(tokens.encode())):08x}"


def _write(path: Path, units: Sequence[Unit], values: Tensor) -> None:
    from safetensors.torch import save

    path.parent.mkdir(exist_ok=True)
    tokens = _fingerprint(units)
    # One entry, because the library writes several in any order, and equal runs shall have equal files.
    atomic_write(path, save({"means": values.contiguous()}, {"tokens": f"{tokens} {_checksum(tokens, values)}"}))
