"""Processes of a run are killed and stopped at random moments, and it ends as if nothing had happened (`chaos.py`; `make chaos`)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from burnish.run.supervise import is_possible
from tests.controller.chaos import SIGNALS, VICTIMS, Disturbed, disturbed, open_runner, output, undisturbed

pytestmark = pytest.mark.skipif(not is_possible(), reason="the supervisor needs Linux")
SEED = 7


def disturb(folder: Path, *victims: str) -> dict[tuple[str, int], Disturbed]:
    """A run for each victim and signal; all must end as the undisturbed one did."""
    found = {}
    with open_runner() as runner:
        expected = undisturbed(runner, folder / "undisturbed", VICTIMS[victims[0]])
        ids = [id for _, some in expected.used for id in some]
        assert len(ids) == len(set(ids)) > 0
        for victim in victims:
            for number in SIGNALS:
                place = folder / f"{victim}-{number}"
                found[victim, number] = disturbed(runner, place, victim, number, SEED, expected)
    assert {kind: run.problems for kind, run in found.items() if run.problems} == {}
    assert all(run.was_hit for run in found.values())
    return found


def test_drivers_and_reward_workers_that_are_killed_or_stopped_change_nothing(tmp_path: Path) -> None:
    disturb(tmp_path, "driver", "reward")
    for number, words in ((signal.SIGKILL, "was killed (SIGKILL)"), (signal.SIGSTOP, "was stopped by a signal")):
        said = output(tmp_path / f"driver-{number}")
        assert words in said
        assert "(restart 1 of 3)" in said
        assert "restart" not in output(tmp_path / f"reward-{number}")


@pytest.mark.slow  # each run has a Ray of its own: one to four minutes for the three runs of a victim
@pytest.mark.parametrize("victim", ["rollout", "trainer", "ray_driver", "ray_reward", "async_rollout", "async_trainer"])
def test_workers_of_ray_that_are_killed_or_stopped_change_nothing(tmp_path: Path, victim: str) -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    disturb(tmp_path, victim)
