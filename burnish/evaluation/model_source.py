"""Finds the model of a command: a Hugging Face directory, or the best checkpoint of a run. Also its dtype and token limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.environment import Environment
from burnish.config.errors import UserError, did_you_mean
from burnish.config.model import Model
from burnish.config.model_ids import fetch_model, parse_model_id
from burnish.config.yaml_text import parse_yaml, read_json_object
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.run_directory import RunDirectory


@dataclass(frozen=True)
class ModelSource:
    """The directory of the weights; for a run also its config, and a note about the chosen checkpoint."""

    path: Path
    note: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


def find_model(path: Path, say: Callable[[str], None] = lambda text: None) -> ModelSource:
    """Return a Hugging Face or PEFT directory as it is; for a run, its best checkpoint, or the newest if none has a score.

    A hub id (`org/name`) for which there is no directory is read from the Hugging Face cache, or downloaded; `say` reports that.
    """
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return ModelSource(path)
    if (path / "config.yaml").is_file():
        return _best_of_run(RunDirectory.open(path))
    model = parse_model_id(str(path)) if not path.exists() else None
    if model is not None:
        folder = fetch_model(model, say=say)
        say(f"{model}: commit {folder.name} in {folder.parent.parent}")
        return ModelSource(folder)
    if not path.is_dir():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        raise UserError(f"{path} is not a directory{did_you_mean(path.name, siblings)}")
    raise UserError(
        f"{path} is neither a Hugging Face model directory (it has no config.json or adapter_config.json) nor a run (it has no config.yaml)"
    )


def stored_dtype(path: Path) -> str | None:
    """Return the dtype that the config of a directory names for its weights, for an adapter those of its base; None if none."""
    if not (path / "config.json").is_file():
        from burnish.models.lora.peft_files import base_model_of

        path = base_model_of(path)
    config = read_json_object(path / "config.json")
    found = config.get("dtype") or config.get("torch_dtype")
    return found if isinstance(found, str) else None


def compute_dtype(source: ModelSource, on_gpu: bool) -> str:
    """Return the default dtype for sampling: that of the run that the model comes from.

    Without a run, a GPU samples in the half precision that the weights are stored in, else in bfloat16. A CPU samples in
    float32, because half precision saves no time there, or in float64 if the run did.
    """
    config = _run_config(source)
    ran_in = (config.get("model") or {}).get("dtype", Model().dtype) if config else None
    if not on_gpu:
        return "float64" if ran_in == "float64" else "float32"
    stored = stored_dtype(source.path)
    return ran_in or (stored if stored in ("bfloat16", "float16") else "bfloat16")


def sampling_model(source: ModelSource, dtype: str | None, device: str) -> Model:
    """Return the model section of a command that samples: with the limits of image sizes that the run trained with."""
    from burnish.models.policy import resolve_device

    dtype = dtype or compute_dtype(source, resolve_device(device).type == "cuda")
    image_pixels = (_run_config(source).get("model") or {}).get("image_pixels")
    return Model.model_validate({"dtype": dtype, "device": device, "image_pixels": image_pixels})


def _run_config(source: ModelSource) -> dict[str, Any]:
    """Return the config of the run that a model comes from, also if the command named a checkpoint of it; else nothing."""
    if source.config or source.path.parent.name != "checkpoints":
        return source.config
    path = source.path.parent.parent / "config.yaml"
    return (parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}) if path.is_file() else {}


def _best_of_run(run: RunDirectory) -> ModelSource:
    checkpoints = Checkpoints(run.checkpoints, keep_last=1, of="model")
    best = checkpoints.best()
    chosen = best or checkpoints.latest()
    if chosen is None:
        raise UserError(f"run {run.path} has no checkpoint yet; wait for its first one (run.save_every)")
    why = "the newest checkpoint, none has a score" if chosen.score is None else f"its best: {chosen.score_text}"
    config = parse_yaml(run.config.read_text(encoding="utf-8"), str(run.config))
    if not isinstance(config, dict):
        raise UserError(f"{run.config}: expected `key: value` lines")
    return ModelSource(chosen.path, f"{run.path} is a run: taking {chosen.path.name} ({why})", config)


def fit_max_tokens(
    max_tokens: int,
    longest_prompt: int,
    positions: int | None,
    environment: Environment = Environment(),  # noqa: B008 (a frozen record)
) -> tuple[int, str | None]:
    """Reduce `max_tokens` to what the model's positions and environment.max_tokens leave after the longest prompt.

    Returns a note if it was reduced. Several turns share what is left, because a turn that might not fit is not started.
    """
    limits = [limit for limit in (positions, environment.max_tokens) if limit is not None]
    longest, turns = min(limits, default=None), environment.max_turns
    if longest is None or longest_prompt + max_tokens <= longest:
        return max_tokens, None
    is_own = longest == environment.max_tokens
    left = (longest - longest_prompt) // turns
    if left < 1:
        limit = f"environment.max_tokens={longest} is" if is_own else f"the model is made for {longest} positions"
        whole = "in all" if turns == 1 else f"for all {turns} turns together"
        advice = "; raise it" if is_own else ""
        raise UserError(f"the prompt has {longest_prompt} tokens, but {limit} {whole}{advice}")
    of = f"environment.max_tokens={longest}" if is_own else f"{longest} positions"
    rest = "" if turns == 1 else f", the rest for {turns} turns"
    return left, f"max_tokens cut from {max_tokens} to {left}: {of}, {longest_prompt} of them prompt{rest}"
