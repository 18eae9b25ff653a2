"""Config sections for rollouts: sampling, engines, injected engine faults and rollout sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from burnish.config.foreign_engines import Sglang, Vllm, check_engine_fits, check_vllm_fits
from burnish.config.model import Model
from burnish.config.placement import RayPlacement
from burnish.config.records import Record, Slot, choice

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


# --- sources: when the rollouts of a step are made ------------------------------------------------------------------------


class Sync(Slot):
    """Sample, then learn: every token is sampled with the current weights."""

    name: Literal["sync"] = "sync"


class Ahead(Slot):
    """Sample the next step's rollouts while this step is trained. Every token is exactly one step old, and the run is as reproducible as sync."""

    name: Literal["ahead"] = "ahead"


class Async(Slot):
    """Sample continuously. The engine loads new weights while samples are unfinished, and a step trains on the oldest complete groups."""

    name: Literal["async"] = "async"
    max_staleness: int = Field(1, ge=0)
    """How many steps older than the trained weights a token may be; 0 is sync."""
    deadline_s: float = Field(600.0, gt=0)
    """Maximum time that a step waits for incomplete groups. After it the step trains on the complete ones, and later steps use the others.
    Tokens that are too old by then are dropped and sampled again."""


SourceSlot: Any = choice(Sync, Ahead, Async, plugin=False)
RolloutSource = Sync | Ahead | Async


def check_source_fits(config: TrainConfig) -> None:
    """Refuse a source that cannot sample while the learner trains."""
    rollout, placement = config.rollout, config.placement
    if rollout.source.name == "sync":
        return
    what = f"rollout.source={rollout.source.name}"
    if rollout.mismatch is not None:
        raise ValueError(
            f"{what} makes sampler and trainer differ by itself: use rollout.source=sync to study rollout.mismatch"
        )
    if rollout.exact:
        raise ValueError(f"{what} samples with older weights, so rollout.exact cannot hold: use sync")
    if isinstance(placement, RayPlacement):
        if any(placement.share_pool(role, "rollout") for role in ("actor", "reference", "critic")):
            where = "one pool" if placement.pools else "placement.layout=colocated"
            instead = "give them pools of their own" if placement.pools else "set placement.layout=split"
            raise ValueError(f"{what} samples while the learner trains, but in {where} they take turns: {instead}")
        return
    if rollout.engine == "vllm" and (rollout.vllm is None or rollout.vllm.url is None):
        raise ValueError(
            f"{what} needs an engine that samples while the learner trains, but vLLM in this process takes turns with it: "
            "start a server and set rollout.vllm.url"
        )


def check_repeatable(config: TrainConfig) -> None:
    """Refuse `training.deterministic` where samples depend on time, so that no two runs are equal."""
    if not config.training.deterministic:
        return
    rollout = config.rollout
    if rollout.source.name == "async":
        raise ValueError(
            "training.deterministic with rollout.source=async: a step trains on the groups that are complete by then, so no two runs "
            "are equal; use sync or ahead"
        )
    if rollout.engine in ("vllm", "sglang"):
        raise ValueError(
            f"training.deterministic with rollout.engine={rollout.engine}: its batches depend on time, and rounding on its batches; "
            "use the native engine"
        )
    if isinstance(rollout.speculation, Speculation) and rollout.speculation.source != "context" and not rollout.exact:
        raise ValueError(
            f"training.deterministic with rollout.speculation.source={rollout.speculation.source}: earlier answers are not in a checkpoint, so a "
            "resumed run would verify other drafts and round differently; use source=context, or rollout.exact"
        )


# --- injected faults --------------------------------------------------------------------------------------------------------
#
# For tests and studies: one known difference between the policy that samples and the policy that is trained.
# `burnish.inference.engine_wrappers` wraps an engine in one of them. Either the sampling is wrong and the reported log-probs are
# true, so that importance weights can correct it, or the reported log-probs are wrong, so that nothing computed from them holds.


class NoiseFault(Slot):
    """Samples with weights moved in a fixed random direction, like an engine with other kernels or another precision."""

    formula: ClassVar[str] = "w + scale rms(w) z, z standard normal, drawn once for each tensor from seed and its name"
    name: Literal["noise"] = "noise"
    scale: float = Field(0.01, ge=0)
    """Size of the change relative to the root mean square of each tensor; 0 changes nothing."""
    seed: int = 0
    """Seed of the random direction."""


class StaleFault(Slot):
    """Samples with the weights of an earlier load and reports their version, like an engine behind its trainer."""

    formula: ClassVar[str] = (
        "after load v: the weights of load v - steps, or the first weights while there are fewer loads"
    )
    name: Literal["stale"] = "stale"
    steps: int = Field(1, ge=0)
    """How many loads the engine lags behind; 0 is up to date. Each takes the memory of one more set of weights."""


