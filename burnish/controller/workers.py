"""The classes whose objects are workers: one that trains, with the policy, its reference and its critic, and one that samples.

They are made from a run's config, each in its own process, and know nothing of the controller: it calls the marked methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.algorithms.losses import Loss
from burnish.config.placement import RayPlacement
from burnish.config.plugins import load_plugin
from burnish.config.schema import TrainConfig
from burnish.config.slots import Plugin
from burnish.controller import roles
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Engine
from burnish.core.spread import spread
from burnish.core.workers import InProcess, Store
from burnish.models.policy import pick_device
from burnish.rollout.messages import Completions, Requests, pack_completions, unpack_requests
from burnish.rollout.sync import buckets
from burnish.rollout.sync.buckets import Publication, Publisher, digest
from burnish.rollout.sync.checksum import checksum
from burnish.rollout.sync.verify import Report, probe
from burnish.rollout.thread import EngineThread
from burnish.run.contents import Content, Sums, write_contents
from burnish.run.staging import HostCopy, leave, wait_for_devices
from burnish.training.forward import Needs, batch_outputs
from burnish.training.learner import Learner, Update
from burnish.training.memory_use import memory_values, restart_peak
from burnish.training.meter import Reading
from burnish.training.parallel.gather import full_parameters
from burnish.training.parallel.join import is_launched, join
from burnish.training.parallel.ranks import SOLO

ACTOR, CRITIC, POLICY, REFERENCE = "actor", "critic", "policy", "reference"
"""The learners, and what else a checkpoint holds."""


class TrainingWorker:
    """One rank of those that train. With `weights`, a saved model directory, the run starts from those."""

    store: Store = InProcess()

    def __init__(self, config: TrainConfig, base: Path | None, weights: Path | None) -> None:
        assert isinstance(config.placement, RayPlacement)
        torch.set_num_threads(config.placement.cpus)
        on_gpu = pick_device(config.model.device).type == "cuda"
        self.ranks = join(config.parallel, on_gpu) if is_launched() else SOLO
        # What is divided goes to its device piece by piece: no device has room for all of a model that needs several.
        model = config.model if self.ranks.weights is None else config.model.model_copy(update={"device": "cpu"})
        sources = [*config.data.train, *config.data.validation]
        self.policy = roles.build_policy(model, sources, config.seed, base)
        if weights is not None:
            self.policy.load_weights(weights)
        self.reference = roles.build_reference(config, self.policy, self.ranks)
        self.critic = roles.build_critic(config, self.policy, self.ranks)
        self.learner = roles.build_learner(config, self.policy, self.ranks)
        if isinstance(
            config.algorithm.loss, Plugin
        ):  # a loss that arrives names the module it is of, which must be here
            load_plugin(config.algorithm.loss.name, base)
        if self.reference is not None and config.algorithm.kl.loss.estimator == "full":
            self.learner.reference = self.reference.distribution
        self.device = self.learner.device
        self._delta = config.placement.sync == "delta"
        self._publisher: Publisher | None = None
        self._staged: dict[str, list[Content]] = {}

    def _learner(self, role: str) -> Learner:
        if role == ACTOR:
            return self.learner
        assert self.critic is not None
        return self.critic.learner

    # --- the learners ----------------------------------------------------------------------------------------------------

    @spread("broadcast", "list")
    def place(self) -> int:
        """Which share of a batch this rank has."""
        return self.ranks.index

    @spread("broadcast", "first")
    def about(self) -> dict[str, Any]:
        """What the controller must know of the roles."""
        return {
            "dtype": self.learner.dtype,
            "restarts": self.reference is not None and self.reference.restarts,
            "is_policy": self.reference is not None and self.reference.is_policy,
        }

    @spread("sequences", "sequences")
    def outputs(self, role: str, batch: Batch, needs: Needs, mask: str) -> dict[str, Tensor]:
        """Log-probs, or a critic's values, under the current weights."""
        return self._learner(role).outputs(batch.to(self.device), needs, mask)

    @spread("sequences", "sequences")
    def update(
        self, role: str, batch: Batch, loss: Loss, lr_scale: float, also: tuple[Batch, Loss] | None, columns: bool
    ) -> Update:
        """One optimizer step."""
        second = None if also is None else (also[0].to(self.device), also[1])
        return self._learner(role).update(batch.to(self.device), loss, lr_scale, second, columns)

    @spread("broadcast", "nothing")
    def release(self, role: str) -> None:
        """Let go of the gradients."""
        self._learner(role).release()

    @spread("broadcast", "nothing")
    def reset_optimizer(self, role: str) -> None:
        """Forget the optimizer's moments."""
        self._learner(role).reset_optimizer()

    @spread("broadcast", "list")
    def read(self, role: str) -> tuple[Reading, dict[str, float]]:
        """What the learner did and holds, since the last time it was asked."""
        found = self._learner(role).meter.read(), memory_values(self.device)
        restart_peak(self.device)
        return found

    # --- the reference ---------------------------------------------------------------------------------------------------

    @spread("sequences", "sequences")
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs under the reference."""
        assert self.reference is not None
        return self.reference.logprobs(batch.to(self.device))

    @spread("broadcast", "nothing")
    def after_update(self) -> None:
        """Let the reference follow an update."""
        assert self.reference is not None
        self.reference.after_update(self.learner.model)

    @spread("broadcast", "first")
    def after_step(self, step: int) -> bool:
        """Let the reference follow a step."""
        assert self.reference is not None
        return self.reference.after_step(self.learner.model, step)

    # --- weights for engines ---------------------------------------------------------------------------------------------

    @spread("broadcast", "first")
    def publish(self, version: int, complete: bool) -> Publication | None:
        """Gather the weights and leave them in the store; the first rank has the list of them."""
        trained = self.learner.names.keys()
        tensors = ((n, t) for n, t in full_parameters(self.policy.module) if complete or n in trained)
        if not self.ranks.is_first:
            for _ in tensors:  # to gather a tensor takes everyone
                pass
            return None
        if self._publisher is None:
            self._publisher = Publisher(self.store.put, self._delta)
        return self._publisher.publish(version, tensors, as_delta=not complete, complete=complete)

    @spread("broadcast", "first")
    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Log-probs of tokens after a prompt, at temperature 1."""
        packed = torch.tensor([*prompt, *tokens], device=self.device)
        written = torch.arange(len(packed), device=self.device) >= len(prompt)
        batch = Batch(packed, torch.tensor([0, len(packed)], device=self.device), {"action_mask": written})
        learner = self.learner
        found = batch_outputs(learner.model, batch, frozenset(), learner.packing, 1.0, ranks=self.ranks)["logp"]
        return [float(value) for value in found[written]]

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    @spread("broadcast", "list")
    def stage(self, what: str, in_memory: bool) -> bool:
        """Take hold of what a checkpoint shall have; whether there was no room for a copy in memory."""
        stage = HostCopy() if in_memory else leave
        part: Any = {POLICY: self.policy, ACTOR: self.learner, REFERENCE: self.reference, CRITIC: self.critic}[what]
        self._staged[what] = part.contents(stage)
        wait_for_devices()
        return isinstance(stage, HostCopy) and stage.is_short

    @spread("broadcast", "list", lane="side")
    def write(self, what: str, folder: Path) -> Sums:
        """Write what was staged into a checkpoint's folder."""
        contents = self._staged.pop(what)
        # Where every rank has all of a model, the first one's files are everyone's.
        return write_contents(folder, contents) if self.policy.part.count > 1 or self.ranks.is_first else {}

    @spread("broadcast", "list")
    def load(self, what: str, folder: Path) -> int:
        """Take back what a checkpoint has; the updates made until then."""
        if what == POLICY:
            self.policy.load_weights(folder)
            return 0
        part = {ACTOR: self.learner, REFERENCE: self.reference, CRITIC: self.critic}[what]
        assert part is not None
        part.load(folder)
        return self._learner(what).updates if what != REFERENCE else 0


