"""The numbers behind the curves of the page, as its script computes them: run by node, where there is one."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from burnish.report.html_report import static_file

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")


def computed(*expressions: str) -> list[Any]:
    """The values of expressions that use the functions of scale.js."""
    script = f"{static_file('scale.js')}\nconsole.log(JSON.stringify([{', '.join(expressions)}]))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    found: list[Any] = json.loads(done.stdout)
    return found


def test_smoothing_weighs_what_is_k_steps_old_by_the_weight_to_the_k() -> None:
    points = [[1, 4.0], [2, 0.0], [4, 8.0]]
    none, half, sparse = computed(
        f"smoothed({points}, 0)", f"smoothed({points}, 0.5)", "smoothed([[0, 1], [50, 2], [100, 3]], 0.9)"
    )
    assert none == points
    assert half[0] == [1, 4.0]
    assert half[1] == [2, pytest.approx((0.5 * 4 + 0) / 1.5)]
    assert half[2] == [4, pytest.approx((0.125 * 4 + 0.25 * 0 + 8) / 1.375)]
    assert [y for _, y in sparse] == pytest.approx([1, 2, 3], abs=0.02), "validations far apart stay as they are"


def test_the_nearest_point_and_those_in_sight_with_one_more_at_each_side() -> None:
    points = [[k, k] for k in range(0, 100, 10)]
    assert computed(*(f"nearest({points}, {step})[0]" for step in (-5, 0, 14, 15, 16, 95))) == [0, 0, 10, 10, 20, 90]
    inside, beyond = computed(f"inSight({points}, 25, 45)", f"inSight({points}, 200, 300)")
    assert [x for x, _ in inside] == [20, 30, 40, 50]
    assert [x for x, _ in beyond] == [90]


def test_ticks_are_round_and_inside_and_powers_on_a_logarithmic_scale() -> None:
    spans = {(0, 1): [0, 0.5, 1], (0, 150): [0, 50, 100, 150], (-2, 2): [-2, -1, 0, 1, 2], (0.017, 0.93): [0.5]}
    for expected, found in zip(spans.values(), computed(*(f"ticks({a}, {b}, 4)" for a, b in spans)), strict=True):
        assert found == pytest.approx(expected)
    few, many, narrow = computed("logTicks(0.5, 30)", "logTicks(1e-9, 10)", "logTicks(2.1, 3.9)")
    assert few == pytest.approx([1, 10])
    assert many == pytest.approx([1e-8, 1e-6, 1e-4, 1e-2, 1])
    assert narrow == pytest.approx([2.5, 3, 3.5])


def test_a_long_line_is_drawn_with_its_spikes_and_its_end() -> None:
    script = "Array.from({ length: 5000 }, (_, k) => [k, k === 3333 ? 99 : k === 1234 ? -99 : Math.sin(k)])"
    kept, few = computed(f"thinned({script}, 200)", "thinned([[1, 2], [3, 4]], 200)")
    steps = [x for x, _ in kept]
    assert len(kept) <= 202
    assert steps == sorted(set(steps))
    assert {1234, 3333, 4999} <= set(steps)
    assert few == [[1, 2], [3, 4]]


def test_a_logarithmic_scale_has_only_what_is_above_zero() -> None:
    plain, logarithmic, nothing = computed(
        "bounds([-1, 0, 4], false)", "bounds([-1, 0, 2, 4], true)", "bounds([-1, 0], true)"
    )
    assert (plain, logarithmic, nothing) == ([-1, 4], [2, 4], None)
    assert computed("part(10, [1, 100], true)", "part(10, [0, 100], false)") == pytest.approx([0.5, 0.1])


def test_numbers_are_short() -> None:
    assert computed("short(0.5)", "short(1234.56)", "short(0.0000017321)", "short(0)", "short(-25000000)") == [
        "0.5",
        "1235",
        "1.732e-6",
        "0",
        "-2.5e+7",
    ]
