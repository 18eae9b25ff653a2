"""Keys of sampling: how tokens are drawn, by whom, and how many."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from burnish.config.engines import Sglang, check_engine_fits
from burnish.config.model import Model
from burnish.config.slots import Record
from burnish.config.slots.mismatch import CHANGES_WEIGHTS, MismatchSlot
from burnish.config.source import SourceSlot, Sync
from burnish.config.vllm import Vllm, check_vllm_fits


class Sampling(Record):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this probability."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 is off."""
    max_tokens: int = Field(256, ge=1)
    """Most new tokens of one completion."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, besides the model's end tokens."""


class RolloutStage(Record):
    """Rollout settings from a step on (progressive context, DeepScaleR); what is left out stays as it was."""

    start: int = Field(ge=2)
    """First step of the stage."""
    max_tokens: int | None = Field(None, ge=1)
    """Most new tokens of one completion; also where soft overlong penalties and the horizon of Dr.GRPO take theirs from."""
    n: int | None = Field(None, ge=1)
    """Samples of each prompt."""
    prompts: int | None = Field(None, ge=1)
    """Prompts a step."""

    @model_validator(mode="after")
    def _changes(self) -> RolloutStage:
        if self.max_tokens is None and self.n is None and self.prompts is None:
            raise ValueError(f"the stage from step {self.start} changes nothing: give max_tokens, n or prompts")
        return self


def check_mismatch_fits(rollout: Rollout, model: Model) -> None:
    """Refuse a fault in weights that cannot have it."""
    base = "dtype" if model.lora is None else model.lora.base
    if rollout.mismatch is not None and rollout.mismatch.name in CHANGES_WEIGHTS and base != "dtype":
        raise ValueError(
            f"rollout.mismatch={rollout.mismatch.name} changes weights that are plain numbers, and model.lora.base={base} has those of "
            "the layers in 4 bits: set model.lora.base=dtype"
        )


class Rollout(Sampling):
    """Sampling for training."""

    engine: Literal["auto", "native", "transformers", "vllm", "sglang"] = "auto"
    """Who samples; auto follows model.backend."""
    vllm: Vllm | None = None
    """How vLLM samples, with rollout.engine=vllm; null is an engine in this process."""
    sglang: Sglang | None = None
    """The servers of rollout.engine=sglang."""
    prompts: int = Field(64, ge=1)
    """Prompts a step."""
    n: int = Field(8, ge=1)
    """Samples of each prompt."""
    max_rows: int = Field(256, ge=1)
    """Most sequences decoded at once."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the native engine's KV cache in GiB: less sets rows aside when they grow, more keeps the beginnings of more prompts.
    null takes what all rows at their longest need, at most 40% of what is free. On a CPU a number chooses the paged cache. Also the
    cache of vLLM in this process, where null means 4."""
    cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8 keeps keys and values in 8 bits (half of bfloat16's memory) with a scale for each vector; what it changes of the samples
    the mismatch metrics show. On a CPU it chooses the paged cache, like cache_gib."""
    exact: bool = False
    """Sample and score with operations whose bits do not depend on what is computed beside them: the learner's log-prob of every
    sampled token is then the engine's, bit for bit, at a cost in speed that `bench/exact.py` measures."""
    mismatch: MismatchSlot | None = None
    """A fault injected between the policy that samples and the one that is trained, to study corrections; validation has it too."""
    stages: list[RolloutStage] = Field(default_factory=list)
    """Changes of max_tokens, n and prompts at later steps, in order."""
    source: SourceSlot = Sync()
    """When rollouts are made: before their step, during the one before, or all the time."""

    @model_validator(mode="after")
    def _in_order(self) -> Rollout:
        check_engine_fits(self)
        check_vllm_fits(self)
        other = self.engine not in ("auto", "native")
        if self.exact and other:
            raise ValueError(f"rollout.exact needs the native engine, and rollout.engine={self.engine}")
        if self.exact and (self.top_p < 1 or self.top_k):
            raise ValueError(
                "rollout.exact with top_p or top_k: the engine reports log-probs of the truncated distribution, the learner of the whole"
            )
        if other and self.engine != "vllm" and (self.cache_gib is not None or self.cache_dtype != "auto"):
            raise ValueError(
                f"rollout.cache_gib and cache_dtype are of the native engine, and rollout.engine={self.engine}"
            )
        if self.exact and self.cache_dtype != "auto":
            raise ValueError(
                "rollout.exact with cache_dtype=fp8: the learner has no cache to round, so the log-probs would differ"
            )
        if self.exact and self.mismatch is not None:
            raise ValueError("rollout.exact and rollout.mismatch contradict each other")
        starts = [stage.start for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"rollout.stages start at steps {starts}; each must start after the one before")
        return self

    def at(self, step: int) -> Rollout:
        """The settings of a step: every stage that has begun laid over the first ones."""
        begun = [stage.model_dump(exclude_none=True, exclude={"start"}) for stage in self.stages if stage.start <= step]
        changes = {key: value for stage in begun for key, value in stage.items()}
        return self.model_copy(update=changes)

    def all_stages(self) -> list[Rollout]:
        """The settings at the start and after each change."""
        return [self, *(self.at(stage.start) for stage in self.stages)]
