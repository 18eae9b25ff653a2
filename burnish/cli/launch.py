"""`burnish launch recipe.yaml --address HOST:6379 --nodes 2 [key=value ...]`: `burnish train` on a Ray cluster, once it is complete.

Run it on a machine of the cluster. It waits until the given number of machines have joined and the processes of the run fit, and prints
what is missing. Then it becomes `burnish train` with RAY_ADDRESS set. Without an address it uses the cluster of RAY_ADDRESS, or the one on
this machine, or this machine alone, on which `burnish train` starts Ray itself.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.cli import train
from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.config.placement import RayPlacement
from burnish.config.schema import TrainConfig
from burnish.distributed.ray_cluster import ClusterRequirement, Nodes, describe_nodes, wait_for_cluster

WAIT_S = 600.0
CONNECT_TIMEOUT_S = 2.0
ADDRESS_VARIABLE = "RAY_ADDRESS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `burnish train`, and those of the cluster."""
    train.add_arguments(parser)
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"head of the cluster (default: {ADDRESS_VARIABLE}, else the cluster on this machine)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines to wait for (default 1)")
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="SECONDS", help=f"longest time to wait (default {WAIT_S:g})"
    )


def run(args: argparse.Namespace) -> int:
    """Wait, then train; the exit status is that of `burnish train`."""
    if args.nodes < 1 or not args.wait >= 0:
        raise UserError(
            f"--nodes {args.nodes} --wait {args.wait:g}: expected at least 1 machine and at least 0 seconds"
        )
    config = train.load_recipe(TrainConfig, args)[0].config
    if not isinstance(config.placement, RayPlacement):
        args.overrides = [*args.overrides, "placement=ray"]
        config = train.load_recipe(TrainConfig, args)[0].config
        print("placement=ray: the recipe uses a single process")
    assert isinstance(config.placement, RayPlacement)
    on_gpu = {"auto": None, "cpu": False}.get(config.model.device, True)
    environment = dict(os.environ)
    if not args.dry_run:
        environment |= join_cluster(args, ClusterRequirement(config.placement, args.nodes, on_gpu))
    command = train_command(args)
    if args.is_command:
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, "-m", "burnish.cli.main", *command], environment)
    os.environ.update(environment)
    from burnish.cli.main import dispatch

    return dispatch(command)


def join_cluster(args: argparse.Namespace, wanted: ClusterRequirement) -> Mapping[str, str]:
    """Wait for the cluster and return the environment variables of the run."""
    address = args.address or os.environ.get(ADDRESS_VARIABLE)
    if address is not None and address.startswith("ray://"):
        raise UserError(
            f"--address {address}: run burnish launch on a machine of the cluster, with HOST:PORT of its head (6379)"
        )
    cluster = _Cluster(address)
    try:
        if address is None and args.nodes == 1 and not cluster.is_running():
            print("no Ray cluster runs here: burnish train starts Ray on this machine")
            return {}
        where = address or "this machine"
        nodes = wait_for_cluster(wanted, cluster.nodes, where, args.wait, lambda text: print(text, flush=True))
        print(f"the cluster at {where} has {describe_nodes(nodes)}", flush=True)
        return {ADDRESS_VARIABLE: cluster.address}
    finally:
        cluster.close()


class _Cluster:
    """A connection to a Ray cluster; without an address, to the one on this machine."""

    def __init__(self, address: str | None) -> None:
        try:
            import ray
        except ModuleNotFoundError as error:
            raise UserError(f"burnish launch needs Ray: {install_hint('ray')}") from error
        self.ray: Any = ray
        self.address = _local_cluster_address() if address is None else address
        self._is_connected = False

    def nodes(self) -> Nodes:
        """The resources of each machine. Raises `ConnectionError` if the cluster does not answer."""
        if not self.ray.is_initialized():
            self._check_port()
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self.ray.init(address=self.address, log_to_driver=False, logging_level="error")
            self._is_connected = True
            from burnish.distributed.ray_cluster import check_token

            check_token(self.address)
        return [node["Resources"] for node in self.ray.nodes() if node["Alive"]]

    def _check_port(self) -> None:
        """Raise `ConnectionError` if the port is closed. Ray itself would retry for a minute, with warnings."""
        host, _, port = self.address.rpartition(":")
        if not port.isdecimal():
            raise ConnectionError(f"{self.address or 'no address'} is not HOST:PORT of a running cluster")
        try:
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(str(error)) from error

    def is_running(self) -> bool:
        """Whether the cluster answers."""
        try:
            return bool(self.nodes())
        except ConnectionError:
            return False

    def close(self) -> None:
        """Disconnect: `burnish train` connects itself."""
        if self._is_connected:
            self.ray.shutdown()


def _local_cluster_address() -> str:
    """The address that `ray start` has written on this machine; empty if there is none."""
    file = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir())) / "ray" / "ray_current_cluster"
    return file.read_text().strip() if file.is_file() else ""


def train_command(args: argparse.Namespace) -> list[str]:
    """The arguments of `burnish train`."""
    flags = [
        f"--{name.replace('_', '-')}" for name in ("dry_run", "shrink", "controls", "fresh") if getattr(args, name)
    ]
    options = [f"--deadline={args.deadline}"]
    if args.max_restarts is not None:
        options.append(f"--max-restarts={args.max_restarts}")
    if args.profile is not None:
        options += ["--profile", *([str(args.profile)] if args.profile else [])]
    return ["train", str(args.recipe), *args.overrides, *flags, *options]
