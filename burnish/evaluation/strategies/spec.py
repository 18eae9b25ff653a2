"""The records of strategies and of their verifiers, for configs and `--help`. This module does not import torch.

`burnish.evaluation.strategies.registry` has the function of every record under the same name.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from burnish.config.records import Record, Slot, choice, name_to_record

LIKELIHOOD, SELF_CERTAINTY, ORACLE = "likelihood", "self_certainty", "oracle"


class VerifierPart(Record):
    """What a strategy compares candidates by. Only `oracle` sees the expected answer."""

    name: str = LIKELIHOOD
    """likelihood (mean log-prob of the sampled tokens), self_certainty (2502.18581), a reward that needs no answer (model, judge, format,
    think_format, language), task (for countdown and proofs, whose questions state all that their check needs), `path/to/file.py:function`,
    `package.module:function`, or oracle."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the reward of that name, such as `path`, `delimiter` and `aggregate` of model."""


Verifier = Annotated[VerifierPart, BeforeValidator(name_to_record)]


class StrategyRecord(Slot):
    """One strategy with its options."""

    verified: ClassVar[bool] = False
    """Whether it compares candidates by a verifier."""


class Single(StrategyRecord):
    """One answer: the baseline that the cost of every other strategy is compared with."""

    formula: ClassVar[str] = "y ~ p(y | x)"
    name: Literal["single"] = "single"


class Majority(StrategyRecord):
    """Samples n answers and returns the one that most of them agree on (self-consistency)."""

    formula: ClassVar[str] = "argmax_a #{i: answer(y_i) = a}; ties by the first sample"
    paper: ClassVar[str] = "Self-consistency (2203.11171)"
    name: Literal["majority"] = "majority"
    n: int = Field(16, ge=1)
    """Answers sampled."""


class WeightedVote(StrategyRecord):
    """Samples n answers and returns the one with the largest sum of the verifier's scores."""

    formula: ClassVar[str] = (
        "argmax_a sum_{i: answer(y_i) = a} w_i; w = score, or exp(score) for log-probs, or (n - rank + 1)^power (Borda)"
    )
    paper: ClassVar[str] = "Weighted self-consistency (2206.02336); Borda votes by self-certainty (2502.18581)"
    verified: ClassVar[bool] = True
    name: Literal["weighted_vote"] = "weighted_vote"
    n: int = Field(16, ge=1)
    """Answers sampled."""
    borda: float | None = Field(None, ge=0)
    """Weigh a vote by (n - rank + 1) to this power, with the best score at rank 1. null weighs it by the score itself."""
    verifier: Verifier = VerifierPart()
    """What scores the answers."""


class BestOfN(StrategyRecord):
    """Samples n answers and returns the one with the highest score."""

    formula: ClassVar[str] = "argmax_i v(x, y_i); ties by the first sample"
    paper: ClassVar[str] = "Best-of-n by a verifier (2110.14168); by step scores (2305.20050)"
    verified: ClassVar[bool] = True
    name: Literal["best_of_n"] = "best_of_n"
    n: int = Field(16, ge=1)
    """Answers sampled."""
    verifier: Verifier = VerifierPart()
    """What scores the answers."""


STRATEGY_RECORDS: tuple[type[StrategyRecord], ...] = (Single, Majority, WeightedVote, BestOfN)

Strategy = choice(*STRATEGY_RECORDS)
