"""Builds what an update receives: mini-batches with their loss weights, and the `PolicyLoss`. Also looks up slot functions.

Loss weights are computed on a whole mini-batch, before the learner splits it. The gradient is then the same for any micro-batch split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.aligned_columns import group_ends
from burnish.algorithms.batch_columns import ALIGNED, ANSWER_COLUMN, first_sequences, sampled_loss_mask
from burnish.algorithms.correction.spec import BypassCorrection
from burnish.algorithms.filters.filter_functions import GROUP_FILTERS, RESAMPLERS, SAMPLE_FILTERS
from burnish.algorithms.losses.off_policy_spec import SecondMomentClip
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.losses.ratios_and_clips import SECOND_MOMENT_KEPT, second_moment_mask
from burnish.algorithms.losses.spec import SCOPES, scope_of
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import positive_nll_weights, sequence_aggregation_weights
from burnish.algorithms.terms.observations import OBSERVATION_WEIGHT, role_weights, with_observation_weights
from burnish.config.plugins import check_options, load_plugin
from burnish.config.records import Plugin, Slot, slot_options
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids


def mini_batches(batch: Batch, algorithm: Algorithm, num: int, epochs: int, horizon: int) -> Iterator[Batch]:
    """Yield `num` parts of nearly equal group count, `epochs` times. A group is never split, and so no trajectory is.

    `horizon` is the divisor of the aggregation seq-mean-token-sum-norm if the config sets none.
    """
    parts = _parts(batch, num)
    for _ in range(epochs):
        for part in parts:
            yield with_loss_weights(batch.select(part.nonzero().squeeze(1)), algorithm, horizon)


def in_whole_batch(column: Tensor, batch: Batch, num: int) -> Tensor:
    """Return a column of the first of `num` mini-batches as one [N] of the whole batch, nan elsewhere."""
    if len(column) == batch.num_tokens:
        return column
    of_token = torch.repeat_interleave(_parts(batch, num)[0], batch.lengths)
    whole = torch.full_like(of_token, torch.nan, dtype=column.dtype)
    whole[of_token] = column
    return whole


def _parts(batch: Batch, num: int) -> list[Tensor]:
    """[S] the sequences of each mini-batch."""
    groups, num_groups = compact_ids(batch.sequence["group_ids"])
    num = min(num, num_groups)
    return [(groups >= k * num_groups // num) & (groups < (k + 1) * num_groups // num) for k in range(num)]


def with_loss_weights(mini: Batch, algorithm: Algorithm, horizon: int) -> Batch:
    """Return the mini-batch with the weights of its policy loss, and of the NLL terms on correct answers and observations if there are any.

    A group of aligned tokens (loss gold) counts as one token.
    """
    aggregation = algorithm.aggregation
    if isinstance(algorithm.clip, SecondMomentClip):
        mini = with_second_moment_mask(mini, algorithm.clip)
    others = {name: column for name, column in mini.token.items() if name != "weight"}
    counted = mini.with_token(loss_mask=group_ends(mini)) if ALIGNED in mini.token else mini
    weights = sequence_aggregation_weights(counted, aggregation.name, aggregation.horizon or horizon)
    mini = with_answer_ids(replace(mini, token=others).with_sequence(weight=weights))
    if algorithm.auxiliary.positive_nll > 0:
        mini = mini.with_token(nll_weight=positive_nll_weights(mini, algorithm.auxiliary.positive_nll))
    if algorithm.auxiliary.observations is not None:
        mini = with_observation_weights(mini, role_weights(algorithm.auxiliary.observations))
    return mini


def with_second_moment_mask(mini: Batch, clip: SecondMomentClip) -> Batch:
    """Return the mini-batch with the tokens that M2PO keeps; with `denominator` kept, the others leave the loss.

    Demonstrations, which no engine sampled, are kept and take no part in the mean.
    """
    mask = sampled_loss_mask(mini)
    gap = (mini.token["behaviour_logp"] - mini.token["old_logp"])[mask]
    kept = torch.ones_like(mask).masked_scatter(mask, second_moment_mask(gap**2, clip.tau))
    if clip.denominator == "kept":
        mini = mini.with_token(loss_mask=mini.loss_mask & kept)
    return mini.with_token(**{SECOND_MOMENT_KEPT: kept})


def scaled_loss(mini: Batch, factor: float) -> Batch:
    """The mini-batch with all weights of its loss multiplied by a factor."""
    names = ("weight", "nll_weight", OBSERVATION_WEIGHT)
    token = {name: mini.token[name] * factor for name in names if name in mini.token}
    sequence = {name: mini.sequence[name] * factor for name in names if name in mini.sequence}
    return mini.with_token(**token).with_sequence(**sequence)


def with_answer_ids(mini: Batch) -> Batch:
    """Return the mini-batch with `answer_ids` if an answer has several sequences, which losses then see as one."""
    if ANSWER_COLUMN in mini.sequence or first_sequences(mini) is None:
        return mini
    return mini.with_sequence(**{ANSWER_COLUMN: mini.sequence["trajectory_ids"]})


# --- Slot functions -------------------------------------------------------------------------------------------------------


def slot_function(slot: Slot, table: dict[str, Callable[..., Any]], base: Path | None) -> Callable[..., Any]:
    """Return the function of a slot: a built-in one from the table, or a plug-in."""
    if not isinstance(slot, Plugin):
        return table[slot.name]
    function = load_plugin(slot.name, base)
    check_options(function, slot.options, slot.name)
    return function


def filter_function(slot: Slot, base: Path | None) -> Callable[..., Any]:
    """The function of a filter of any kind."""
    return slot_function(slot, {**GROUP_FILTERS, **SAMPLE_FILTERS, **RESAMPLERS}, base)


def build_policy_loss(algorithm: Algorithm, base: Path | None) -> PolicyLoss:
    """Return the policy loss of an algorithm."""
    custom = isinstance(algorithm.loss, Plugin)
    scope = "token" if custom else scope_of(algorithm.ratio, algorithm.clip, algorithm.loss)
    correction = algorithm.correction
    bypass = isinstance(correction, BypassCorrection)
    if bypass:
        scope = max(scope, correction.span, key=SCOPES.index)
    anchored = not custom and algorithm.loss.anchored and algorithm.kl.reference.name != "none"
    return PolicyLoss(
        ratio=algorithm.ratio.name,
        clip=algorithm.clip.name,
        clip_options=slot_options(algorithm.clip),
        loss=algorithm.loss.name,
        loss_options={} if custom else slot_options(algorithm.loss),
        custom=slot_function(algorithm.loss, {}, base) if custom else None,
        custom_options=slot_options(algorithm.loss) if custom else {},
        scope="batch" if algorithm.entropy.top_share is not None else scope,
        anchor="ref_logp" if anchored else "old_logp",
        bypass=slot_options(correction) if bypass else None,
        kl_estimator=algorithm.kl.loss.estimator,
        kl_coef=algorithm.kl.loss.coef,
        kl_clamp=algorithm.kl.loss.clamp,
        kl_is_corrected=algorithm.kl.loss.is_corrected,
        entropy_coef=algorithm.entropy.coef,
        entropy_top=algorithm.entropy.top_share,
        observes=algorithm.auxiliary.observations is not None,
    )