class QuantisedFault(Slot):
    """Samples with rounded weights, like an engine that serves in a lower precision."""

    formula: ClassVar[str] = (
        "bf16: every tensor rounded; int8: every matrix, s round(w / s), s = max |w| / 127 of its row (output channel)"
    )
    name: Literal["quantised"] = "quantised"
    kind: Literal["bf16", "int8"] = "int8"
    """What the weights are rounded to; bf16 changes nothing if the policy is in bfloat16 already."""


class TemperatureFault(Slot):
    """Uses a wrong temperature, for the sampling or for the reported log-probs. Greedy requests are not changed."""

    formula: ClassVar[str] = (
        "T' = factor T; sampled: y ~ p_T', reports log p_T'(y); reported: y ~ p_T, reports log p_T'(y)"
    )
    name: Literal["temperature"] = "temperature"
    factor: float = Field(1.2, gt=0)
    """Factor of the temperature. 1 / temperature is a server that reports at temperature 1."""
    wrong: Literal["sampled", "reported"] = "sampled"
    """sampled: tokens are drawn at the wrong temperature, and the report is true. reported: tokens are drawn at the right one, and
    log-probs are reported at the wrong one."""


class ReencodedFault(Slot):
    """Returns text that is tokenized again: other token ids, with the log-probs of the sampled ones.

    Log-probs are paired by position, as a client would do it: surplus ones are dropped, and a token without one gets 0. The stop token
    that ended a completion is put back. Other special tokens are not part of the text and are lost.
    """

    name: Literal["reencoded"] = "reencoded"


class ExtraBosFault(Slot):
    """Adds a token before every prompt that the trainer does not see, like a server that adds a BOS to token ids."""

    name: Literal["extra_bos"] = "extra_bos"
    token: int = Field(0, ge=0)
    """Id of the added token. If the tokenizer has no BOS, any id will do."""


class NeverLoadedFault(Slot):
    """Always samples with the initial weights, but reports the version of each load, as if weights never arrived."""

    name: Literal["never_loaded"] = "never_loaded"


class TruncatedFault(Slot):
    """Always samples with top-p, whatever the request says."""

    formula: ClassVar[str] = (
        "y ~ p restricted to the smallest set of mass top_p; reports log p(y), or the log-prob after the restriction"
    )
    name: Literal["truncated"] = "truncated"
    top_p: float = Field(0.9, gt=0, le=1)
    """Probability mass that tokens are drawn from."""
    reported: Literal["full", "truncated"] = "full"
    """full: log-probs of the whole distribution, which are wrong although they show no gap to the trainer. truncated: log-probs of the
    distribution that was sampled from."""


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
if TYPE_CHECKING:  # the union is built at run time
    MismatchSlot: TypeAlias = Any
else:
    MismatchSlot = choice(*MISMATCH_FAULTS, plugin=False)
WEIGHT_FAULTS = ("noise", "quantised")
"""Faults that change every weight. They cannot change weights in 4 bits."""


def check_mismatch_fits(rollout: Rollout, model: Model) -> None:
    """Refuse a fault that would have to change 4-bit weights."""
    base = "dtype" if model.lora is None else model.lora.base
    if rollout.mismatch is not None and rollout.mismatch.name in WEIGHT_FAULTS and base != "dtype":
        raise ValueError(
            f"rollout.mismatch={rollout.mismatch.name} changes floating-point weights, but model.lora.base={base} keeps those of "
            "the layers in 4 bits: set model.lora.base=dtype"
        )


# --- weights of the engine ------------------------------------------------------------------------------------------------


class ModelWeights(Slot):
    """The engine samples from the learner's own weights."""

    name: Literal["model"] = "model"


class Fp8Weights(Slot):
    """The engine multiplies by copies of the layers' matrices in 8 bits, quantised again after every update, and by activations in 8 bits.

    Embedding, head, norms, biases, adapters and small attention projections keep the model's type.
    """

    formula: ClassVar[str] = (
        "y_c = s_x s_c sum_k x_k w_ck, with x = X / s_x and w_c = W_c / s_c in e4m3, s = max |.| / 448 of a row"
    )
    name: Literal["fp8"] = "fp8"


WeightsSlot: Any = choice(ModelWeights, Fp8Weights, plugin=False)


# --- sampling ---------------------------------------------------------------------------------------------------------------


class Sampling(Record):
    """How tokens are drawn."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this probability."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 is off."""
    max_tokens: int = Field(256, ge=1)
    """Maximum number of new tokens of one completion."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a completion, in addition to the model's end tokens."""


