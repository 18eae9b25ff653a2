"""Waiting for a cluster: it ends when all is there, or at its deadline with what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from burnish.config.errors import UserError
from burnish.config.placement import RayPlacement
from burnish.distributed.ray_cluster import REPORT_INTERVAL_S, ClusterRequirement, describe_nodes, wait_for_cluster


class Times:
    """A cluster that has other machines every second, and a clock that is set forward by waiting."""

    def __init__(self, *nodes: Sequence[Mapping[str, float]] | None) -> None:
        self.nodes, self.now, self.said = nodes, 0.0, list[str]()

    def look(self) -> Sequence[Mapping[str, float]]:
        found = self.nodes[min(int(self.now), len(self.nodes) - 1)]
        if found is None:
            raise ConnectionError("no route to host")
        return found

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, wanted: ClusterRequirement, deadline_s: float = 100) -> Sequence[Mapping[str, float]]:
        return wait_for_cluster(
            wanted, self.look, "head:6379", deadline_s, self.said.append, lambda: self.now, self.sleep
        )


SPLIT = RayPlacement(workers=1, engines=2, layout="split")


def test_it_goes_on_when_everyone_is_there_and_tells_each_change_once() -> None:
    one, two = [{"CPU": 2.0}], [{"CPU": 2.0}, {"CPU": 2.0}]
    times = Times(None, None, one, one, one, two)
    assert times.wait(ClusterRequirement(SPLIT, 2, False)) == two
    assert times.now == 5
    assert len(times.said) == 2
    assert "there is no answer, or this process has another token (no route to host) (0 s of 100 s)" in times.said[0]
    assert times.said[1].startswith(
        "waiting for the cluster at head:6379: 1 of 2 machines are there; placement needs 3 CPUs"
    )
    assert "the cluster has 2" in times.said[1]


def test_a_long_wait_is_told_again() -> None:
    times = Times([{"CPU": 1.0}])
    with pytest.raises(UserError):
        times.wait(ClusterRequirement(SPLIT, 1, False), deadline_s=3 * REPORT_INTERVAL_S)
    assert len(times.said) == 3


@pytest.mark.parametrize(
    ("nodes", "wanted", "words"),
    [
        ([{"CPU": 2.0}], ClusterRequirement(SPLIT, 1, False), "needs 3 CPUs (1 worker and 2 engines, split, 1 CPU each), the cluster has 2"),
        ([{"CPU": 9.0}], ClusterRequirement(SPLIT, 3, False), "1 of 3 machines are there. `ray status`"),
        ([{"CPU": 9.0}], ClusterRequirement(SPLIT, 1, True), "placement needs 3 GPUs (1 worker and 2 engines, split, 1 CPU each), the cluster has 0"),
        ([{"CPU": 9.0, "GPU": 1.0}], ClusterRequirement(SPLIT, 1, None), "needs 3 GPUs"),
        ([{"CPU": 2.0}] * 2, ClusterRequirement(RayPlacement(workers=1, engines=1, cpus=3), 2, None), "needs 1 places of 3 CPU, each on one machine"),
        (None, ClusterRequirement(SPLIT, 1, None), "there is no answer"),
    ],
)  # fmt: skip
def test_past_the_deadline_an_error_says_what_is_missing(
    nodes: Sequence[Mapping[str, float]] | None, wanted: ClusterRequirement, words: str
) -> None:
    times = Times(nodes)
    with pytest.raises(UserError) as it:
        times.wait(wanted, deadline_s=7.5)
    assert str(it.value).startswith("the cluster at head:6379 was not ready in 7.5 s (--wait): ")
    assert words in str(it.value)
    assert times.now == 7.5


def test_without_time_it_looks_once() -> None:
    assert Times([{"CPU": 3.0}]).wait(ClusterRequirement(SPLIT, 1, None), deadline_s=0) == [{"CPU": 3.0}]


def test_machines_in_words() -> None:
    assert describe_nodes([{"CPU": 4.0, "memory": 1e9}]) == "1 machine with 4 CPUs"
    assert describe_nodes([{"CPU": 4.0, "GPU": 8.0}, {"CPU": 2.0}]) == "2 machines with 6 CPUs and 8 GPUs"
