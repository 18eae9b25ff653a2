"""From the records of an algorithm to its functions: ours by name, or a user's own; and the loss record made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.algorithms.filters import GROUP_FILTERS, RESAMPLERS, SAMPLE_FILTERS
from burnish.algorithms.losses import PolicyLoss
from burnish.config.algorithm import Algorithm
from burnish.config.plugins import check_options, load_plugin
from burnish.config.slots import Plugin, Slot
from burnish.config.slots.correction import BypassCorrection
from burnish.config.slots.policy import SCOPES, scope_of

NOT_OPTIONS = {"name", "options"}


def options_of(slot: Slot) -> dict[str, Any]:
    """A slot record's options as keyword arguments of its function."""
    return (
        dict(slot.options) if isinstance(slot, Plugin) else slot.model_dump(exclude={*NOT_OPTIONS, *slot.of_rollouts})
    )


def function_of(slot: Slot, table: dict[str, Callable[..., Any]], base: Path | None) -> Callable[..., Any]:
    """The function of a slot: ours by name, or the user's."""
    if not isinstance(slot, Plugin):
        return table[slot.name]
    function = load_plugin(slot.name, base)
    check_options(function, slot.options, slot.name)
    return function


def filter_function(slot: Slot, base: Path | None) -> Callable[..., Any]:
    """The function of a filter, of whichever kind."""
    return function_of(slot, {**GROUP_FILTERS, **SAMPLE_FILTERS, **RESAMPLERS}, base)


def policy_loss(algorithm: Algorithm, base: Path | None) -> PolicyLoss:
    """The loss record of an algorithm."""
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
        clip_options=options_of(algorithm.clip),
        loss=algorithm.loss.name,
        loss_options={} if custom else options_of(algorithm.loss),
        custom=function_of(algorithm.loss, {}, base) if custom else None,
        custom_options=options_of(algorithm.loss) if custom else {},
        scope="batch" if algorithm.entropy.top_share is not None else scope,
        anchor="ref_logp" if anchored else "old_logp",
        bypass=options_of(correction) if bypass else None,
        kl_estimator=algorithm.kl.loss.estimator,
        kl_coef=algorithm.kl.loss.coef,
        kl_is_corrected=algorithm.kl.loss.is_corrected,
        entropy_coef=algorithm.entropy.coef,
        entropy_top=algorithm.entropy.top_share,
    )
