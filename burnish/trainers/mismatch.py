"""Corrects the gap between sampler and trainer before the advantages, and reports it after the updates.

The gap of a token is its log-prob under the trainer minus its log-prob under the engine that sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import (
    answer_ids,
    has_demonstrations,
    sampled_sequences,
    scatter_sampled,
    without_replayed,
)
from burnish.algorithms.correction.budget import RUNGS, BudgetState
from burnish.algorithms.correction.corrections import (
    CORRECTIONS,
    budget_correction,
    decoupled_correction,
    no_correction,
)
from burnish.algorithms.correction.mismatch_diagnostics import (
    ComparedTokens,
    compare_tokens,
    mismatch_profiles,
    symptom_metrics,
    worst_tokens,
)
from burnish.algorithms.correction.rollout_mismatch import MAX_ABS_LOGP
from burnish.algorithms.correction.spec import (
    BudgetCorrection,
    BypassCorrection,
    CoupledCorrection,
    DecoupledCorrection,
)
from burnish.algorithms.correction.weights_and_rejection import CorrectionResult
from burnish.config.records import Slot, slot_options
from burnish.core.batch import Batch

NUM_WORST_TOKENS = 8
"""Tokens with the largest gap that a step reports."""
TOKENS_BEFORE, TOKENS_AFTER = 16, 8
"""Context tokens that are reported with each of them."""
NO_TOKEN = -1
"""Marks positions outside of the sequence."""


@dataclass(frozen=True)
class WorstToken:
    """A sampled token with one of the largest gaps between engine and trainer, with its context."""

    trajectory: int
    """Index into the packed trajectories."""
    position: int
    """Number of sampled tokens before it in its sequence."""
    token: int
    before: list[int]
    after: list[int]
    engine: float
    """Log-prob under the engine; this and the next are clamped to +-300."""
    trainer: float
    gap: float
    """Trainer log-prob minus engine log-prob."""
    weight: float | None
    """The factor of its loss, 0 if rejected; None without a correction before the loss."""


@dataclass(frozen=True)
class GapReport:
    """Metrics of the gap, and its worst tokens."""

    metrics: dict[str, float] = field(default_factory=dict)
    worst: Sequence[WorstToken] = ()


def acts_before_advantages(correction: Slot) -> bool:
    """Whether the correction weights or rejects tokens before the advantages. Bypass does so inside the loss."""
    return isinstance(correction, CoupledCorrection | DecoupledCorrection | BudgetCorrection) and correction.acts


class CorrectedBatch(NamedTuple):
    """A batch with `rollout_weight`, and without rejected tokens in `loss_mask`."""

    batch: Batch
    metrics: dict[str, float]
    budget: BudgetState | None = None
    """The next state of a mismatch budget."""
    reason: str = ""
    """Why the budget chose another correction, where it did."""


ApplyCorrection = Callable[[Batch, Slot, BudgetState | None], CorrectedBatch]


def apply_correction(batch: Batch, correction: Slot, budget: BudgetState | None) -> CorrectedBatch:
    """Weight and reject tokens by the gap between sampler and trainer."""
    result, budget, reason = _compute_correction(batch, correction, budget)
    return CorrectedBatch(_with_correction(batch, result), result.metrics, budget, reason)


def apply_to_replayed(batch: Batch, correction: Slot, budget: BudgetState | None) -> CorrectedBatch:
    """`apply_correction` for a batch with replayed groups.

    All groups are corrected, but metrics and budget are computed from new groups only: replayed groups come from an older policy, so their
    gap says nothing about the engine.
    """
    new = without_replayed(batch)
    metrics: dict[str, float] = {}
    reason, result = "", None
    if new.num_sequences:
        result, budget, reason = _compute_correction(new, correction, budget)
        metrics = result.metrics
    if result is None or new.num_sequences < batch.num_sequences:
        if isinstance(correction, BudgetCorrection):
            result = decoupled_correction(batch, **RUNGS[(budget or BudgetState()).rung].options)
        else:
            result = CORRECTIONS[correction.name](batch, **slot_options(correction))
    return CorrectedBatch(_with_correction(batch, result), metrics, budget, reason)


def apply_to_sampled(
    batch: Batch, correction: Slot, budget: BudgetState | None, apply: ApplyCorrection
) -> CorrectedBatch:
    """`apply` on the sequences that the policy sampled. Demonstrations have weight 1 and are never rejected."""
    if not has_demonstrations(batch):
        return apply(batch, correction, budget)
    sampled = sampled_sequences(batch)
    if sampled.num_sequences == 0:
        return CorrectedBatch(batch, {}, budget)
    corrected = apply(sampled, correction, budget)
    token = corrected.batch.token
    columns = {"loss_mask": scatter_sampled(batch, token["loss_mask"], True) & batch.loss_mask}
    if "rollout_weight" in token:
        columns["rollout_weight"] = scatter_sampled(batch, token["rollout_weight"], 1.0)
    return corrected._replace(batch=batch.with_token(**columns))


def _compute_correction(
    batch: Batch, correction: Slot, budget: BudgetState | None
) -> tuple[CorrectionResult, BudgetState | None, str]:
    if isinstance(correction, BudgetCorrection):
        return budget_correction(batch, budget, **slot_options(correction))
    return CORRECTIONS[correction.name](batch, **slot_options(correction)), budget, ""


def _with_correction(batch: Batch, result: CorrectionResult) -> Batch:
    batch = batch.with_token(loss_mask=batch.loss_mask & result.keep)
    return batch if result.weights is None else batch.with_token(rollout_weight=result.weights)


@torch.inference_mode()  # makes hundreds of small operations faster; only numbers leave
def gap_report(whole: Batch, batch: Batch, learner: Tensor | None, correction: Slot, version: int) -> GapReport:
    """Return the gap between sampler and trainer. Demonstrations and replayed groups are left out.

    `learner` [N] are the trainer's log-probs at the tokens in the loss of `batch`. With None they are read from `old_logp`, which covers
    every sampled token. Profiles, symptoms and worst tokens then cover all of `whole`, the batch before the sample filters, because
    rejected tokens are the ones to look at. All other metrics cover the tokens in the loss.
    """
    if learner is not None:
        batch = batch.with_token(learner_logp=learner)
    whole, batch = (sampled_sequences(without_replayed(one)) for one in (whole, batch))
    used = compare_tokens(batch, batch.token["old_logp" if learner is None else "learner_logp"], batch.loss_mask)
    seen = used if learner is not None else compare_tokens(whole, whole.token["old_logp"], whole.action_mask)
    metrics = loss_token_metrics(used, correction) | mismatch_profiles(seen)
    if seen.num_tokens:
        metrics |= symptom_metrics(seen.as_batch(), version)
    return GapReport(metrics, find_worst_tokens(seen, acts_before_advantages(correction)))


def loss_token_metrics(used: ComparedTokens, correction: Slot) -> dict[str, float]:
    """The gap at the tokens in the loss, with the metrics of a correction that only measures.

    A correction that acts reported its metrics together with the weights.
    """
    if used.num_tokens == 0:
        return {}
    size = used.log_ratio.abs()
    mean, largest = torch.stack([size.mean(), size.max()]).tolist()
    values = {"mismatch/mean": mean, "mismatch/max": largest}
    if acts_before_advantages(correction):
        return values
    alone, ids = used.as_batch(), answer_ids(used.batch)
    if ids is not None:
        alone = alone.with_sequence(trajectory_ids=ids)
    if isinstance(correction, BypassCorrection):
        return values | no_correction(alone).metrics
    found: CorrectionResult = CORRECTIONS[correction.name](alone, **slot_options(correction))
    return values | found.metrics


def find_worst_tokens(seen: ComparedTokens, is_corrected: bool) -> list[WorstToken]:
    """The tokens with the largest gap, worst first; none if engine and trainer agree exactly."""
    which = worst_tokens(seen, NUM_WORST_TOKENS)
    batch, place = seen.batch, seen.token_indices[which]
    sequence = torch.searchsorted(batch.offsets, place, right=True) - 1
    around = place[:, None] + torch.arange(-TOKENS_BEFORE, TOKENS_AFTER + 1, device=place.device)
    inside = (around >= batch.offsets[sequence, None]) & (around < batch.offsets[sequence + 1, None])
    windows = torch.where(inside, batch.tokens[around.clamp(0, batch.num_tokens - 1)], NO_TOKEN)
    weights: list[float | None] = [None] * len(place)
    if is_corrected:
        weight = batch.token["rollout_weight"][place] if "rollout_weight" in batch.token else 1.0
        weights = (weight * batch.loss_mask[place].double()).tolist()
    owners = batch.sequence["trajectory_ids"][sequence]
    log_probs = (side[which].clamp(-MAX_ABS_LOGP, MAX_ABS_LOGP) for side in (seen.engine, seen.trainer))
    columns = (owners, seen.position[which], windows, *log_probs, seen.log_ratio[which])
    found = []
    for owner, position, window, engine, trainer, gap, weight in zip(
        *(c.tolist() for c in columns), weights, strict=True
    ):
        before, after = (
            [t for t in part if t != NO_TOKEN] for part in (window[:TOKENS_BEFORE], window[TOKENS_BEFORE + 1 :])
        )
        found.append(WorstToken(owner, position, window[TOKENS_BEFORE], before, after, engine, trainer, gap, weight))
    return found
