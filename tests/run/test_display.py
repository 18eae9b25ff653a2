"""The display: few lines in a pipe, everything in log.txt, and no way for it to stop a run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from burnish.run.display import Display, ProgressPanel, ProgressView, format_duration, headline_numbers

VALUES = {
    "reward/mean": 0.5,
    "rollout/length_mean": 6.54,
    "time/tokens_per_s": 12345.6,
}


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(tmp_path: Path, total: int, seconds: float, first: int = 0, stop_at: int | None = None) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    with Display(tmp_path / "log.txt", stream, clock) as display:
        display.start("grpo", total, first)
        for step in range(first + 1, (stop_at or total) + 1):
            clock.now += seconds
            display.phase("rollout 1/2")
            display.step(step, VALUES)
    return stream.getvalue().splitlines()


def test_a_line_says_step_reward_length_speed_and_time_left(tmp_path: Path) -> None:
    lines = run(tmp_path, 3, 60.0)
    assert lines[0] == "grpo"
    assert lines[2] == "step 1/3  reward 0.500  length 6.5  tokens/s 12,346  left 2m00s"
    assert lines[-1] == "step 3/3  reward 0.500  length 6.5  tokens/s 12,346"


def test_slow_steps_each_have_a_line(tmp_path: Path) -> None:
    lines = [line for line in run(tmp_path, 50, 5.0) if "reward" in line]
    assert len(lines) == 50


def test_fast_steps_have_a_line_every_two_seconds_and_always_the_first_and_the_last(tmp_path: Path) -> None:
    lines = [line for line in run(tmp_path, 1001, 0.125) if "reward" in line]
    steps = [int(line.split()[1].split("/")[0]) for line in lines]
    assert steps == [1, *range(17, 1001, 16), 1001]
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert len([line for line in log if "reward" in line]) == 1001


def test_a_held_out_figure_says_its_step_and_stands_only_in_the_line_of_that_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    display = Display(tmp_path / "log.txt", stream, Clock())
    display.start("grpo", 1000)
    display.step(0, {"validation/greedy/accuracy": 0.25, "validation/greedy/reward_mean": 0.5})
    display.step(1, VALUES)
    display.step(2, VALUES | {"validation/sampled/reward_mean": 7.25})
    display.step(3, VALUES)
    display.stop()
    numbers = "reward 0.500  length 6.5  tokens/s 12,346"
    log = (tmp_path / "log.txt").read_text().splitlines()[1:]
    assert [line.split("  ", 1)[1] for line in log] == [
        "held-out accuracy 0.250 before step 1 (greedy)",
        f"step 1/1000  {numbers}",
        f"step 2/1000  {numbers}  | held-out reward 7.250 at step 2 (sampled)",
        f"step 3/1000  {numbers}",
    ]
    shown = stream.getvalue().splitlines()
    assert "held-out accuracy 0.250 before step 1 (greedy)" in shown
    assert any(line.endswith("at step 2 (sampled)") for line in shown), (
        "a validation is shown even where steps are fast"
    )


def test_what_happens_in_a_validation_is_not_told_as_the_next_step(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    display = Display(tmp_path / "log.txt", stream, clock)
    display.start("grpo", 2)
    clock.now += 40.0
    display.phase("rollout 3/8", of="validation before step 1, greedy")
    assert stream.getvalue().splitlines()[1:] == ["validation before step 1, greedy: rollout 3/8"]


def test_the_live_view_has_the_held_out_figure_on_a_line_of_its_own() -> None:
    view = ProgressView(values=[("reward", "0.500")], held_out="held-out accuracy 0.250 at step 50 (greedy)")
    lines = [line.plain.strip() for line in ProgressPanel(view).lines(80)]
    assert "reward 0.500" in lines
    assert "held-out accuracy 0.250 at step 50 (greedy)" in lines


def test_an_interrupted_run_shows_where_it_was(tmp_path: Path) -> None:
    assert run(tmp_path, 1000, 0.01, stop_at=40)[-1].startswith("step 40/1000 ")


def test_time_left_counts_only_the_steps_of_this_process(tmp_path: Path) -> None:
    lines = run(tmp_path, 104, 10.0, first=100, stop_at=102)
    assert lines[0] == "grpo, going on after step 100 of 104"
    assert lines[1].endswith("left 30s")


def test_a_long_phase_speaks_in_a_pipe(tmp_path: Path) -> None:
    stream, clock = io.StringIO(), Clock()
    display = Display(tmp_path / "log.txt", stream, clock)
    display.start("grpo", 5)
    for done in range(70):
        clock.now += 1.0
        display.phase(f"rollout {done}/512")
    assert stream.getvalue().splitlines() == ["grpo", "step 1/5: rollout 29/512", "step 1/5: rollout 59/512"]


def test_notes_go_to_the_stream_and_the_log(tmp_path: Path) -> None:
    stream = io.StringIO()
    Display(tmp_path / "log.txt", stream).note("[bold]not markup[/bold]")
    assert stream.getvalue() == "[bold]not markup[/bold]\n"
    assert (tmp_path / "log.txt").read_text().endswith("  [bold]not markup[/bold]\n")


def test_a_terminal_gets_the_live_view_and_notes_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Display(tmp_path / "log.txt", stream) as display:
        display.start("grpo", 3)
        display.phase("rollout [red]3/8")
        display.step(1, VALUES)
        display.note("a [red]note")
    shown = stream.getvalue()
    assert "a [red]note" in shown
    assert "step 1/3" in shown.splitlines()[-1]
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor was hidden and came back
    assert "a [red]note" in (tmp_path / "log.txt").read_text()


def test_a_failing_rich_falls_back_to_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("rich.live.Live.start", lambda *_: (_ for _ in ()).throw(RuntimeError("strange terminal")))
    stream = Terminal()
    with Display(tmp_path / "log.txt", stream) as display:
        display.start("grpo", 1)
        display.step(1, VALUES)
    lines = stream.getvalue().splitlines()
    assert "strange terminal" in lines[1]
    assert lines[2].startswith("step 1/1  reward 0.500")


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    display = Display(tmp_path / "log.txt", stream)
    display.start("grpo", 3)
    with pytest.raises(KeyboardInterrupt), display:
        raise KeyboardInterrupt
    assert stream.getvalue().count("\x1b[?25h") == 1


def test_a_reader_that_left_does_not_stop_the_run(tmp_path: Path) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("reader left")

    with Display(tmp_path / "log.txt", Closed()) as display:
        display.start("grpo", 2)
        display.step(1, VALUES)
    log = (tmp_path / "log.txt").read_text()
    assert "the output cannot be written any more" in log
    assert "step 1/2" in log


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path) -> None:
    stream = io.StringIO()
    display = Display(tmp_path / "missing" / "log.txt", stream)
    display.note("one")
    display.note("two")
    lines = stream.getvalue().splitlines()
    assert "cannot write" in lines[0]
    assert lines[1:] == ["one", "two"]


def test_text_the_stream_cannot_spell_is_replaced(tmp_path: Path) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Display(tmp_path / "log.txt", stream).note("π")
    assert raw.getvalue() == b"?\n"
    assert "π" in (tmp_path / "log.txt").read_text()


def test_a_summary_takes_what_is_there() -> None:
    assert headline_numbers({"sft/loss": 1, "other": 2}) == {"loss": 1.0}
    assert headline_numbers({"reward/mean": "nan"}) == {}


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (187, "3m07s"), (7500, "2h05m"), (-3, "0s")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
