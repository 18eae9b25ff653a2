"""Cost of the controller with hundreds of workers: driver time, messages and bytes of one RL step.

    python bench/controller_sim.py [--workers 1000] [--samples 65536] [--tokens 128] [--steps 9] [--no-ray] [--profile]

Half of the workers train, half sample. The driver runs the real code: the group, the split and the join, the engine
that distributes requests and gathers completions, the proxies, the mini-batches, the verification of new weights. The
workers are simulated. A call is answered at its simulated time, on a clock that is advanced without waiting, with
results of the right shape. The table has processor time: median and minimum over some steps after a warm-up step. Ray's
cost of a message and of a stored byte in the driver is measured here, with real actors, and added. `--no-ray` uses the
last measured costs instead.

Not included:

- the trainer's own work in the driver between calls (environments, packing, rewards, advantages, metrics), which is the
  same in one process and grows with samples, not with workers
- Ray's work in its other processes, in threads, and on other machines
- the time of the workers, which makes up a step of `--step-s` seconds

`--profile` prints where the driver's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import heapq
import json
import pickle
import pstats
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import RESULTS, save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.spec import Algorithm
from burnish.config.placement import ACTOR
from burnish.core.batch import Batch
from burnish.core.dispatch import dispatch
from burnish.core.engine import Request, SamplingOptions
from burnish.core.segments import offsets_from_lengths
from burnish.core.serialization import encode, num_array_bytes
from burnish.distributed.ray_roles import freeze_garbage_collector
from burnish.distributed.role_proxies import ControllerMetrics, ForwardColumns, RemoteLearner, RemoteReference
from burnish.distributed.role_workers import RolloutWorker, TrainingWorker
from burnish.distributed.worker_group import RankCall, Traffic, WorkerGroup
from burnish.inference.engine_common import check_native_request, check_requests
from burnish.inference.remote_engine import RemoteEngine
from burnish.inference.request_arrays import PackedCompletions, PackedRequests
from burnish.inference.weight_sync import (
    PROBE_TOLERANCE,
    Bucket,
    EngineReport,
    Entry,
    Publication,
    TrainerClient,
    digest,
    probe_request,
)
from burnish.trainers.minibatches import mini_batches
from burnish.training.learner import Update
from burnish.training.meter import MeterReading

RELAYS_FROM, FAN_OUT = 64, 64
"""As in `distributed/ray_backend.py`, which cannot be imported without Ray."""
PROMPT, N, VOCAB, TENSORS, UPDATES = 128, 16, 32000, 339, 4
"""Tokens of a prompt, samples of it, tokens there are, tensors of a 7B model, mini-batches of a step."""


ENTRIES = tuple(Entry(f"layers.{k}.weight", torch.bfloat16, 1, 0, 1, False, k) for k in range(TENSORS))


@dataclass
class Clock:
    """Seconds as the workers see them."""

    now: float = 0.0


class Reply:
    """What a relay, or a worker alone, answers: pickled as Ray does it, with arrays beside that may not be written to, and read once."""

    def __init__(self, values: list[Any]) -> None:
        self.buffers: list[memoryview] = []
        keep: Callable[[pickle.PickleBuffer], None] = lambda one: self.buffers.append(one.raw().toreadonly())  # noqa: E731
        self.content = pickle.dumps(values, protocol=5, buffer_callback=keep)
        self.values: list[Any] | None = None

    def value(self, index: int) -> Any:
        if self.values is None:
            self.values = pickle.loads(self.content, buffers=self.buffers)
        return self.values[index]


@dataclass(eq=False)
class Sent:
    """A call, and when it is answered."""

    rank: int
    ready_at: float
    reply: Reply
    index: int


class SimBackend:
    """Workers that answer after a delay: `answer(rank, method, args)` gives the seconds and the result."""

    is_here = False
    keeps_promises = False

    def __init__(
        self, size: int, clock: Clock, answer: Callable[[int, str, tuple[Any, ...]], tuple[float, Any]]
    ) -> None:
        self.size, self.clock, self.answer, self.traffic = size, clock, answer, Traffic()
        self.aside_s = 0.0
        """What the pretending itself took: not the driver's."""
        self.stored = 0
        """Bytes that would be written into the object store."""

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        packed = encode((args, kwargs))
        return packed, num_array_bytes(packed)

    def promise(self, token: Sent) -> None:
        return None

    def send(self, orders: Sequence[RankCall]) -> list[Sent]:
        """As `RayBackend` does it: a message for each relay, parts of a batch stored once."""
        fan_out = FAN_OUT if self.size > RELAYS_FROM else 1
        by_relay: dict[int, list[RankCall]] = {}
        for order in orders:
            by_relay.setdefault(order.rank // fan_out, []).append(order)
        self.traffic.messages += len(by_relay)
        sent: dict[int, Sent] = {}
        for relay, group in by_relay.items():
            self._write(relay, group)
            started = time.process_time()
            answers = [self._answer(order) for order in group]
            reply, latest = Reply([value for _, value in answers]), max(moment for moment, _ in answers)
            sent |= {id(order): Sent(order.rank, latest, reply, k) for k, order in enumerate(group)}
            self.aside_s += time.process_time() - started
        return [sent[id(order)] for order in orders]

    def _write(self, relay: int, orders: Sequence[RankCall]) -> None:
        """Serialise what goes to a relay, as Ray does: arrays are not looked into. Parts that are known are named."""
        same = all(order.parcel is orders[0].parcel for order in orders)
        parcels = [order.parcel for order in (orders[:1] if same else orders)]
        content: list[Any] = [parcel for parcel, _ in parcels]
        self.stored += sum(size for _, size in parcels)
        for j, (sharded, _) in enumerate(orders[0].parts):
            if relay not in sharded.stored:
                bale = [sharded.parts[order.parts[j][1]] for order in orders]
                sharded.stored[relay] = num_array_bytes(bale)
                self.stored += sharded.stored[relay]
                content.append(bale)
        pickle.dumps(content, protocol=5, buffer_callback=lambda _: None)

    def _answer(self, order: RankCall) -> tuple[float, Any]:
        args, _ = order.parcel[0]
        if order.parts:
            sharded, share = order.parts[0]
            args = (*args, sum(b - a for a, b in sharded.plan.token_ranges(share)))
        delay, value = self.answer(order.rank, order.method, args)
        return self.clock.now + delay, value

    def wait(self, tokens: Sequence[Sent], timeout_s: float) -> list[Sent]:
        return self._until(tokens, max((token.ready_at for token in tokens), default=0.0))

    def any_of(self, tokens: Sequence[Sent], timeout_s: float) -> list[Sent]:
        soonest = heapq.nsmallest(max(1, len(tokens) // 16), (token.ready_at for token in tokens))
        return self._until(tokens, min(soonest[-1], self.clock.now + timeout_s) if soonest else 0.0)

    def _until(self, tokens: Sequence[Sent], moment: float) -> list[Sent]:
        self.clock.now = max(self.clock.now, moment)
        return [token for token in tokens if token.ready_at <= self.clock.now]

    def value(self, token: Sent) -> Any:
        value = token.reply.value(token.index)
        self.traffic.bytes_in += num_array_bytes(value)
        return value

    def describe(self, rank: int) -> str:
        return ""

    def silent(self, ranks: Sequence[int], what: str) -> str:
        return ""

    def restart(self, rank: int) -> None:
        raise RuntimeError("nobody dies here")

    def close(self) -> None:
        """Nobody is there."""


@dataclass
class Engines:
    """Engines that finish their samples one after the other, evenly over the time that sampling takes."""

    clock: Clock
    seconds: float
    tokens: int
    waiting: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    digest: int = 0
    """Of the weights that are published."""
    version: int = 0
    """Of the weights that all took last."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self, rank: int, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        if method == "submit":
            requests: PackedRequests = args[0]
            count = len(requests.keys)
            ends = self.clock.now + self.rng.random(count) * self.seconds
            queue = self.waiting.setdefault(rank, [])
            queue += zip(ends.tolist(), range(requests.first, requests.first + count), strict=True)
            heapq.heapify(queue)
            return 0.0, None
        if method == "collect":
            return self._collect(rank, *args)
        assert method == "take"
        publication: Publication = args[0]
        self.version = publication.version
        return 1.0, EngineReport(self.version, self.digest, (1, 2, 3, 4), np.zeros(4, dtype=np.float32))

    def _collect(self, rank: int, at_least: int, wait_s: float) -> tuple[float, PackedCompletions]:
        queue, found = self.waiting[rank], list[int]()
        until = self.clock.now + wait_s
        moment = self.clock.now
        while queue and len(found) < at_least and queue[0][0] <= until:
            moment, number = heapq.heappop(queue)
            found.append(number)
        late = max(0.0, (moment if len(found) >= at_least else until) - self.clock.now)
        lengths = self.rng.integers(self.tokens // 4, self.tokens * 7 // 4 + 1, len(found))
        total, count = int(lengths.sum()), len(found)
        return late, PackedCompletions(
            np.array([found, lengths.tolist(), [self.version] * count, [0] * count], dtype=np.int64).reshape(4, -1),
            ["stop"] * count,
            np.zeros(total, dtype=np.int32),
            np.zeros(total, dtype=np.float32),
            None,
        )


def trainers(rank: int, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
    """What ranks that train answer, after a second."""
    if method in ("outputs", "update", "reference_logprobs"):
        column = torch.zeros(args[-1])
        value: Any = {"logp": column} if method == "outputs" else column
        if method == "update":
            value = Update({"loss": 0.0}, column, None, column) if args[-2] else Update({"loss": 0.0}, None, None)
        return 1.0, encode(value)
    if method == "publish":
        return 1.0, Publication(args[0], (Bucket(ENTRIES, None),)) if rank == 0 else None
    if method in ("read", "release"):
        return 0.0, (MeterReading(), {"memory/peak_gib": 1.0})
    return 0.0, [0.0] * 4 if method == "score" else None


def batch_of(samples: int, tokens: int) -> Batch:
    """A batch as `core.trajectory.pack` makes it, of numpy's memory, its groups one after the other."""
    rng = np.random.default_rng(0)
    lengths = PROMPT + rng.integers(tokens // 4, tokens * 7 // 4 + 1, samples)
    offsets = offsets_from_lengths(torch.from_numpy(lengths))
    n = int(offsets[-1])
    mask = torch.from_numpy(np.arange(n) - np.repeat(offsets[:-1].numpy(), lengths) >= PROMPT)
    numbers = {name: torch.zeros(samples, dtype=torch.float64) for name in ("reward", "accuracy", "part/task")}
    return Batch(
        torch.from_numpy(np.ones(n, dtype=np.int64)),
        offsets,
        {
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "behaviour_logp": torch.from_numpy(np.zeros(n, dtype=np.float32)),
            "version": torch.from_numpy(np.zeros(n, dtype=np.int32)),
        },
        {
            "group_ids": torch.arange(samples) // N,
            "trajectory_ids": torch.arange(samples),
            "key": torch.arange(samples),
            "truncated": torch.zeros(samples, dtype=torch.bool),
        }
        | numbers,
    )


@dataclass
class Row:
    """One part of a step."""

    part: str
    python_s: float
    least_s: float
    """In the quickest of the steps: what else the machine does only adds."""
    messages: int
    mb_out: float
    mb_in: float
    stored: int


class Simulation:
    """A controller with workers that are not there, and what each part of a step costs it."""

    def __init__(self, workers: int, samples: int, tokens: int, step_s: float) -> None:
        clock, half = Clock(), workers // 2
        sums = digest({entry.name: entry.checksum for entry in ENTRIES})
        engines = Engines(clock, step_s / 2, tokens, digest=sums)
        self.samples, self.tokens, self.version = samples, tokens, 0
        self.backends = [SimBackend(half, clock, trainers), SimBackend(half, clock, engines)]
        actor = WorkerGroup(ACTOR, TrainingWorker, self.backends[0], 1e9, mini_batches=UPDATES)
        rollout = WorkerGroup("rollout", RolloutWorker, self.backends[1], 1e9)
        ledger, slim = ControllerMetrics([actor, rollout]), ForwardColumns()
        trainer = TrainerClient(
            actor.publish.later, actor.publish_again.later, actor.score.later, PROBE_TOLERANCE["bfloat16"]
        )
        model: Any = SimpleNamespace(
            arch=SimpleNamespace(vocab_size=VOCAB, max_positions=1 << 15)
        )  # what is asked of it

        def check(requests: Sequence[Request]) -> None:
            check_requests(requests, frozenset(), partial(check_native_request, model=model, has_text=False))

        self.engine = RemoteEngine(rollout, trainer, probe_request(VOCAB, None), 1e9, check, ledger.count, print)
        self.learner = RemoteLearner(actor, ACTOR, ledger, torch.bfloat16, slim, lambda: None)
        self.reference = RemoteReference(actor, "frozen", {"restarts": False, "is_policy": False}, slim, lambda: None)
        self.engine.load(0, ())

    def step(self) -> list[Row]:
        """The parts of one step, each with what it cost the driver; all batches are the product's."""
        engine, learner, rows = self.engine, self.learner, list[Row]()
        self.version += 1
        options = SamplingOptions(max_tokens=2 * self.tokens)
        requests = [
            Request(f"{k}#{self.version}.{s}/0", prompt, options, key=k * N + s)
            for k in range(self.samples // N)
            for prompt in [tuple(range(k, k + PROMPT))]
            for s in range(N)
        ]
        batch = batch_of(self.samples, self.tokens)

        def measured(part: str, work: Callable[[], Any]) -> Any:
            for backend in self.backends:
                backend.traffic.take()
                backend.aside_s, backend.stored = 0.0, 0
            started = time.process_time()
            found = work()
            seconds = time.process_time() - started - sum(backend.aside_s for backend in self.backends)
            taken = [backend.traffic.take() for backend in self.backends]
            stored, back = (sum(b.stored for b in self.backends), sum(t.bytes_in for t in taken))
            rows.append(Row(part, seconds, seconds, sum(t.messages for t in taken), stored / 1e6, back / 1e6, stored))
            return found

        def updates() -> None:
            for k, mini in enumerate(minis):
                learner.update(mini, PolicyLoss(), columns=k == 0)

        measured("requests out", lambda: engine.submit(requests))
        measured("completions in", lambda: deque(engine.stream(), maxlen=0))
        old = measured("old log-probs", lambda: learner.logprobs(batch))
        batch = batch.with_token(
            old_logp=old, ref_logp=measured("reference log-probs", lambda: self.reference.logprobs(batch))
        )
        batch = batch.with_sequence(advantages=torch.zeros(self.samples, dtype=torch.float64))
        minis = list(mini_batches(batch, Algorithm(), UPDATES, 1, self.tokens))
        measured(f"{UPDATES} updates", updates)
        measured("weights to engines", lambda: (engine.load(self.version, ()), engine.confirm()))
        measured("meters, release", lambda: (learner.release(), learner.meter.read(), learner.usage()))
        return rows


def simulate(workers: int, samples: int, tokens: int, step_s: float, steps: int = 3) -> list[Row]:
    """The median step of some, after one that warms up."""
    simulation = Simulation(workers, samples, tokens, step_s)
    freeze_garbage_collector()
    simulation.step()
    found = [simulation.step() for _ in range(steps)]
    parts = zip(*found, strict=True)
    return [
        replace(
            same[0],
            python_s=statistics.median(row.python_s for row in same),
            least_s=min(row.python_s for row in same),
        )
        for same in parts
    ]


def show_profile(workers: int, samples: int, tokens: int, step_s: float) -> None:
    """Where the time of a warm step goes, that of the simulation included."""
    simulation = Simulation(workers, samples, tokens, step_s)
    freeze_garbage_collector()
    simulation.step()
    profile = cProfile.Profile()
    profile.runcall(simulation.step)
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def ray_costs(messages: int = 3000) -> dict[str, float]:
    """Processor time of the driver for a message there and back, and for a byte that is stored; with two real actors."""
    import ray

    from burnish.config.placement import RayPlacement
    from burnish.distributed.ray_backend import RayBackend
    from burnish.distributed.ray_cluster import Cluster

    with TemporaryDirectory() as folder, Cluster(RayPlacement(engines=2), on_gpu=False) as cluster:
        backend = RayBackend(cluster, "rollout", Idle, (), Path(folder), 60)
        backend.start()
        group = WorkerGroup("rollout", Idle, backend, 60)
        group.nothing(0)
        started = time.process_time()
        calls = [group.send(k % 2, "nothing", k) for k in range(messages)]
        group.gather(calls)
        message_s = (time.process_time() - started) / messages
        data = {"x": np.zeros(1 << 23, dtype=np.uint8)}  # the parts of a relay's ranks
        costs = []
        for _ in range(
            16
        ):  # a step's objects take the place of those of steps before, in memory that was touched by then
            started = time.process_time()
            held = [ray.put(data) for _ in range(10)]
            costs.append((time.process_time() - started) / (len(held) << 23))
            del held
            time.sleep(0.2)  # the store frees them meanwhile
        put_s = statistics.median(costs[8:])
    return {"message_us": 1e6 * message_s, "stored_gb_per_s": 1e-9 / put_s}


class Idle:
    """A worker that does nothing."""

    @dispatch("broadcast", "list")
    def nothing(self, number: int) -> int:
        """Nothing."""
        return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=128, help="mean length of a completion")
    parser.add_argument("--step-s", type=float, default=30.0)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "controller_sim.json"
    costs = json.loads(path.read_text())["rows"][-1] if args.no_ray else ray_costs()
    simulate(8, 256, 16, args.step_s)  # imports and caches
    if args.profile:
        show_profile(args.workers, args.samples, args.tokens, args.step_s)
    rows = simulate(args.workers, args.samples, args.tokens, args.step_s, args.steps)
    shown = []
    for row in rows:
        ray_s = row.messages * costs["message_us"] / 1e6 + row.stored / costs["stored_gb_per_s"] / 1e9
        shown.append(
            {
                "part": row.part,
                "messages": row.messages,
                "MB out": round(row.mb_out, 1),
                "MB in": round(row.mb_in, 1),
                "python s": round(row.python_s, 3),
                "least s": round(row.least_s, 3),
                "ray s": round(ray_s, 3),
            }
        )
    total = sum(one["python s"] + one["ray s"] for one in shown)
    least = sum(one["least s"] + one["ray s"] for one in shown)
    print(table(shown, list(shown[0])))
    print(
        f"driver: {total:.2f} s a step, {total / args.step_s:.1%} of {args.step_s:g} s ({least / args.step_s:.1%} of the quickest parts); a message costs Ray {costs['message_us']:.0f} us "
        f"there and back, a stored GB {1 / costs['stored_gb_per_s']:.2f} s"
    )
    asked = {name: getattr(args, name) for name in ("workers", "samples", "tokens", "step_s")}
    whole = {name: costs[name] for name in ("message_us", "stored_gb_per_s")}
    save(
        "controller_sim",
        [
            *shown,
            {**asked, **whole, "driver_s": total, "share": total / args.step_s, "least_share": least / args.step_s},
        ],
    )


if __name__ == "__main__":
    main()
