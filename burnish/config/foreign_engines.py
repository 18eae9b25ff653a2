"""Config sections of engines with weights of their own: vLLM, in this process or as a server, and SGLang's servers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.placement import RayPlacement
from burnish.config.records import Record

if TYPE_CHECKING:
    from burnish.config.rollout import Rollout
    from burnish.config.schema import TrainConfig

LOCAL_ENGINE_KEYS = ("engine",)
"""Keys of `rollout.vllm` that apply to an engine in this process only."""
SERVER_KEYS = ("weights_dir", "timeout_s")
"""Keys of `rollout.vllm` that apply to a server only."""


def _str_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sglang(Record):
    """Running SGLang servers (0.5 or later) with the policy's model. New weights are sent to them after every step."""

    urls: Annotated[list[str], BeforeValidator(_str_as_list)] = Field(default_factory=list)
    """Addresses, such as http://localhost:30000. Each request goes to the server with the least work. Empty if placement.server starts the
    servers."""
    timeout_s: float = Field(1800.0, gt=0)
    """Time limit of one request, including retries and the wait in a server's queue, and of one transfer of weights."""
    weights_dir: str | None = None
    """Folder for transferred weights. This process writes it, and every server reads it under the same path. null: a temporary folder,
    for servers on this machine. A folder in memory, such as /dev/shm, is faster."""

    @model_validator(mode="after")
    def _check_urls(self) -> Sglang:
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError("rollout.sglang.urls names a server twice")
        return self


class Vllm(Record):
    """How vLLM samples, with rollout.engine=vllm."""

    url: str | None = None
    """A vLLM server (`http://host:8000`) to sample from. null: an engine in this process. docs/engines.md shows how to start a server."""
    weights_dir: str | None = None
    """Folder for new weights, which this process writes and the server reads. null: a temporary folder."""
    timeout_s: float = Field(1800.0, gt=0)
    """Time limit of one completion and of one weight update by a server."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Arguments of vLLM's own (`EngineArgs`) for an engine in this process, such as dtype (default: model.dtype), max_model_len (default: the
    model's own limit) and enforce_eager (no compilation and no CUDA graphs: faster start, slower sampling)."""

    @model_validator(mode="after")
    def _check_effect(self) -> Vllm:
        given = self.given(LOCAL_ENGINE_KEYS)
        if given and self.url is not None:
            raise ValueError(
                f"rollout.vllm.{given[0]} has no effect on a server, which has its own setting: remove it, or url"
            )
        return self

    def given(self, keys: Iterable[str]) -> list[str]:
        """Those of the keys that do not have their default."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default(call_default_factory=True)]


def check_engine_fits(rollout: Rollout) -> None:
    """Refuse what SGLang cannot do, and SGLang options that have no effect."""
    engine = rollout.engine
    if engine != "sglang" and rollout.sglang is not None:
        raise ValueError(f"rollout.sglang has no effect with rollout.engine={engine}: set rollout.engine=sglang")
    if engine == "sglang" and rollout.mismatch is not None:
        raise ValueError(
            "rollout.mismatch changes the learner's own tensors, but rollout.engine=sglang has weights of its own"
        )


def is_vllm_in_process(config: TrainConfig) -> bool:
    """Whether vLLM samples in the run's own processes, and not in servers."""
    rollout, has_server = config.rollout, getattr(config.placement, "server", None) is not None
    return rollout.engine == "vllm" and not has_server and (rollout.vllm is None or rollout.vllm.url is None)


def check_servers_fit(config: TrainConfig) -> None:
    """Refuse an engine without a server, and options of servers that have no effect."""
    rollout, placement = config.rollout, config.placement
    command = placement.server if isinstance(placement, RayPlacement) else None
    urls = rollout.sglang.urls if rollout.sglang is not None else []
    url = rollout.vllm.url if rollout.vllm is not None else None
    if rollout.engine == "sglang" and not urls and command is None:
        raise ValueError(
            "rollout.engine=sglang: give the addresses of its servers in rollout.sglang.urls, or with placement=ray the command that starts "
            "one in placement.server"
        )
    if rollout.vllm is not None and url is None and command is None and (given := rollout.vllm.given(SERVER_KEYS)):
        raise ValueError(f"rollout.vllm.{given[0]} applies to a server: give rollout.vllm.url, or remove it")
    if command is not None and rollout.engine not in ("vllm", "sglang"):
        raise ValueError(
            f"placement.server has no effect with rollout.engine={rollout.engine}: set it to vllm or sglang"
        )
    if command is not None and (urls or url is not None):
        raise ValueError(
            "placement.server starts the servers, and rollout names the addresses of others: remove one of them"
        )
    if command is not None and rollout.vllm is not None and (given := rollout.vllm.given(LOCAL_ENGINE_KEYS)):
        raise ValueError(f"rollout.vllm.{given[0]} has no effect on a server: write it into placement.server")
    if command is not None and rollout.cache_gib is not None:
        raise ValueError("rollout.cache_gib has no effect on a server: write its option into placement.server")
    if command is not None and "{port}" not in command:
        raise ValueError(
            f"placement.server={command!r} has no {{port}}: each process that samples starts its own server at a free port and waits for it there"
        )
    if isinstance(placement, RayPlacement) and (urls or url is not None) and placement.size("rollout") > 1:
        raise ValueError(
            f"one process speaks to all servers that rollout names, and the placement has {placement.size('rollout')} that sample: set "
            "placement.engines=1 (or the places of its pool), or start a server for each with placement.server"
        )


def check_vllm_fits(rollout: Rollout) -> None:
    """Refuse what vLLM cannot do, and vLLM options that have no effect."""
    if rollout.vllm is not None and rollout.engine != "vllm":
        raise ValueError(f"rollout.vllm has no effect with rollout.engine={rollout.engine}: set rollout.engine=vllm")
    if rollout.engine != "vllm":
        return
    if rollout.mismatch is not None:
        raise ValueError(
            "rollout.mismatch changes the learner's own tensors, but rollout.engine=vllm has weights of its own"
        )
    if rollout.cache_dtype != "auto":
        raise ValueError(
            f"rollout.cache_dtype={rollout.cache_dtype} applies to the native engine, but rollout.engine=vllm"
        )
    if rollout.cache_gib is not None and rollout.vllm is not None and rollout.vllm.url is not None:
        raise ValueError("rollout.cache_gib has no effect on a server: start it with --kv-cache-memory-bytes")
