"""Engines of several processes under Ray: the worker class of their ranks, and a group of such engines as one worker each.

The first rank of an engine leads (`inference/native/parallel_engine.py`): the driver sends it requests and reads its completions. New
weights are sent to all ranks, each of which reads and proves its own part.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import torch

from burnish.config.placement import ROLLOUT, RayPlacement
from burnish.config.schema import TrainConfig
from burnish.core.dispatch import CallHandle, WorkerLost, Workers, dispatch
from burnish.core.engine import Engine
from burnish.core.random_keys import MASK_64
from burnish.distributed import engine_builder, roles
from burnish.distributed.role_workers import RolloutWorker
from burnish.distributed.weight_link import LinkAddress, Member, WeightLink
from burnish.inference import weight_sync
from burnish.inference.native.parallel_decoder import ParallelDecoder, join_engine_ranks
from burnish.inference.native.parallel_engine import ParallelFollower
from burnish.inference.threaded_engine import EngineThread
from burnish.inference.weight_sync import EngineReport, Publication, digest, part_name, probe_request
from burnish.models.kernels.device import use_deterministic_algorithms
from burnish.models.lora.peft_files import read_lora_config
from burnish.models.policy import PolicyModel, resolve_device

TO_ALL_RANKS = ("take", "take_resharded", "checksums")
"""Calls that every rank of an engine gets. All others go to its first rank."""


NO_VERSION = -1
"""The version that a rank reports whose weights did not all arrive."""


@dataclass(frozen=True)
class ReshardedWeights:
    """Weights that come over the link from the learner's ranks."""

    version: int
    complete: bool


class ParallelRolloutWorker(RolloutWorker):
    """One rank of an engine. It never holds the whole model: its part of the weights comes from the trainer."""

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        assert isinstance(config.placement, RayPlacement)
        torch.set_num_threads(config.placement.cpus_of(ROLLOUT))
        device, dtype = resolve_device(config.model.device), getattr(torch, config.model.dtype)
        if config.training.deterministic and device.type == "cuda":
            use_deterministic_algorithms()
        self.ranks, self.timeout_s = join_engine_ranks(device.type == "cuda"), config.placement.timeout_s
        outline = roles.build_outline(config.model, [*config.data.train, *config.data.validation], config.seed, base)
        engine_builder.engine_kind(config.rollout, outline.arch is not None)
        assert outline.arch is not None, "checked by engine_kind"
        lora = config.model.lora if outline.adapter is None else read_lora_config(outline.adapter)
        model = ParallelDecoder(outline.arch, self.ranks, dtype, device, lora)
        self.policy = PolicyModel(model, outline.tokenizer, outline.source, "a part of the native decoder")
        engine_builder.set_expert_recording(config, self.policy)
        self.probe = probe_request(outline.tokenizer.vocab_size, outline.max_positions)
        self.version: int | None = None
        self._taken: list[str] = []
        self._sent_weights: queue.SimpleQueue[tuple[Publication | ReshardedWeights, Future[None]]] = queue.SimpleQueue()
        self._link: WeightLink | None = None
        if self.ranks.is_leader:
            self.thread = EngineThread(
                engine_builder.build_parallel_engine(model, config.rollout, outline.tokenizer.decode)
            )
        else:
            follower = ParallelFollower(model, self._write_weights)
            threading.Thread(target=_run_or_exit, args=(follower,), name="follower", daemon=True).start()

    @dispatch("broadcast", "list")
    def take(self, publication: Publication) -> EngineReport:
        """Load a rank's part of new weights and prove that it arrived."""
        own = publication.of_rank(self.ranks.rank)
        if self.ranks.is_leader:
            return super().take(own)
        written: Future[None] = Future()
        self._sent_weights.put((own, written))
        written.result()  # a follower that fails ends this process
        self.version, weights = own.version, self._weights()
        self._taken = list(weights if own.is_complete else own.checksums)
        return EngineReport(self.version, digest(self.checksums()), (), np.empty(0, dtype=np.float32))

    @dispatch("broadcast", "list")
    def join_link(self, address: LinkAddress, process: int) -> bool:
        """Join the link to the learner, as this process of all engines; returns False if another did not come."""
        model = self.policy.module
        assert isinstance(model, ParallelDecoder)
        own = Member(gethostname(), names=[name for name, _ in model.named_parameters()])
        self._link = None  # close the last one
        try:
            self._link = WeightLink(address, address.num_learners + process, model.whole, model.lora, own)
        except RuntimeError as error:
            print(f"the link to the learner was not made: {error}", file=sys.stderr, flush=True)
        return self._link is not None

    @dispatch("broadcast", "list")
    def take_resharded(self, version: int, complete: bool) -> EngineReport:
        """Receive a rank's part of new weights from the learner's ranks. A rank that did not get all of it reports no version."""
        sent = ReshardedWeights(version, complete)
        if not self.ranks.is_leader:
            written: Future[None] = Future()
            self._sent_weights.put((sent, written))
            written.result()
            return EngineReport(self._reported, 0, (), np.empty(0, dtype=np.float32))

        def write(engine: Engine) -> None:
            engine.load(version, ())  # the followers receive at the same time
            self._receive(sent)

        self.thread.do(write)
        if self._reported == NO_VERSION:
            return EngineReport(NO_VERSION, 0, (), np.empty(0, dtype=np.float32))
        return EngineReport(self._reported, 0, *self.thread.do(self._show))

    @property
    def _reported(self) -> int:
        return NO_VERSION if self.version is None else self.version

    def _receive(self, sent: ReshardedWeights) -> None:
        """Write what comes over the link. Each bucket is verified by its checksum."""
        assert self._link is not None, "opened before"
        try:
            self._link.move(sent.complete, {}, dict(self.policy.module.named_parameters()))
        except RuntimeError as error:
            print(f"the link to the learner broke in version {sent.version}: {error}", file=sys.stderr, flush=True)
            self.version = None
        else:
            self.version = sent.version

    @dispatch("broadcast", "list")
    def checksums(self) -> dict[str, int]:
        """Report checksums of a rank's part of the tensors loaded last."""
        found = super().checksums()
        return {part_name(name, self.ranks.rank, self.ranks.size): total for name, total in found.items()}

    def _write_weights(self, version: int) -> None:
        """Write the weights of a version when the leader has its own; wait for them if they have not arrived."""
        try:
            publication, written = self._sent_weights.get(timeout=self.timeout_s)
        except queue.Empty:
            raise RuntimeError(
                f"the leader has weights of version {version}, and none came here in {self.timeout_s:g} s"
            ) from None
        if publication.version != version:
            raise RuntimeError(f"the leader has weights of version {version}, and {publication.version} were sent here")
        if isinstance(publication, ReshardedWeights):
            self._receive(publication)
            written.set_result(None)
            return
        if publication.base is not None and publication.base != self.version:
            raise RuntimeError(f"a delta from version {publication.base} does not apply to version {self.version}")
        weight_sync.apply_publication(publication, self._weights(), self.store.get)
        written.set_result(None)


