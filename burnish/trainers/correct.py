"""The gap between the policy that sampled and the one that is trained: corrected before advantages, reported after updates."""

from __future__ import annotations

from torch import Tensor

from burnish.algorithms.correction import CORRECTIONS, BudgetState, Corrected, budget_correction, measured
from burnish.algorithms.correction.symptoms import symptoms
from burnish.config.slots.base import Slot
from burnish.config.slots.correction import BudgetCorrection, BypassCorrection, DecoupledCorrection, SeedCorrection
from burnish.core.batch import Batch
from burnish.trainers.functions import options_of


def acts_before_advantages(correction: Slot) -> bool:
    """Whether weights or rejection are made here; bypass makes its own inside the loss."""
    return isinstance(correction, SeedCorrection | DecoupledCorrection | BudgetCorrection) and correction.acts


def corrected(
    batch: Batch, correction: Slot, stats: dict[str, float], budget: BudgetState | None
) -> tuple[Batch, BudgetState | None, str]:
    """The batch with weights (`rollout_weight`) and without what is rejected; where a budget chooses the correction, its
    next state and why it changed. What there is to log goes into `stats`.
    """
    if not acts_before_advantages(correction):
        return batch, None, ""
    why = ""
    if isinstance(correction, BudgetCorrection):
        found, budget, why = budget_correction(batch, budget, **options_of(correction))
    else:
        found = CORRECTIONS[correction.name](batch, **options_of(correction))
    stats |= found.metrics
    batch = batch.with_token(loss_mask=batch.loss_mask & found.keep)
    return batch if found.weights is None else batch.with_token(rollout_weight=found.weights), budget, why


def gap_report(batch: Batch, learner: Tensor, correction: Slot, version: int) -> dict[str, float]:
    """How far the sampler is from the trainer, whose log-probs are `learner` [N], at the tokens in the loss; what is odd
    about it; and the report of a correction that only measures: one that acts made its own with the weights.
    """
    mask, sampler = batch.loss_mask, batch.token["behaviour_logp"]
    if not bool(mask.any()):
        return {}
    gap = (learner[mask].double() - sampler[mask].double()).abs()
    seen = batch.with_token(old_logp=learner, action_mask=mask)
    values = {"mismatch/mean": float(gap.mean()), "mismatch/max": float(gap.max()), **symptoms(seen, version)}
    if acts_before_advantages(correction):
        return values
    if isinstance(correction, BypassCorrection):
        return values | measured(seen).metrics
    found: Corrected = CORRECTIONS[correction.name](seen, **options_of(correction))
    return values | found.metrics
