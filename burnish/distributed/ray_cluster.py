"""Connects to Ray or starts it, and reserves a placement group for a run's processes.

The layout is checked against the cluster's resources before anything starts, so that nothing waits forever.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from burnish.config.errors import UserError
from burnish.config.placement import RayPlacement
from burnish.core.dispatch import WorkerLost
from burnish.distributed.placement import (
    Layout,
    ProcessSlot,
    check_layout,
    check_placement,
    num_usable_cpus,
    plan_layout,
)
from burnish.distributed.ray_actors import LANES, WorkerActor

PLACEMENT_TIMEOUT_S = 60.0
"""How long a cluster may take to reserve resources that it has."""
RAY_INIT_OPTIONS: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
LOCAL_RAY_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Environment of a Ray that this process starts. Its workers do the run's work: at Ray's default niceness of 15, anything else on the
machine would come first, also the driver that waits for them."""
AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
"""Variables with Ray's token. Without one, any program that reaches Ray's ports may run code as the cluster's user."""
MAX_RAY_STARTS = 3
"""Attempts to start Ray on this machine."""


class Cluster:
    """Ray with resources reserved for a layout; use it in a `with` block."""

    def __init__(self, placement: RayPlacement, on_gpu: bool | None = None) -> None:
        self.placement = placement
        self.before_close: list[Callable[[], None]] = []
        """Functions to call while the workers still exist."""
        joined = ray.is_initialized() or "RAY_ADDRESS" in os.environ
        check_placement(placement)
        self.is_own = _connect()
        self._group: PlacementGroup | None = None
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            self.on_gpu = any(node.get("GPU", 0) for node in nodes) if on_gpu is None else on_gpu
            self.layout = plan_layout(placement, self.on_gpu)
            check_layout(placement, self.layout, nodes, "the cluster" if joined else "this machine")
            self._group = self._reserve(self.layout)
            places: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
            self.layout = self.layout.sorted_by_machine([places[k] for k in range(len(self.layout.bundles))])
        except BaseException:
            self.close()
            raise

    def _reserve(self, layout: Layout) -> PlacementGroup:
        group = placement_group(layout.bundles, strategy="PACK")
        if not group.wait(PLACEMENT_TIMEOUT_S):
            free = ray.available_resources()
            remove_placement_group(group)
            wanted = {what: layout.total(what) for what in ("CPU", "GPU") if layout.total(what)}
            names = " and ".join(f"{amount:g} {what}s" for what, amount in wanted.items())
            there = " and ".join(f"{free.get(what, 0):g}" for what in wanted)
            smaller = "the places of placement.pools" if self.placement.pools else "placement.workers, engines or cpus"
            raise UserError(
                f"placement needs {names}, which the cluster has, but {there} are free after {PLACEMENT_TIMEOUT_S:g} s: another run holds "
                f"the rest, or no machine has a whole place free; wait for it, or lower {smaller}"
            )
        return group

    def has_gpu(self, role: str) -> bool:
        """Whether the processes of a role have GPUs."""
        return all("GPU" in slot.resources for slot in self.layout.slots[role])

    def host(self, slot: ProcessSlot) -> Any:
        """Start a new actor in a slot."""
        assert self._group is not None
        remote: Any = ray.remote  # its type hints lack concurrency_groups
        actor = remote(concurrency_groups=LANES)(WorkerActor)
        return actor.options(
            num_cpus=slot.resources["CPU"],
            num_gpus=slot.resources.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, slot.bundle),
        ).remote()

    def close(self) -> None:
        """Free the reserved resources, and stop Ray if this run started it."""
        while self.before_close:
            self.before_close.pop()()
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self.is_own:
            ray.shutdown()
            self.is_own = False

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connect() -> bool:
    """Connect to the Ray that the program or RAY_ADDRESS names, or start one. Returns whether this process initialised it."""
    if ray.is_initialized():
        return False
    if "RAY_ADDRESS" in os.environ:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(**RAY_INIT_OPTIONS)
        except ConnectionError as error:
            raise UserError(
                f"cannot join the Ray cluster at RAY_ADDRESS={os.environ['RAY_ADDRESS']}: {error}; is it running, and if it checks tokens, "
                "does this process have the RAY_AUTH_MODE and the token that its machines have? Without RAY_ADDRESS Ray is started here"
            ) from error
        try:
            check_token(os.environ["RAY_ADDRESS"])
        except UserError:
            ray.shutdown()
            raise
    else:
        start_local_ray(num_usable_cpus())
    return True


