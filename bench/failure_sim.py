"""A run of the controller with 512 simulated workers that die, hang and answer late; it must end as an undisturbed run does.

    python bench/failure_sim.py [--workers 512] [--steps 8] [--failures 40] [--seed 0]

Half of the workers train, half sample. The controller is the real code: worker groups, division and joining of batches, the engine that deals out
requests and restarts lost engines, the verification of weights, mini-batches, the learner's proxy. The workers are simulated on a clock that
is advanced without waiting. Their work is exact arithmetic in which everything matters: an engine's tokens follow from the request's key
and the weights that it was sent, and the weights follow from every trained token and its advantage. A sample that is lost, repeated, sampled
with old weights or given to the wrong rank changes all later weights.

An engine that fails is restarted by the controller. A trainer that fails ends the run with an error that names it; as the supervisor does, the
simulation then starts again from the last checkpoint with new workers.

Not in it: Ray itself, machines that vanish with several workers, networks that split, the journal and files of a run (`make chaos` kills real
processes of short runs).
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.spec import Algorithm
from burnish.config.placement import ACTOR
from burnish.core.batch import Batch
from burnish.core.dispatch import WorkerLost
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import MASK_64, fold
from burnish.core.segments import offsets_from_lengths
from burnish.core.serialization import decode, encode, num_array_bytes
from burnish.distributed.batch_dispatch import fill_placeholders
from burnish.distributed.resident_batches import ResidentShard
from burnish.distributed.role_proxies import ControllerMetrics, ForwardColumns, RemoteLearner
from burnish.distributed.role_workers import RolloutWorker, TrainingWorker
from burnish.distributed.worker_group import RankCall, Traffic, WorkerGone, WorkerGroup
from burnish.inference.engine_common import check_native_request, check_requests
from burnish.inference.remote_engine import RemoteEngine
from burnish.inference.request_arrays import PackedCompletions, PackedRequests, pack_completions, unpack_requests
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

ROLLOUT = "rollout"
VOCAB, PROMPT, SAMPLES, UPDATES = 1000, 8, 4, 2
"""Tokens there are, tokens of a prompt, samples of it, mini-batches of a step."""
TOKEN_S, TAKE_S, TRAIN_S = 0.05, 1.0, 2.0
"""Simulated seconds of a sampled token, of loading weights, and of a call of a trainer."""
DEADLINE_S = 600.0
"""As placement.timeout_s. A silent engine is restarted after `remote_engine.MAX_SILENCE_S`."""
LATE_S = 100.0
"""What comes so late comes after its engine was restarted."""
MAX_STARTS = 50
METHODS = {ROLLOUT: ("submit", "collect", "take"), ACTOR: ("outputs", "update", "publish")}
"""Calls in which workers fail."""


@dataclass
class Clock:
    """Simulated seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Failure:
    """A worker fails once: in its first call of `method` at `step` or later."""

    group: str
    rank: int
    method: str
    step: int
    kind: str
    """dies, hangs, or is late."""
    has_happened: bool = False

    @property
    def text(self) -> str:
        return f"{self.group} {self.rank} {self.kind} in {self.method} of step {self.step}"


# --- workers -----------------------------------------------------------------------------------------------------------------


