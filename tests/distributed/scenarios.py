"""The runs that the tests of Ray look at: `python -m tests.distributed.scenarios <folder> <name> ...`.

One process, one Ray; each run in a folder of its own, and what else a test must know in `<folder>/facts.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.distributed import ray_backend, ray_cluster
from burnish.distributed.roles import build_policy
from burnish.distributed.worker_group import WorkerGroup
from burnish.inference.remote_engine import RemoteEngine
from burnish.run.run import Run
from burnish.trainers.rl_run import checked_run, execute
from tests.distributed.actor_pool import Pool, PooledCluster
from tests.distributed.echo_worker import Echo
from tests.distributed.toy_run import TOY

CPUS = 4
MIXED = [
    "algorithm=ppo",
    "algorithm.kl.reference=ema",
    "algorithm.kl.loss.coef=0.1",
    "algorithm.kl.loss.estimator=full",
    "training.steps=3",
]
"""A critic, a reference that follows the policy, and one that is asked during the update."""
PROCESS = [
    "algorithm={preset: prime, filters: [], refill: {oversample: 1, short: partial}}",
    "algorithm.process={mini_batches: 2, optimizer: {lr: 0.01}}",
    "algorithm.kl={loss: {coef: 0}, reference: none}",
    "warm_start={data: {task: sort_digits, options: {num: 200, clean: true, min_digits: 2, max_digits: 3}}, batch_size: 32}",
    "warm_start={updates: 80, optimizer: {lr: 0.01}}",
    "training.steps=4",
    "run.save_every=2",
    "run.save=wait",
]
"""A process reward model, of a policy that is right now and then."""
GAME = [
    "data.train=[{task: guess_number, limit: 12, options: {numbers: 3}}]",
    "environment={name: guess_number, max_turns: 2}",
    "reward.parts=[task]",
    "algorithm={preset: gigpo, kl: {loss: {coef: 0.1}, reference: frozen}}",
    "warm_start={data: {task: guess_number, options: {num: 200, numbers: 3, guesses: 2}}, batch_size: 32}",
    "warm_start={updates: 60, optimizer: {lr: 0.01}}",
    "training.steps=4",
    "training.optimizer.lr=0.001",
]
"""Episodes of several turns, whose turns are compared by state."""
APART = [
    "algorithm=ppo",
    "algorithm.kl.reference=frozen",
    "algorithm.kl.loss.coef=0.1",
    "training.steps=4",
    "run.save_every=2",
]
"""A critic, and a reference that stands still."""
POOLS = [
    "placement=ray",
    "placement.pools={policy: {places: 1}, others: {places: 1}, checks: {places: 1}}",
    "placement.roles={actor: policy, rollout: policy, reference: others, critic: others, reward: checks}",
]
"""Both in a pool of their own, and the reward in another."""
FEWER_POOLS = [
    "placement=ray",
    "placement.pools={policy: {places: 1}, others: {places: 1}}",
    "placement.roles={actor: policy, rollout: policy, critic: others}",
]
"""The critic alone in a pool of its own."""
TEACHER = [
    "algorithm=on_policy_distillation",
    "algorithm.kl.reference={name: teacher, path: base}",
    "training.steps=2",
    "seed=1",
]
"""The toy's model of another seed as the teacher."""
TEACHER_APART = [
    "placement=ray",
    "placement.pools={policy: {places: 1}, others: {places: 1}}",
    "placement.roles={actor: policy, rollout: policy, reference: others}",
]
"""The teacher in a process of its own."""
ADAPTERS = ["model.new=null", "model.path=base", "model.lora={rank: 2, alpha: 4}", "training.steps=4"]
"""Adapters on a saved model, whose frozen reference is that model with them off."""
EXPERTS = ["model.new={family: qwen3_moe, experts: [4, 2, 12]}", "training.steps=3"]
"""Experts in every layer."""
Facts = dict[str, Any]
fresh = ray_cluster.Cluster