class NoSpeculation(Slot):
    """Every step draws one token of each row."""

    name: Literal["none"] = "none"


class Speculation(Slot):
    """Tokens are guessed from earlier text (prompt lookup) and verified several at a time."""

    name: Literal["lookup"] = "lookup"
    draft: int = Field(7, ge=1, le=15)
    """Tokens that are guessed for each row in a step. One more than those can be drawn."""
    rows: int = Field(16, ge=1)
    """Steps with at most so many running sequences verify drafts. With more, the additional products cost more than the saved steps."""
    source: Literal["context", "answers", "both"] = "both"
    """Where the guess comes from: the sequence itself, earlier answers to the same prompt in this run, or both."""


SpeculationSlot: Any = choice(NoSpeculation, Speculation, plugin=False)


class NoOpponents(Slot):
    """The current weights play all roles."""

    name: Literal["none"] = "none"


class Opponents(Slot):
    """Earlier weights of the policy play against it in some of the games."""

    name: Literal["pool"] = "pool"
    share: float = Field(0.5, gt=0, le=1)
    """Share of the prompts whose games are played against earlier weights. The other games are self-play."""
    every: int = Field(10, ge=1)
    """The weights join the pool after every k-th step, with k this number. The weights before step 1 are the first."""
    keep: int = Field(8, ge=1)
    """Most snapshots in the pool; the oldest leaves first. Each is a model directory of the run, or with adapters an adapter directory."""
    pick: Literal["uniform", "recent", "newest"] = "uniform"
    """Which snapshots of the pool play in a step: any with equal chance, newer ones more often (weights 1, 2, 3, ... from the oldest on), or
    the newest."""
    at_once: int = Field(1, ge=1)
    """Different snapshots that play in one step. Each takes the memory of a copy of the weights (with adapters, of the adapters)."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Opponents:
        if self.at_once > self.keep:
            raise ValueError(
                f"rollout.opponents.at_once={self.at_once} snapshots cannot play out of a pool of keep={self.keep}"
            )
        return self


OpponentSlot: Any = choice(NoOpponents, Opponents, plugin=False)


def check_opponents_fit(config: TrainConfig) -> None:
    """Refuse opponents where the policy's engine is not in this process, or where their games would be counted wrongly."""
    rollout = config.rollout
    if isinstance(rollout.opponents, NoOpponents):
        return
    problems = {
        f"rollout.source={rollout.source.name}": rollout.source.name != "sync",
        f"rollout.engine={rollout.engine}": rollout.engine in ("vllm", "sglang"),
        "placement=ray": isinstance(config.placement, RayPlacement),
        "rollout.mismatch": rollout.mismatch is not None,
        "algorithm.replay": config.algorithm.replay is not None,
    }
    if found := [name for name, is_there in problems.items() if is_there]:
        raise ValueError(
            f"rollout.opponents loads earlier weights into engines of this process before each step, which does not go with {found[0]}: "
            "use rollout.source=sync, the native or transformers engine and placement=local, without mismatch and replay"
        )
    if config.algorithm.refill.rounds > 1:
        raise ValueError(
            "algorithm.refill counts the groups of all roles, but a game against an opponent has a group for one role only: set "
            "algorithm.refill.rounds=1"
        )


class RolloutStage(Record):
    """Rollout settings from a step on (progressive context, DeepScaleR). Keys that are not given keep their values."""

    start: int = Field(ge=2)
    """First step of the stage."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum number of new tokens of one completion. Soft overlong penalties and the horizon of Dr.GRPO follow it, times the turns."""
    n: int | None = Field(None, ge=1)
    """Samples of each prompt."""
    prompts: int | None = Field(None, ge=1)
    """Prompts per step."""

    @model_validator(mode="after")
    def _check_effect(self) -> RolloutStage:
        if self.max_tokens is None and self.n is None and self.prompts is None:
            raise ValueError(f"the stage from step {self.start} changes nothing: give max_tokens, n or prompts")
        return self


def _check_fp8_weights(rollout: Rollout) -> None:
    """Refuse 8-bit weights where the engine has no such products."""
    if rollout.engine not in ("auto", "native"):
        own = "; vLLM's own is rollout.vllm.engine.quantization=fp8" if rollout.engine == "vllm" else ""
        raise ValueError(f"rollout.weights=fp8 applies to the native engine, but rollout.engine={rollout.engine}{own}")
    if rollout.exact:
        raise ValueError(
            "rollout.exact with rollout.weights=fp8: the learner's weights are not rounded, so the log-probs would differ"
        )