class SimulatedEngine:
    """Answers as a `RolloutWorker`: `(seconds, result)` of each call."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.weights, self.version = clock, 0, -1
        self.running: list[tuple[float, Completion]] = []

    def submit(self, packed: PackedRequests) -> tuple[float, None]:
        for request in unpack_requests(packed):
            tokens = sampled_tokens(request, self.weights)
            logp = np.zeros(len(tokens), dtype=np.float32)
            done = Completion(request.id, tokens, logp, "stop", self.version)
            self.running.append((self.clock.now + TOKEN_S * len(tokens), done))
        self.running.sort(key=lambda one: one[0])
        return 0.0, None

    def collect(self, at_least: int, wait_s: float) -> tuple[float, PackedCompletions]:
        until = self.clock.now + wait_s
        found = [one for one in self.running if one[0] <= until][:at_least]
        self.running = self.running[len(found) :]
        moment = found[-1][0] if len(found) >= at_least else until
        return max(0.0, moment - self.clock.now), pack_completions([completion for _, completion in found])

    def take(self, publication: Publication) -> tuple[float, EngineReport]:
        self.version, self.weights = publication.version, int(publication.buckets[0].data)
        return TAKE_S, EngineReport(
            self.version, digest({"weights": self.weights}), (1, 2, 3, 4), np.zeros(4, np.float32)
        )


def sampled_tokens(request: Request, weights: int) -> np.ndarray:
    """The tokens of a request: a function of its key, its prompt and the weights alone."""
    start = fold("sample", request.key, weights, sum(request.tokens))
    length = 2 + start % 11
    return (np.arange(1, length + 1, dtype=np.int64) * (start % 7919 + 1) % VOCAB).astype(np.int32)


@dataclass
class TrainerState:
    """The weights that all ranks hold."""

    weights: int = 1
    published: int = 1


class SimulatedTrainer:
    """Answers as a `TrainingWorker`. An update returns the rank's share of the gradient, which `SimulatedBackend` sums over the ranks."""

    def __init__(self, state: TrainerState) -> None:
        self.state = state

    def outputs(self, role: str, batch: Batch, needs: Any, mask: str) -> tuple[float, dict[str, torch.Tensor]]:
        return TRAIN_S, {"logp": -((batch.tokens * 31 + self.state.weights % 997) % 97).float() / 97}

    def gradient(self, batch: Batch) -> int:
        lengths = batch.offsets.diff()
        places = torch.arange(batch.num_tokens) - torch.repeat_interleave(batch.offsets[:-1], lengths) + 1
        advantages = torch.repeat_interleave((batch.sequence["advantages"] * 48).round().long(), lengths)
        old = (batch.token["old_logp"].double() * 97).round().long()
        return int(((batch.tokens + 1) * places * (advantages + 97) * (old + 131)).sum())

    def publication(self, version: int) -> Publication:
        weights = self.state.published
        return Publication(version, (Bucket((Entry("weights", torch.int64, 1, 0, 8, False, weights),), weights),))


# --- the backend ---------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Sent:
    """A call, and when it is answered: never, if its worker hangs."""

    rank: int
    ready_at: float
    value: Any = None
    error: Exception | None = None


