"""What the controller itself costs with hundreds of workers: driver time, messages and bytes of one RL step.

    python bench/controller_sim.py [--workers 1000] [--samples 65536] [--tokens 256] [--no-ray]

Half of the workers train, half sample. All code of the driver is the product's: the group, the split and the join, the engine
that deals requests and gathers completions, the proxies, the verification of new weights. The workers are not there: a call is
answered at the moment it would be, on a clock that is set forward and never waited for, with results of the right shape. What
Ray's own part of a message and of a stored byte costs the driver is measured here, with real actors, and added; `--no-ray`
takes the last measured costs instead.

Not in it: what the trainer itself does in the driver between calls (packing, rewards, advantages), which is the same in one
process, and the time of the workers, which is what a step of `--step-s` seconds consists of.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, save, table

from burnish.algorithms.losses import PolicyLoss
from burnish.controller.group import Order, Traffic, WorkerGroup
from burnish.controller.proxies import Ledger, RemoteLearner, RemoteReference, Slimmer
from burnish.controller.workers import ACTOR, RolloutWorker, TrainingWorker
from burnish.core.batch import Batch
from burnish.core.engine import Request, SamplingOptions
from burnish.core.segments import offsets_from_lengths
from burnish.core.spread import spread
from burnish.core.wire import decode, encode, num_bytes
from burnish.rollout.messages import Completions, Requests
from burnish.rollout.remote import RemoteEngine, Trainer
from burnish.rollout.sync.buckets import Bucket, Entry, Publication, digest
from burnish.rollout.sync.verify import Report, probe
from burnish.training.learner import Update
from burnish.training.meter import Reading

RELAYS_FROM, FAN_OUT = 64, 32
"""As in `controller/ray_group.py`, which cannot be imported without Ray."""
PROMPT, N, VOCAB, TENSORS, UPDATES = 128, 16, 32000, 339, 4
"""Tokens of a prompt, samples of it, tokens there are, tensors of a 7B model, mini-batches of a step."""


ENTRIES = tuple(Entry(f"layers.{k}.weight", torch.bfloat16, 1, 0, 1, False, k) for k in range(TENSORS))


@dataclass
class Clock:
    """Seconds as the workers see them."""

    now: float = 0.0


@dataclass(eq=False)
class Sent:
    """A call, and when it is answered."""

    rank: int
    ready_at: float
    value: Any


class SimBackend:
    """Workers that answer after a delay: `answer(rank, method, args)` gives the seconds and the result."""

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
        return packed, num_bytes(packed)

    def send(self, orders: Sequence[Order]) -> list[Sent]:
        """As `RayBackend` does it: a message for each relay, parts of a batch stored once."""
        relayed = self.size > RELAYS_FROM
        self.traffic.messages += len({order.rank // FAN_OUT for order in orders}) if relayed else len(orders)
        seen: set[int] = set()
        for order in orders:
            if id(order.parcel) not in seen:
                seen.add(id(order.parcel))
                self.stored += order.parcel[1]
            for divided, share in order.parts:
                if share not in divided.stored:
                    divided.stored[share] = divided.parts[share].num_bytes
                    self.stored += divided.stored[share]
        started = time.process_time()
        sent = [Sent(order.rank, *self._answer(order)) for order in orders]
        if relayed:  # a relay answers when all it asked have answered
            latest: dict[int, float] = {}
            for one in sent:
                latest[one.rank // FAN_OUT] = max(latest.get(one.rank // FAN_OUT, 0.0), one.ready_at)
            for one in sent:
                one.ready_at = latest[one.rank // FAN_OUT]
        self.aside_s += time.process_time() - started
        return sent

    def _answer(self, order: Order) -> tuple[float, Any]:
        args, _ = order.parcel[0]
        if order.parts:
            divided, share = order.parts[0]
            args = (*args, divided.parts[share])
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
        self.traffic.bytes_in += num_bytes(token.value)
        return decode(token.value)

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
    waiting: dict[int, list[tuple[float, str]]] = field(default_factory=dict)
    digest: int = 0
    """Of the weights that are published."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def __call__(self, rank: int, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
        if method == "submit":
            requests: Requests = args[0]
            ends = self.clock.now + self.rng.random(len(requests.ids)) * self.seconds
            queue = self.waiting.setdefault(rank, [])
            queue += zip(ends.tolist(), requests.ids, strict=True)
            heapq.heapify(queue)
            return 0.0, None
        if method == "collect":
            return self._collect(rank, *args)
        assert method == "take"
        publication: Publication = args[0]
        return 1.0, Report(publication.version, self.digest, (1, 2, 3, 4), np.zeros(4, dtype=np.float32))

    def _collect(self, rank: int, at_least: int, wait_s: float) -> tuple[float, Completions]:
        queue, found = self.waiting[rank], list[str]()
        until = self.clock.now + wait_s
        moment = self.clock.now
        while queue and len(found) < at_least and queue[0][0] <= until:
            moment, id = heapq.heappop(queue)
            found.append(id)
        late = max(0.0, (moment if len(found) >= at_least else until) - self.clock.now)
        lengths = self.rng.integers(self.tokens // 4, self.tokens * 7 // 4 + 1, len(found))
        total, count = int(lengths.sum()), len(found)
        return late, Completions(
            found,
            np.zeros(total, dtype=np.int32),
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            np.zeros(total, dtype=np.float32),
            ["stop"] * count,
            np.ones(count, dtype=np.int64),
            np.empty(0, dtype=np.float32),
            np.zeros(count, dtype=bool),
        )


def trainers(rank: int, method: str, args: tuple[Any, ...]) -> tuple[float, Any]:
    """What ranks that train answer, after a second."""
    if method in ("outputs", "update", "reference_logprobs"):
        column = torch.zeros(len(args[-1].arrays["tokens"]))
        value: Any = {"logp": column} if method == "outputs" else column
        return 1.0, encode(Update({"loss": 0.0}, column, None, column) if method == "update" else value)
    if method == "publish":
        return 1.0, Publication(args[0], (Bucket(ENTRIES, None),)) if rank == 0 else None
    if method == "read":
        return 0.0, (Reading(), {"memory/peak_gib": 1.0})
    return 0.0, [0.0] * 4 if method == "score" else None


def batch_of(samples: int, tokens: int) -> Batch:
    """A prepared batch, its groups one after the other."""
    rng = torch.Generator().manual_seed(0)
    lengths = PROMPT + torch.randint(tokens // 4, tokens * 7 // 4 + 1, (samples,), generator=rng)
    offsets = offsets_from_lengths(lengths)
    n = int(offsets[-1])
    starts = torch.repeat_interleave(offsets[:-1], lengths)
    mask = torch.arange(n) - starts >= PROMPT
    floats = {name: torch.zeros(n) for name in ("behaviour_logp", "weight")}
    return Batch(
        torch.ones(n, dtype=torch.long),
        offsets,
        {"action_mask": mask, "loss_mask": mask.clone(), "version": torch.zeros(n, dtype=torch.int32)} | floats,
        {
            "group_ids": torch.arange(samples) // N,
            "key": torch.arange(samples),
            "advantages": torch.zeros(samples, dtype=torch.float64),
        },
    )


@dataclass
class Row:
    """One part of a step."""

    part: str
    python_s: float
    messages: int
    mb_out: float
    mb_in: float
    stored: int


def simulate(workers: int, samples: int, tokens: int, step_s: float) -> list[Row]:
    """The parts of one step, each with what it cost the driver."""
    clock, half = Clock(), workers // 2
    sums = digest({entry.name: entry.checksum for entry in ENTRIES})
    engines = Engines(clock, step_s / 2, tokens, digest=sums)
    training, sampling = SimBackend(half, clock, trainers), SimBackend(half, clock, engines)
    actor = WorkerGroup(ACTOR, TrainingWorker, training, 1e9)
    rollout = WorkerGroup("rollout", RolloutWorker, sampling, 1e9)
    ledger = Ledger([actor, rollout])
    trainer = Trainer(actor.publish, actor.score, "bfloat16")
    engine = RemoteEngine(rollout, trainer, probe(VOCAB, None), 1e9, lambda requests: None, ledger.count, print)
    slim = Slimmer()
    learner = RemoteLearner(actor, ACTOR, ledger, torch.bfloat16, slim, lambda: None)
    reference = RemoteReference(actor, "frozen", {"restarts": False, "is_policy": False}, slim, lambda: None)
    engine.load(0, ())
    options = SamplingOptions(max_tokens=2 * tokens)
    prompts = [tuple(range(k, k + PROMPT)) for k in range(samples // N)]
    requests = [
        Request(f"{k}#0.{s}/0", tuple(p), options, key=k * N + s) for k, p in enumerate(prompts) for s in range(N)
    ]
    batch = batch_of(samples, tokens)
    quarter = samples // UPDATES
    minis = [batch.select(torch.arange(k * quarter, (k + 1) * quarter)) for k in range(UPDATES)]
    rows: list[Row] = []

    def measured(part: str, work: Callable[[], Any]) -> None:
        for backend in (training, sampling):
            backend.traffic.take()
            backend.aside_s, backend.stored = 0.0, 0
        started = time.process_time()
        work()
        seconds = time.process_time() - started - training.aside_s - sampling.aside_s
        taken = [backend.traffic.take() for backend in (training, sampling)]
        messages = sum(t.messages for t in taken)
        stored, back = training.stored + sampling.stored, sum(t.bytes_in for t in taken)
        rows.append(Row(part, seconds, messages, stored / 1e6, back / 1e6, stored))

    measured("requests out", lambda: engine.submit(requests))
    measured("completions in", lambda: sum(1 for _ in engine.stream()))
    measured("old log-probs", lambda: learner.logprobs(batch))
    measured("reference log-probs", lambda: reference.logprobs(batch))
    measured(f"{UPDATES} updates", lambda: [learner.update(mini, PolicyLoss()) for mini in minis])
    measured("weights to engines", lambda: engine.load(1, ()))
    measured("meters, release", lambda: (learner.release(), learner.meter.read(), learner.usage()))
    return rows


def ray_costs(messages: int = 3000) -> dict[str, float]:
    """Processor time of the driver for a message there and back, and for a byte that is stored; with two real actors."""
    import ray

    from burnish.config.placement import RayPlacement
    from burnish.controller.ray_group import Cluster, RayBackend

    with Cluster(RayPlacement(engines=2), on_gpu=False) as cluster:
        backend = RayBackend(cluster, "rollout", Idle, (), Path("/tmp/controller_sim"), 60)
        backend.start()
        group = WorkerGroup("rollout", Idle, backend, 60)
        group.nothing(0)
        started = time.process_time()
        calls = [group.send(k % 2, "nothing", k) for k in range(messages)]
        group.gather(calls)
        message_s = (time.process_time() - started) / messages
        data = {"x": np.zeros(1 << 23, dtype=np.uint8)}  # the parts of a relay's ranks
        ray.put(data)
        started = time.process_time()
        held = [ray.put(data) for _ in range(40)]
        put_s = (time.process_time() - started) / (len(held) << 23)
    return {"message_us": 1e6 * message_s, "stored_gb_per_s": 1e-9 / put_s}


class Idle:
    """A worker that does nothing."""

    @spread("broadcast", "list")
    def nothing(self, number: int) -> int:
        """Nothing."""
        return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=256, help="mean length of a completion")
    parser.add_argument("--step-s", type=float, default=30.0)
    parser.add_argument("--no-ray", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "controller_sim.json"
    costs = json.loads(path.read_text())["rows"][-1] if args.no_ray else ray_costs()
    simulate(8, 256, 16, args.step_s)  # imports and caches
    rows = simulate(args.workers, args.samples, args.tokens, args.step_s)
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
                "ray s": round(ray_s, 3),
            }
        )
    total = sum(one["python s"] + one["ray s"] for one in shown)
    print(table(shown, list(shown[0])))
    print(
        f"driver: {total:.2f} s a step, {total / args.step_s:.1%} of {args.step_s:g} s; a message costs Ray {costs['message_us']:.0f} us "
        f"there and back, a stored GB {1 / costs['stored_gb_per_s']:.2f} s"
    )
    asked = {name: getattr(args, name) for name in ("workers", "samples", "tokens", "step_s")}
    whole = {name: costs[name] for name in ("message_us", "stored_gb_per_s")}
    save("controller_sim", [*shown, {**asked, **whole, "driver_s": total, "share": total / args.step_s}])


if __name__ == "__main__":
    main()
