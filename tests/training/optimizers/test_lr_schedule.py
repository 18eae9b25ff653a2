"""Learning-rate schedules: the factor at every update of short runs, written out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.training.optimizers.update_rules import lr_factor


def factors(total: int, schedule: str, warmup: int, final: float) -> list[float]:
    return [lr_factor(update, total, schedule, warmup, final) for update in range(total)]


def test_constant_stays_at_the_peak() -> None:
    assert factors(4, "constant", 0, 0.1) == [1, 1, 1, 1]


def test_warm_up_climbs_in_equal_steps_to_the_peak() -> None:
    assert factors(6, "constant", 4, 0.0) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_ends_at_final_on_the_last_update() -> None:
    assert factors(5, "linear", 0, 0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


def test_linear_after_warm_up() -> None:
    assert factors(7, "linear", 2, 0.0) == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25, 0])


def test_cosine_ends_at_final_on_the_last_update() -> None:
    half = math.sqrt(0.5)
    expected = [1, 0.55 + 0.45 * half, 0.55, 0.55 - 0.45 * half, 0.1]
    assert factors(5, "cosine", 0, 0.1) == pytest.approx(expected)


def test_wsd_stays_at_the_peak_and_falls_in_the_last_part() -> None:
    found = [lr_factor(update, 10, "wsd", 2, 0.2, 0.4) for update in range(10)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    assert [lr_factor(update, 5, "wsd", 0, 0.0, 0.2) for update in range(5)] == [1, 1, 1, 1, 0]
    assert [lr_factor(update, 3, "wsd", 0, 0.5, 0.01) for update in range(3)] == [1, 1, 0.5], "one update at least"


def test_a_fraction_of_warm_up_is_of_all_updates() -> None:
    assert factors(10, "constant", 0.4, 0.0) == factors(10, "constant", 4, 0.0)
    assert factors(10, "wsd", 0.4, 0.0) == factors(10, "wsd", 4, 0.0)
    assert factors(3, "linear", 0.1, 0.0) == factors(3, "linear", 0, 0.0), "less than half an update is none"


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_past_the_end_the_rate_stays_at_final(schedule: str) -> None:
    assert lr_factor(50, 10, schedule, 2, 0.25) == pytest.approx(0.25)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(1, 40), st.integers(0, 10), st.floats(0, 1))
def test_the_rate_rises_to_the_peak_and_never_again(schedule: str, total: int, warmup: int, final: float) -> None:
    values = factors(total + warmup, schedule, warmup, final)
    assert all(a < b for a, b in pairwise(values[:warmup]))
    assert values[warmup] == 1
    later = values[warmup:]
    assert all(a >= b - 1e-12 for a, b in pairwise(later))
    assert min(later) >= min(final, 1) - 1e-12


def test_an_unknown_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match="'step'"):
        lr_factor(3, 10, "step", 0, 0.0)
