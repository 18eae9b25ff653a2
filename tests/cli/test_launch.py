"""`burnish launch`: waiting for a cluster, starting `burnish train`, and the examples of docs/cluster.md."""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.cli import launch
from burnish.cli import main as cli
from burnish.config.placement import RayPlacement
from tests.distributed.toy_run import TOY

DOCS = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text()
ADDRESS = "head:6379"


class Cluster:
    """A cluster with some machines."""

    nodes_there: list[dict[str, float]] | None = None
    closed = 0

    def __init__(self, address: str | None) -> None:
        self.address = address or "10.0.0.7:6379"

    def nodes(self) -> list[dict[str, float]]:
        if Cluster.nodes_there is None:
            raise ConnectionError("nobody")
        return Cluster.nodes_there

    def is_running(self) -> bool:
        return Cluster.nodes_there is not None

    def close(self) -> None:
        Cluster.closed += 1


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The command line that training gets, and the cluster it would join."""
    (tmp_path / "toy.yaml").write_text(TOY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(launch.ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr(launch, "_Cluster", Cluster)
    monkeypatch.setattr(launch.os, "environ", dict(os.environ))
    seen: list[Any] = []
    dispatch = cli.dispatch

    def watched(argv: list[str], is_command: bool = False) -> int:
        if argv[0] != "train":
            return dispatch(argv, is_command)
        seen.extend([argv, launch.os.environ.get(launch.ADDRESS_VARIABLE)])
        return 7

    monkeypatch.setattr(cli, "dispatch", watched)
    return seen


def test_it_becomes_train_with_the_same_arguments_where_the_cluster_is(trained: list[Any], capsys: Any) -> None:
    Cluster.nodes_there = [{"CPU": 2.0}, {"CPU": 2.0}]
    words = ["toy.yaml", "placement=ray", "placement.engines=2", "--address", ADDRESS, "--nodes", "2"]
    assert cli.main(["launch", *words, "--controls", "--max-restarts", "0", "rollout.n=4"]) == 7
    given = ["placement=ray", "placement.engines=2", "rollout.n=4"]
    assert trained[0] == ["train", "toy.yaml", *given, "--controls", "--deadline=1800.0", "--max-restarts=0"]
    assert trained[1] == ADDRESS
    assert f"the cluster at {ADDRESS} has 2 machines with 4 CPUs" in capsys.readouterr().out


def test_a_recipe_in_one_process_is_placed_on_the_cluster_and_told_so(trained: list[Any], capsys: Any) -> None:
    Cluster.nodes_there = [{"CPU": 2.0}]
    assert cli.main(["launch", "toy.yaml"]) == 7
    assert "placement=ray" in trained[0]
    assert trained[1] == "10.0.0.7:6379"  # the one that runs on this machine
    assert "placement=ray: the recipe uses a single process" in capsys.readouterr().out


def test_without_a_cluster_this_machine_is_one(trained: list[Any], capsys: Any) -> None:
    Cluster.nodes_there = None
    assert cli.main(["launch", "toy.yaml"]) == 7
    assert trained[1] is None
    assert "burnish train starts Ray on this machine" in capsys.readouterr().out


def test_what_is_missing_is_told_and_nothing_is_started(trained: list[Any], capsys: Any) -> None:
    Cluster.nodes_there, before = [{"CPU": 2.0}], Cluster.closed
    words = [
        "toy.yaml",
        "placement=ray",
        "placement.engines=2",
        "placement.layout=split",
        "--wait",
        "0",
        "--nodes",
        "2",
    ]
    assert cli.main(["launch", *words, "--address", ADDRESS]) == 2
    error = capsys.readouterr().err
    assert (
        "1 of 2 machines are there; placement needs 3 CPUs (1 worker and 2 engines, split, 1 CPU each), the cluster has 2"
        in error
    )
    assert not trained
    assert Cluster.closed == before + 1
    assert cli.main(["launch", "toy.yaml", "--nodes", "0"]) == 2


def test_an_address_where_nobody_listens_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    (tmp_path / "toy.yaml").write_text(TOY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"  # bound, and nobody listens
        assert cli.main(["launch", str(tmp_path / "toy.yaml"), "--address", address, "--wait", "0"]) == 2
    assert f"the cluster at {address} was not ready in 0 s (--wait): there is no answer" in capsys.readouterr().err
    assert cli.main(["launch", str(tmp_path / "toy.yaml"), "--address", "ray://head:10001"]) == 2
    assert "HOST:PORT of its head" in capsys.readouterr().err
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert launch._Cluster(None).is_running() is False


# --- the examples --------------------------------------------------------------------------------------------------------


def example(language: str, begins: str = "") -> str:
    found = re.findall(rf"```{language}\n({begins}.*?)```", DOCS, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def launch_line(text: str, **variables: str) -> Any:
    """The arguments of `burnish launch` in a text, as the command reads them."""
    [line] = re.findall(r"burnish launch ([^\n|]+)", text)
    for name, value in variables.items():
        line = line.replace(f'"${name}"', value)
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    return parser.parse_intermixed_args(line.split())


def test_the_example_of_pools_is_a_placement() -> None:
    wanted = RayPlacement.model_validate(yaml.safe_load(example("yaml", "placement:"))["placement"])
    assert [wanted.size(role) for role in ("actor", "rollout", "reference", "critic", "reward")] == [4, 4, 2, 2, 2]


def test_the_slurm_example_is_a_script(tmp_path: Path) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text(example("bash"))
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    lines = script.read_text().splitlines()
    token = next(i for i, line in enumerate(lines) if line.startswith("(umask 077;"))
    made = "\n".join(
        ["set -eu", *(line for line in lines if line.startswith("export RAY_AUTH_MODE=token")), lines[token]]
    )
    environment = os.environ | {"HOME": str(tmp_path), "SLURM_JOB_ID": "7"}
    subprocess.run(["bash", "-c", made], env=environment, check=True, timeout=30)
    file = tmp_path / ".burnish-ray-token-7"
    assert (len(file.read_text()), file.stat().st_mode & 0o777) == (64, 0o600)
    assert token < next(i for i, line in enumerate(lines) if "ray start --head" in line)
    assert lines[0].startswith("#!")
    asked = dict(line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH --"))
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= asked.keys()
    assert all(line.startswith("#SBATCH --") for line in lines if line.startswith("#SBATCH"))
    args = launch_line(script.read_text(), HEAD_ADDRESS=ADDRESS, SLURM_NNODES=asked["nodes"])
    assert (args.address, args.nodes, str(args.recipe)) == (ADDRESS, int(asked["nodes"]), "recipe.yaml")


def test_the_kubernetes_example_is_a_ray_job() -> None:
    manifest = yaml.safe_load(example("yaml", "apiVersion:"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = cluster["workerGroupSpecs"]
    for group in [cluster["headGroupSpec"], *groups]:
        assert isinstance(group["rayStartParams"], dict)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        for container in group["template"]["spec"]["containers"]:
            assert {"name", "image", "resources"} <= container.keys()
            assert container["resources"]["limits"] == container["resources"]["requests"]
    for group in groups:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["groupName"]
    args = launch_line(spec["entrypoint"])
    assert args.nodes == 1 + sum(group["replicas"] for group in groups)
    assert str(args.recipe).endswith(".yaml")
    assert spec["shutdownAfterJobFinishes"] is True


# --- on a real cluster ---------------------------------------------------------------------------------------------------

REAL = """
import subprocess, sys, time
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
command = [sys.executable, "-m", "burnish.cli.main", "launch", "toy.yaml", "placement=ray", "placement.layout=split"]
command += ["training.steps=2", "--address", cluster.address, "--nodes", "2", "--wait", "120", "--max-restarts", "0"]
launched = subprocess.Popen(command)
time.sleep(10)
cluster.add_node(num_cpus=1)
status = launched.wait(200)
cluster.shutdown()
sys.exit(status)
"""


@pytest.mark.slow  # a cluster of two on this machine: half a minute
def test_it_waits_for_the_second_machine_of_a_real_cluster_and_trains_there(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
    (tmp_path / "toy.yaml").write_text(TOY)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64}
    environment.pop(launch.ADDRESS_VARIABLE, None)
    ran = subprocess.run(
        [sys.executable, "-c", REAL],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    assert "1 of 2 machines are there; placement needs 2 CPUs" in ran.stdout
    assert "has 2 machines with 2 CPUs" in ran.stdout
    assert len(list((tmp_path / "runs").glob("*/metrics.jsonl"))) == 1