def _run_or_exit(follower: ParallelFollower) -> None:
    """Run a follower. If it fails, end the process: the leader then notices a closed connection instead of waiting for this rank."""
    try:
        follower.run()
    except BaseException:  # noqa: BLE001 (written to the worker's log, which the driver quotes)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


@dataclass(frozen=True, eq=False)
class EngineCall:
    """A call to one engine: to its first rank, or to all."""

    rank: int
    """Number of the engine."""
    calls: Sequence[CallHandle]


class ParallelEngines:
    """Processes that form engines of `size_of_engine` ranks each, called as one worker an engine (`core/dispatch.py`: `Workers`)."""

    def __init__(self, processes: Workers, size_of_engine: int) -> None:
        self.processes, self.size_of_engine = processes, size_of_engine
        self.size = processes.size // size_of_engine

    def send(self, rank: int, method: str, *arguments: Any) -> EngineCall:
        return self.send_same([rank], method, *arguments)[0]

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[EngineCall]:
        members = [process for rank in ranks for process in self._members(rank, method)]
        return self._by_engine(self.processes.send_same(members, method, *arguments))

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[EngineCall]:
        own = {process: given for rank, given in arguments.items() for process in self._members(rank, method)}
        return self._by_engine(self.processes.send_each(method, own))

    def ready(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        ended = self.processes.ready([call for handle in handles for call in handle.calls], timeout_s)
        found = {id(call) for call in ended}
        return [handle for handle in handles if all(id(call) in found for call in handle.calls)]

    def wait_all(self, handles: Sequence[Any]) -> None:
        self.processes.wait_all([call for handle in handles for call in handle.calls])

    def result(self, handle: Any) -> Any:
        """The result of an engine: what its ranks say together. A lost rank means that the engine is lost."""
        try:
            results = [self.processes.result(call) for call in handle.calls]
        except WorkerLost as error:
            raise WorkerLost(f"engine {handle.rank}: {error}", handle.rank) from error
        if len(results) == 1:
            return results[0]
        return _joined_reports(results) if isinstance(results[0], EngineReport) else _joined_checksums(results)

    def restart(self, rank: int) -> None:
        """Start all ranks of an engine again."""
        self.processes.restart(rank * self.size_of_engine)

    def _members(self, rank: int, method: str) -> range:
        first = rank * self.size_of_engine
        return range(first, first + (self.size_of_engine if method in TO_ALL_RANKS else 1))

    def _by_engine(self, calls: Sequence[CallHandle]) -> list[EngineCall]:
        engines: dict[int, list[CallHandle]] = {}
        for call in calls:
            engines.setdefault(call.rank // self.size_of_engine, []).append(call)
        return [EngineCall(engine, own) for engine, own in engines.items()]


def _joined_reports(reports: Sequence[EngineReport]) -> EngineReport:
    """The report of an engine. A digest is a sum over tensors, so those of all ranks add up to that of the whole publication."""
    total = sum(report.digest for report in reports) & MASK_64
    return replace(reports[0], version=min(report.version for report in reports), digest=total)


def _joined_checksums(parts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: total for part in parts for name, total in part.items()}
