"""`Algorithm`, the record with one choice per slot.

`combinations_spec.py` checks that the choices fit together; `burnish.algorithms.presets` is the table of named algorithms.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, model_validator

from burnish.algorithms.advantages.spec import (
    ADVANTAGE_RECORDS,
    GrpoAdvantage,
)
from burnish.algorithms.combinations_spec import check_combinations
from burnish.algorithms.correction.spec import CORRECTION_RECORDS, CorrectionSlot, NoCorrection
from burnish.algorithms.curriculum.spec import CURRICULUM_RECORDS, CurriculumSlot, NoCurriculum
from burnish.algorithms.filters.spec import FILTER_RECORDS, Refill
from burnish.algorithms.losses.distillation_spec import DivergenceLoss, GoldLoss
from burnish.algorithms.losses.spec import (
    CLIP_RECORDS,
    LOSS_RECORDS,
    RATIO_RECORDS,
    ImitationLoss,
    PpoClip,
    SurrogateLoss,
    TokenRatio,
)
from burnish.algorithms.shaping.spec import SHAPER_RECORDS
from burnish.algorithms.terms.spec import (
    CONTEXT_RECORDS,
    REFERENCE_RECORDS,
    Aggregation,
    Auxiliary,
    Entropy,
    Kl,
    Router,
)
from burnish.config.model import Critic, ProcessModel
from burnish.config.records import Record, Slot, choice, name_to_record

SLOT_RECORDS: dict[str, tuple[type[Slot], ...]] = {
    "advantage": ADVANTAGE_RECORDS,
    "ratio": RATIO_RECORDS,
    "clip": CLIP_RECORDS,
    "loss": LOSS_RECORDS,
    "reference": REFERENCE_RECORDS,
    "context": CONTEXT_RECORDS,
    "filters": FILTER_RECORDS,
    "shaping": SHAPER_RECORDS,
    "curriculum": CURRICULUM_RECORDS,
    "correction": CORRECTION_RECORDS,
}
"""The records of every slot; `burnish algorithms` prints this table."""

OLD_PASS_COLUMNS = ("sum_p2", "entropy")
"""Outputs other than log-probs that a slot may need of the policy before its first update."""

if TYPE_CHECKING:  # mypy cannot follow unions that are built at run time
    AdvantageSlot: TypeAlias = Any
    RatioSlot: TypeAlias = Any
    ClipSlot: TypeAlias = Any
    LossSlot: TypeAlias = Any
    FilterSlot: TypeAlias = Any
    ShaperSlot: TypeAlias = Any
else:
    AdvantageSlot = choice(*SLOT_RECORDS["advantage"])
    RatioSlot = choice(*SLOT_RECORDS["ratio"], plugin=False)
    ClipSlot = choice(*SLOT_RECORDS["clip"], plugin=False)
    LossSlot = choice(*SLOT_RECORDS["loss"])
    FilterSlot = choice(*SLOT_RECORDS["filters"])
    ShaperSlot = choice(*SLOT_RECORDS["shaping"])
AggregationSlot = Annotated[Aggregation, BeforeValidator(name_to_record)]


class Replay(Record):
    """Trains on groups of earlier steps again, together with the new ones (PF-PPO, 2409.06957; SPO-tree, 2505.23564)."""

    share: float = Field(0.5, gt=0)
    """Number of replayed groups per step, as a multiple of rollout.prompts, rounded up. It is lower while the buffer holds fewer."""
    uses: int = Field(2, ge=2)
    """Maximum number of steps that train on a group, including the first."""
    max_age: int = Field(4, ge=1)
    """Largest number of steps between the weights that sampled a group's oldest token and the current ones."""
    capacity: int = Field(1024, ge=1)
    """Largest number of groups in the buffer, in memory and in every checkpoint; the oldest are dropped first."""
    pick: Literal["random", "newest", "oldest"] = "random"
    """Which groups are replayed: random ones, the newest, or the oldest (which reach max_age first)."""

    @model_validator(mode="after")
    def _check_uses_are_reachable(self) -> Replay:
        if self.uses > self.max_age + 1:
            raise ValueError(
                f"replay.uses={self.uses} cannot be reached: a group is used once per step, and never after max_age={self.max_age} steps"
            )
        return self


