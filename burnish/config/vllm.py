"""vLLM as the engine: in this process, or a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from burnish.config.slots.base import Record

if TYPE_CHECKING:
    from burnish.config.rollout import Rollout

OF_THE_ENGINE = ("dtype", "max_model_len", "enforce_eager")
OF_A_SERVER = ("weights_dir", "timeout_s")


class Vllm(Record):
    """How vLLM samples, with rollout.engine=vllm."""

    url: str | None = None
    """A vLLM server (`http://host:8000`) to sample from; null starts an engine in this process. docs/engines.md says how to start one."""
    weights_dir: str | None = None
    """A folder that this process writes and the server reads, for new weights; null makes one among the system's temporary files."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one completion and of one update of weights by a server."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the engine's weights and arithmetic; auto is model.dtype."""
    max_model_len: int | None = Field(None, ge=2)
    """Most tokens of a prompt and its completion; null is what the model is made for. A small cache may only have room for less."""
    enforce_eager: bool = False
    """Without compiled code and CUDA graphs: ready sooner, slower afterwards."""

    @model_validator(mode="after")
    def _one(self) -> Vllm:
        idle = OF_THE_ENGINE if self.url is not None else OF_A_SERVER
        given = [key for key in idle if getattr(self, key) != type(self).model_fields[key].default]
        if given and self.url is not None:
            raise ValueError(f"rollout.vllm.{given[0]} has no effect on a server, which has its own: remove it, or url")
        if given:
            raise ValueError(f"rollout.vllm.{given[0]} is about a server: give rollout.vllm.url, or remove it")
        return self


def check_vllm_fits(rollout: Rollout) -> None:
    """Raise for options that contradict vLLM or that it would not see."""
    if rollout.vllm is not None and rollout.engine != "vllm":
        raise ValueError(f"rollout.vllm has no effect with rollout.engine={rollout.engine}: set rollout.engine=vllm")
    if rollout.engine != "vllm":
        return
    if rollout.mismatch is not None:
        raise ValueError(
            "rollout.mismatch puts its fault into an engine on the policy's own tensors, and rollout.engine=vllm has weights of its own"
        )
    if rollout.cache_dtype != "auto":
        raise ValueError(f"rollout.cache_dtype={rollout.cache_dtype} is of the native engine, and rollout.engine=vllm")
    if rollout.cache_gib is not None and rollout.vllm is not None and rollout.vllm.url is not None:
        raise ValueError("rollout.cache_gib has no effect on a server: start it with --kv-cache-memory-bytes")
