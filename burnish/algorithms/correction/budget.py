"""A mismatch budget: the user says how much gap is tolerable, and the mildest correction that keeps to it is chosen.

A ladder of corrections, from none to the strictest, and a controller that is a value: `step` takes the last state and a
batch and gives the next state, the rung to apply to this batch, and why it changed. It climbs at once when the budget
is broken and comes down only after milder rungs would have held it, with a margin, for some steps in a row; a descent that
did not last doubles that number, so that a batch at the edge of a budget does not make it go up and down.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from burnish.algorithms.correction.corrections import METRIC_PREFIX, decoupled_correction
from burnish.algorithms.correction.rollout_mismatch import (
    LOG_RATIO_BOUND,
    RolloutMismatch,
    rollout_mismatch,
    written_of,
)
from burnish.algorithms.correction.weights_and_rejection import (
    CorrectionResult,
    accepted_tokens,
    bound_weights,
    raw_weights,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch

MIN_TOKEN_SHARE = 0.5
"""A correction must leave this share of the tokens: past it the batch is another one, not a corrected one."""
DESCENT_MARGIN = 0.95
"""A milder rung must use no more than this part of the budget before it is trusted: the next batch is another sample."""
INITIAL_PATIENCE, MAX_PATIENCE = 3, 48
"""Steps in a row for which a milder rung must have held, at first and at most."""


@dataclass(frozen=True)
class Rung:
    """One correction of the ladder: a name for people, and options of `decoupled_correction`."""

    name: str
    options: dict[str, Any]


def _truncation_rung(threshold: float) -> Rung:
    return Rung(f"token_tis_{threshold:g}", {"weights": "token", "threshold": threshold})


def _masking_rung(name: str, high: float, **reject: Any) -> Rung:
    """Weights of the tokens within [1/high, high] and, by `reject`, of rows; all else leaves the loss."""
    band = {"token_k1": (1 / high, high), **reject}
    return Rung(name, {"weights": "token", "threshold": high, "reject": band})


RUNGS: tuple[Rung, ...] = (
    Rung("none", {}),
    _truncation_rung(5.0),
    _truncation_rung(3.0),
    _truncation_rung(2.0),
    _truncation_rung(1.5),
    Rung("token_icepop", {"weights": "token", "threshold": (0.5, 5.0)}),
    _masking_rung("token_mis_2", 2.0),
    _masking_rung("token_mis_1.5", 1.5),
    _masking_rung("k3_rs_token_mis", 1.5, seq_mean_k3=0.01),
    _masking_rung("geo_rs_token_mis", 1.5, seq_mean_k1=(0.99, 1.01)),
    _masking_rung("strictest", 1.25, seq_mean_k1=(0.999, 1.001)),
)


class Budget(Protocol):
    """What is tolerated; None tolerates anything."""

    @property
    def k3_kl(self) -> float | None: ...

    @property
    def ess(self) -> float | None: ...


class MismatchBudget(NamedTuple):
    """A budget as a value."""

    k3_kl: float | None = None
    ess: float | None = None


class BudgetError(UserError):
    """No correction holds the budget for this batch."""

    def __init__(self, text: str, batch: Batch) -> None:
        super().__init__(text)
        self.batch = batch


class RungMeasurement(NamedTuple):
    """A batch under a correction."""

    k3_kl: float
    ess: float
    share: float


def measure_rung(batch: Batch, rung: Rung) -> RungMeasurement:
    """What a correction leaves of the gap, of the sample and of the batch.

    With l = old_logp - behaviour_logp and w the weight applied (1 without weights), over the tokens still trained on (kept,
    w > 0): k3_kl = mean(exp(r) - r - 1), r = l - log w, the gap that remains once a token is weighted: l itself without
    weights, 0 within bounds, log(W / C) beyond a truncation. ess = mean(w)^2 / mean(w^2) over the tokens kept, those of weight 0
    among them; without weights, of exp(l), the weights it would take. share: of the tokens the model wrote, those
    trained on. Where none is, k3_kl is inf and ess 0. Logarithms are clamped to +-20.
    """
    return _measure(_gap(batch), rung)


def is_within_budget(found: RungMeasurement, budget: Budget, margin: float = 1.0) -> bool:
    """Whether a measured batch is within `margin` of what is tolerated, and enough of it is left."""
    k3_ok = budget.k3_kl is None or found.k3_kl <= margin * budget.k3_kl
    ess_ok = budget.ess is None or 1 - found.ess <= margin * (1 - budget.ess)
    return k3_ok and ess_ok and found.share >= MIN_TOKEN_SHARE


def first_rung_within_budget(batch: Batch, budget: Budget) -> int:
    """The first rung under which the budget holds, by trying all; a `BudgetError` if there is none."""
    gap = _gap(batch)
    found = [_measure(gap, rung) for rung in RUNGS]
    return _first_within_budget(batch, found, budget, range(len(RUNGS)))


# --- the controller ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BudgetState:
    """Where the controller is, as plain JSON values."""

    rung: int = 0
    streaks: list[int] = field(default_factory=lambda: [0] * len(RUNGS))
    """For how many steps in a row each milder rung would have held the budget with a margin."""
    patience: int = INITIAL_PATIENCE
    """The streak that is enough to come down."""
    came_down: bool = False
    """Whether the rung was reached from above."""


def budget_step(state: BudgetState, batch: Batch, budget: Budget) -> tuple[BudgetState, Rung, str]:
    """(next state, the rung to apply to this batch, why it changed or the empty string where it did not); a `BudgetError`
    where no rung holds."""
    gap, now = _gap(batch), state.rung
    found = [_measure(gap, rung) for rung in RUNGS[: now + 1]]
    if not is_within_budget(found[now], budget):
        found += [_measure(gap, rung) for rung in RUNGS[now + 1 :]]
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
    why = f"{RUNGS[now].name} -> {RUNGS[new].name}: it would have held the budget for {streaks[new]} steps ({_describe(found[new])})"
    return replace(state, rung=new, streaks=[0] * len(RUNGS), came_down=True), RUNGS[new], why


def budget_correction(
    batch: Batch, state: BudgetState | None, k3_kl: float | None = None, ess: float | None = None
) -> tuple[CorrectionResult, BudgetState, str]:
    """The correction that the controller chooses for a batch, its next state, and why the rung changed or an empty string."""
    state, rung, why = budget_step(state or BudgetState(), batch, MismatchBudget(k3_kl, ess))
    found = decoupled_correction(batch, **rung.options)
    metrics = {**found.metrics, f"{METRIC_PREFIX}budget_rung": float(state.rung)}
    return replace(found, metrics=metrics), state, why


def _climb(
    state: BudgetState, batch: Batch, found: list[RungMeasurement], budget: Budget
) -> tuple[BudgetState, Rung, str]:
    """To the next stricter rung that holds, else to a milder one: truncating less leaves a smaller gap."""
    now = state.rung
    new = _first_within_budget(batch, found, budget, [*range(now + 1, len(RUNGS)), *range(now)])
    patience = min(MAX_PATIENCE, 2 * state.patience) if state.came_down else state.patience
    why = (
        f"{RUNGS[now].name} -> {RUNGS[new].name}: {_describe_excess(found[now], budget)}, "
        f"and under the new correction it holds ({_describe(found[new])})"
    )
    return BudgetState(rung=new, patience=patience), RUNGS[new], why


def _first_within_budget(batch: Batch, found: list[RungMeasurement], budget: Budget, order: range | list[int]) -> int:
    """The first rung in `order` that holds the budget for a batch, `found` being what it is under each."""
    for k in order:
        if is_within_budget(found[k], budget):
            return k
    raw, last = found[0], found[-1]
    most = max(range(len(found)), key=lambda k: (found[k].share >= MIN_TOKEN_SHARE, -_excess(found[k], budget)))
    text = (
        f"no correction holds correction.budget: uncorrected, {_describe_excess(raw, budget)}; the closest, {RUNGS[most].name}, is at "
        f"{_describe(found[most])}, and the strictest keeps {last.share:.0%} of the tokens (at least {MIN_TOKEN_SHARE:.0%} must be left). "
        "Engine and trainer are too far apart to be corrected: remove the cause, or allow a larger budget"
    )
    raise BudgetError(text, batch)


def _excess(found: RungMeasurement, budget: Budget) -> float:
    """How many times over the budget, by what is furthest over it."""
    k3 = 0.0 if budget.k3_kl is None else found.k3_kl / budget.k3_kl
    ess = 0.0 if budget.ess is None else (1 - found.ess) / max(1 - budget.ess, 1e-12)
    return max(k3, ess)


# --- measuring ---------------------------------------------------------------------------------------------------------


def _gap(batch: Batch) -> RolloutMismatch:
    written = written_of(batch)
    return rollout_mismatch(written.column("old_logp"), written.column("behaviour_logp"), written.offsets)


def _measure(gap: RolloutMismatch, rung: Rung) -> RungMeasurement:
    options = rung.options
    is_weighted = options.get("weights") is not None
    assert options.get("weights") in (None, "token"), "the ladder weights tokens"
    raw = raw_weights(gap, "token")[1]
    weights = bound_weights(raw, options["threshold"]) if is_weighted else raw
    left = gap.clamped - weights.log() if is_weighted else gap.clamped
    keep = accepted_tokens(gap, options["reject"]) if "reject" in options else torch.ones_like(raw, dtype=torch.bool)
    trained = keep & (weights > 0)
    left, weights = left[trained].clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), weights[keep]
    if left.shape[0] == 0:
        return RungMeasurement(float("inf"), 0.0, 0.0)
    k3 = (left.expm1() - left).mean().clamp(min=0)
    ess = (weights.mean() ** 2 / weights.square().mean()).clamp(max=1)
    share = trained.double().mean()
    return RungMeasurement(*torch.stack([k3, ess, share]).tolist())


def _describe(found: RungMeasurement) -> str:
    return f"k3_kl {found.k3_kl:.2g}, ess {found.ess:.3g}, {found.share:.0%} of tokens"


def _describe_excess(found: RungMeasurement, budget: Budget) -> str:
    """What of a budget does not hold."""
    broken = []
    if budget.k3_kl is not None and found.k3_kl > budget.k3_kl:
        broken.append(f"k3_kl {found.k3_kl:.2g} is over {budget.k3_kl:g}")
    if budget.ess is not None and found.ess < budget.ess:
        broken.append(f"ess {found.ess:.3g} is under {budget.ess:g}")
    if found.share < MIN_TOKEN_SHARE:
        broken.append(f"only {found.share:.0%} of tokens are left")
    return " and ".join(broken)
