"""The classes that worker groups run: `TrainingWorker` (actor, reference, critic, process reward model) and `RolloutWorker`.

They are built from a run's config, and know nothing of the driver, which calls the methods marked with `@dispatch`. The first line
of such a method's docstring is quoted in errors about the call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import get_rank

from burnish.algorithms.losses.policy_loss import Loss
from burnish.config.errors import UserError
from burnish.config.placement import ACTOR, CRITIC, REFERENCE, ROLLOUT, RayPlacement
from burnish.config.plugins import load_plugin
from burnish.config.records import Plugin
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch
from burnish.core.dispatch import InProcessStore, ObjectStore, dispatch
from burnish.core.engine import Completion, Engine
from burnish.distributed import engine_builder, roles
from burnish.distributed.roles import build_process_reward_model
from burnish.distributed.server_process import ServerProcess, start_server
from burnish.distributed.weight_link import LinkAddress, Member, WeightLink, host_store
from burnish.inference import weight_sync
from burnish.inference.native.parallel_decoder import rank_part
from burnish.inference.request_arrays import PackedCompletions, PackedRequests, pack_completions, unpack_requests
from burnish.inference.reshard_transfer import learner_layout
from burnish.inference.threaded_engine import EngineThread
from burnish.inference.weight_sync import EngineReport, Publication, Publisher, checksum, digest, probe_request
from burnish.models.decoder import Decoder
from burnish.models.kernels.device import use_deterministic_algorithms
from burnish.models.nf4 import quantised_tensors
from burnish.models.policy import PolicyModel, resolve_device
from burnish.run.checkpoint.saver import HostCopy, keep_in_place, wait_for_devices
from burnish.run.checkpoint.snapshot import Checksums, Content, write_contents, writer_rank_of
from burnish.training.forward import Needs, batch_outputs
from burnish.training.learner import Learner, Update
from burnish.training.meter import MeterReading, memory_metrics, reset_peak_memory
from burnish.training.parallel.fsdp import full_parameters, full_quantised_tensors, parameter_names
from burnish.training.parallel.fsdp import reshard as reshard_parameters
from burnish.training.parallel.ranks import SOLO, is_launched, join_process_group, parallelize_model

PROCESS, POLICY = "process", "policy"
"""The role of the process reward model, and the name of the policy's weights in checkpoint calls."""
SERVER_END_S = 2.0
"""How long after a failed request its server may take to end."""
TRAINING_ROLES = (ACTOR, REFERENCE, CRITIC, PROCESS)
"""The roles that a `TrainingWorker` may have."""


