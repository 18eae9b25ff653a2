"""Ctrl-C: the first lets the step finish, the second stops now, and neither depends on the display."""

from __future__ import annotations

import signal

import pytest

from burnish.run.supervisor.liveness import StopOnInterrupt


def test_the_first_interrupt_is_noted_and_the_second_raises() -> None:
    notes: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    times = iter([10.0, 12.0])
    with StopOnInterrupt(notes.append, lambda: next(times)) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert len(notes) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_of_the_same_moment_are_one() -> None:
    times = iter([10.0, 10.1, 10.2, 11.0])
    with StopOnInterrupt(lambda text: None, lambda: next(times)) as stop:
        signal.raise_signal(signal.SIGTERM)  # a batch system's
        signal.raise_signal(signal.SIGTERM)  # the same, passed on by the supervisor
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_in_the_middle_of_a_line_of_output_does_not_end_the_run() -> None:
    def reentrant(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with StopOnInterrupt(reentrant) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
