"""Keys of sampling: how tokens are drawn, by whom, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from burnish.config.engines import WEIGHT_FAULTS, MismatchSlot, Sglang, Vllm, check_engine_fits, check_vllm_fits
from burnish.config.model import Model
from burnish.config.placement import RayPlacement
from burnish.config.records import Record, Slot, choice

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


# --- When a step's rollouts are made: before it, during the one before, or all the time.


class Sync(Slot):
    """Sample, then learn: every token is of the weights that are trained."""

    name: Literal["sync"] = "sync"


class Ahead(Slot):
    """The rollouts of the next step are made while this one is learnt: every token is exactly one step old, the run as repeatable as sync."""

    name: Literal["ahead"] = "ahead"


class Async(Slot):
    """Sampling never stops: new weights are taken in the middle of samples, and a step gets the oldest groups that are complete."""

    name: Literal["async"] = "async"
    max_staleness: int = Field(1, ge=0)
    """Most steps that a token may be older than the weights that are trained; 0 is sync."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest time a step waits for groups that are not complete; then it goes on with those that are, and the others come later.
    Tokens that have grown too old by then are dropped and drawn again."""


SourceSlot: Any = choice(Sync, Ahead, Async, plugin=False)
RolloutSource = Sync | Ahead | Async


def check_source_fits(config: TrainConfig) -> None:
    """Refuse a source that cannot sample while the learner learns."""
    rollout, placement = config.rollout, config.placement
    if rollout.source.name == "sync":
        return
    what = f"rollout.source={rollout.source.name}"
    if rollout.mismatch is not None:
        raise ValueError(f"{what} has a gap of its own between sampler and trainer: study rollout.mismatch with sync")
    if rollout.exact:
        raise ValueError(f"{what} samples with older weights, so rollout.exact has nothing to be exact about: use sync")
    if isinstance(placement, RayPlacement):
        if any(placement.take_turns(role, "rollout") for role in ("actor", "reference", "critic")):
            where = "one pool" if placement.pools else "placement.layout=colocated"
            instead = "give them pools of their own" if placement.pools else "set placement.layout=split"
            raise ValueError(f"{what} samples while the learner learns, and {where} lets them take turns: {instead}")
        return
    if rollout.engine == "vllm" and (rollout.vllm is None or rollout.vllm.url is None):
        raise ValueError(
            f"{what} needs an engine that samples while the learner learns, and vLLM in this process takes turns with it: "
            "start a server and set rollout.vllm.url"
        )
    if config.model.device.startswith("cuda") and rollout.engine not in ("vllm", "sglang"):
        raise ValueError(gpu_refusal(rollout.source.name))


def gpu_refusal(name: str) -> str:
    """Why one GPU does not sample and learn at once."""
    return (
        f"rollout.source={name} with placement=local on a GPU: sampler and learner would slow each other down on the one device; "
        "set placement=ray and placement.layout=split (a GPU for each), or rollout.engine to a vLLM or SGLang server on another GPU"
    )


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
    if rollout.mismatch is not None and rollout.mismatch.name in WEIGHT_FAULTS and base != "dtype":
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


# --- What answers a completion, and whether it fits the rest of a run.

SINGLE_TURN, GUESS_NUMBER = "single_turn", "guess_number"


def named(value: Any) -> Any:
    """`environment: name` for `environment: {name: name}`."""
    return {"name": value} if isinstance(value, str) else value


class Environment(Record):
    """What answers a completion."""

    name: str = SINGLE_TURN
    """single_turn; guess_number, for the task of that name; or `path/to/file.py:Class` (`package.module:Class`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    max_turns: int = Field(1, ge=1)
    """Most completions in one trajectory; one whose environment wants more is cut off (`rollout/out_of_turns` counts them). guess_number,
    and algorithms that compare states, take 2 or more."""
    max_tokens: int | None = Field(None, ge=2)
    """Most tokens of one trajectory, prompt and observations included: a turn that might not fit is not begun, a prompt whose first turn
    might not is an error, and a sample whose environment begins with more than its prompt, and might not fit then, is lost. null is what
    the model has positions for."""


def check_turns(environment: Environment) -> None:
    """Refuse a game of several turns that may have but one."""
    if environment.name == GUESS_NUMBER and environment.max_turns == 1:
        raise ValueError(
            "environment guess_number is a game of several turns, and environment.max_turns=1 ends it after the first guess: set "
            "environment.max_turns, such as 3 for its 7 numbers"
        )


def check_environment_fits(config: TrainConfig) -> None:
    """Refuse an environment that cannot play with the data, or settings that nothing would come of."""
    environment = config.environment
    if environment.name == SINGLE_TURN and environment.max_turns != 1:
        raise ValueError("environment.max_turns has no effect on single_turn, which ends after one completion")
    if environment.max_tokens is not None and environment.max_turns == 1:
        raise ValueError(
            "environment.max_tokens has no effect with environment.max_turns=1: rollout.max_tokens limits a completion"
        )
    sources = [*config.data.train, *config.data.validation]
    if environment.name == SINGLE_TURN and any(source.task == GUESS_NUMBER for source in sources):
        raise ValueError(
            "task guess_number is a game of several turns: set environment=guess_number and environment.max_turns"
        )
    check_turns(environment)
    if environment.name == GUESS_NUMBER:
        other = next((source for source in sources if source.task != GUESS_NUMBER), None)
        if other is not None:
            what = other.task or other.path or other.plugin
            raise ValueError(
                f"environment guess_number plays with numbers of the task guess_number, and data has {what}"
            )
        if [part.name for part in config.reward.parts] != ["task"]:
            raise ValueError(
                "reward.parts has no effect: environment guess_number gives the rewards itself; leave it out"
            )
    if config.algorithm.needs("states") and environment.name == SINGLE_TURN:
        raise ValueError(
            f"{', '.join(config.algorithm.needs('states'))} compares turns that begin in the same state, and single_turn has one turn of "
            "each sample: give an environment that reports its state, such as guess_number, or use grpo"
        )
    if config.algorithm.needs("states") and environment.max_turns == 1:
        raise ValueError(
            f"{', '.join(config.algorithm.needs('states'))} compares turns that begin in the same state, and environment.max_turns=1 "
            "leaves each sample its first: set environment.max_turns to the most that the environment may ask for, or use grpo"
        )
