"""Sampling from the base model and from the weights that clients saved, with one engine for each kind of adapter.

The engines of all adapters read the same base tensors. An engine has one set of adapter tensors, whose addresses never change:
other weights of the same kind are copied into them when the engine is idle. Requests for the same weights are batched; requests
for different weights run one after the other. Only one engine holds a cache at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.config.rollout import Rollout
from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.distributed.engine_builder import build_engine
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.serve.request_to_engine import TokenScorer
from burnish.serve.tinker.checkpoints import saved_at
from burnish.serve.tinker.prompt_scoring import ScoredPrompt, score_prompts, scored_prompt
from burnish.serve.tinker.requests import BadRequest, Sample, SamplingParams, text_tokens
from burnish.serve.tinker.responses import NO_LOGPROB, Failure, Result, SampledSequence, SampleOutput, TopTable
from burnish.serve.tinker.training_model import Weights, new_module

Kind = tuple[object, ...]


@dataclass(eq=False)
class SamplerWeights:
    """Weights to sample from: the base model, a snapshot in memory, or a checkpoint on disk."""

    form: Literal["base", "adapter", "full"] = "base"
    lora: Lora | None = None
    tensors: Weights | None = None
    directory: Path | None = None
    saved_at: str | None = None
    """When the checkpoint in `directory` was saved."""

    @property
    def kind(self) -> Kind:
        """Weights of one kind use the same engine."""
        return (self.form,) if self.lora is None else (self.form, self.lora.rank, self.lora.projections)


@dataclass(eq=False)
class SampleJob:
    """A sampling request. `finish` is called once, with its result or the reason why it has none."""

    id: str
    asked: Sample
    weights: SamplerWeights
    finish: Callable[[Result], None]
    seed: int
    prompt: ScoredPrompt | None = None
    options: SamplingOptions = field(default_factory=SamplingOptions)
    completions: dict[int, Completion] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(eq=False)
class EngineSlot:
    """An engine for one kind of weights, and the weights that it has now."""

    policy: PolicyModel
    module: Decoder
    engine: Engine
    weights: SamplerWeights | None = None


class SamplerPool:
    """The engines. Used on the worker's thread only."""

    def __init__(self, base: PolicyModel, rollout: Rollout, token_budget: int) -> None:
        self.base, self.rollout, self.token_budget = base, rollout, token_budget
        self.slots: dict[Kind, EngineSlot] = {}
        self.version = 0
        self.is_stopping = False

    def run(self, jobs: Sequence[SampleJob], take_more: Callable[[], Sequence[SampleJob]]) -> None:
        """Sample for jobs of the same weights, and for those that `take_more` returns meanwhile, until all are finished.

        If this raises, the engine is discarded, and jobs without a result have to be failed by the caller.
        """
        weights = jobs[0].weights
        try:
            slot = self.slot_with(weights)
            running: dict[str, SampleJob] = {}
            self._begin(slot, jobs, running)
            while running and not self.is_stopping:
                for completion in slot.engine.stream():
                    job_id, _, index = completion.id.rpartition("#")
                    job = running[job_id]
                    job.completions[int(index)] = completion
                    if len(job.completions) == job.asked.num_samples:
                        del running[job_id]
                        job.finish(self._result(slot, job))
                    self._change(slot, take_more(), running)
                # The stream has ended by `interrupt`, or because no request is left.
                self._change(slot, take_more(), running)
        except Exception:
            self.slots.pop(weights.kind, None)
            raise

    def interrupt(self) -> None:
        """Make `run` look for new and cancelled jobs after the engine's present step, from any thread."""
        for slot in list(self.slots.values()):
            slot.engine.interrupt()

    def stop(self) -> None:
        """Make `run` return after the engine's present step, from any thread. Unfinished jobs are left without a result."""
        self.is_stopping = True
        self.interrupt()

    def slot_with(self, weights: SamplerWeights) -> EngineSlot:
        """The engine of the weights' kind with these weights. The caches of other engines are freed."""
        slot = self.slots.get(weights.kind)
        for other in self.slots.values():
            if other is not slot:
                other.engine.sleep()
        if slot is None:
            slot = self.slots[weights.kind] = self._new_slot(weights)
        if slot.weights is not weights:
            if weights.directory is not None and saved_at(weights.directory) != weights.saved_at:
                raise BadRequest(
                    f"the checkpoint {weights.directory} was replaced or deleted since this sampler was made; make another sampler"
                )
            self.version += 1
            slot.weights = None  # until the copy is complete
            slot.engine.load(self.version, (weights.tensors or {}).items())
            if weights.directory is not None:
                slot.policy.load_weights(weights.directory)
                slot.engine.load(self.version, ())
            slot.weights = weights
        slot.engine.wake()
        return slot

    def _new_slot(self, weights: SamplerWeights) -> EngineSlot:
        base = self.base
        assert isinstance(base.module, Decoder), "checked when the server started"
        module = base.module if weights.form == "base" else new_module(base, weights.lora, 0).requires_grad_(False)
        policy = PolicyModel(module, base.tokenizer, base.source, "")
        return EngineSlot(policy, module, build_engine(policy, self.rollout))

    def _change(self, slot: EngineSlot, new: Iterable[SampleJob], running: dict[str, SampleJob]) -> None:
        """Begin new jobs, and end those that were cancelled."""
        self._begin(slot, new, running)
        self._abort(slot, [job for job in running.values() if job.is_cancelled], running)

    def _begin(self, slot: EngineSlot, jobs: Iterable[SampleJob], running: dict[str, SampleJob]) -> None:
        """Score the prompts of jobs and submit their requests. A job that cannot run is finished with the reason."""
        ready = []
        for job in jobs:
            if job.is_cancelled:
                job.finish(Failure("the request was cancelled", "user"))
                continue
            try:
                self._prepare(slot, job)
                slot.engine.submit(engine_requests(job))
            except (BadRequest, UserError) as error:
                job.finish(Failure(str(error), "user"))
                continue
            running[job.id] = job
            ready.append(job)
        score_prompts(slot.module, [job.prompt for job in ready if job.prompt is not None], self.token_budget)

    def _prepare(self, slot: EngineSlot, job: SampleJob) -> None:
        asked, arch = job.asked, slot.module.arch
        tokens = text_tokens(asked.prompt.chunks)
        if asked.record_stability_info:
            raise BadRequest(
                "record_stability_info is not served here: only the loss stable_reinforce, which is not either, reads it"
            )
        room = arch.max_positions - len(tokens)
        if not tokens or room < 1:
            raise BadRequest(
                f"the prompt has {len(tokens)} tokens; expected 1 to {arch.max_positions - 1}, since the model has "
                f"{arch.max_positions} positions"
            )
        job.options = sampling_options(asked.sampling_params, room, self.base.tokenizer.eos_ids)
        job.prompt = scored_prompt(asked, tokens, arch.vocab_size, job.seed)

    def _result(self, slot: EngineSlot, job: SampleJob) -> Result:
        assert job.prompt is not None, "made when the job began"
        completions = [job.completions[index] for index in range(job.asked.num_samples)]
        if any(not np.isfinite(completion.logp).all() for completion in completions):
            return Failure("the model computed log-probs that are not numbers; serve it with a wider --dtype", "server")
        sequences = [
            SampledSequence(
                np.asarray(completion.tokens, np.int64),
                np.asarray(completion.logp, np.float32),
                "stop" if completion.finish == "stop" else "length",
                self._top(slot, job, completion) if job.asked.topk_sample_logprobs else None,
            )
            for completion in completions
        ]
        return SampleOutput(sequences, job.prompt.result())

    def _top(self, slot: EngineSlot, job: SampleJob, completion: Completion) -> TopTable:
        """The likeliest tokens at each sampled position, under the distribution that was sampled from."""
        assert job.prompt is not None
        k, size = job.asked.topk_sample_logprobs, len(completion.tokens)
        tokens = [*job.prompt.tokens, *completion.tokens.tolist()]
        rows = TokenScorer(slot.module).score(tokens, len(job.prompt.tokens), k, job.options).top
        table = TopTable(np.zeros((size, k), np.int64), np.full((size, k), NO_LOGPROB, np.float32))
        for position, row in enumerate(rows):
            for column, (token, logp) in enumerate(row):
                table.tokens[position, column], table.logprobs[position, column] = token, logp
        return table

    def _abort(self, slot: EngineSlot, jobs: Sequence[SampleJob], running: dict[str, SampleJob]) -> None:
        for job in jobs:
            left = [i for i in range(job.asked.num_samples) if i not in job.completions]
            slot.engine.abort([f"{job.id}#{index}" for index in left], keep=False)
            del running[job.id]
            job.finish(Failure("the request was cancelled", "user"))


def engine_requests(job: SampleJob) -> list[Request]:
    """The engine's requests of a job, one for each sample. Equal seeds give equal samples."""
    assert job.prompt is not None, "made when the job began"
    tokens = tuple(job.prompt.tokens)
    return [
        Request(f"{job.id}#{index}", tokens, job.options, fold("tinker sample", job.seed, index))
        for index in range(job.asked.num_samples)
    ]


def sampling_options(params: SamplingParams, room: int, eos_ids: tuple[int, ...]) -> SamplingOptions:
    """The engine's options. Without `max_tokens` a sample may fill the model's positions."""
    given: list[str] | list[int] = [params.stop] if isinstance(params.stop, str) else params.stop or []
    stop = [one for one in given if isinstance(one, str)]
    stop_tokens = [one for one in given if isinstance(one, int)]
    if params.stop != []:
        stop_tokens += eos_ids
    if "" in stop:
        raise BadRequest("stop has an empty string, which every text contains")
    return SamplingOptions(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        max_tokens=room if params.max_tokens is None else params.max_tokens,
        stop_tokens=tuple(stop_tokens),
        stop=tuple(stop),
    )