class SimulatedBackend:
    """Workers on a simulated clock, with failures (`WorkerBackend`)."""

    is_here = False
    keeps_promises = False

    def __init__(self, name: str, size: int, clock: Clock, make: Callable[[], Any], happen: Happenings) -> None:
        self.name, self.size, self.clock, self.make, self.happen = name, size, clock, make, happen
        self.workers, self.keepers = [make() for _ in range(size)], [ResidentShard() for _ in range(size)]
        self.traffic = Traffic()
        self.gone: set[int] = set()
        self.mute: set[int] = set()
        self.version = 0

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return encode((args, kwargs))

    def send(self, orders: Sequence[RankCall]) -> list[Sent]:
        self.traffic.messages += len(orders)
        late = {order.rank: self._fail(order) for order in orders}
        lost = {order.rank for order in orders} & (self.gone | self.mute)
        if orders and orders[0].method == "update":
            return self._update(orders, lost)
        return [self._answer(order, late[order.rank]) for order in orders]

    def _fail(self, order: RankCall) -> float:
        """Let the failure of this call happen, if there is one; return how late its answer is."""
        failure = self.happen.next(self.name, order.rank, order.method)
        if failure is not None and failure.kind == "dies":
            self.gone.add(order.rank)
        elif failure is not None and failure.kind == "hangs":
            self.mute.add(order.rank)
        return LATE_S if failure is not None and failure.kind == "is late" else 0.0

    def _answer(self, order: RankCall, late: float) -> Sent:
        if (lost := self._lost(order.rank)) is not None:
            return lost
        args, parts = self._arguments(order)
        seconds, value = self._call(order, args)
        self.keepers[order.rank].keep(parts, value)
        return Sent(order.rank, self.clock.now + seconds + late, encode(value))

    def _lost(self, rank: int) -> Sent | None:
        if rank in self.gone:
            return Sent(rank, self.clock.now, error=WorkerGone("its process was killed by signal 9"))
        return Sent(rank, math.inf) if rank in self.mute else None

    def _arguments(self, order: RankCall) -> tuple[tuple[Any, ...], list[Any]]:
        """The arguments as the worker gets them, and the parts of batches that came with them."""
        parts = [sharded.parts[share] for sharded, share in order.parts]
        self.traffic.bytes_out += num_array_bytes(order.parcel) + num_array_bytes(parts)
        opened = [self.keepers[order.rank].open(part) for part in parts]
        args, _ = fill_placeholders(decode(order.parcel), opened)
        return args, parts

    def _call(self, order: RankCall, args: tuple[Any, ...]) -> tuple[float, Any]:
        worker = self.workers[order.rank]
        if order.method == "publish":
            worker.state.published, self.version = worker.state.weights, args[0]
        if order.method in ("publish", "publish_again"):
            return TRAIN_S, worker.publication(self.version) if order.rank == 0 else None
        if order.method == "score":
            return TRAIN_S, [0.0] * 4
        found: tuple[float, Any] = getattr(worker, order.method)(*args)
        return found

    def _update(self, orders: Sequence[RankCall], lost: set[int]) -> list[Sent]:
        """All ranks exchange gradients. If one is lost the others wait for it for ever, and no weight changes."""
        batches = {order.rank: self._arguments(order)[0][1] for order in orders}  # after the role comes the batch
        if lost:
            return [self._lost(order.rank) or Sent(order.rank, math.inf) for order in orders]
        state: TrainerState = self.workers[0].state
        total = sum(self.workers[rank].gradient(batch) for rank, batch in batches.items())
        state.weights = fold("update", state.weights, total & MASK_64)
        value = encode(Update({"loss": 0.0}, None, None))
        return [Sent(order.rank, self.clock.now + TRAIN_S, value) for order in orders]

    def wait(self, tokens: Sequence[Sent], timeout_s: float) -> list[Sent]:
        return self._until(tokens, max((token.ready_at for token in tokens), default=0.0), timeout_s)

    def any_of(self, tokens: Sequence[Sent], timeout_s: float) -> list[Sent]:
        return self._until(tokens, min((token.ready_at for token in tokens), default=math.inf), timeout_s)

    def _until(self, tokens: Sequence[Sent], moment: float, timeout_s: float) -> list[Sent]:
        self.clock.now = max(self.clock.now, min(moment, self.clock.now + timeout_s))
        ended = [token for token in tokens if token.ready_at <= self.clock.now]
        return sorted(ended, key=lambda token: token.error is None)  # failed ones first

    def promise(self, token: Sent) -> None:
        return None

    def value(self, token: Sent) -> Any:
        if token.error is not None:
            raise token.error
        self.traffic.bytes_in += num_array_bytes(token.value)
        return token.value

    def describe(self, rank: int) -> str:
        return f"(simulated {self.name} {rank})"

    def silent(self, ranks: Sequence[int], what: str) -> str:
        stuck = sorted(self.mute & set(ranks))
        return f"ranks {stuck} have stopped, the others wait for them"

    def restart(self, rank: int) -> None:
        self.gone.discard(rank)
        self.mute.discard(rank)
        self.workers[rank], self.keepers[rank] = self.make(), ResidentShard()

    def close(self) -> None:
        self.workers = []


@dataclass
class Happenings:
    """The failures of a run that have not happened yet."""

    failures: list[Failure]
    step: int = 0

    def next(self, group: str, rank: int, method: str) -> Failure | None:
        for failure in self.failures:
            wanted = (failure.group, failure.rank, failure.method)
            if wanted == (group, rank, method) and failure.step <= self.step and not failure.has_happened:
                failure.has_happened = True
                return failure
        return None


# --- the controller ------------------------------------------------------------------------------------------------------------


