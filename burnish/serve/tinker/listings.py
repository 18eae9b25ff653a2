"""Answers to questions about sessions, training runs and checkpoints: what the client's `RestClient` asks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from burnish.serve.tinker.checkpoints import Checkpoint, ModelDescription
from burnish.serve.tinker.service import TinkerService
from burnish.serve.tinker.state import NotFound

OWNER = "burnish"
PAGE = 20
MAX_PAGE = 1000


def capabilities(service: TinkerService) -> dict[str, Any]:
    """The base model."""
    longest = service.decoder.arch.max_positions
    model = {"model_name": service.name, "max_context_length": longest, "trainable": True, "sampleable": True}
    return {"supported_models": [model]}


def weights_info(service: TinkerService, path: str) -> dict[str, Any]:
    """What a model must be to load a checkpoint."""
    model = service.store.find(path).model
    lora = model.adapters
    switches = {name: getattr(model, name) for name in ("train_unembed", "train_mlp", "train_attn")}
    found = {"base_model": model.base_model, "is_lora": lora is not None}
    return found | ({} if lora is None else {"lora_rank": lora.rank, **switches})


def training_run(service: TinkerService, model_id: str) -> dict[str, Any]:
    """A model that is loaded or has checkpoints."""
    checkpoints, entry = service.store.of(model_id), service.models.get(model_id)
    if entry is not None:
        when = datetime.fromtimestamp(entry.last_request, UTC).isoformat()
        return _run(model_id, entry.description, when, checkpoints)
    if not checkpoints:
        raise NotFound(f"there is no training run {model_id}: it is not loaded, and has no checkpoint")
    return _run(model_id, checkpoints[-1].model, checkpoints[-1].time, checkpoints)


def _run(model_id: str, model: ModelDescription, when: str, checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    lora = model.adapters
    newest = {one.folder: one.to_json() for one in checkpoints}
    return {
        "training_run_id": model_id,
        "base_model": model.base_model,
        "model_owner": OWNER,
        "is_lora": lora is not None,
        "lora_rank": None if lora is None else lora.rank,
        "last_request_time": when,
        "last_checkpoint": newest.get("weights"),
        "last_sampler_checkpoint": newest.get("sampler_weights"),
        "user_metadata": {key: str(value) for key, value in model.user_metadata.items()},
    }


def training_runs(service: TinkerService, offset: int, limit: int) -> dict[str, Any]:
    """All models that are loaded or have checkpoints, a page at a time."""
    ids = list(dict.fromkeys([*service.models, *(one.model_id for one in service.store.all())]))
    runs = [training_run(service, model_id) for model_id in ids[offset : offset + limit]]
    return {"training_runs": runs, "cursor": {"offset": offset, "limit": limit, "total_count": len(ids)}}


def checkpoints(service: TinkerService, model_id: str) -> dict[str, Any]:
    """The checkpoints of a model."""
    return {"checkpoints": [one.to_json() for one in service.store.of(model_id)]}


def all_checkpoints(service: TinkerService, offset: int, limit: int) -> dict[str, Any]:
    """The checkpoints of all models, the newest first, a page at a time."""
    found = service.store.all()[::-1]
    page = [one.to_json() for one in found[offset : offset + limit]]
    return {"checkpoints": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(found)}}


def session(service: TinkerService, session_id: str) -> dict[str, Any]:
    """The models and samplers of a session."""
    found = service.sessions.get(session_id)
    if found is None:
        raise NotFound(f"there is no session {session_id}")
    return {
        "training_run_ids": found.model_ids,
        "sampler_ids": found.sampler_ids,
        "user_metadata": {key: str(value) for key, value in found.user_metadata.items()},
        "display_name": found.display_name,
    }


def sampler(service: TinkerService, sampler_id: str) -> dict[str, Any]:
    """What a sampler samples from."""
    found = service.sampler(sampler_id)
    return {"sampler_id": sampler_id, "base_model": service.name, "model_path": found.path}
