"""Processes of a run are killed and stopped at random moments, and it ends as if nothing had happened (`chaos.py`; `make chaos`)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from burnish.run.supervisor.supervisor import is_supported
from tests.distributed import chaos
from tests.distributed.chaos import (
    ATTEMPTS,
    NO_RAY,
    SIGNALS,
    VICTIMS,
    Disturbed,
    Result,
    disturbed,
    output,
    rows_of,
    told,
    undisturbed,
)
from tests.distributed.chaos_runs import open_runner

pytestmark = pytest.mark.skipif(not is_supported(), reason="the supervisor needs Linux")
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


class Starts:
    """A runner whose runs say one thing each, those that say nothing having ended well."""

    def __init__(self, *said: str) -> None:
        self.said, self.folders = list(said), list[Path]()

    def start(self, folder: Path, overrides: tuple[str, ...]) -> int:
        folder.mkdir()
        (folder / "output.txt").write_text(self.said[len(self.folders)])
        self.folders.append(folder)
        return len(self.folders)

    def wait(self, pid: int) -> int:
        return int(self.said[pid - 1] != "")


@pytest.mark.parametrize(
    ("said", "is_judged", "problem"),
    [
        (["", ""], True, None),
        ([NO_RAY, ""], True, None),
        ([NO_RAY, "a bug"], True, "status 1: a bug"),
        ([NO_RAY] * 2 * ATTEMPTS, False, None),
        ([NO_RAY] * ATTEMPTS + [""], True, f"{NO_RAY} {ATTEMPTS} times, though it does where nothing is disturbed"),
    ],
)
def test_a_run_without_ray_is_made_again_and_blamed_on_burnish_only_where_others_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str], is_judged: bool, problem: str | None
) -> None:
    nothing = Result([], {}, [])
    monkeypatch.setattr(chaos, "strike", lambda *args: True)
    monkeypatch.setattr(chaos, "result", lambda folder: nothing)
    found = disturbed(Starts(*said), tmp_path / "run", "ray_driver", signal.SIGKILL, SEED, nothing)
    assert found.is_judged is is_judged
    assert found.problems[:1] == ([] if problem is None else [problem])
    counts = {("ray_driver", int(signal.SIGKILL)): [found]}
    assert told(counts) == (0 if not found.problems and is_judged else 1 if problem else 2)
    (row,) = rows_of(counts, SEED)
    assert (row["work"], row["seed"], row["runs"], row["hit"]) == ("ray_driver SIGKILL", SEED, 1, 1)
    assert (row["as_undisturbed"], row["not_judged"]) == (is_judged and problem is None, not is_judged)


@pytest.mark.slow  # each run has a Ray of its own: one to four minutes for the three runs of a victim
@pytest.mark.parametrize("victim", [name for name, overrides in VICTIMS.items() if "placement=ray" in overrides])
def test_workers_of_ray_that_are_killed_or_stopped_change_nothing(tmp_path: Path, victim: str) -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    disturb(tmp_path, victim)