class Controller:
    """The parts that a driver on Ray has, with simulated workers behind them. It begins with the weights of a checkpoint."""

    def __init__(self, workers: int, weights: int, version: int, clock: Clock, happen: Happenings, note: Callable[[str], None]) -> None:  # fmt: skip
        half, self.state = workers // 2, TrainerState(weights, weights)
        backends = [
            SimulatedBackend(ACTOR, half, clock, partial(SimulatedTrainer, self.state), happen),
            SimulatedBackend(ROLLOUT, workers - half, clock, partial(SimulatedEngine, clock), happen),
        ]
        actor = WorkerGroup(ACTOR, TrainingWorker, backends[0], DEADLINE_S, mini_batches=UPDATES, clock=clock)
        rollout = WorkerGroup(ROLLOUT, RolloutWorker, backends[1], DEADLINE_S, clock=clock)
        metrics = ControllerMetrics([actor, rollout])
        trainer = TrainerClient(
            actor.publish.later, actor.publish_again.later, actor.score.later, PROBE_TOLERANCE["float32"]
        )
        model: Any = SimpleNamespace(arch=SimpleNamespace(vocab_size=VOCAB, max_positions=1024, vision=None))

        def check(requests: Sequence[Request]) -> None:
            check_requests(requests, frozenset(), partial(check_native_request, model=model, has_text=False))

        probe = probe_request(VOCAB, None)
        self.engine = RemoteEngine(rollout, trainer, probe, DEADLINE_S, check, metrics.count, note, clock=clock)
        self.learner = RemoteLearner(actor, ACTOR, metrics, torch.float32, ForwardColumns(), self.engine.confirm)
        self.engine.load(version, ())

    def step(self, step: int, prompts: int) -> int:
        """One step of RL; returns the weights after it."""
        requests = step_requests(step, prompts)
        self.engine.submit(requests)
        done: dict[str, Completion] = {}
        for completion in self.engine.stream():
            if completion.id in done:
                raise AssertionError(f"request {completion.id} was answered twice")
            done[completion.id] = completion
        batch = packed([(request, done[request.id]) for request in requests])
        batch = batch.with_token(old_logp=self.learner.logprobs(batch))
        for mini in mini_batches(batch, Algorithm(), UPDATES, 1, 16):
            self.learner.update(mini, PolicyLoss(), columns=False)
        self.engine.load(step, ())
        self.engine.confirm()
        return self.state.weights


def step_requests(step: int, prompts: int) -> list[Request]:
    options = SamplingOptions(max_tokens=16)
    return [
        Request(f"{k}#{step}.{sample}", tokens, options, key=fold("key", step, k, sample))
        for k in range(prompts)
        for tokens in [tuple(fold("prompt", step, k, place) % VOCAB for place in range(PROMPT))]
        for sample in range(SAMPLES)
    ]


def packed(pairs: list[tuple[Request, Completion]]) -> Batch:
    """Samples as a batch. The reward is the parity of the last token, the advantage its distance from the mean of the group."""
    tokens = torch.tensor([t for request, one in pairs for t in (*request.tokens, *one.tokens.tolist())])
    lengths = torch.tensor([PROMPT + len(one.tokens) for _, one in pairs])
    offsets = offsets_from_lengths(lengths)
    mask = torch.arange(len(tokens)) - torch.repeat_interleave(offsets[:-1], lengths) >= PROMPT
    reward = torch.tensor([float(one.tokens[-1] % 2) for _, one in pairs], dtype=torch.float64).view(-1, SAMPLES)
    count = torch.arange(len(pairs))
    columns = {"group_ids": count // SAMPLES, "trajectory_ids": count, "key": count, "advantages": (reward - reward.mean(1, True)).view(-1)}  # fmt: skip
    return Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask.clone()}, columns)


@dataclass
class Outcome:
    """What became of a run."""

    weights: list[int] = field(default_factory=list)
    """After each step."""
    notes: list[str] = field(default_factory=list)
    """What the controller said of lost engines."""
    errors: list[str] = field(default_factory=list)
    """Errors that ended the controller, which then began again from its checkpoint."""
    seconds: float = 0.0
    """Simulated."""