class RolloutWorker:
    """An engine on a copy of the weights, which come from the trainer before anything is sampled."""

    store: Store = InProcess()

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        assert isinstance(config.placement, RayPlacement)
        torch.set_num_threads(config.placement.cpus)
        sources = [*config.data.train, *config.data.validation]
        self.policy = roles.build_policy(config.model, sources, config.seed, base)
        self.policy.module.requires_grad_(False)
        self.thread = EngineThread(roles.build_engine(self.policy, config.rollout))
        self.probe = probe(self.policy.tokenizer.vocab_size, self.policy.max_positions)
        self.version: int | None = None
        self._taken: list[str] = []

    @spread("each", "nothing")
    def submit(self, requests: Requests) -> None:
        """Queue requests."""
        self.thread.submit(unpack_requests(requests))

    @spread("each", "list", lane="side")
    def collect(self, at_least: int, wait_s: float) -> Completions:
        """Hand over completions."""
        return pack_completions(self.thread.collect(at_least, wait_s))

    @spread("each", "list")
    def abort(self, ids: Sequence[str]) -> Completions:
        """Stop requests."""
        return pack_completions(self.thread.abort(ids))

    @spread("broadcast", "list")
    def take(self, publication: Publication) -> Report:
        """Take new weights and show that they are there."""
        if publication.base is not None and publication.base != self.version:
            raise RuntimeError(
                f"what changed since version {publication.base} is of no use to an engine with version {self.version}"
            )
        parameters = dict(self.policy.module.named_parameters())

        def write(engine: Engine) -> tuple[tuple[int, ...], np.ndarray]:
            buckets.take(publication, parameters, self.store.get)
            engine.load(publication.version, ())
            engine.submit([self.probe])
            done: list[Completion] = []
            while not done:  # a stream may be interrupted
                done = list(engine.stream())
            return tuple(done[0].tokens.tolist()), done[0].logp

        tokens, logp = self.thread.do(write)
        self.version = publication.version
        self._taken = list(parameters if publication.is_complete else publication.checksums)
        return Report(self.version, digest(self.checksums()), tokens, logp)

    @spread("broadcast", "list")
    def checksums(self) -> dict[str, int]:
        """Tell the checksums of the parameters that were taken last."""
        parameters = dict(self.policy.module.named_parameters())
        return {name: checksum(parameters[name]) for name in self._taken}

    @spread("broadcast", "list")
    def sleep(self) -> None:
        """Give the engine's memory back until its next request."""
        self.thread.do(lambda engine: engine.sleep())
