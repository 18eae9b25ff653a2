"""`ProcessRewards` trains an implicit process reward model online on outcomes, and rewards tokens with it (PRIME, 2502.01456).

    prior = log-probs under a frozen copy of the model's initial weights
    update on the outcomes           one optimizer step per mini-batch
    process_rewards = beta (log-probs - prior)

By default the update comes first, so that the rewards come from the updated model. With `update: after` the rewards come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import is_replayed
from burnish.algorithms.losses.model_losses import ImplicitPrmLoss, outcome_prediction_metrics
from burnish.algorithms.losses.preference_losses import LOGP_ROUNDING_ULPS
from burnish.config.model import ProcessModel
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, contiguous_sum, segment_mean, segment_sum
from burnish.core.trajectory import pack
from burnish.rollout.scoring import RolloutBatch
from burnish.training.interfaces import AnyProcessRewardModel
from burnish.training.learner import Update


class ProcessRewardResult(NamedTuple):
    """[N] `process_rewards` of a batch, with metrics and notes for the user."""

    rewards: Tensor
    metrics: dict[str, float]
    notes: list[str]


class JudgedAnswers(NamedTuple):
    """Log-ratios and outcomes of answers whose outcome is known; [T] each."""

    log_ratio: Tensor
    outcome: Tensor
    size: Tensor
    """Magnitude of the log-probs whose difference is the log-ratio; it bounds the rounding error."""

    def metrics(self) -> dict[str, float]:
        """How well the log-ratios separate correct from wrong answers."""
        rounding = LOGP_ROUNDING_ULPS * torch.finfo(self.log_ratio.dtype).eps * float(self.size.max())
        return outcome_prediction_metrics(self.log_ratio, self.outcome, rounding)


class ProcessRewards:
    """A process reward model with its training settings."""

    def __init__(self, model: AnyProcessRewardModel, settings: ProcessModel) -> None:
        self.model, self.settings = model, settings
        self.loss = ImplicitPrmLoss(settings.loss, settings.beta)

    def __call__(self, batch: Batch) -> ProcessRewardResult:
        """Learn from the batch and reward its tokens, in the order that the settings name.

        The logged accuracy is measured on each mini-batch before its update, so on answers the model has not seen.
        """
        prior = self.model.prior(batch)
        logp = self.model.logprobs(batch) if self.settings.update == "after" else None
        updates, seen = list[Update](), list[JudgedAnswers]()
        for mini in outcome_mini_batches(outcome_batch(batch, prior), self.settings.mini_batches):
            update = self.model.update(mini, self.loss)
            assert update.logp is not None, "update() returns columns by default"
            updates.append(update)
            seen.append(judged_answers(mini, update.logp))
        logp = self.model.logprobs(batch) if logp is None else logp
        return ProcessRewardResult(self.settings.beta * (logp - prior), _stats(updates, seen), list(_notes(updates)))

    def held_out_metrics(self, rollouts: RolloutBatch) -> dict[str, float]:
        """Accuracy and ranking on held-out answers; empty if none has an outcome."""
        known = [t for t in rollouts.usable if t.accuracy is not None and t.num_actions]
        if not known:
            return {}
        batch = pack(known).to(self.model.learner.device)
        found = judged_answers(outcome_batch(batch, self.model.prior(batch)), self.model.logprobs(batch)).metrics()
        return {f"process_{name}": found[name] for name in ("accuracy", "ranking") if name in found}


def outcome_batch(batch: Batch, prior: Tensor) -> Batch:
    """The columns that `ImplicitPrmLoss` reads, except its weights.

    Only new, non-empty answers with a known outcome are in the loss.
    """
    owner, num = compact_ids(batch.sequence["trajectory_ids"])
    written = contiguous_sum(batch.action_mask.double(), batch.offsets)
    is_known = (
        batch.sequence["accuracy"].isfinite() & (segment_sum(written, owner, num) > 0)[owner] & ~is_replayed(batch)
    )
    return replace(
        batch,
        token={
            "action_mask": batch.action_mask,
            "loss_mask": batch.action_mask & is_known[batch.sequence_ids],
            "prior_logp": prior,
        },
        sequence={
            "group_ids": batch.sequence["group_ids"],
            "answer_ids": owner,
            "outcome": torch.where(is_known, batch.sequence["accuracy"], 0.0),
            "is_known": is_known,
        },
    )


def outcome_mini_batches(batch: Batch, num: int) -> Iterator[Batch]:
    """The answers with known outcomes in `num` parts of nearly equal group count, with the weights of their mean."""
    batch = batch.select(batch.sequence["is_known"].nonzero().squeeze(1))
    groups, count = compact_ids(batch.sequence["group_ids"])
    for k in range(min(num, count)):
        part = (groups >= k * count // min(num, count)) & (groups < (k + 1) * count // min(num, count))
        mini = batch.select(part.nonzero().squeeze(1))
        owner, size = compact_ids(mini.sequence["answer_ids"])
        yield mini.with_sequence(weight=torch.full(owner.shape, 1 / size, dtype=torch.float64, device=owner.device))


def judged_answers(batch: Batch, logp: Tensor) -> JudgedAnswers:
    """The answers with known outcomes, under log-probs [N] of a process reward model."""
    known = batch.sequence["is_known"]
    owner, num = compact_ids(batch.sequence["answer_ids"][known])

    def of_answers(column: Tensor) -> Tensor:
        masked = torch.where(batch.loss_mask, column, torch.zeros_like(column))
        return segment_sum(contiguous_sum(masked, batch.offsets)[known], owner, num)

    outcome = segment_mean(batch.sequence["outcome"][known], owner, num)
    return JudgedAnswers(of_answers(logp - batch.token["prior_logp"]), outcome, of_answers(logp).abs())


def _stats(updates: list[Update], seen: list[JudgedAnswers]) -> dict[str, float]:
    if not seen:
        return {}
    found = JudgedAnswers(*(torch.cat(columns) for columns in zip(*seen, strict=True))).metrics()
    for name in ("loss", "grad_norm", "lr"):
        found[name] = sum(update.stats.get(name, 0.0) for update in updates) / len(updates)
    return {f"process/{name}": value for name, value in found.items()}


def _notes(updates: list[Update]) -> Iterator[str]:
    if not updates:
        yield "process reward model: no answer of the batch was judged right or wrong, so it learns nothing"
    for update in updates:
        if update.skipped:
            yield f"process reward model: no update, {update.skipped}"