def run(workers: int, steps: int, prompts: int, failures: Sequence[Failure] = ()) -> Outcome:
    """Run all steps; after an error continue from the last checkpoint, which every step writes."""
    outcome, clock, happen = Outcome(), Clock(), Happenings(list(failures))
    for _ in range(MAX_STARTS):
        done = len(outcome.weights)
        happen.step = done + 1
        try:
            weights = outcome.weights[-1] if outcome.weights else 1
            controller = Controller(workers, weights, done, clock, happen, outcome.notes.append)
            for step in range(done + 1, steps + 1):
                happen.step = step
                outcome.weights.append(controller.step(step, prompts))
        except WorkerLost as error:
            outcome.errors.append(str(error))
            continue
        outcome.seconds = clock.now
        return outcome
    raise SystemExit(f"the run did not end after {MAX_STARTS} starts; the last error: {outcome.errors[-1]}")


def random_failures(count: int, workers: int, steps: int, seed: int) -> list[Failure]:
    """Failures at random places, a quarter of them of trainers.

    No two trainers fail in the same call, of which only the first could be named. A call of a trainer, and of an engine that loads weights, may
    take minutes, so that being late is no failure there.
    """
    dice, found = random.Random(seed), list[Failure]()
    places = [(method, step) for method in METHODS[ACTOR] for step in range(1, steps + 1)]
    for method, step in dice.sample(places, min(count // 4, len(places))):
        found.append(Failure(ACTOR, dice.randrange(workers // 2), method, step, dice.choice(("dies", "hangs"))))
    ranks = dice.sample(range(workers - workers // 2), min(count - len(found), workers - workers // 2))
    for rank in ranks:
        method = dice.choice(METHODS[ROLLOUT])
        kind = dice.choice(
            {"submit": ("dies",), "take": ("dies", "hangs"), "collect": ("dies", "hangs", "is late")}[method]
        )
        found.append(Failure(ROLLOUT, rank, method, dice.randint(1, steps), kind))
    return found


def is_named(failure: Failure, outcome: Outcome) -> bool:
    """Whether a note or an error names the worker that failed."""
    if failure.group == ACTOR:
        pattern = re.compile(rf"rank {failure.rank} of|ranks \[{failure.rank}\] have stopped")
        return any(pattern.search(text) for text in outcome.errors)
    return any(f"engine {failure.rank} is started again" in text for text in outcome.notes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=512)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--failures", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.perf_counter()
    calm = run(args.workers, args.steps, args.prompts)
    calm_s = time.perf_counter() - started
    failures = random_failures(args.failures, args.workers, args.steps, args.seed)
    started = time.perf_counter()
    outcome = run(args.workers, args.steps, args.prompts, failures)
    happened = [failure for failure in failures if failure.has_happened]
    rows = [
        {
            "work": f"{args.workers} workers, {args.steps} steps of {args.prompts * SAMPLES} samples",
            "system": "burnish, simulated workers",
            "failures": len(happened),
            "not_reached": len(failures) - len(happened),
            "named": sum(is_named(failure, outcome) for failure in happened),
            "engine_restarts": len(outcome.notes),
            "starts": 1 + len(outcome.errors),
            "is_equal": outcome.weights == calm.weights,
            "simulated_s": outcome.seconds,
            "undisturbed_simulated_s": calm.seconds,
            "wall_s": time.perf_counter() - started,
            "undisturbed_wall_s": calm_s,
        }
    ]
    print(table(rows, ["work", "failures", "named", "engine_restarts", "starts", "is_equal", "simulated_s", "undisturbed_simulated_s", "wall_s"]))  # fmt: skip
    for failure in happened:
        if not is_named(failure, outcome):
            print(f"not named: {failure.text}")
    print(f"saved {save('failure_sim', rows)}")
    if not rows[0]["is_equal"] or rows[0]["named"] < len(happened):
        raise SystemExit("the weights differ from those of the undisturbed run, or a failure was not named")


if __name__ == "__main__":
    main()