class Rollout(Sampling):
    """Sampling for training."""

    engine: Literal["auto", "native", "transformers", "vllm", "sglang"] = "auto"
    """The inference engine; auto follows model.backend."""
    vllm: Vllm | None = None
    """How vLLM samples, with rollout.engine=vllm. null: an engine in this process."""
    sglang: Sglang | None = None
    """The servers of rollout.engine=sglang."""
    prompts: int = Field(64, ge=1)
    """Prompts per step."""
    n: int = Field(8, ge=1)
    """Samples of each prompt."""
    max_rows: int = Field(256, ge=1)
    """Maximum number of sequences decoded at once."""
    cache_gib: float | None = Field(None, gt=0)
    """Size of the native engine's KV cache in GiB. A small cache preempts sequences when they grow; a large one keeps more prompt prefixes.
    null: what all sequences need at full length, at most 40% of the free memory. On a CPU, a number selects the paged cache. Also the cache
    of vLLM in this process, where null means 4."""
    cache_dtype: Literal["auto", "fp8"] = "auto"
    """fp8 stores keys and values in 8 bits (half the memory of bfloat16) with one scale per vector, but for layers whose keys would suffer. The
    mismatch metrics show its effect on the samples. Unless algorithm.correction is set, it switches on decoupled_token_is. On a CPU it selects
    the paged cache, like cache_gib."""
    weights: WeightsSlot = ModelWeights()
    """The weights that the native engine multiplies by. Unless algorithm.correction is set, fp8 switches on decoupled_token_is. On a CPU it
    selects the paged cache, like cache_gib."""
    exact: bool = False
    """Sample and score with operations whose results do not depend on the rest of the batch. The learner's log-prob of every sampled token
    then equals the engine's, bit for bit. `bench/exact.py` measures the cost in speed."""
    speculation: SpeculationSlot = NoSpeculation()
    """Speculative decoding while few sequences run, such as the last ones of a step. Samples have the same distribution, and the same
    tokens up to rounding; in exact mode they are the same bit for bit. On a CPU it selects the paged cache, like cache_gib."""
    mismatch: MismatchSlot | None = None
    """A fault injected between the policy that samples and the policy that is trained, to study corrections. Validation has it too."""
    stages: list[RolloutStage] = Field(default_factory=list)
    """Changes of max_tokens, n and prompts at later steps, in order."""
    source: SourceSlot = Sync()
    """When rollouts are made: before their step, during the step before, or continuously."""
    opponents: OpponentSlot = NoOpponents()
    """Who plays the other roles of games of several players."""

    @property
    def is_paged(self) -> bool:
        """Whether a setting selects the native engine's paged cache. On a GPU it has no other."""
        is_8_bits = self.cache_dtype == "fp8" or self.weights.name == "fp8"
        return self.exact or self.cache_gib is not None or is_8_bits or self.speculation.name != "none"

    @model_validator(mode="after")
    def _check_combinations(self) -> Rollout:
        check_engine_fits(self)
        check_vllm_fits(self)
        is_native = self.engine in ("auto", "native")
        if self.exact and not is_native:
            raise ValueError(f"rollout.exact needs the native engine, but rollout.engine={self.engine}")
        if self.exact and (self.top_p < 1 or self.top_k):
            raise ValueError(
                "rollout.exact with top_p or top_k: the engine reports log-probs of the truncated distribution, the learner of the whole"
            )
        if not is_native and self.engine != "vllm" and (self.cache_gib is not None or self.cache_dtype != "auto"):
            raise ValueError(
                f"rollout.cache_gib and cache_dtype apply to the native engine, but rollout.engine={self.engine}"
            )
        if self.exact and self.cache_dtype != "auto":
            raise ValueError(
                "rollout.exact with cache_dtype=fp8: the learner has no cache to round, so the log-probs would differ"
            )
        if self.weights.name == "fp8":
            _check_fp8_weights(self)
        if self.exact and self.mismatch is not None:
            raise ValueError("rollout.exact and rollout.mismatch contradict each other")
        if isinstance(self.speculation, Speculation) and not is_native:
            raise ValueError(
                f"rollout.speculation applies to the native engine, but rollout.engine={self.engine}, which has settings of its own"
            )
        starts = [stage.start for stage in self.stages]
        if starts != sorted(set(starts)):
            raise ValueError(f"rollout.stages start at steps {starts}; each must start after the one before")
        return self

    def at(self, step: int) -> Rollout:
        """The settings at a step: all stages that have started, applied in order."""
        started = [
            stage.model_dump(exclude_none=True, exclude={"start"}) for stage in self.stages if stage.start <= step
        ]
        changes = {key: value for stage in started for key, value in stage.items()}
        return self.model_copy(update=changes)

    def all_stages(self) -> list[Rollout]:
        """The settings at the start and in each stage."""
        return [self, *(self.at(stage.start) for stage in self.stages)]
