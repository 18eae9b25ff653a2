"""Mismatch budget: the user says how much mismatch is tolerable, and a controller chooses the mildest correction.

`RUNGS` is a ladder of decoupled corrections, from none to the strictest. The controller is a pure function: `budget_step`
takes the last state and a batch, and returns the next state, the rung for this batch and why it changed.

The controller climbs at once when the budget is exceeded. It descends only after a milder rung would have been within the
budget, with a margin, for `patience` steps in a row. A descent that did not last doubles the patience, so that batches at
the edge of a budget do not make the controller oscillate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from burnish.algorithms.correction.rollout_mismatch import LOG_RATIO_BOUND, RolloutMismatch, batch_mismatch
from burnish.algorithms.correction.spec import DecoupledCorrection
from burnish.algorithms.correction.weights_and_rejection import accepted_tokens, bound_weights, raw_weights
from burnish.config.errors import UserError
from burnish.config.records import slot_options
from burnish.core.batch import Batch

MIN_TOKEN_SHARE = 0.5
"""A correction must leave this share of the tokens in the loss. With fewer, the batch is no longer the one that was sampled."""
DESCENT_MARGIN = 0.95
"""A milder rung counts as within the budget only below this part of it, because the next batch is a different sample."""
INITIAL_PATIENCE, MAX_PATIENCE = 3, 48
"""Steps in a row for which a milder rung must be within the budget before a descent: at first, and at most."""


@dataclass(frozen=True)
class Rung:
    """One correction of the ladder."""

    name: str
    correction: DecoupledCorrection

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of `decoupled_correction`."""
        return slot_options(self.correction)


def _rung(name: str, **options: Any) -> Rung:
    return Rung(name, DecoupledCorrection(**options))


def _truncation_rung(threshold: float) -> Rung:
    return _rung(f"token_tis_{threshold:g}", weights="token", threshold=threshold)


def _masking_rung(name: str, high: float, **reject: Any) -> Rung:
    """Token weights within [1/high, high]; tokens outside, and what `reject` rejects, leave the loss."""
    return _rung(name, weights="token", threshold=high, reject={"token_k1": (1 / high, high), **reject})


RUNGS: tuple[Rung, ...] = (
    _rung("none"),
    _truncation_rung(5.0),
    _truncation_rung(3.0),
    _truncation_rung(2.0),
    _truncation_rung(1.5),
    _rung("token_icepop", weights="token", threshold=(0.5, 5.0)),
    _masking_rung("token_mis_2", 2.0),
    _masking_rung("token_mis_1.5", 1.5),
    _masking_rung("k3_rs_token_mis", 1.5, seq_mean_k3=0.01),
    _masking_rung("geo_rs_token_mis", 1.5, seq_mean_k1=(0.99, 1.01)),
    _masking_rung("strictest", 1.25, seq_mean_k1=(0.999, 1.001)),
)
"""The ladder of corrections, from the mildest to the strictest."""


class MismatchBudget(NamedTuple):
    """The tolerable mismatch; None sets no limit."""

    k3_kl: float | None = None
    """Largest k3 estimate of the KL that a correction may leave."""
    ess: float | None = None
    """Smallest effective sample size of the weights, as a share of the tokens."""


class BudgetError(UserError):
    """No correction keeps this batch within the budget."""

    def __init__(self, text: str, batch: Batch) -> None:
        super().__init__(text)
        self.batch = batch


class RungMeasurement(NamedTuple):
    """The mismatch, effective sample size and token share of a batch under a correction."""

    k3_kl: float
    ess: float
    share: float
    """Share of the action tokens that is trained on."""


def measure_rung(batch: Batch, rung: Rung) -> RungMeasurement:
    """The mismatch, the effective sample size and the share of tokens that a correction leaves.

    With l = old_logp - behaviour_logp and w the weight applied (1 without weights):

    - k3_kl = mean(exp(r) - r - 1) with r = l - log w, over the tokens trained on (accepted, w > 0). r is the log-ratio that
      remains after weighting: l without weights, 0 within bounds, log(W / C) beyond a truncation.
    - ess = mean(w)^2 / mean(w^2) over the accepted tokens, those of weight 0 included. Without weights it is that of
      exp(l), the weights that would be needed.
    - share = tokens trained on / action tokens.

    If no token is trained on, k3_kl is inf and ess is 0. Log-ratios are clamped to +-20.
    """
    return _measure(batch_mismatch(batch)[1], rung)


def is_within_budget(found: RungMeasurement, budget: MismatchBudget, margin: float = 1.0) -> bool:
    """Whether a measurement is within `margin` times the budget and leaves enough tokens."""
    k3_ok = budget.k3_kl is None or found.k3_kl <= margin * budget.k3_kl
    ess_ok = budget.ess is None or 1 - found.ess <= margin * (1 - budget.ess)
    return k3_ok and ess_ok and found.share >= MIN_TOKEN_SHARE


def first_rung_within_budget(batch: Batch, budget: MismatchBudget) -> int:
    """The mildest rung within the budget, found by measuring all; raises `BudgetError` if there is none."""
    mismatch = batch_mismatch(batch)[1]
    found = [_measure(mismatch, rung) for rung in RUNGS]
    return _first_within_budget(batch, found, budget, range(len(RUNGS)))


# --- The controller


@dataclass(frozen=True)
class BudgetState:
    """The controller's state as plain JSON values, saved in checkpoints."""

    rung: int = 0
    streaks: list[int] = field(default_factory=lambda: [0] * len(RUNGS))
    """For each milder rung, the steps in a row in which it would have been within the budget with the margin."""
    patience: int = INITIAL_PATIENCE
    """The streak after which the controller descends."""
    came_down: bool = False
    """Whether the current rung was reached by a descent."""


