"""The model a command is pointed at: a Hugging Face directory, or a run, which stands for its best checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, nearest
from burnish.config.text import parse
from burnish.run.checkpoints import Checkpoints
from burnish.run.directory import RunDirectory


@dataclass(frozen=True)
class Subject:
    """Where the weights are; for a run also its config, and a note that says what was chosen."""

    path: Path
    note: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def find_subject(path: Path) -> Subject:
    """The model in a directory: a Hugging Face or PEFT one as it is, of a run the best checkpoint (the newest if none is scored)."""
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return Subject(path)
    if (path / "config.yaml").is_file():
        return _of_run(RunDirectory.open(path))
    if not path.is_dir():
        beside = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"{path} is not a directory{nearest(path.name, beside)}")
    raise UserError(
        f"{path} is neither a Hugging Face model directory (it has no config.json or adapter_config.json) nor a run (it has no config.yaml)"
    )


def stored_dtype(path: Path) -> str | None:
    """The type the weights of a directory are stored in, of an adapter those of its base, as its config says; None where it
    does not."""
    if not (path / "config.json").is_file():
        from burnish.models.adapters import base_of

        path = base_of(path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def _of_run(run: RunDirectory) -> Subject:
    checkpoints = Checkpoints(run.checkpoints, keep_last=1)
    best = checkpoints.best()
    chosen = best or checkpoints.latest()
    if chosen is None:
        raise UserError(f"run {run.path} has no checkpoint yet; wait for its first one (run.save_every)")
    why = "the newest checkpoint, none has a score" if chosen.score is None else f"its best, {chosen.score:.3f}"
    config = parse(run.config.read_text(encoding="utf-8"), str(run.config))
    if not isinstance(config, dict):
        raise UserError(f"{run.config}: expected `key: value` lines")
    return Subject(chosen.path, f"{run.path} is a run: taking {chosen.path.name} ({why})", config)


def fit_max_tokens(max_tokens: int, longest_prompt: int, positions: int | None) -> tuple[int, str | None]:
    """`max_tokens` cut to what the model's positions leave after the longest prompt, and a note if it was."""
    if positions is None or longest_prompt + max_tokens <= positions:
        return max_tokens, None
    if longest_prompt >= positions:
        raise UserError(
            f"the prompt has {longest_prompt} tokens, but the model is made for {positions} positions in all"
        )
    left = positions - longest_prompt
    return left, f"max_tokens cut from {max_tokens} to {left}: {positions} positions, {longest_prompt} of them prompt"