class TrainingWorker:
    """One training rank. `weights` is a saved model directory to start from. `parts` are its roles; the first one names its pool."""

    store: ObjectStore = InProcessStore()

    def __init__(
        self, config: TrainConfig, base: Path | None, weights: Path | None, parts: Sequence[str] = TRAINING_ROLES
    ) -> None:
        assert isinstance(config.placement, RayPlacement)
        self.parts = parts
        torch.set_num_threads(config.placement.cpus_of(parts[0]))
        on_gpu = resolve_device(config.model.device).type == "cuda"
        if config.training.deterministic and on_gpu:
            use_deterministic_algorithms()
        self.ranks = join_process_group(config.parallel, on_gpu) if is_launched() else SOLO
        sources = [*config.data.train, *config.data.validation]
        policy = roles.build_policy(config.model, sources, config.seed, base, self.ranks)
        if weights is not None:
            policy.load_weights(weights)
        self._build(config, base, policy, parts)
        if isinstance(config.algorithm.loss, Plugin):  # unpickling the user's loss needs its module
            load_plugin(config.algorithm.loss.name, base)
        self._delta, self._overlaps = config.placement.sync == "delta", config.rollout.source.name != "sync"
        self._engine_ranks = config.placement.engine_tensor
        self._publisher: Publisher | None = None
        self._link: WeightLink | None = None
        self._link_store: Any = None
        self._staged: dict[str, list[Content]] = {}

    def _build(self, config: TrainConfig, base: Path | None, policy: PolicyModel, parts: Collection[str]) -> None:
        """Build the roles, all from the policy at its start. Without the actor role the policy is not kept."""
        self.reference = roles.build_reference(config, policy, base, self.ranks) if REFERENCE in parts else None
        self.critic = roles.build_critic(config, policy, self.ranks) if CRITIC in parts else None
        self.process = build_process_reward_model(config, policy, base, self.ranks) if PROCESS in parts else None
        if ACTOR in parts:
            self.policy, self.learner = policy, roles.build_learner(config, policy, self.ranks)
            if self.reference is not None:
                self.learner.reference = self.reference.distribution
        own = policy if ACTOR in parts else self.critic or self.reference
        assert own is not None, "a pool only has roles that the run has"
        if (
            own is self.reference and self.reference.model is policy.module
        ):  # it uses the policy's module, which has no learner here to divide it
            parallelize_model(policy.module, self.ranks, config.parallel.offload)
        self._model: nn.Module = own.module if isinstance(own, PolicyModel) else own.model
        self.device = self.ranks.device or next(self._model.parameters()).device

    def _learner(self, role: str) -> Learner:
        if role == ACTOR:
            return self.learner
        part = self.critic if role == CRITIC else self.process
        assert part is not None
        return part.learner

    # --- learners --------------------------------------------------------------------------------------------------------

    @dispatch("broadcast", "list")
    def place(self) -> int:
        """Report the rank's data-parallel index."""
        return self.ranks.data_rank

    @dispatch("broadcast", "first")
    def about(self) -> dict[str, Any]:
        """Report dtype and kind of the roles."""
        return {
            "dtype": self.learner.dtype if ACTOR in self.parts else None,
            "restarts": self.reference is not None and self.reference.restarts,
            "is_policy": self.reference is not None and self.reference.is_policy,
        }

    @dispatch("sequences", "sequences")
    def outputs(self, role: str, batch: Batch, needs: Needs, mask: str) -> dict[str, Tensor]:
        """Compute log-probs or a critic's values under the current weights."""
        return self._learner(role).outputs(batch.to(self.device), needs, mask)

    @dispatch("sequences", "sequences")
    def update(
        self, role: str, batch: Batch, loss: Loss, lr_scale: float, also: tuple[Batch, Loss] | None, columns: bool
    ) -> Update:
        """Make one optimizer step."""
        second = None if also is None else (also[0].to(self.device), also[1])
        return self._learner(role).update(batch.to(self.device), loss, lr_scale, second, columns)

    @dispatch("broadcast", "list")
    def release(self, role: str) -> tuple[MeterReading, dict[str, float]]:
        """Free the gradients and report what the learner did."""
        self._learner(role).release()
        return self.read(role)

    @dispatch("broadcast", "nothing")
    def reset_optimizer(self, role: str) -> None:
        """Reset the optimizer's moments."""
        self._learner(role).reset_optimizer()

    @dispatch("broadcast", "list")
    def read(self, role: str) -> tuple[MeterReading, dict[str, float]]:
        """Report what the learner did and its memory since the last report."""
        found = self._learner(role).meter.read(), memory_metrics(self.device)
        reset_peak_memory(self.device)
        return found

    # --- reference -------------------------------------------------------------------------------------------------------

    @dispatch("sequences", "sequences")
    def reference_logprobs(self, batch: Batch) -> Tensor:
        """Compute log-probs under the reference."""
        assert self.reference is not None
        return self.reference.logprobs(batch.to(self.device))

    @dispatch("broadcast", "nothing")
    def after_update(self) -> None:
        """Move the reference after an update."""
        assert self.reference is not None
        self.reference.after_update(self.learner.model)

    @dispatch("broadcast", "first")
    def after_step(self, step: int) -> bool:
        """Move the reference after a step."""
        assert self.reference is not None
        return self.reference.after_step(self.learner.model, step)

    # --- process reward model --------------------------------------------------------------------------------------------

    @dispatch("sequences", "sequences")
    def process_prior(self, batch: Batch) -> Tensor:
        """Compute log-probs under the frozen start of the process reward model."""
        assert self.process is not None
        return self.process.prior(batch.to(self.device))

    # --- weight sync -------------------------------------------------------------------------------------------------------

    @dispatch("broadcast", "first")
    def publish(self, version: int, complete: bool) -> Publication | None:
        """Gather the weights and put them into the object store; the first rank returns the publication."""
        tensors = self._tensors(None if complete else self.learner.trained_names, complete)
        if not self._is_publisher(tensors):
            return None
        return self._weight_publisher().publish(version, tensors, as_delta=not complete, complete=complete)

    def _weight_publisher(self) -> Publisher:
        if self._publisher is None:
            trained, keeps_buckets = self.learner.trained_names, self._overlaps and not self._delta
            ranks, cut = self._engine_ranks, self._part_of_engine
            self._publisher = Publisher(self.store.put, trained, self._delta, keeps_buckets, num_parts=ranks, cut=cut)
        return self._publisher

    @dispatch("first", "first")
    def host_link(self) -> tuple[str, int]:
        """Open a store where the processes of a link meet; returns its address."""
        host = os.environ["MASTER_ADDR"]  # where the learner's own ranks met
        self._link_store = host_store(host)
        return host, int(self._link_store.port)

    @dispatch("broadcast", "list")
    def join_link(self, address: LinkAddress) -> bool:
        """Join the link to the engines; returns False if a process did not come."""
        module = self.policy.module
        assert isinstance(module, Decoder), "engines of several ranks have native decoders"
        sizes = {name: parameter.element_size() for name, parameter in module.named_parameters()}
        own = Member(gethostname(), learner_layout(module), sizes, list(self.learner.trained_names))
        self._link = None  # close the last one
        try:
            self._link = WeightLink(address, get_rank(), module.arch, module.lora, own)
        except RuntimeError as error:
            print(f"the link to the engines was not made: {error}", file=sys.stderr, flush=True)
        return self._link is not None

    @dispatch("broadcast", "first")
    def reshard(self, version: int, complete: bool) -> Publication:
        """Send each rank's part of the weights to the engines' ranks that need it."""
        assert self._link is not None, "opened before"
        self._weight_publisher().skip(version)
        module = self.policy.module
        reshard_parameters(module)
        plan = self._link.plan(complete)
        try:
            self._link.move(complete, dict(module.named_parameters()), {})
        except RuntimeError as error:  # engines that have not all blocks say so
            print(f"the link to the engines broke in version {version}: {error}", file=sys.stderr, flush=True)
        return Publication(
            version, (), is_complete=complete, num_parts=self._engine_ranks, moved_bytes=plan.moved_bytes
        )

    @dispatch("broadcast", "first")
    def publish_again(self) -> Publication | None:
        """Put the last published weights into the store again, for an engine that lost them."""
        names = parameter_names(self.policy.module)
        # With a delta or an overlapping source the publisher has its own copy of the trained weights, which have moved since.
        if self._delta or self._overlaps:
            names = [name for name in names if name not in self.learner.trained_names]
        tensors = self._tensors(names, complete=True)
        if not self._is_publisher(tensors):
            return None
        return self._weight_publisher().publish_again(tensors)

    def _tensors(self, names: Collection[str] | None, complete: bool) -> Iterator[tuple[str, Tensor]]:
        """The parameters in `names`, or all; if `complete`, also the 4-bit tensors, which are frozen."""
        yield from full_parameters(self.policy.module, names)
        yield from full_quantised_tensors(self.policy.module) if complete else ()

    def _part_of_engine(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """The part of a full tensor that a rank of an engine has."""
        module = self.policy.module
        assert isinstance(module, Decoder), "checked with the config"
        return rank_part(module.arch, module.lora, name, tensor, rank, self._engine_ranks)

    def _is_publisher(self, tensors: Iterator[tuple[str, Tensor]]) -> bool:
        """Whether this rank publishes. The other ranks iterate too, since gathering a tensor needs all ranks."""
        if not self.ranks.is_first:
            for _ in tensors:
                pass
        return self.ranks.is_first

    @dispatch("broadcast", "first")
    def score(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Compute log-probs of tokens after a prompt, at temperature 1."""
        packed = torch.tensor([*prompt, *tokens], device=self.device)
        written = torch.arange(len(packed), device=self.device) >= len(prompt)
        batch = Batch(packed, torch.tensor([0, len(packed)], device=self.device), {"action_mask": written})
        learner = self.learner
        found = batch_outputs(learner.model, batch, frozenset(), learner.packing, 1.0, ranks=self.ranks)["logp"]
        return [float(value) for value in found[written]]

    # --- checkpoints -----------------------------------------------------------------------------------------------------

    def _part(self, what: str) -> Any:
        """The object whose files a checkpoint holds under this name."""
        part = {REFERENCE: self.reference, CRITIC: self.critic, PROCESS: self.process}.get(what)
        assert what == ACTOR or part is not None
        return self.learner if what == ACTOR else part

    @dispatch("broadcast", "list")
    def stage(self, what: str, in_memory: bool) -> bool:
        """Stage the files of a checkpoint; reports whether there was too little memory for a copy."""
        stage = HostCopy() if in_memory else keep_in_place
        part: Any = self.policy if what == POLICY else self._part(what)
        self._staged[what] = part.contents(stage)
        wait_for_devices()
        return isinstance(stage, HostCopy) and stage.is_short

    @dispatch("broadcast", "list", lane="side")
    def write(self, what: str, folder: Path) -> Checksums:
        """Write the staged files into the checkpoint's folder."""
        contents = self._staged.pop(what)
        # If every rank has the whole model, only the first one writes.
        is_divided = writer_rank_of(self._model).count > 1
        return write_contents(folder, contents) if is_divided or self.ranks.is_first else {}

    @dispatch("broadcast", "list")
    def load(self, what: str, folder: Path) -> int:
        """Load a part of a checkpoint; returns the number of updates made before it."""
        if what == POLICY:
            self.policy.load_weights(folder)
            return 0
        part = self._part(what)
        part.load(folder)
        return self._learner(what).updates if what != REFERENCE else 0


class RolloutWorker:
    """An engine with its own copy of the weights, which come from the trainer before anything is sampled."""

    store: ObjectStore = InProcessStore()

    def __init__(self, config: TrainConfig, base: Path | None) -> None:
        assert isinstance(config.placement, RayPlacement)
        torch.set_num_threads(config.placement.cpus_of(ROLLOUT))
        if config.training.deterministic and resolve_device(config.model.device).type == "cuda":
            use_deterministic_algorithms()
        sources, rollout = [*config.data.train, *config.data.validation], config.rollout
        # vLLM and SGLang have weights of their own. The policy here is a copy in host memory, from which they are sent.
        model = (
            config.model.model_copy(update={"device": "cpu"}) if engine_builder.is_foreign(rollout) else config.model
        )
        self.policy = roles.build_policy(model, sources, config.seed, base)
        self.policy.module.requires_grad_(False)
        engine_builder.set_expert_recording(config, self.policy)
        self.server: ServerProcess | None = None
        if config.placement.server is not None:
            timeout_s = config.placement.timeout_s
            self.server, rollout = start_server(config.placement.server, self.policy, rollout, timeout_s)
        self.thread = EngineThread(engine_builder.build_engine(self.policy, rollout))
        self.probe = probe_request(self.policy.tokenizer.vocab_size, self.policy.max_positions)
        self.version: int | None = None
        self._taken: list[str] = []

    @dispatch("each", "nothing")
    def submit(self, requests: PackedRequests) -> None:
        """Queue requests."""
        self.thread.submit(unpack_requests(requests))

    @dispatch("each", "list", lane="side")
    def collect(self, at_least: int, wait_s: float) -> PackedCompletions:
        """Return completions."""
        try:
            return pack_completions(self.thread.collect(at_least, wait_s))
        except UserError as error:
            if self.server is not None and self.server.has_ended(SERVER_END_S):
                print(f"this process ends, since its server has ended: {error}", file=sys.stderr, flush=True)
                os._exit(1)  # the driver starts both again
            raise

    @dispatch("each", "list")
    def abort(self, numbers: Sequence[int]) -> PackedCompletions:
        """Abort requests."""
        return pack_completions(self.thread.abort([str(number) for number in numbers]))

    @dispatch("broadcast", "list")
    def take(self, publication: Publication) -> EngineReport:
        """Load new weights and prove that they arrived."""
        if publication.base is not None and publication.base != self.version:
            raise RuntimeError(
                f"a delta from version {publication.base} does not apply to an engine with version {self.version}"
            )
        weights = self._weights()

        def write(engine: Engine) -> None:
            weight_sync.apply_publication(publication, weights, self.store.get)
            engine.load(publication.version, ())

        self.thread.do(write)
        self.version = publication.version
        self._taken = list(weights if publication.is_complete else publication.checksums)
        shown = self.thread.begin(self._show)
        found = digest(self.checksums())  # computed while the engine runs the probe
        return EngineReport(self.version, found, *self.thread.wait(shown))

    def _show(self, engine: Engine) -> tuple[tuple[int, ...], np.ndarray]:
        """The engine's continuation of the probe, and its log-probs."""
        engine.submit([self.probe])
        done: list[Completion] = []
        while not done:  # a stream may be interrupted
            done = list(engine.stream())
        return tuple(done[0].tokens.tolist()), done[0].logp

    @dispatch("broadcast", "list")
    def checksums(self) -> dict[str, int]:
        """Report checksums of the tensors loaded last."""
        weights = self._weights()
        return {name: checksum(weights[name]) for name in self._taken}

    def _weights(self) -> dict[str, Tensor]:
        """All tensors that the engine multiplies by, in any type, by name."""
        module = self.policy.module
        return dict[str, Tensor](module.named_parameters()) | quantised_tensors(module)

    @dispatch("broadcast", "list")
    def sleep(self) -> None:
        """Free the engine's memory until its next request."""
        self.thread.do(lambda engine: engine.sleep())
