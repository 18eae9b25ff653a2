"""The controller settles on the rung that trying all of them picks, whatever the noise, and does not swing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import pytest
import torch
from pydantic import ValidationError

from burnish.algorithms.correction.budget import (
    INITIAL_PATIENCE,
    MIN_TOKEN_SHARE,
    RUNGS,
    BudgetError,
    BudgetState,
    Rung,
    RungMeasurement,
    budget_step,
    first_rung_within_budget,
    is_within_budget,
    measure_rung,
)
from burnish.algorithms.correction.spec import BudgetCorrection as Budget
from burnish.algorithms.correction.spec import DecoupledCorrection
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import decoupled_correction

ROWS, LENGTH = 128, 32
BUDGET = Budget(k3_kl=1e-3, ess=0.9)
STRENGTHS = {0.001: "none", 0.02: "none", 0.15: "token_tis_5", 0.36: "token_mis_2", 0.5: "token_mis_1.5"}
NAMES = [rung.name for rung in RUNGS]
Build = Callable[..., Batch]


def draw(noise: float, seed: int, far: float = 0.0, bad_rows: float = 0.0) -> Batch:
    """Log-ratios of normal noise with E[e^l] = 1; a share `far` of tokens off by e^4, and `bad_rows` of rows by noise 1."""
    generator = torch.Generator().manual_seed(seed)
    num = ROWS * LENGTH

    def chance(count: int) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float64)

    scale = torch.where(chance(ROWS) < bad_rows, 1.0, noise).repeat_interleave(LENGTH)
    log_ratio = scale * torch.randn(num, generator=generator, dtype=torch.float64) - scale**2 / 2
    log_ratio += 4 * (chance(num) < far)
    behaviour = -3 * chance(num) - 0.01
    written = torch.ones(num, dtype=torch.bool)
    columns = {"action_mask": written, "loss_mask": written, "behaviour_logp": behaviour}
    return Batch(
        torch.arange(num),
        torch.arange(0, num + 1, LENGTH),
        {**columns, "old_logp": behaviour + log_ratio},
    )


def run(noises: Sequence[float], state: BudgetState | None = None, seed: int = 0) -> tuple[BudgetState, list[str]]:
    state, names = state or BudgetState(), []
    for k, noise in enumerate(noises):
        state, rung, _ = budget_step(state, draw(noise, 1000 * seed + k), BUDGET)
        names.append(rung.name)
    return state, names


def changes(names: list[str]) -> int:
    return sum(a != b for a, b in zip(names, names[1:], strict=False))


# --- the controller ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", STRENGTHS)
def test_it_settles_on_what_exhaustive_search_picks(noise: float) -> None:
    _, names = run([noise] * 10)
    assert {first_rung_within_budget(draw(noise, seed), BUDGET) for seed in range(10)} == {
        NAMES.index(STRENGTHS[noise])
    }
    assert names == [STRENGTHS[noise]] * 10  # every batch is corrected enough, the first too


@pytest.mark.parametrize("after", STRENGTHS)
@pytest.mark.parametrize("before", STRENGTHS)
def test_it_settles_within_ten_steps_of_a_change_in_strength(before: float, after: float) -> None:
    state, _ = run([before] * 3)
    _, names = run([after] * 10, state, seed=1)
    assert names[-1] == STRENGTHS[after]
    assert changes(names) <= 1
    if after > before:
        assert names[0] == STRENGTHS[after]
    elif STRENGTHS[after] != STRENGTHS[before]:
        assert names.count(STRENGTHS[before]) == INITIAL_PATIENCE - 1


def test_it_does_not_swing_where_the_budget_is_broken_now_and_then() -> None:
    _, names = run(([0.02] * 4 + [0.1]) * 30)
    assert changes(names) <= 6  # and not 60: every descent that did not last doubles the wait
    assert names[-1] == "token_tis_5"


def test_a_rung_that_holds_without_a_margin_is_not_come_down_to(build: Build) -> None:
    def even(k3: float) -> Batch:
        gap = math.acosh(1 + k3)  # half of the tokens at +gap, half at -gap
        return build([[gap - 1, -gap - 1] * 4], [[-1.0] * 8])

    for k3, last in ((0.97e-3, "token_tis_5"), (0.93e-3, "none")):
        state, _ = run([0.15])
        assert first_rung_within_budget(even(k3), BUDGET) == 0
        for _ in range(10):
            state, rung, _ = budget_step(state, even(k3), BUDGET)
        assert rung.name == last


def test_it_says_why_it_changed_and_is_silent_otherwise() -> None:
    state, rung, why = budget_step(BudgetState(), draw(0.15, 0), BUDGET)
    assert rung is RUNGS[1]
    assert why.startswith(
        "none -> token_tis_5: k3_kl 0.011 is over 0.001, and the new correction is within the budget (k3_kl 0"
    )
    state, _, why = budget_step(state, draw(0.15, 1), BUDGET)
    assert why == ""
    for seed in range(INITIAL_PATIENCE):
        state, rung, why = budget_step(state, draw(0.001, seed), BUDGET)
    assert rung is RUNGS[0]
    assert why.startswith(f"token_tis_5 -> none: it would have been within the budget for {INITIAL_PATIENCE} steps")


def test_the_state_is_plain_json() -> None:
    state, _ = run([0.15, 0.02])
    assert state.streaks[0] == 1
    assert BudgetState(**json.loads(json.dumps(asdict(state)))) == state


def test_a_gap_that_no_correction_can_bring_within_the_budget_stops_with_what_was_tried() -> None:
    batch, words = (
        draw(1.5, 0),
        r"no correction holds.*is over 0.001 and ess .* is under 0.9.*too far apart to be corrected",
    )
    for stop in (lambda: first_rung_within_budget(batch, BUDGET), lambda: budget_step(BudgetState(), batch, BUDGET)):
        with pytest.raises(BudgetError, match=words) as found:
            stop()
        assert found.value.batch is batch
        assert isinstance(found.value, UserError)


def test_a_rung_below_is_taken_where_none_above_holds() -> None:
    batch, budget = draw(0.15, 0, bad_rows=0.1), Budget(k3_kl=1e-2)
    fitting = [k for k, rung in enumerate(RUNGS) if is_within_budget(measure_rung(batch, rung), budget)]
    state = BudgetState(rung=len(RUNGS) - 1)
    _, rung, _ = budget_step(state, batch, budget)
    assert rung is RUNGS[fitting[0]]


# --- the ladder --------------------------------------------------------------------------------------------------------


def test_a_few_absurd_tokens_are_dropped_and_not_truncated() -> None:
    assert NAMES[first_rung_within_budget(draw(0.01, 0, far=0.01), BUDGET)] == "token_icepop"


def test_bad_rows_are_rejected_where_bad_tokens_are_not_enough() -> None:
    batch, budget = draw(0.005, 0, bad_rows=0.3), Budget(ess=0.995)
    assert NAMES[first_rung_within_budget(batch, budget)] == "k3_rs_token_mis"
    assert measure_rung(batch, RUNGS[first_rung_within_budget(batch, budget)]).share == pytest.approx(0.7, abs=0.1)


def test_an_effective_sample_size_alone_is_held_by_lower_and_lower_thresholds() -> None:
    found = [NAMES[first_rung_within_budget(draw(0.6, 0), Budget(ess=ess))] for ess in (0.5, 0.708, 0.72, 0.77, 0.82)]
    assert found == sorted(found, key=NAMES.index)
    assert {"none", "token_tis_3", "token_tis_2", "token_tis_1.5"} <= set(found)


@pytest.mark.parametrize("rung", RUNGS, ids=NAMES)
def test_a_rung_is_a_valid_correction_and_is_measured_as_it_is_applied(rung: Rung) -> None:
    record = DecoupledCorrection(**rung.options)
    batch = draw(0.15, 0, far=0.01, bad_rows=0.1)
    done = decoupled_correction(batch, **record.model_dump(exclude={"name"}))
    log_ratio = batch.token["old_logp"] - batch.token["behaviour_logp"]
    ess_weights = (log_ratio.exp() if done.weights is None else done.weights)[done.keep]
    weights = torch.ones_like(log_ratio) if done.weights is None else done.weights
    trained = done.keep & (weights > 0)
    left = (log_ratio - weights.log())[trained]
    expected = RungMeasurement(
        float((left.exp() - left - 1).mean()) if left.numel() else math.inf,
        float(ess_weights.mean() ** 2 / (ess_weights**2).mean()) if left.numel() else 0.0,
        float(trained.double().mean()),
    )
    assert measure_rung(batch, rung) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("rung", RUNGS, ids=NAMES)
def test_the_same_policy_is_left_alone_by_every_rung(build: Build, rung: Rung) -> None:
    rows = [[-1.0, -2.0, -0.3], [-0.5]]
    assert measure_rung(build(rows, rows), rung) == (0, 1, 1)


@pytest.mark.parametrize("rung", RUNGS, ids=NAMES)
def test_masked_rows_one_token_rows_and_absurd_gaps_have_a_measure(ragged: Build, build: Build, rung: Rung) -> None:
    for batch in (ragged(0), build([[-1.0], [-101.0]], [[-101.0], [-1.0]]), build([[-9.0]], [[-1.0]])):
        found = measure_rung(batch, rung)
        assert not any(math.isnan(x) for x in found)
        assert 0 <= found.share <= 1
        assert 0 <= found.ess <= 1
        assert found.k3_kl >= 0


def test_a_batch_of_which_too_little_is_left_does_not_hold() -> None:
    assert is_within_budget(RungMeasurement(0.0, 1.0, MIN_TOKEN_SHARE), BUDGET)
    assert not is_within_budget(RungMeasurement(0.0, 1.0, MIN_TOKEN_SHARE - 0.01), BUDGET)
    assert is_within_budget(RungMeasurement(1e-3, 0.9, 1.0), BUDGET)
    assert not is_within_budget(RungMeasurement(1e-3, 0.9, 1.0), BUDGET, margin=0.95)


def test_a_budget_tolerates_something_and_not_anything() -> None:
    assert Budget(ess=0.9).k3_kl is None
    for bad in ({}, {"k3_kl": 0}, {"ess": 1.0}, {"k3_kl": -1}, {"kl": 1e-3}):
        with pytest.raises(ValidationError):
            Budget(**bad)
