"""The state of the training API: sessions, models and samplers. Requests become tasks of the worker, with a future each.

Methods run on the event loop; what touches weights runs on the worker's thread. A request that is refused after its model is known
gets a future that fails, since the numbers of a model's requests must not have a gap.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from burnish.config.model import Lora
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.serve.tinker.checkpoints import Checkpoint, CheckpointStore, Folder, ModelDescription
from burnish.serve.tinker.futures import GAP_S, Futures, OrderedTask, RequestOrder
from burnish.serve.tinker.requests import (
    AdamOptions,
    BadRequest,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    ForwardBackward,
    LoadWeights,
    LoraOptions,
    OptimizerOptions,
    OptimStep,
    Sample,
    SaveWeights,
)
from burnish.serve.tinker.responses import Failure, JsonResult, Result
from burnish.serve.tinker.sampler import SampleJob, SamplerWeights
from burnish.serve.tinker.state import (
    MAX_SNAPSHOTS,
    NO_UNEMBEDDING,
    ModelEntry,
    NotFound,
    SamplerEntry,
    Session,
    check_optimizer,
    lora_of,
)
from burnish.serve.tinker.training_model import TrainingModel
from burnish.serve.tinker.worker import Task, Worker


@dataclass
class TinkerService:
    """Sessions, models and samplers of one base model."""

    name: str
    base: PolicyModel
    worker: Worker
    store: CheckpointStore
    token_budget: int
    tokenizer_id: str | None
    """Where clients on this machine find the tokenizer; None if they must find it by the model's name."""
    aliases: frozenset[str] = frozenset()
    """Other names of the base model."""
    session_timeout_s: float = 3600.0
    gap_s: float = GAP_S
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.futures = Futures(self.clock)
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, ModelEntry] = {}
        self.samplers: dict[str, SamplerEntry] = {}
        self.jobs: dict[str, SampleJob] = {}
        self.base_weights = SamplerWeights()

    @property
    def decoder(self) -> Decoder:
        """The base model."""
        assert isinstance(self.base.module, Decoder), "checked when the server started"
        return self.base.module

    # --- sessions --------------------------------------------------------------------------------------------------------

    def create_session(self, asked: CreateSession) -> dict[str, Any]:
        """Open a session."""
        session = Session(str(uuid.uuid4()), self.clock(), asked.user_metadata or {}, asked.display_name)
        self.sessions[session.id] = session
        return {"type": "create_session", "session_id": session.id, "warning_message": NO_UNEMBEDDING}

    def heartbeat(self, session_id: str) -> dict[str, Any]:
        """Note that a client is there."""
        self.session(session_id)
        return {"type": "session_heartbeat"}

    def session(self, session_id: str) -> Session:
        """A session of a client that is there."""
        found = self.sessions.get(session_id)
        if found is None:
            raise NotFound(f"there is no session {session_id}: it has ended, or the server was started again")
        found.last_seen = self.clock()
        return found

    def end_lost_sessions(self) -> list[str]:
        """Drop the sessions of clients that have not been heard of, with their models and unnamed samplers; returns their ids."""
        limit = self.clock() - self.session_timeout_s
        lost = [session for session in self.sessions.values() if session.last_seen < limit]
        for session in lost:
            for model_id in session.model_ids:
                self._drop_model(model_id, Failure(f"the session {session.id} has ended", "user"))
            for sampler_id in session.sampler_ids:
                self.samplers.pop(sampler_id, None)
            self.futures.drop_session(session.id)
            del self.sessions[session.id]
        return [session.id for session in lost]

    # --- models ----------------------------------------------------------------------------------------------------------

    def create_model(self, asked: CreateModel) -> dict[str, Any]:
        """Make a model with new adapters, or with a copy of all weights."""
        session = self.session(asked.session_id)
        model_id = f"{session.id}:train:{asked.model_seq_id}"
        request_id = f"{model_id}:0"
        if request_id in self.futures or model_id in self.models:  # sent again: its answer was lost
            return self._future(request_id, model_id)
        try:
            self._check_base(asked.base_model)
            check_optimizer(asked.optimizer_config)
            lora = None if asked.lora_config is None else lora_of(asked.lora_config)
        except BadRequest as error:
            return self._failed(request_id, session.id, model_id, error)
        options = asked.lora_config or LoraOptions(rank=1)
        description = ModelDescription(
            self.name,
            None if lora is None else lora.model_dump(),
            options.train_attn,
            options.train_mlp,
            options.train_unembed,
            asked.user_metadata or {},
        )
        seed = options.seed if options.seed is not None else secrets.randbits(62)
        entry = self._add_model(session, model_id, description)

        def make() -> Result:
            entry.model = TrainingModel(self.base, lora, seed, self.token_budget)
            return JsonResult({"type": "create_model", "model_id": model_id})

        what = "all weights" if lora is None else f"rank {lora.rank}"
        return self._start(request_id, session.id, model_id, f"create_model  {model_id}, {what}", make)

    def forward_backward(self, asked: ForwardBackward) -> dict[str, Any]:
        """Add the gradient of a loss, or compute log-probs only."""
        entry = self.model(asked.model_id)

        def run() -> Result:
            return entry.require().forward_backward(asked.data, asked.loss_fn, asked.config, asked.forward_only)

        name = "forward" if asked.forward_only else "forward_backward"
        num_tokens = sum(len(datum.tokens) for datum in asked.data)
        label = f"{name}  {entry.id} #{asked.seq_id}, {asked.loss_fn}, {len(asked.data)} sequences, {num_tokens} tokens"
        return self._ordered(entry, asked.seq_id, label, run)

    def optim_step(self, asked: OptimStep) -> dict[str, Any]:
        """One step of AdamW."""
        entry = self.model(asked.model_id)

        def run() -> Result:
            if asked.optimizer_params is not None:
                check_optimizer(OptimizerOptions.model_validate(asked.optimizer_params))
            return JsonResult({"metrics": entry.require().optim_step(asked.adam_params or AdamOptions())})

        return self._ordered(entry, asked.seq_id, f"optim_step  {entry.id} #{asked.seq_id}", run)

    def save_weights(self, asked: SaveWeights, folder: Folder) -> dict[str, Any]:
        """Save a checkpoint under a name; unnamed sampler weights stay in memory and get a sampler at once."""
        entry = self.model(asked.model_id)
        is_state = folder == "weights"

        def run() -> Result:
            if asked.path is None and is_state:
                raise BadRequest("save_weights needs a path, the name of the checkpoint")
            if asked.path is None:
                return self._snapshot(entry, asked)
            saved = self.store.save(
                entry.id,
                folder,
                asked.path,
                entry.require().contents(with_optimizer=is_state),
                entry.description,
                asked.ttl_seconds,
                asked.user_metadata,
                asked.overwrite,
            )
            kind = "save_weights" if is_state else "save_weights_for_sampler"
            return JsonResult({"type": kind, "path": saved.path})

        label = f"save {folder}  {entry.id} #{asked.seq_id}, {asked.path or 'in memory'}"
        return self._ordered(entry, asked.seq_id, label, run)

    def _snapshot(self, entry: ModelEntry, asked: SaveWeights) -> Result:
        """Copy the present weights for a sampler (on the worker's thread). The oldest copy beyond MAX_SNAPSHOTS is dropped."""
        model = entry.require()
        # A number of the model's own would be that of another model's sampler, too.
        number = uuid.uuid4() if asked.sampling_session_seq_id is None else asked.sampling_session_seq_id
        sampler_id = f"{entry.session_id}:sample:{number}"
        weights = SamplerWeights("full" if model.lora is None else "adapter", model.lora, model.snapshot())

        def register() -> None:
            session = self.sessions.get(entry.session_id)
            if session is None:
                return
            self.samplers[sampler_id] = SamplerEntry(weights)
            session.sampler_ids.append(sampler_id)
            entry.snapshots.append(sampler_id)
            while len(entry.snapshots) > MAX_SNAPSHOTS:
                oldest = entry.snapshots.popleft()
                self.samplers.pop(oldest, None)
                session.sampler_ids.remove(oldest)

        assert self.futures.loop is not None, "set when the server starts"
        # Before the result is set, which goes the same way: a client knows the sampler when it is registered.
        self.futures.loop.call_soon_threadsafe(register)
        return JsonResult({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

    def load_weights(self, asked: LoadWeights) -> dict[str, Any]:
        """Load a checkpoint into a model, or into a new one of the checkpoint's kind."""
        if asked.model_id is None:
            return self._create_from_checkpoint(asked)
        entry = self.model(asked.model_id)

        def run() -> Result:
            found = self.store.find(asked.path)
            self._check_checkpoint(found, entry.description.adapters, asked.optimizer)
            entry.require().load(found.directory, asked.optimizer)
            return JsonResult({"type": "load_weights", "path": found.path, "model_id": entry.id})

        return self._ordered(entry, asked.seq_id, f"load_weights  {entry.id} #{asked.seq_id}, {asked.path}", run)

    def _create_from_checkpoint(self, asked: LoadWeights) -> dict[str, Any]:
        if asked.session_id is None or asked.model_seq_id is None:
            raise BadRequest("load_weights needs a model_id, or a session_id with a model_seq_id")
        session = self.session(asked.session_id)
        model_id = f"{session.id}:train:{asked.model_seq_id}"
        request_id = f"{model_id}:0"
        if request_id in self.futures or model_id in self.models:  # sent again: its answer was lost
            return self._future(request_id, model_id)
        try:
            found = self.store.find(asked.path)
            lora = found.model.adapters
            self._check_checkpoint(found, lora, asked.optimizer)
            check_optimizer(asked.optimizer_config or OptimizerOptions())
        except BadRequest as error:
            return self._failed(request_id, session.id, model_id, error)
        described = ModelDescription(**{**vars(found.model), "user_metadata": asked.user_metadata or {}})
        entry = self._add_model(session, model_id, described)

        def make() -> Result:
            model = TrainingModel(self.base, lora, 0, self.token_budget)
            model.load(found.directory, asked.optimizer)
            entry.model = model
            return JsonResult({"type": "load_weights", "path": found.path, "model_id": model_id})

        return self._start(request_id, session.id, model_id, f"load_weights  {model_id}, {asked.path}", make)

    def get_info(self, model_id: str) -> dict[str, Any]:
        """Describe a model."""
        entry = self.model(model_id)
        lora = entry.description.adapters
        return {
            "type": "get_info",
            "model_id": entry.id,
            "model_name": self.name,
            "is_lora": lora is not None,
            "lora_rank": None if lora is None else lora.rank,
            "model_data": {
                "arch": self.decoder.arch.family,
                "model_name": self.name,
                "tokenizer_id": self.tokenizer_id,
            },
        }

    def unload_model(self, model_id: str) -> dict[str, Any]:
        """Free a model when the tasks before it are done. Its checkpoints stay."""
        entry = self.model(model_id)
        self._drop_model(model_id, Failure(f"the model {model_id} was unloaded", "user"))

        def run() -> Result:
            entry.model = None
            return JsonResult({"type": "unload_model", "model_id": model_id})

        return self._start(f"{model_id}:unload", entry.session_id, model_id, f"unload_model  {model_id}", run)

    def refuse(self, model_id: str, seq_id: int | None, error: BadRequest) -> dict[str, Any]:
        """A future that fails, for a request that could not be read but for its model and number."""
        entry = self.model(model_id)

        def run() -> Result:
            raise error

        return self._ordered(entry, seq_id, f"refused  {entry.id} #{seq_id}", run)

    def model(self, model_id: str) -> ModelEntry:
        """A model by its id."""
        entry = self.models.get(model_id)
        if entry is None:
            raise NotFound(
                f"there is no model {model_id}: it was unloaded, its session has ended, or the server was started again"
            )
        self.session(entry.session_id)
        entry.last_request = time.time()
        return entry

    def _add_model(self, session: Session, model_id: str, description: ModelDescription) -> ModelEntry:
        entry = ModelEntry(model_id, session.id, description, RequestOrder(model_id, self.gap_s))
        self.models[model_id] = entry
        session.model_ids.append(model_id)
        return entry

    def _drop_model(self, model_id: str, failure: Failure) -> None:
        entry = self.models.pop(model_id, None)
        if entry is not None:
            entry.order.close(failure)

    def _check_base(self, name: str) -> None:
        if name not in {self.name, *self.aliases}:
            raise BadRequest(f"this server has the base model {self.name}, not {name}; it is named with --name")

    def _check_checkpoint(self, found: Checkpoint, lora: Lora | None, needs_optimizer: bool = False) -> None:
        """Refuse weights of another base or kind, and an optimizer's state where there is none."""
        self._check_base(found.model.base_model)
        if needs_optimizer and found.folder != "weights":
            raise BadRequest(
                f"{found.path} has no optimizer state, which only save_state saves; load it without the optimizer"
            )
        if found.model.adapters != lora:
            kinds = [
                ("all weights" if one is None else f"adapters of rank {one.rank} on {', '.join(one.projections)}")
                for one in (found.model.adapters, lora)
            ]
            raise BadRequest(f"{found.path} has {kinds[0]}, and the model has {kinds[1]}")

    # --- sampling --------------------------------------------------------------------------------------------------------

    def create_sampling_session(self, asked: CreateSamplingSession) -> dict[str, Any]:
        """A sampler of saved weights, or of the base model."""
        session = self.session(asked.session_id)
        sampler_id = f"{session.id}:sample:{asked.sampling_session_seq_id}"
        if sampler_id not in self.samplers:
            self.samplers[sampler_id] = self._sampler(asked.model_path, asked.base_model)
            session.sampler_ids.append(sampler_id)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _sampler(self, path: str | None, base_model: str | None) -> SamplerEntry:
        if base_model is not None:
            self._check_base(base_model)
        if path is None:
            if base_model is None:
                raise BadRequest("name a base_model or a model_path to sample from")
            return SamplerEntry(self.base_weights)
        found = self.store.find(path)
        lora = found.model.adapters
        self._check_checkpoint(found, lora)
        # Samplers of one checkpoint share their weights, so that their requests are batched.
        for other in self.samplers.values():
            if (other.path, other.saved_at) == (found.path, found.time):
                return SamplerEntry(other.weights, found.path, found.time)
        weights = SamplerWeights("full" if lora is None else "adapter", lora, None, found.directory, found.time)
        return SamplerEntry(weights, found.path, found.time)

    def sampler(self, sampler_id: str) -> SamplerEntry:
        """A sampler by its id."""
        found = self.samplers.get(sampler_id)
        if found is None:
            raise NotFound(
                f"there is no sampler {sampler_id}: its session has ended, or {MAX_SNAPSHOTS} newer ones of its model were made since "
                "(give weights a name to keep them)"
            )
        return found

    def sample(self, asked: Sample) -> dict[str, Any]:
        """Queue a sampling request."""
        if asked.sampling_session_id is not None:
            entry = self.sampler(asked.sampling_session_id)
            session_id = asked.sampling_session_id.rpartition(":sample:")[0]
            self.session(session_id)  # a client that only samples is there, too
            request_id = f"{asked.sampling_session_id}:{uuid.uuid4() if asked.seq_id is None else asked.seq_id}"
        else:
            entry, session_id, request_id = self._sampler(asked.model_path, asked.base_model), "", str(uuid.uuid4())
        ids = [f"{request_id}#{index}" for index in range(asked.num_samples)]
        if request_id not in self.futures:
            self.futures.begin(request_id, session_id)
            seed = asked.sampling_params.seed
            job = SampleJob(
                request_id,
                asked,
                entry.weights,
                partial(self._end_job, request_id),
                secrets.randbits(62) if seed is None else seed & (1 << 63) - 1,
            )
            self.jobs[request_id] = job
            self.worker.put(job)
        return {"request_id": request_id, "sample_sequence_ids": ids}

    def _end_job(self, request_id: str, result: Result) -> None:
        """Set the result of a sampling request, on the worker's thread."""
        self.futures.resolve(request_id, result)
        assert self.futures.loop is not None, "set when the server starts"
        self.futures.loop.call_soon_threadsafe(self.jobs.pop, request_id, None)

    def cancel(self, request_id: str) -> None:
        """Stop a sampling request; one that has ended is left alone."""
        job = self.jobs.get(request_id)
        if job is not None:
            job.is_cancelled = True
            self.worker.pool.interrupt()

    # --- tasks and futures -----------------------------------------------------------------------------------------------

    def _ordered(self, entry: ModelEntry, seq_id: int | None, label: str, run: Callable[[], Result]) -> dict[str, Any]:
        """Queue a task behind the model's earlier requests. A request that is sent again gets the same future."""
        if seq_id is not None and seq_id < 1:
            raise BadRequest(f"seq_id is {seq_id}; the first request of a model has 1")
        request_id = f"{entry.id}:{uuid.uuid4() if seq_id is None else seq_id}"
        if seq_id is not None and entry.order.is_known(seq_id):
            return self._future(request_id, entry.id)
        self.futures.begin(request_id, entry.session_id)
        finish = partial(self.futures.resolve, request_id)
        task = Task(label, run, finish)
        entry.order.put(seq_id, OrderedTask(lambda: self.worker.put(task), finish))
        return self._future(request_id, entry.id)

    def _start(
        self, request_id: str, session_id: str, model_id: str, label: str, run: Callable[[], Result]
    ) -> dict[str, Any]:
        self.futures.begin(request_id, session_id)
        self.worker.put(Task(label, run, partial(self.futures.resolve, request_id)))
        return self._future(request_id, model_id)

    def _failed(self, request_id: str, session_id: str, model_id: str, error: BadRequest) -> dict[str, Any]:
        self.futures.begin(request_id, session_id)
        self.futures.resolve(request_id, Failure(str(error), "user"))
        return self._future(request_id, model_id)

    def _future(self, request_id: str, model_id: str) -> dict[str, Any]:
        return {"request_id": request_id, "model_id": model_id}