def check_token(address: str) -> None:
    """Refuse a cluster that was joined without a token; warn if the user chose that, or if other users can read the token."""
    said = (
        f"the Ray cluster at {address} asks for no token: every program that reaches its ports can run code as its user"
    )
    mode = os.environ.get(AUTH_MODE, "").lower()  # Ray sets it if it found a token by itself
    if mode == "disabled":
        warn(f"{said} ({AUTH_MODE}=disabled)")
    elif mode != "token":
        raise UserError(
            f"{said}. Start it with a token on every machine (`ray get-auth-token --generate`, {AUTH_MODE}=token; docs/cluster.md), or set "
            f"{AUTH_MODE}=disabled if nothing else reaches its network"
        )
    file = Path(os.environ.get(AUTH_TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    if mode == "token" and AUTH_TOKEN not in os.environ and file.is_file() and file.stat().st_mode & 0o077:
        warn(f"other users of this machine can read the token of the Ray cluster: chmod 600 {file}")


def warn(text: str) -> None:
    """Print a warning that is shown even if notes are not."""
    print(f"burnish: WARNING: {text}", file=sys.stderr, flush=True)


def start_local_ray(num_cpus: int) -> None:
    """Start Ray on this machine. Ray gives up after half a minute, so a busy machine may need several attempts.

    Ray listens on all interfaces, so it gets a token that only this process and its children know.
    """
    if AUTH_TOKEN not in os.environ and AUTH_TOKEN_PATH not in os.environ:
        os.environ[AUTH_TOKEN] = secrets.token_hex(32)
    for name, value in LOCAL_RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for attempt in range(1, MAX_RAY_STARTS + 1):
        try:
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **RAY_INIT_OPTIONS)
            if os.environ.get(AUTH_MODE, "").lower() != "token":
                warn(
                    f"this Ray checks no tokens ({AUTH_MODE} is not token, or Ray {ray.__version__} is too old): its ports are open to the network"
                )
            return
        except PermissionError as error:
            ray.shutdown()
            raise UserError(_why_not_permitted(error)) from error
        except Exception as error:  # Ray raises bare exceptions for a node that started too slowly
            ray.shutdown()
            if attempt == MAX_RAY_STARTS:
                raise WorkerLost(
                    f"Ray did not start on this machine, tried {MAX_RAY_STARTS} times: {error}; is it too busy, or out of memory, ports or disk?",
                    0,
                ) from error
            print(f"burnish: Ray did not start ({error}); trying again", file=sys.stderr, flush=True)


def _why_not_permitted(error: PermissionError) -> str:
    """Which file stops Ray from starting, and what to do: one of its programs, or one that another user's Ray left behind."""
    file = "" if error.filename is None else os.fsdecode(error.filename)
    if Path(ray.__file__).parent in Path(file).parents:
        return (
            f"Ray cannot run a program of its own: {error}. Its files are on a disk that is mounted noexec, or were copied without their modes; "
            "pip install --force-reinstall ray"
        )
    return (
        f"Ray did not start on this machine, for it may not use {file or 'one of its files'}: {error}. If another user's Ray made it, set RAY_TMPDIR "
        "to a directory of your own"
    )


# --- Waiting for the machines of a cluster -------------------------------------------------------------------------------
#
# Machines of a batch system arrive one after the other, minutes apart. A run that starts too early would be refused. This waits with
# a deadline, and reports what is missing.

POLL_INTERVAL_S = 1.0
REPORT_INTERVAL_S = 30.0
Nodes = Sequence[Mapping[str, float]]
"""Resources of each machine."""
ListNodes = Callable[[], Nodes]
"""Lists the machines; raises `ConnectionError` if there is no cluster yet."""


@dataclass(frozen=True)
class ClusterRequirement:
    """The resources that a run needs of a cluster."""

    placement: RayPlacement
    nodes: int
    """Number of machines."""
    on_gpu: bool | None
    """Whether its processes need GPUs; None means if there are any."""

    def missing(self, nodes: Nodes) -> str | None:
        """What is still missing, in words; None if nothing is."""
        words = []
        if len(nodes) < self.nodes:
            words.append(f"{len(nodes)} of {self.nodes} machines are there")
        on_gpu = any(node.get("GPU", 0) for node in nodes) if self.on_gpu is None else self.on_gpu
        try:
            check_layout(self.placement, plan_layout(self.placement, on_gpu), nodes, "the cluster")
        except UserError as error:
            words.append(str(error))
        return "; ".join(words) or None


def wait_for_cluster(
    wanted: ClusterRequirement,
    look: ListNodes,
    where: str,
    deadline_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Nodes:
    """Wait until the requirement is met, and return the machines. After the deadline, raise what is missing."""
    started, said, said_at = clock(), "", float("-inf")
    while True:
        try:
            nodes: Nodes = look()
            missing = wanted.missing(nodes)
        except ConnectionError as error:
            missing = f"there is no answer, or this process has another token ({' '.join(str(error).split())[:200]})"
        waited_s = clock() - started
        if missing is None:
            return nodes
        if waited_s >= deadline_s:
            raise UserError(
                f"the cluster at {where} was not ready in {deadline_s:g} s (--wait): {missing}. `ray status` there tells who has joined"
            )
        if missing != said or waited_s - said_at >= REPORT_INTERVAL_S:
            say(f"waiting for the cluster at {where}: {missing} ({waited_s:.0f} s of {deadline_s:g} s)")
            said, said_at = missing, waited_s
        sleep(min(POLL_INTERVAL_S, deadline_s - waited_s))


def describe_nodes(nodes: Nodes) -> str:
    """The machines in words."""
    amounts = {what: sum(node.get(what, 0) for node in nodes) for what in ("CPU", "GPU")}
    there = " and ".join(f"{amount:g} {what}s" for what, amount in amounts.items() if amount)
    return f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'} with {there}"
