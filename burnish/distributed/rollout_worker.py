"""The worker that samples: an engine in a process of its own.

It is made from a run's config and knows nothing of the controller, which calls the marked methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from burnish.config.placement import ROLLOUT, RayPlacement
from burnish.config.schema import TrainConfig
from burnish.core.dispatch import InProcess, Store, dispatch
from burnish.core.engine import Completion, Engine
from burnish.distributed import roles
from burnish.inference.request_arrays import Completions, Requests, pack_completions, unpack_requests
from burnish.inference.weight_sync import buckets
from burnish.inference.weight_sync.buckets import Publication, checksum, digest
from burnish.inference.weight_sync.publisher import Report, probe
from burnish.models.quantization.nf4_decoder import quantised_tensors
from burnish.rollout.thread import EngineThread


class RolloutWorker:
    """An engine on a copy of the weights, which come from the trainer before anything is sampled."""

    store: Store = InProcess()

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        assert isinstance(config.placement, RayPlacement)
        torch.set_num_threads(config.placement.cpus_of(ROLLOUT))
        sources = [*config.data.train, *config.data.validation]
        self.policy = roles.build_policy(config.model, sources, config.seed, base)
        self.policy.module.requires_grad_(False)
        self.thread = EngineThread(roles.build_engine(self.policy, config.rollout))
        self.probe = probe(self.policy.tokenizer.vocab_size, self.policy.max_positions)
        self.version: int | None = None
        self._taken: list[str] = []

    @dispatch("each", "nothing")
    def submit(self, requests: Requests) -> None:
        """Queue requests."""
        self.thread.submit(unpack_requests(requests))

    @dispatch("each", "list", lane="side")
    def collect(self, at_least: int, wait_s: float) -> Completions:
        """Hand over completions."""
        return pack_completions(self.thread.collect(at_least, wait_s))

    @dispatch("each", "list")
    def abort(self, numbers: Sequence[int]) -> Completions:
        """Stop requests."""
        return pack_completions(self.thread.abort([str(number) for number in numbers]))

    @dispatch("broadcast", "list")
    def take(self, publication: Publication) -> Report:
        """Take new weights and show that they are there."""
        if publication.base is not None and publication.base != self.version:
            raise RuntimeError(
                f"what changed since version {publication.base} is of no use to an engine with version {self.version}"
            )
        weights = self._weights()

        def write(engine: Engine) -> None:
            buckets.take(publication, weights, self.store.get)
            engine.load(publication.version, ())

        def show(engine: Engine) -> tuple[tuple[int, ...], np.ndarray]:
            engine.submit([self.probe])
            done: list[Completion] = []
            while not done:  # a stream may be interrupted
                done = list(engine.stream())
            return tuple(done[0].tokens.tolist()), done[0].logp

        self.thread.do(write)
        self.version = publication.version
        self._taken = list(weights if publication.is_complete else publication.checksums)
        shown = self.thread.begin(show)
        found = digest(self.checksums())  # while the engine is at the probe
        return Report(self.version, found, *self.thread.wait(shown))

    @dispatch("broadcast", "list")
    def checksums(self) -> dict[str, int]:
        """Tell the checksums of the tensors that were taken last."""
        weights = self._weights()
        return {name: checksum(weights[name]) for name in self._taken}

    def _weights(self) -> dict[str, Tensor]:
        """All that the engine multiplies by, in whatever type, by name."""
        module = self.policy.module
        return dict[str, Tensor](module.named_parameters()) | quantised_tensors(module)

    @dispatch("broadcast", "list")
    def sleep(self) -> None:
        """Give the engine's memory back until its next request."""
        self.thread.do(lambda engine: engine.sleep())