def budget_step(state: BudgetState, batch: Batch, budget: MismatchBudget) -> tuple[BudgetState, Rung, str]:
    """The next state, the rung for this batch, and why the rung changed (the empty string if it did not).

    Raises `BudgetError` if no rung is within the budget.
    """
    mismatch, now = batch_mismatch(batch)[1], state.rung
    found = [_measure(mismatch, rung) for rung in RUNGS[: now + 1]]
    if not is_within_budget(found[now], budget):
        found += [_measure(mismatch, rung) for rung in RUNGS[now + 1 :]]
        return _climb(state, batch, found, budget)
    streaks = [
        s + 1 if is_within_budget(m, budget, DESCENT_MARGIN) else 0
        for s, m in zip(state.streaks, found[:now], strict=False)
    ]
    streaks += [0] * (len(RUNGS) - now)
    ready = [k for k in range(now) if streaks[k] >= state.patience]
    if not ready:
        return replace(state, streaks=streaks), RUNGS[now], ""
    new = ready[0]
    why = f"{RUNGS[now].name} -> {RUNGS[new].name}: it would have been within the budget for {streaks[new]} steps ({_describe(found[new])})"
    return replace(state, rung=new, streaks=[0] * len(RUNGS), came_down=True), RUNGS[new], why


def _climb(
    state: BudgetState, batch: Batch, found: list[RungMeasurement], budget: MismatchBudget
) -> tuple[BudgetState, Rung, str]:
    """Moves to the next stricter rung within the budget. If there is none, a milder rung may fit: truncation can leave less mismatch."""
    now = state.rung
    new = _first_within_budget(batch, found, budget, [*range(now + 1, len(RUNGS)), *range(now)])
    patience = min(MAX_PATIENCE, 2 * state.patience) if state.came_down else state.patience
    why = (
        f"{RUNGS[now].name} -> {RUNGS[new].name}: {_describe_excess(found[now], budget)}, "
        f"and the new correction is within the budget ({_describe(found[new])})"
    )
    return BudgetState(rung=new, patience=patience), RUNGS[new], why


def _first_within_budget(
    batch: Batch, found: list[RungMeasurement], budget: MismatchBudget, order: Iterable[int]
) -> int:
    """The first rung in `order` that is within the budget, given the measurement of each rung."""
    for k in order:
        if is_within_budget(found[k], budget):
            return k
    raw, last = found[0], found[-1]
    closest = max(range(len(found)), key=lambda k: (found[k].share >= MIN_TOKEN_SHARE, -_excess(found[k], budget)))
    text = (
        f"no correction holds correction.budget: uncorrected, {_describe_excess(raw, budget)}; the closest, {RUNGS[closest].name}, is at "
        f"{_describe(found[closest])}, and the strictest keeps {last.share:.0%} of the tokens (at least {MIN_TOKEN_SHARE:.0%} must be left). "
        "Engine and trainer are too far apart to be corrected: remove the cause, or allow a larger budget"
    )
    raise BudgetError(text, batch)


def _excess(found: RungMeasurement, budget: MismatchBudget) -> float:
    """The measurement as a multiple of the budget, by the limit that is exceeded most."""
    k3 = 0.0 if budget.k3_kl is None else found.k3_kl / budget.k3_kl
    ess = 0.0 if budget.ess is None else (1 - found.ess) / max(1 - budget.ess, 1e-12)
    return max(k3, ess)


def _measure(mismatch: RolloutMismatch, rung: Rung) -> RungMeasurement:
    correction = rung.correction
    assert correction.weights in (None, "token"), "the ladder has token weights only"
    raw = raw_weights(mismatch, "token")[1]
    weights, remaining = raw, mismatch.clamped_log_ratio
    if correction.weights is not None:
        weights = bound_weights(raw, correction.threshold)
        remaining = remaining - weights.log()
    accepted = torch.ones_like(raw, dtype=torch.bool)
    if correction.reject:
        accepted = accepted_tokens(mismatch, rung.options["reject"])
    trained = accepted & (weights > 0)
    remaining, weights = remaining[trained].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), weights[accepted]
    if remaining.shape[0] == 0:
        return RungMeasurement(float("inf"), 0.0, 0.0)
    k3 = (remaining.expm1() - remaining).mean().clamp(min=0)
    ess = (weights.mean() ** 2 / weights.square().mean()).clamp(max=1)
    share = trained.double().mean()
    return RungMeasurement(*torch.stack([k3, ess, share]).tolist())


def _describe(found: RungMeasurement) -> str:
    return f"k3_kl {found.k3_kl:.2g}, ess {found.ess:.3g}, {found.share:.0%} of tokens"


def _describe_excess(found: RungMeasurement, budget: MismatchBudget) -> str:
    """The limits of the budget that a measurement exceeds."""
    exceeded = []
    if budget.k3_kl is not None and found.k3_kl > budget.k3_kl:
        exceeded.append(f"k3_kl {found.k3_kl:.2g} is over {budget.k3_kl:g}")
    if budget.ess is not None and found.ess < budget.ess:
        exceeded.append(f"ess {found.ess:.3g} is under {budget.ess:g}")
    if found.share < MIN_TOKEN_SHARE:
        exceeded.append(f"only {found.share:.0%} of tokens are left")
    return " and ".join(exceeded)
