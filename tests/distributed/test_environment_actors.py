"""Environment workers that Ray actors start: the same calls and failures as on one machine, and a new actor for one that was killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.worker_output import WorkerLog
from burnish.environments.workers import CallFailed, ObjectSpec, WorkerLimits

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
pytestmark = pytest.mark.slow  # a Ray of its own

HERE = str(Path(__file__).parents[1] / "environments")
COUNTER = ObjectSpec("worker_objects.py:Counter", base=HERE)


@pytest.fixture
def cluster() -> Iterator[None]:
    import ray

    from burnish.distributed.ray_cluster import start_local_ray

    start_local_ray(2)
    yield
    ray.shutdown()


def test_objects_live_on_the_machines_of_a_cluster_and_fail_as_on_one(cluster: None, tmp_path: Path) -> None:
    from burnish.distributed.environment_actors import RayObjectWorkers, actor_starter

    async def scenario() -> dict[str, int]:
        limits = WorkerLimits(memory_gib=2, unresponsive_s=20)
        workers = RayObjectWorkers(actor_starter(num_cpus=0), 2, 2, limits)
        workers.log = WorkerLog(tmp_path / "workers.log")
        games = [await workers.open(COUNTER) for _ in range(4)]
        facts = [await game.call("facts") for game in games]
        assert len({fact["pid"] for fact in facts}) == 4
        assert len({fact["parent"] for fact in facts}) == 2
        episode = Episode("rows/1#0.0", 5, "go")
        assert await games[0].call("start", episode) == Observation(text="rows/1#0.0", metrics={"seed": 5.0})
        answers = [game.call("step", Answer("end", "end")) for game in games[:1] * 100]
        assert {end.reward for end in await asyncio.gather(*answers)} == {float(k + 1) for k in range(100)}
        with pytest.raises(CallFailed, match=r"raised: Counter\.raises: ValueError: no such square"):
            await games[0].call("raises")
        with pytest.raises(CallFailed, match=r"timed_out: Counter\.hangs_async did not return in 0\.05 s"):
            await games[0].call("hangs_async", deadline_s=0.05)
        with pytest.raises(UserError, match="the data folder is missing"):
            await workers.open(ObjectSpec("worker_objects.py:Refuses", base=HERE))
        with pytest.raises(CallFailed, match=r"(?s)died: environment worker 0 exited with status 7.*about to end"):
            await games[0].call("ends_process")
        assert await games[1].call("step", Answer("end", "end")) == End(reward=0.0)

        os.kill(facts[1]["parent"], signal.SIGKILL)
        with pytest.raises(CallFailed, match="died: the actor of an environment worker has ended"):
            await games[1].call("hangs")
        for game in games:
            await game.close()
        again = [await workers.open(COUNTER) for _ in range(4)]
        assert len({(await game.call("facts"))["parent"] for game in again}) == 2
        await workers.aclose()
        return workers.counters()

    counters = asyncio.run(scenario())
    logged = (tmp_path / "workers.log").read_text()
    assert "0| about to end" in logged
    assert "0| environment worker 0 exited with status 7" in logged
    assert counters["died"] == 3  # one ended itself, two ended with their actor
    assert (counters["started"], counters["restarts"], counters["calls_timed_out"]) == (7, 3, 1)
