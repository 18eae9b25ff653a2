"""Named tensors to a safetensors file and back, checked: what is read is what was saved, or an error names the file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.config.errors import UserError


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file; the caller sees to it that a half-written one is never taken for whole."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file."""
    if not path.is_file():
        raise UserError(f"{path} is not there: the checkpoint was saved by a run of another kind, or is incomplete")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error


@torch.no_grad()
def read_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a file's tensors into these, bit for bit: the names, shapes and types must be the same."""
    stored = read_tensors(path)
    if stored.keys() != tensors.keys():
        unexpected, missing = sorted(stored.keys() - tensors.keys()), sorted(tensors.keys() - stored.keys())
        raise UserError(f"{path} does not fit the model: unexpected {unexpected[:3]}, missing {missing[:3]}")
    for name, tensor in tensors.items():
        got, wanted = (f"{tuple(t.shape)} in {t.dtype}" for t in (stored[name], tensor))
        if got != wanted:
            raise UserError(f"{path} does not fit the model: {name} is {got}, but the model has {wanted}")
    for name, tensor in tensors.items():
        tensor.copy_(stored[name])