class Algorithm(Record):
    """One choice per slot. `algorithm: grpo` names a preset; its slots can be overridden one by one."""

    preset: str = "grpo"
    """The preset this algorithm started from."""
    advantage: AdvantageSlot = GrpoAdvantage()
    """How rewards become advantages."""
    ratio: RatioSlot = TokenRatio()
    """The importance ratio of the current policy to the policy that sampled."""
    clip: ClipSlot = PpoClip()
    """How the ratio is bounded."""
    loss: LossSlot = SurrogateLoss()
    """The per-token or per-sequence loss."""
    aggregation: AggregationSlot = Aggregation(name="seq-mean-token-mean")
    """How tokens are averaged: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm, prompt-mean."""
    kl: Kl = Kl()
    """KL to a reference."""
    entropy: Entropy = Entropy()
    """Entropy bonus, fixed or adaptive, and training on high-entropy tokens only."""
    router: Router = Router()
    """Routers of a model with experts: balance loss, and replay of the engine's or the learner's own experts."""
    auxiliary: Auxiliary = Auxiliary()
    """Supervised losses added to the policy loss."""
    filters: list[FilterSlot] = Field(default_factory=list)
    """Group and sample filters, in order."""
    refill: Refill = Refill()
    """More generation when group filters leave too few groups (dynamic sampling)."""
    replay: Replay | None = None
    """Training on groups of earlier steps again; null trains on each group once."""
    shaping: list[ShaperSlot] = Field(default_factory=list)
    """Changes of the reward before filters and advantages, in order."""
    curriculum: CurriculumSlot = NoCurriculum()
    """Which prompts each step draws."""
    correction: CorrectionSlot = NoCorrection()
    """Rollout correction: corrects the mismatch between the policy that samples and the one that is trained. The default only measures it."""
    critic: Critic | None = None
    """A learned value model; only advantage gae uses it."""
    process: ProcessModel | None = None
    """An implicit process reward model, trained online; only advantage prime_rloo uses it."""

    def choices(self) -> Iterator[tuple[str, Slot]]:
        """Every slot record with the name of its slot."""
        for name in ("advantage", "ratio", "clip", "loss", "correction", "curriculum"):
            yield name, getattr(self, name)
        yield "kl.reference", self.kl.reference
        if self.kl.context.name != "prompt":
            yield "kl.context", self.kl.context
        for name in ("filters", "shaping"):
            for one in getattr(self, name):
                yield name, one

    @property
    def compares_vocabulary(self) -> bool:
        """Whether the loss compares whole distributions of policy and reference, which needs both models' hidden states."""
        in_loss = self.kl.loss.estimator == "full" and self.kl.loss.coef > 0
        in_distillation = isinstance(self.loss, DivergenceLoss) and self.loss.support != "sampled"
        return in_loss or in_distillation or isinstance(self.loss, GoldLoss)

    @property
    def own_temperature(self) -> float | None:
        """Temperature of the learner's log-probs if the loss sets one (SSD); None if it is that of the samples."""
        return self.loss.temperature if isinstance(self.loss, ImitationLoss) else None

    def needs(self, what: str) -> list[str]:
        """The choices that need `what` from the rest of the system; a correction that only measures needs nothing."""
        metrics_only = None if self.correction.acts else self.correction
        return [c.name for _, c in self.choices() if what in _needs_of(c) and c is not metrics_only]

    def reads_old_logp(self, num_updates: int) -> bool:
        """Whether anything reads `old_logp`. With one update per batch the current policy is the anchor, and the ratio is 1."""
        is_own_anchor = num_updates == 1 and self.replay is None
        in_reward = self.kl.reward.coef > 0 and self.kl.reward.policy == "old"
        return not is_own_anchor or in_reward or self.kl.advantage.coef > 0 or bool(self.needs("old"))

    def has_trainer_logp(self, num_updates: int) -> bool:
        """Whether `old_logp` holds the trainer's log-probs before the first update."""
        return self.reads_old_logp(num_updates) and self.correction.name != "bypass"

    def makes_old_pass(self, num_updates: int) -> bool:
        """Whether the policy passes over the batch before the updates: for `old_logp`, or for what else such a pass gives."""
        gives_more = self.router.learner_experts == "replay" or any(self.needs(name) for name in OLD_PASS_COLUMNS)
        return gives_more or self.has_trainer_logp(num_updates)

    @model_validator(mode="after")
    def _combinations(self) -> Algorithm:
        check_combinations(self)
        return self


def _needs_of(choice: Slot) -> tuple[str, ...]:
    """What a choice needs; one with an option `metric` may need the accuracy."""
    return (*choice.needs, "accuracy") if getattr(choice, "metric", None) == "accuracy" else choice.needs