def run(folder: Path, name: str, *overrides: str) -> None:
    (folder / "toy.yaml").write_text(TOY)
    loaded = load(TrainConfig, folder / "toy.yaml", [*overrides, f"run.directory={folder}", f"run.name={name}"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, name) as (parts, directory):
        assert execute(parts, directory)


def save_base(folder: Path) -> None:
    """The toy's model, for adapters to adapt."""
    (folder / "toy.yaml").write_text(TOY)
    config = load(TrainConfig, folder / "toy.yaml", []).config
    build_policy(config.model, config.data.train, 0, folder).save(folder / "base")


def placed(workers: int, engines: int, *more: str) -> list[str]:
    return ["placement=ray", f"placement.workers={workers}", f"placement.engines={engines}", *more]


# --- runs ----------------------------------------------------------------------------------------------------------------


def equal(folder: Path, facts: Facts) -> None:
    """The same recipe in one process, with one worker of Ray's and with two."""
    save_base(folder)
    run(folder, "one-apart", *APART)
    run(folder, "one-teacher", *TEACHER)
    run(folder, "ray-teacher", *TEACHER, *TEACHER_APART)
    places = {"one": [], "ray-one": placed(1, 1), "ray-two": placed(2, 1, "placement.sync=delta")}
    for name, where in places.items():
        run(folder, name, *where)
        run(folder, f"{name}-float32", "model.dtype=float32", "training.steps=1", *where)
        run(folder, f"{name}-adapters", *ADAPTERS, *where)
    facts["niceness"] = [ray.get(host.niceness.remote()) - os.nice(0) for _, host in PooledCluster.pool.free]
    facts["killed critic"] = struck(folder, "ray-apart", "critic", 0, 3, *APART, *POOLS)
    run(folder, "ray-apart", *APART, *FEWER_POOLS)


def long(folder: Path, facts: Facts) -> None:
    """Many steps."""
    run(folder, "long", *placed(1, 1), "training.steps=200", "run.save_every=1000", "run.samples_every=1000")


def numbers(folder: Path, facts: Facts) -> None:
    """The same recipe in one process, in two, in four, and divided in two ways."""
    run(folder, "one")
    run(folder, "two", *placed(2, 2, "placement.sync=delta"))
    run(folder, "copies", *placed(2, 1, "parallel.data=[2, 1]", "placement.layout=split", "training.steps=3"))
    save_base(folder)
    for name, where in (("one", []), ("two", placed(2, 2))):
        run(folder, f"{name}-float32", "model.dtype=float32", "training.steps=1", *where)
        run(folder, f"{name}-mixed", *MIXED, *where)
        run(folder, f"{name}-adapters", *ADAPTERS, *MIXED, *where)
    run(folder, "one-experts", *EXPERTS)
    run(folder, "cut-experts", *EXPERTS, *placed(2, 1, "parallel.expert=2"))
    run(folder, "cut-adapters", *ADAPTERS, *MIXED, *placed(2, 1, "parallel.tensor=2"))
    run(folder, "stages-mixed", *MIXED, *placed(2, 1, "parallel.pipeline=2", "placement.sync=delta"))


def process(folder: Path, facts: Facts) -> None:
    """A process reward model in one process and divided over two; and one that one worker goes on with when two have come half way."""
    run(folder, "one", *PROCESS)
    run(folder, "two", *PROCESS, *placed(2, 1))
    commit = Run.commit

    def broken(owner: Run, step: int, *rest: Any) -> None:
        if step == 3:
            raise InterruptedError
        commit(owner, step, *rest)

    Run.commit = broken  # type: ignore[method-assign]
    try:
        run(folder, "half", *PROCESS, *placed(2, 1))
    except InterruptedError:
        facts["half"] = True
    finally:
        Run.commit = commit  # type: ignore[method-assign]
    run(folder, "half", *PROCESS, *placed(1, 1))


def games(folder: Path, facts: Facts) -> None:
    """Episodes of several turns in one process, and with two workers and two engines."""
    run(folder, "one", *GAME)
    run(folder, "two", *GAME, *placed(2, 2))


def own_processes(folder: Path, facts: Facts) -> None:
    """Processes that nobody warmed up: what a user gets."""
    ray_cluster.Cluster = fresh
    try:
        run(folder, "fresh", *placed(1, 1))
    finally:
        ray_cluster.Cluster = PooledCluster


def parallel_engine(folder: Path, facts: Facts) -> None:
    """An engine of two processes, which have no process in common with another run; its second rank is killed in the middle of one."""
    ray_cluster.Cluster = fresh
    where = placed(1, 2, "placement.engine_tensor=2", "placement.sync=delta")
    try:
        save_base(folder)
        run(folder, "one-plain-adapters", *ADAPTERS, "training.steps=3")
        run(folder, "parallel-adapters", *ADAPTERS, "training.steps=3", *where)
        victims: list[int] = []
        with at_deal(3, signal.SIGKILL, victims):
            run(folder, "parallel", *where)
        facts["parallel"] = len(victims)
        # Two ranks that train and two that sample: weights go from one to the other, also to an engine that was started again.
        both = placed(2, 2, "placement.engine_tensor=2", "parallel.data=2")
        killed: list[int] = []
        with at_deal(3, signal.SIGKILL, killed):
            run(folder, "resharded", *both, "training.steps=5")
        facts["resharded"] = len(killed)
    finally:
        ray_cluster.Cluster = PooledCluster


def servers(folder: Path, facts: Facts) -> None:
    """A server that each engine's process starts; one is killed in the middle of a run."""
    serve = f"{sys.executable} -m tests.inference.sglang.fake_sglang_server {{model}} {{port}}"
    where = placed(1, 1, "rollout.engine=sglang", f"placement.server='{serve}'", "training.steps=4")
    original, killed = RemoteEngine._send_requests, list[int]()

    def deal(engine: RemoteEngine, requests: Any) -> None:
        if engine.version == 2 and not killed:
            engine.confirm()
            workers: Any = engine.workers
            launcher = pid_of("start_new_session", workers.backend.pid(0))
            killed.append(pid_of("fake_sglang_server", parent=launcher))
            os.kill(killed[0], signal.SIGKILL)
        original(engine, requests)

    RemoteEngine._send_requests = deal  # type: ignore[method-assign]
    ray_cluster.Cluster = fresh
    try:
        run(folder, "served", *where)
    finally:
        ray_cluster.Cluster = PooledCluster
        RemoteEngine._send_requests = original  # type: ignore[method-assign]
    facts["killed servers"] = len(killed)


def pid_of(word: str, parent: int) -> int:
    """The child of a process whose command line has a word."""
    children = [
        int(pid) for task in Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    (found,) = [pid for pid in children if word in Path(f"/proc/{pid}/cmdline").read_text()]
    return found


def killed_engine(folder: Path, facts: Facts) -> None:
    """kill -9, and a stop for ever, of an engine that has just been given requests, in the middle of a run."""
    for name, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        victims: list[int] = []
        with at_deal(3, number, victims):
            run(folder, name, *placed(1, 2))
        until = time.monotonic() + 10
        while Path(f"/proc/{victims[0]}").exists() and time.monotonic() < until:
            time.sleep(0.1)
        facts[name] = {"victims": len(victims), "ended": not Path(f"/proc/{victims[0]}").exists()}


def relayed(folder: Path, facts: Facts) -> None:
    """Messages by way of relays, as in large groups; an engine is killed meanwhile."""
    backend = ray_backend.RayBackend
    usual = backend.relays_from, backend.fan_out
    backend.relays_from, backend.fan_out = 1, 2
    victims: list[int] = []
    try:
        with at_deal(3, signal.SIGKILL, victims):
            run(folder, "relayed", *placed(2, 2))
    finally:
        backend.relays_from, backend.fan_out = usual
    facts["relayed"] = sorted(path.name for path in (folder / "relayed" / "workers").glob("*relay*"))


@contextmanager
def at_deal(n: int, number: signal.Signals, victims: list[int]) -> Iterator[None]:
    """A signal to the second process of the engines, right after it was given requests for the n-th time."""
    original, count = RemoteEngine._send_requests, 0

    def deal(engine: RemoteEngine, requests: Any) -> None:
        nonlocal count
        original(engine, requests)
        count += 1
        if count == n:
            engine.confirm()  # it is at the requests, and not at the weights before them
            processes: Any = getattr(engine.workers, "processes", engine.workers)
            assert engine.engines[-1].running
            engine.deadline_s = 3.0
            victims.append(processes.backend.pid(1))
            os.kill(victims[0], number)

    RemoteEngine._send_requests = deal  # type: ignore[method-assign]
    try:
        yield
    finally:
        RemoteEngine._send_requests = original  # type: ignore[method-assign]


def killed_trainer(folder: Path, facts: Facts) -> None:
    """A rank that trains is killed: the run says so at once, and goes on from its checkpoint, here in one process."""
    facts["killed trainer"] = struck(folder, "resumed", "actor", 1, 6, *placed(2, 1))
    run(folder, "resumed")


def struck(folder: Path, name: str, role: str, rank: int, step: int, *overrides: str) -> Facts:
    """A run that ends because a rank is killed after a step: what was said, and how long after it."""
    started = 0.0

    def kill(engine: RemoteEngine) -> None:
        nonlocal started
        if engine.version == step:
            started = time.monotonic()
            os.kill(next(b for b in backends if b.name == role).pid(rank), signal.SIGKILL)

    original = RemoteEngine.load
    backends: list[Any] = []
    begin = ray_backend.RayBackend.start

    def starting(backend: Any) -> None:
        backends.append(backend)
        begin(backend)

    def load(engine: RemoteEngine, version: int, named_tensors: Any) -> None:
        original(engine, version, named_tensors)
        kill(engine)

    ray_backend.RayBackend.start = starting  # type: ignore[method-assign]
    RemoteEngine.load = load  # type: ignore[method-assign]
    try:
        run(folder, name, *overrides)
    except UserError as error:
        return {"said": str(error), "seconds": time.monotonic() - started}
    finally:
        RemoteEngine.load = original  # type: ignore[method-assign]
        ray_backend.RayBackend.start = begin  # type: ignore[method-assign]
    raise AssertionError("the run went on without it")


def refused(folder: Path, facts: Facts) -> None:
    """Placements that this cluster of four CPUs cannot have."""
    facts["refused"] = {}
    for key, overrides in {
        "too many": placed(2, 3, "placement.layout=split"),
        "too large": placed(1, 1, "placement.cpus=5"),
    }.items():
        try:
            run(folder, "refused", *overrides)
        except UserError as error:
            facts["refused"][key] = str(error)
    facts["refused"]["left behind"] = (folder / "refused").exists()


def taken(folder: Path, facts: Facts) -> None:
    """Room that the cluster has, and somebody else holds."""
    group = ray.util.placement_group([{"CPU": 3}])
    assert group.wait(10)
    waits, ray_cluster.PLACEMENT_TIMEOUT_S = ray_cluster.PLACEMENT_TIMEOUT_S, 0.5
    try:
        run(folder, "taken", *placed(2, 2))
    except UserError as error:
        facts["taken"] = str(error)
    finally:
        ray_cluster.PLACEMENT_TIMEOUT_S = waits
        ray.util.remove_placement_group(group)


def actors(folder: Path, facts: Facts) -> None:
    """A group of actors by itself: marks, errors and bytes over the real wire."""
    from burnish.config.placement import RayPlacement

    with PooledCluster(RayPlacement(workers=2, engines=1), False) as cluster:
        backend = ray_backend.RayBackend(cluster, "actor", Echo, (3,), folder / "echo", 30, group_size=2)
        backend.start()
        group = WorkerGroup("actor", Echo, backend, 30)
        batch = Batch(torch.arange(40_000), offsets_from_lengths(torch.full((400,), 100)))
        found = group.twice(batch)
        facts["actors"] = seen = {
            "ranks": group.who(),
            "doubled": bool(torch.equal(found, batch.tokens * 2)),
            "out": backend.traffic.bytes_out,
            "in": backend.traffic.bytes_in,
        }
        relays, backend.fan_out = backend.fan_out, 1
        backend._relays = [backend._new_relay(rank) for rank in range(2)]
        seen["relayed"] = [group.who(), bool(torch.equal(group.twice(batch), batch.tokens * 2)), group.own([5, 6])]
        backend._relays, backend.fan_out = [], relays
        for what in ("user", "bug"):
            try:
                group.fail(what)
            except (UserError, RuntimeError) as error:
                seen[what] = [type(error).__name__, str(error)]
        group.deadline_s = 1.0
        try:
            group.wait_for(2.5)
        except UserError as error:
            seen["late"] = [type(error).__name__, str(error)]
        group.deadline_s = 30.0
        seen["stacks"] = (folder / "echo" / "stacks-actor-wait_for.txt").read_text()
        pending = group.wait_for.later(3)
        time.sleep(0.5)
        os.kill(backend.pid(0), signal.SIGKILL)
        started = time.monotonic()
        try:
            pending.result()
        except UserError as error:
            seen["lost"] = [type(error).__name__, str(error), time.monotonic() - started]


SCENARIOS = (
    equal,
    long,
    numbers,
    process,
    games,
    parallel_engine,
    servers,
    killed_engine,
    relayed,
    killed_trainer,
    refused,
    taken,
    actors,
    own_processes,
)


def main(folder: Path, names: list[str]) -> int:
    torch.set_num_threads(1)
    ray_cluster.start_local_ray(CPUS)
    PooledCluster.pool = Pool(5 if names == ["equal"] else 4)
    ray_cluster.Cluster = PooledCluster
    facts: Facts = {"times": {}}
    for scenario in [one for one in SCENARIOS if one.__name__ in names]:
        started = time.monotonic()
        try:
            scenario(folder, facts)
        except BaseException:  # noqa: BLE001 (told to the tests)
            (folder / "error.txt").write_text(f"{scenario.__name__}\n{traceback.format_exc()}")
            return 1
        facts["times"][scenario.__name__] = time.monotonic() - started
    (folder / "facts.json").write_text(json.dumps(facts))
    ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
