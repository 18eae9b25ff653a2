"""Faults of a sampling engine, for tests and study: one known difference between what samples and what is trained.

`burnish.rollout.mismatch` wraps an engine in one of them. A fault is of the sampling (the reported log-probs are true, so
importance weights can correct it) or of the reporting (they are not, so nothing computed from them can be trusted).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from burnish.config.slots.base import Slot, choice


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


MISMATCHES: tuple[type[Slot], ...] = (
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
MismatchSlot = choice(*MISMATCHES, plugin=False)
CHANGES_WEIGHTS = ("noise", "quantised")
"""Faults made of every weight: in 4 bits there is none to change."""
