"""Engines that have weights of their own: where they are, and what does not go together with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.records import Record, Slot, choice

if TYPE_CHECKING:
    from burnish.config.rollout import Rollout


def _str_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Sglang(Record):
    """Running SGLang servers (0.5 or later) of the policy's model, which are sent new weights after every step."""

    urls: Annotated[list[str], BeforeValidator(_str_as_list), Field(min_length=1)]
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


# --- vLLM as the engine: in this process, or a server.

LOCAL_ENGINE_KEYS = ("dtype", "max_model_len", "enforce_eager")
SERVER_KEYS = ("weights_dir", "timeout_s")


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
        idle = LOCAL_ENGINE_KEYS if self.url is not None else SERVER_KEYS
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


# --- Faults of a sampling engine, for tests and study: one known difference between what samples and what is trained.
#
# `burnish.inference.engine_wrappers` wraps an engine in one of them. A fault is of the sampling (the reported log-probs are true, so
# importance weights can correct it) or of the reporting (they are not, so nothing computed from them can be trusted).


class NoiseFault(Slot):
    """Samples with weights moved in a fixed random direction: an engine with other kernels or another precision."""

    formula: ClassVar[str] = "w + scale rms(w) z, z standard normal, drawn once for each tensor from seed and its name"
    name: Literal["noise"] = "noise"
    scale: float = Field(0.01, ge=0)
    """Size of the move as a share of each tensor's root mean square; 0 moves nothing."""
    seed: int = 0
    """Which direction."""


class StaleFault(Slot):
    """Samples with the weights of some loads ago, and says so in the version: a trainer that runs ahead."""

    formula: ClassVar[str] = "after load v: the weights of load v - steps; before there were so many, the first ones"
    name: Literal["stale"] = "stale"
    steps: int = Field(1, ge=0)
    """How many loads the engine lags behind; 0 is up to date. Each takes the memory of one more set of weights."""


class QuantisedFault(Slot):
    """Samples with rounded weights: an engine that serves in a lower precision."""

    formula: ClassVar[str] = (
        "bf16: every tensor rounded; int8: every matrix, s round(w / s), s = max |w| / 127 of its row (output channel)"
    )
    name: Literal["quantised"] = "quantised"
    kind: Literal["bf16", "int8"] = "int8"
    """What the weights are rounded to; bf16 changes nothing where the policy has that type already."""


class TemperatureFault(Slot):
    """A temperature that is not the one asked for, in the drawing or in the reported log-probs. Greedy requests are as asked."""

    formula: ClassVar[str] = (
        "T' = factor T; sampled: y ~ p_T', reports log p_T'(y); reported: y ~ p_T, reports log p_T'(y)"
    )
    name: Literal["temperature"] = "temperature"
    factor: float = Field(1.2, gt=0)
    """What the temperature is multiplied with; for a server that reports at temperature 1 it is 1 / temperature."""
    wrong: Literal["sampled", "reported"] = "sampled"
    """Tokens are drawn at the wrong temperature and reported truly, or drawn as asked and reported at the wrong one."""


class ReencodedFault(Slot):
    """The text comes back instead of the tokens and is encoded again: other token ids, with the log-probs of the drawn ones.

    Pairs them by position, as a client would: log-probs left over are dropped, a token without one gets 0. The stop token that ended a
    completion is put back; other special tokens are no text and are lost.
    """

    name: Literal["reencoded"] = "reencoded"


class ExtraBosFault(Slot):
    """Puts a token before every prompt that the trainer does not see: a server that adds a BOS to token ids."""

    name: Literal["extra_bos"] = "extra_bos"
    token: int = Field(0, ge=0)
    """Id of that token; where a tokenizer has no BOS, any of its ids."""


class NeverLoadedFault(Slot):
    """Samples with the weights of the run's start for ever, under the version of each load: weights that never arrived."""

    name: Literal["never_loaded"] = "never_loaded"


class TruncatedFault(Slot):
    """Samples with top-p on, whatever is asked for."""

    formula: ClassVar[str] = "y ~ p on its smallest set of mass top_p; reports log p(y), or its log-prob on that set"
    name: Literal["truncated"] = "truncated"
    top_p: float = Field(0.9, gt=0, le=1)
    """The most mass tokens are drawn from."""
    reported: Literal["full", "truncated"] = "full"
    """Log-probs of the whole distribution, which show no gap to the trainer and are not true, or of the one drawn from."""


MISMATCH_FAULTS: tuple[type[Slot], ...] = (
    NoiseFault,
    StaleFault,
    QuantisedFault,
    TemperatureFault,
    ReencodedFault,
    ExtraBosFault,
    NeverLoadedFault,
    TruncatedFault,
)
Mismatch = (
    NoiseFault
    | StaleFault
    | QuantisedFault
    | TemperatureFault
    | ReencodedFault
    | ExtraBosFault
    | NeverLoadedFault
    | TruncatedFault
)
if TYPE_CHECKING:  # the unions are made at run time
    MismatchSlot: TypeAlias = Any
else:
    MismatchSlot = choice(*MISMATCH_FAULTS, plugin=False)
WEIGHT_FAULTS = ("noise", "quantised")
"""Faults made of every weight: in 4 bits there is none to change."""
