"""The sources over engines in processes of their own: the numbers of one process, and nothing lost when an engine is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.run.metrics import MACHINE_PREFIXES, read_metrics

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
pytestmark = pytest.mark.slow  # a Ray of its own and six runs: one to two minutes

ROOT = Path(__file__).parents[2]
STEPS = 5
SPLIT = ["placement=ray", "placement.layout=split", "placement.engines=2"]
ROOTS = ("mismatch/rollout_is_std", "mismatch/heat_fit", "mismatch/balance")
"""Quotients and roots of differences that are nothing but rounding here: they keep half of the digits."""


def main(folder: Path) -> None:
    """All runs, one after the other, on one Ray."""
    import torch

    from burnish.distributed.ray_cluster import start_local_ray
    from burnish.inference.remote_engine import RemoteEngine

    torch.set_num_threads(1)
    start_local_ray(4)
    assert os.environ["RAY_AUTH_MODE"] == "token", "its ports are open to the network"
    run(folder, "ahead", "rollout.source=ahead")
    run(folder, "ahead-ray", "rollout.source=ahead", *SPLIT)
    run(folder, "sync")
    run(folder, "none-ray", "rollout.source={name: async, max_staleness: 0}", *SPLIT)
    deal, victims = RemoteEngine._send_requests, list[int]()

    def killing(engine: Any, requests: Any) -> None:
        deal(engine, requests)
        last = len(engine.engines) - 1
        if engine.version == 2 and not victims and engine.engines[last].running:
            victims.append(engine.workers.backend.pid(last))
            os.kill(victims[0], signal.SIGKILL)

    RemoteEngine._send_requests = killing  # type: ignore[method-assign]
    run(folder, "killed-ray", "rollout.source={name: async, max_staleness: 2}", *SPLIT)
    assert victims
    victims.clear()
    # By the time that the only engine is there again the two ranks that train have moved.
    run(folder, "ahead-killed-ray", "rollout.source=ahead", *SPLIT, "placement.engines=1", "placement.workers=2")
    assert victims


def run(folder: Path, name: str, *overrides: str) -> None:
    from burnish.config.loading import load
    from burnish.config.schema import TrainConfig
    from burnish.trainers.rl_run import checked_run, execute
    from tests.distributed.toy_run import TOY

    (folder / "toy.yaml").write_text(TOY)
    where = [f"training.steps={STEPS}", f"run.directory={folder}", f"run.name={name}"]
    loaded = load(TrainConfig, folder / "toy.yaml", [*overrides, *where])
    with checked_run(loaded.config, loaded.resolved, loaded.base, name) as (parts, directory):
        assert execute(parts, directory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    line = [sys.executable, "-c", "import sys; from pathlib import Path; from tests.distributed.test_sources_ray import main; main(Path(sys.argv[1]))", str(path)]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    ran = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    return path


def numbers(folder: Path, name: str) -> list[dict[str, float]]:
    skipped = (*MACHINE_PREFIXES, *ROOTS, "staleness/")
    rows = read_metrics(folder / name / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(skipped)} for row in rows]


@pytest.mark.parametrize(
    ("one", "other"), [("ahead", "ahead-ray"), ("ahead", "ahead-killed-ray"), ("sync", "none-ray")]
)
def test_the_numbers_are_those_of_one_process(folder: Path, one: str, other: str) -> None:
    expected, found = numbers(folder, one), numbers(folder, other)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    for here, there in zip(expected, found, strict=True):
        assert there == pytest.approx(here, rel=1e-9, abs=1e-9)


def test_an_engine_that_is_killed_costs_no_sample(folder: Path) -> None:
    events = [json.loads(line) for line in (folder / "killed-ray/journal/events.jsonl").read_text().splitlines()]
    used = [name for e in events if e["event"] == "used" for name in e["ids"]]
    drawn = [name for e in events if e["event"] == "drawn" for name in e["ids"]]
    assert sorted(used) == sorted(f"{group}.{sample}" for group in drawn for sample in range(4))
    assert len(set(used)) == len(used) == STEPS * 4 * 4
    for name, rank in (("killed-ray", 1), ("ahead-killed-ray", 0)):
        assert f"engine {rank} is started again" in (folder / name / "log.txt").read_text()
    assert max(row["staleness/max"] for row in read_metrics(folder / "killed-ray" / "metrics.jsonl")) <= 2
