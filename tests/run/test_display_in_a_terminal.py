"""The live view in terminals of several sizes: it fits, it shows what matters, and it leaves nothing behind but its last line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.cells import cell_len

from burnish.run.display import ProgressPanel, ProgressView, sparkline
from tests.run.small_terminal import Screen, record

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from burnish.run.display import Display
title = "grpo on " + "a-run-with-a-long-name-" * 4 + ": 数学の模型 (1,543,714,304 parameters)"
with Display(Path({log!r})) as display:
    display.start(title, 5000, 1200)
    for step in range(1201, 1241):
        display.phase("rollout 31/512: " + "很长的提示 " * 40)
        display.step(step, {{
            "reward/mean": step / 5000, "validation/greedy/accuracy": 0.621, "rollout/length_mean": 312.4,
            "actor/entropy": 0.312, "actor/kl_ref": 0.00213, "mismatch/mean": 2.1e-4, "time/step_s": 3.21,
            "time/tokens_per_s": 61234.5, "performance/mfu": 0.412, **{{f"other/{{k}}": k for k in range(200)}},
        }})
    display.phase("rollout 31/512: " + "很长的提示 " * 40)
    display.note("a note with \\x1b[2J\\x1b[31m\\u202e in it, 数学 " + "and long " * 20)
    display._live.refresh()
"""


def screen(tmp_path: Path, columns: int, **environment: str) -> tuple[Screen, list[str]]:
    """The terminal at the end, and the live view as it was last seen, line by line."""
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), log=str(tmp_path / "log.txt"))
    shown = Screen(columns).feed(record(script, columns, **environment))
    last = next(state for state in reversed(shown.states) if any("1240/5000" in line for line in state))
    begin = max(k for k, line in enumerate(last) if line.startswith("grpo on a-run"))
    return shown, [line for line in last[begin:] if line]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_live_view_fits_its_terminal_and_goes_without_a_trace(tmp_path: Path, columns: int) -> None:
    shown, view = screen(tmp_path, columns)
    assert all(cell_len(line) <= columns for line in view)
    assert len(view) <= 12
    text = " ".join(view)
    for wanted in ("1240/5000", "reward 0.248", "accuracy 0.621", "length 312.4", "entropy 0.312", "kl 0.0021"):
        assert wanted in text
    for wanted in ("mismatch 0.0002", "s/step 3.21", "tokens/s 61,234", "mfu 41.2%", "left", "rollout 31/512"):
        assert wanted in text
    assert not shown.is_cursor_hidden
    final = [line for line in shown.lines if line.strip()]
    assert sum("rollout 31/512" in line for line in final) == 0, "the view is gone"
    assert "step 1240/5000" in "".join(final)
    assert "␛[2J␛[31m<202E> in it, 数学" in "".join(final)


def test_a_terminal_that_has_only_ascii_gets_ascii(tmp_path: Path) -> None:
    _, view = screen(tmp_path, 60, PYTHONIOENCODING="ascii:replace")
    assert all(line.isascii() for line in view[1:2])
    assert "####" in " ".join(view)


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    script = SCRIPT.format(root=str(Path(__file__).parents[2]), log=str(tmp_path / "log.txt"))
    written = record(script.replace("display._live.refresh()", ""), 80, TERM="dumb")
    assert "\x1b" not in written
    assert "going on after step 1200 of 5000" in written
    assert "step 1240/5000  reward 0.248" in written


@pytest.mark.parametrize("width", [10, 23, 40, 77, 300])
def test_no_line_of_the_panel_is_wider_than_the_terminal(width: int) -> None:
    values = [(f"label-{k}", "1,234.5") for k in range(12)]
    view = ProgressView(
        "模" * 300, 123456, 1000000, "12h03m, 240h00m left", values, [k % 9 for k in range(999)], "reward", "p" * 99
    )
    for line in ProgressPanel(view).lines(width):
        assert cell_len(line.plain) <= width


def test_the_course_of_a_number_is_drawn_from_its_lowest_to_its_highest() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 1.0, 1.0], 2) == "▁█"
    assert sparkline([1.0, 1.0, float("nan")], 10) == "▁▁"
    assert sparkline([1.0], 10) == ""
    assert len(sparkline(list(range(1000)), 30)) == 30


def test_a_run_that_grows_slower_is_judged_by_its_last_steps(tmp_path: Path) -> None:
    import io

    from burnish.run.display import SPEED_WINDOW, Display

    now, stream = [0.0], io.StringIO()
    display = Display(tmp_path / "log.txt", stream, lambda: now[0])
    display.start("grpo", 2000)
    for step in range(1, 1001 + SPEED_WINDOW):
        now[0] += 1.0 if step <= 1000 else 10.0
        display.step(step, {"reward/mean": 0.5})
    assert stream.getvalue().splitlines()[-1].endswith("left 2h38m")  # 950 steps of ten seconds
