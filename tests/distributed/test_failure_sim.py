"""The controller with 512 simulated workers (`bench/failure_sim.py`): failures are named, and the run ends as an undisturbed one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

WORKERS, STEPS, PROMPTS = 512, 2, 144
"""A step has samples for all of the 256 trainers in each of its two mini-batches."""


@pytest.fixture(scope="module")
def simulation() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
        import failure_sim

        yield failure_sim
        sys.modules.pop("failure_sim")


def test_a_run_with_many_failures_ends_as_an_undisturbed_one_and_names_each(simulation: Any) -> None:
    calm = simulation.run(WORKERS, STEPS, PROMPTS)
    failures = simulation.random_failures(16, WORKERS, STEPS, seed=1)
    found = simulation.run(WORKERS, STEPS, PROMPTS, failures)
    assert found.weights == calm.weights
    assert calm.notes == calm.errors == []
    happened = [failure for failure in failures if failure.has_happened]
    assert len(happened) >= 14
    assert {failure.kind for failure in happened} == {"dies", "hangs", "is late"}
    assert [failure.text for failure in happened if not simulation.is_named(failure, found)] == []
    assert len(found.errors) == sum(failure.group == "actor" for failure in happened)
    assert found.seconds > calm.seconds + 600  # a trainer that hangs is noticed at the deadline


def test_a_trainer_that_hangs_ends_the_run_at_its_deadline(simulation: Any) -> None:
    workers, methods = 32, ("publish", "outputs", "update")  # the first weights are published before the step
    hanging = [simulation.Failure("actor", rank, method, 1, "hangs") for rank, method in enumerate(methods, 7)]
    found = simulation.run(workers, 1, 32, hanging)
    assert found.weights == simulation.run(workers, 1, 32).weights
    for error, method, rank in zip(found.errors, methods, (7, 8, 9), strict=True):
        assert f"did not answer `{method}`" in error
        assert "600 s, which is placement.timeout_s" in error
        assert f"ranks [{rank}] have stopped" in error


def test_the_simulation_notices_a_lost_sample_and_old_weights(simulation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the tests above: a simulation that ignored what it is given would be equal too."""
    tokens, right = simulation.sampled_tokens, simulation.run(32, 2, 32).weights
    monkeypatch.setattr(simulation, "sampled_tokens", lambda request, weights: tokens(request, 1))
    old = simulation.run(32, 2, 32).weights
    assert (old[0] == right[0], old[1] == right[1]) == (True, False)  # the first step has these weights
    first, *_, last = simulation.step_requests(1, 32)
    changed = {last.key: first}
    monkeypatch.setattr(
        simulation, "sampled_tokens", lambda request, weights: tokens(changed.get(request.key, request), weights)
    )
    assert simulation.run(32, 1, 32).weights[0] != right[0]
