"""Summaries of a profiler's trace: an artificial GPU trace with known times, and phases and gaps by hand."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.training.profiler import (
    NEXT_STEP,
    idle_gaps,
    phase_lookup,
    render_summary,
    step_to_profile,
    summarise_trace,
)


def span(cat: str, name: str, ts: float, dur: float, tid: Any = 1, **args: Any) -> dict[str, Any]:
    words = {"external": "External id", "correlation": "correlation"}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 1,
        "tid": tid,
        "args": {words[k]: v for k, v in args.items()},
    }


def memory(ts: float, gib: float, device: int = 1) -> dict[str, Any]:
    args = {"Device Type": device, "Total Allocated": int(gib * 2**30)}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": ts, "args": args}


ON_GPU = [
    span("user_annotation", "rollout", 0, 100),
    span("cuda_runtime", "cudaGraphLaunch", 10, 5, correlation=1),
    span("kernel", "_decode_attention", 20, 30, "stream", correlation=1),
    span("kernel", "nvjet_tst_128x256", 50, 40, "stream", correlation=1),
    span("user_annotation", "other", 100, 900),
    span("user_annotation", "forward", 110, 90),
    span("cpu_op", "aten::linear", 120, 10),
    span("cpu_op", "aten::mm", 121, 8, external=7),
    span("cuda_runtime", "cudaLaunchKernel", 122, 2, correlation=2),
    span("kernel", "sm90_unreadable", 130, 50, "stream", correlation=2, external=7),
    span("cpu_op", "_HeadLogprob", 150, 40, external=8),
    span("cpu_op", "aten::mm", 151, 8, external=9),
    span("cuda_runtime", "cudaLaunchKernel", 152, 2, correlation=3),
    span("kernel", "nvjet_again", 180, 60, "stream", correlation=3, external=9),
    span("user_annotation", "backward", 200, 600),
    # The device's own thread runs the backward: it has no mark, but the time is that of one.
    span("cpu_op", "_RmsNormBackward", 300, 20, 2, external=10),
    span("cuda_runtime", "cudaLaunchKernel", 301, 2, 2, correlation=4),
    span("kernel", "void at::elementwise", 310, 90, "stream", correlation=4, external=10),
    span("user_annotation", "optimizer", 800, 100),
    span("cpu_op", "aten::copy_", 810, 10, external=11),
    span("cuda_runtime", "cudaMemcpyAsync", 811, 2, correlation=5),
    span("gpu_memcpy", "Memcpy DtoD", 820, 80, "stream", correlation=5, external=11),
    memory(50, 1),
    memory(150, 3),
    memory(160, 2),
    memory(400, 5),
    memory(420, 9, device=0),
]


def test_kernels_count_for_the_operator_and_the_phase_that_launched_them() -> None:
    summary = summarise_trace(ON_GPU)
    microseconds = {key: round(1e6 * seconds) for key, seconds in summary.seconds.items()}
    assert microseconds == {
        ("attention", "rollout"): 30,
        ("matmul", "rollout"): 40,
        ("matmul", "forward"): 50,
        ("head", "forward"): 60,
        ("norm and activation", "backward"): 90,
        ("optimizer", "optimizer"): 80,
    }
    assert summary.on_gpu
    assert summary.total_s == pytest.approx(1000e-6)
    assert summary.peaks == {"rollout": 1.0, "forward": 3.0, "backward": 5.0}


def test_idle_is_what_no_kernel_covers() -> None:
    summary = summarise_trace(ON_GPU)
    assert summary.idle_s == pytest.approx((1000 - 30 - 40 - 50 - 60 - 90 - 80) * 1e-6)
    assert summary.num_gaps == 5
    assert summary.gaps[0] == pytest.approx((400e-6, 420e-6))


def test_the_page_names_every_kind_that_took_time() -> None:
    page = render_summary(summarise_trace(ON_GPU), "step 2")
    assert page.startswith("step 2: 0.001 s")
    row = next(line for line in page.splitlines() if line.startswith("matmul"))
    assert row.split() == ["matmul", "0.04", "0.05", "0.00", "0.00", "0.09", "9.0%"]
    assert "communication" not in page
    assert "idle (no kernel)" in page


def test_without_a_gpu_an_operator_has_the_time_of_its_own() -> None:
    events = [
        span("user_annotation", "forward", 0, 100),
        span("cpu_op", "aten::linear", 10, 50),
        span("cpu_op", "aten::addmm", 15, 40),
        span("cpu_op", "aten::copy_", 20, 4),
        memory(5, 2, device=0),
    ]
    summary = summarise_trace(events)
    assert {key: round(1e6 * s) for key, s in summary.seconds.items()} == {
        ("matmul", "forward"): 46,
        ("copies", "forward"): 4,
    }
    assert summary.idle_s == pytest.approx(50e-6)
    assert summary.peaks == {"forward": 2.0}
    assert summary.top[0] == ("aten::addmm", "matmul", 1, pytest.approx(36e-6))


def test_a_moment_is_in_the_innermost_phase() -> None:
    at = phase_lookup(
        [
            span("user_annotation", "other", 0, 100),
            span("user_annotation", "forward", 0, 40),
            span("user_annotation", "communication", 10, 10),
            span("user_annotation", "something else", 10, 10),
        ]
    )
    assert [at(t) for t in (0, 5, 10, 15, 20, 39, 40, 99, 100, 1000, -1)] == [
        *("forward", "forward", "communication", "communication", "forward", "forward"),
        *("other", "other", "other", "other", "other"),
    ]


def test_gaps_are_what_intervals_leave() -> None:
    assert idle_gaps([(2, 4), (3, 6), (8, 9)], 0, 10) == [(0, 2), (6, 2), (9, 1)]
    assert idle_gaps([], 0, 5) == [(0, 5)]
    assert idle_gaps([(0, 5)], 0, 5) == []


def test_an_empty_trace_is_an_empty_page() -> None:
    assert summarise_trace([]).total_s == 0
    assert render_summary(summarise_trace([]), "nothing").startswith("nothing: 0.000 s")


def test_which_step_is_recorded() -> None:
    assert step_to_profile(None, 3, 10) is None
    assert step_to_profile(NEXT_STEP, 3, 10) == 5
    assert step_to_profile(NEXT_STEP, 9, 10) == 10
    assert step_to_profile(7, 3, 10) == 7
    with pytest.raises(UserError, match="has only 10 steps"):
        step_to_profile(11, 3, 10)
    with pytest.raises(UserError, match="has made 3 steps already"):
        step_to_profile(3, 3, 10)
