"""Engines that have weights of their own: where they are, and what does not go together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.slots.base import Record

if TYPE_CHECKING:
    from burnish.config.rollout import Rollout


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sglang(Record):
    """Running SGLang servers (0.5 or later) of the policy's model, which are sent new weights after every step."""

    urls: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    """Their addresses, such as http://localhost:30000; each request goes to the one with least work."""
    timeout_s: float = Field(1800.0, gt=0)
    """Deadline of one request, retries and its wait in a server's queue included, and of one transfer of weights."""
    weights_dir: str | None = None
    """Folder for weights on their way: this process writes it and every server reads it, under this name. null means a folder for
    temporary files, for servers on this machine; one in memory, such as /dev/shm, is faster."""

    @model_validator(mode="after")
    def _once(self) -> Sglang:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("rollout.sglang.urls names a server twice")
        return self


def check_engine_fits(rollout: Rollout) -> None:
    """Refuse what an engine cannot do, or would not look at."""
    kind = rollout.engine
    if kind == "sglang" and rollout.sglang is None:
        raise ValueError("rollout.engine=sglang: give the addresses of its servers in rollout.sglang.urls")
    if kind != "sglang" and rollout.sglang is not None:
        raise ValueError(f"rollout.sglang has no effect with rollout.engine={kind}: set rollout.engine=sglang")
    if kind == "sglang" and rollout.mismatch is not None:
        raise ValueError("rollout.mismatch is made of the learner's own tensors, and rollout.engine=sglang has others")
