"""`Policy`: a model that samples, searches, scores its samples' tokens and learns, for training loops of your own.

    policy = burnish.Policy.load("models/qwen", optimizer={"lr": 1e-6})
    samples = policy.sample(["2+3="], n=8, max_tokens=16)
    for sample in samples:
        sample.reward = float(sample.completion == "5")
    batch = burnish.pack(samples)
    policy.update(batch.with_sequence(advantages=batch.sequence["reward"] - batch.sequence["reward"].mean()), "dr_grpo", horizon=16)

It is made of the parts that `burnish train` is made of: the same engine, the same random keys, the same learner and losses.
`examples/grpo_loop.py` is GRPO with it, and a test holds that to the numbers of `burnish train`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from burnish.algorithms.losses.off_policy_spec import SecondMomentClip
from burnish.algorithms.losses.policy_loss import Loss, PolicyLoss
from burnish.algorithms.terms.loss_terms import sequence_aggregation_weights
from burnish.algorithms.terms.spec import Aggregation
from burnish.cli.eval import Progress as ProgressLine
from burnish.cli.main import print_note
from burnish.config.data import Data, Source, Template
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.loading import algorithm_from_preset, load_tree
from burnish.config.model import Model, Optimizer
from burnish.config.records import Record
from burnish.config.rollout import Rollout
from burnish.core.batch import Batch
from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.images import content_digest
from burnish.data.media_columns import inline_media
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.data.row import Message, Row
from burnish.data.row_formats import prompt_columns, prompt_row
from burnish.data.template import render, template_kind
from burnish.distributed.engine_builder import build_engine
from burnish.evaluation.evaluate import make_driver
from burnish.evaluation.model_source import find_model, sampling_model
from burnish.evaluation.settings import TASK_PREFIX
from burnish.evaluation.strategies.solve_settings import (
    DEFAULT_READER,
    check_strategy,
    reader_reward,
    solve_settings,
)
from burnish.evaluation.strategies.solving import Solution, SolveProgress, solve_prompts
from burnish.models.policy import PolicyModel, load_policy
from burnish.rollout.runner import RolloutRunner
from burnish.trainers.minibatches import build_policy_loss, with_answer_ids, with_second_moment_mask
from burnish.training.learner import Learner

PromptLike = str | Sequence[Message] | Mapping[str, Any] | PromptSample
"""A prompt: a text, messages, a row of data, or a draw of `Policy.prompts`."""
Prompts = str | Mapping[str, Any] | PromptSample | Sequence[PromptLike]
"""One prompt or several."""
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation.model_fields["name"].annotation)
LossLike = str | Loss | Callable[..., Tensor]
"""A preset's name, a loss record, or a function `loss(logp, old_logp, advantages)` with one value per token."""


class PolicyOptions(Record):
    """The sections of a config that a policy has."""

    model: Model = Model()
    optimizer: Optimizer = Optimizer()
    template: Template = Template()


class Policy:
    """A model with an engine that samples from its weights, and a learner that changes them."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: Optimizer,
        template: Template,
        seed: int = 0,
        temperature: float = 1.0,
        total_updates: int | None = None,
        token_budget: int = 8192,
        max_rows: int = 256,
    ) -> None:
        """Use `Policy.load`, which describes the arguments."""
        is_share = isinstance(optimizer.warmup, float) and optimizer.warmup > 0
        if (optimizer.schedule != "constant" or is_share) and total_updates is None:
            raise UserError(
                f"optimizer.schedule={optimizer.schedule} with warmup={optimizer.warmup} depends on the last update: give total_updates"
            )
        self._model, self._optimizer, self.template = model, optimizer, template
        self.tokenizer, self.seed, self.temperature = model.tokenizer, seed, temperature
        self._total_updates, self._token_budget, self._max_rows = total_updates or 1, token_budget, max_rows
        self._visits: dict[str, int] = {}

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        optimizer: Mapping[str, Any] | None = None,
        template: Mapping[str, Any] | None = None,
        seed: int = 0,
        temperature: float = 1.0,
        total_updates: int | None = None,
        token_budget: int = 8192,
        max_rows: int = 256,
        **model: Any,
    ) -> Policy:
        """Load a Hugging Face directory, a PEFT adapter, or the best checkpoint of a run.

        `optimizer` and `template` are the sections of a recipe, `model` the keys of its section `model` (dtype, device, backend, lora, vision, image_pixels).
        Without `template`, a run's own is used.
        `temperature` is that of the samples: log-probs and losses are computed at it. `total_updates` is the length of a learning-rate
        schedule. `token_budget` limits a micro-batch, and `max_rows` the sequences that are decoded at once.
        """
        source = find_model(Path(path), print_note)
        of_run = source.config.get("template") or source.config.get("data", {}).get("template")
        sections = {"model": model, "optimizer": optimizer or {}, "template": template or of_run or {}}
        given = load_tree(PolicyOptions, {k: dict(v) for k, v in sections.items()}, None).config
        if named := [key for key in ("path", "new", "adapter") if getattr(given.model, key) is not None]:
            raise UserError(f"the first argument is the model: {named[0]} has no effect here")
        of_run = sampling_model(source, model.get("dtype"), given.model.device)
        pixels = given.model.image_pixels or of_run.image_pixels
        config = given.model.model_copy(update={"dtype": of_run.dtype, "image_pixels": pixels})
        policy = load_policy(config, source.path, None, seed)
        return cls(policy, given.optimizer, given.template, seed, temperature, total_updates, token_budget, max_rows)

    def __repr__(self) -> str:
        return f"Policy({self._model.source}: {self._model.note}, {self.num_updates} updates)"

    @property
    def module(self) -> Any:
        """The torch module. Its parameters are those that the engine samples from."""
        return self._model.module

    @property
    def num_updates(self) -> int:
        """Updates made so far."""
        return self._learner.updates if "_learner" in self.__dict__ else 0

    # --- Sampling ---------------------------------------------------------------------------------------------------------

    def prompts(self, data: Any, *, name: str = "train.jsonl", sampler: str = "shuffle") -> PromptStream:
        """An endless stream of prompts; `draw(k)` gives the next k. It draws in the order of a run with this policy's seed.

        `data` is a list of rows, or `task:NAME`. `name` is the source's name in the ids of the prompts.
        """
        is_task = isinstance(data, str) and data.startswith(TASK_PREFIX)
        if isinstance(data, (str, Path)) and not is_task:
            raise UserError(
                f"{data}: give rows, such as [json.loads(line) for line in open({str(data)!r})], or task:NAME"
            )
        source = Source(task=data.removeprefix(TASK_PREFIX)) if is_task else Source(path=name)
        rows = [] if is_task else [_row(dict(row), f"row {i}", source, i) for i, row in enumerate(data)]
        if not is_task and not rows:
            raise UserError("data holds no rows")
        settings = Data(train=[source], template=self.template, sampler=sampler)
        return PromptStream([source], self.tokenizer, settings, self.seed, read=lambda *_: rows)

    def sample(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
    ) -> list[Trajectory]:
        """`n` samples of each prompt, prompt after prompt. They have no rewards yet.

        A prompt that is sampled again gets other random numbers. `temperature=0` is greedy decoding.
        """
        if n < 1:
            raise UserError(f"n={n}, max_tokens={max_tokens}: expected at least 1 sample")
        draws = self._draws(prompts)
        options = self._sampling(max_tokens, temperature, top_p, top_k, stop)
        order = {(draw.prompt.row.id, draw.visit): index for index, draw in enumerate(draws)}
        found = list(self._driver.run(draws, n, options, "train"))
        return sorted(found, key=lambda t: (order[t.prompt_id, t.visit], t.sample))

    def solve(
        self,
        prompts: Prompts,
        strategy: str | Mapping[str, Any] = "majority",
        *,
        budget: int | None = None,
        reward: str = DEFAULT_READER,
        max_tokens: int = 1024,
        temperature: float | None = None,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        progress: bool | Callable[[str], None] = True,
        **options: Any,
    ) -> list[Solution]:
        """The answer that a strategy chooses for each prompt, with its votes and its cost. `options` are those of the strategy.

        `budget` limits the tokens sampled for one prompt, and `max_tokens` those of one answer. `reward` names the verifier by which an
        answer is read: number, math, choice or exact. Columns of a row other than its prompt have no effect.

        Long calls show their progress on stderr, as `burnish.evaluate` does. `progress` may be a function, which gets the text whenever a
        search has changed, or False.
        """
        settings = solve_settings(strategy, budget, options)
        sampling = self._sampling(max_tokens, temperature, top_p, top_k, stop)
        check_strategy(settings.strategy, sampling.temperature)
        read = reader_reward(reward)
        draws, base = self._draws(prompts), Path.cwd()
        with ProgressLine() as line:
            say = progress if callable(progress) else line
            on_step = SolveProgress(len(draws), say).on_step if progress else None
            return solve_prompts(
                self._model,
                self._engine,
                draws,
                settings,
                sampling,
                read,
                self.seed,
                self.template,
                base,
                on_step,
                print_note,
            )

    def _draws(self, prompts: Prompts) -> list[PromptSample]:
        """The prompts of a call, with how often this policy has drawn each before."""
        if not isinstance(prompts, (str, Mapping, PromptSample, Sequence)):
            raise UserError(
                f"prompts is a {type(prompts).__name__}; expected a text, messages, a row, or a list of them"
            )
        is_one = isinstance(prompts, (str, Mapping, PromptSample)) or _is_conversation(prompts)
        each: Sequence[Any] = [prompts] if is_one else prompts  # type: ignore[assignment]
        return [self._draw(prompt) for prompt in each]

    def _sampling(
        self, max_tokens: int, temperature: float | None, top_p: float, top_k: int, stop: Sequence[str]
    ) -> SamplingOptions:
        if max_tokens < 1 or (temperature or 0) < 0:
            raise UserError(
                f"max_tokens={max_tokens}, temperature={temperature}: expected at least 1, and at least 0 (greedy decoding)"
            )
        return SamplingOptions(
            temperature=self.temperature if temperature is None else temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            stop_tokens=tuple(self.tokenizer.eos_ids),
            stop=tuple(stop),
        )

    def _draw(self, prompt: PromptLike) -> PromptSample:
        if isinstance(prompt, PromptSample):
            return prompt
        record = dict(prompt) if isinstance(prompt, Mapping) else {"prompt": prompt}
        source, where = Source(path="prompts"), f"prompt {prompt!r:.60}"
        row = _row(record, where, source, 0)
        content = json.dumps(row.prompt, sort_keys=True, default=content_digest).encode()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()
        row = Row(f"prompts/{digest}", row.prompt, row.data_source, row.answer, row.extra)
        text, tokens, pictures = render(row, self.tokenizer, self.template)
        is_chat = template_kind(self.tokenizer, self.template) == "chat"
        visit = self._visits.get(row.id, 0)
        self._visits[row.id] = visit + 1
        return PromptSample(Prompt(row, text, tokens, is_chat=is_chat, pictures=pictures), visit)

    @cached_property
    def _engine(self) -> Engine:
        return build_engine(self._model, Rollout(max_rows=self._max_rows))

    @cached_property
    def _driver(self) -> RolloutRunner:
        return make_driver(self._model, self._engine, self.seed)

    # --- Learning ---------------------------------------------------------------------------------------------------------

    @cached_property
    def _learner(self) -> Learner:
        module, optimizer = self._model.module, self._optimizer
        return Learner(module, optimizer, self._total_updates, self._token_budget, self.temperature)

    def logprobs(self, batch: Batch) -> Tensor:
        """[N] log-prob of every token that the model wrote, under the current weights; 0 elsewhere."""
        self._free_cache()
        return self._learner.logprobs(batch.to(self._learner.device))

    def update(
        self, batch: Batch, loss: LossLike, *, aggregation: str | None = None, horizon: int | None = None
    ) -> dict[str, float]:
        """One optimizer step. Returns loss, gradient norm, learning rate and the means of the loss's metrics.

        The batch has `advantages`, one value a sequence or a token. `old_logp` and `ref_logp` are columns that you may add; without `old_logp`
        the current policy is the anchor, and the ratio is 1. `aggregation` averages the losses of tokens, unless the batch has a `weight`;
        the default is that of the preset, or token-mean. `horizon` is the divisor of seq-mean-token-sum-norm.
        """
        if self._learner.dtype == torch.float16:
            raise UserError(
                "the range of float16 is too small for gradients: load the policy with dtype='bfloat16' or 'float32'"
            )
        batch, record = batch.to(self._learner.device), _loss_record(loss)
        _check_columns(batch, record)
        batch = _with_clip_columns(batch, record)
        if "weight" not in batch.token and "weight" not in batch.sequence:
            batch = batch.with_sequence(weight=_token_weights(batch, loss, aggregation, horizon))
        self._free_cache()
        update = self._learner.update(with_answer_ids(batch), record, columns=False)
        if update.skipped:
            raise UserError(f"update {self.num_updates + 1} was not made: {update.skipped}")
        self._learner.release()
        if "_engine" in self.__dict__:
            self._engine.load(self.num_updates, ())
        return update.stats

    def _free_cache(self) -> None:
        """Free the engine's KV cache for the learner, as `burnish train` does; the next sample wakes the engine."""
        if self._learner.device.type == "cuda" and "_engine" in self.__dict__:
            self._engine.sleep()

    def save(self, directory: str | Path) -> Path:
        """Write a Hugging Face directory (with adapters: a PEFT directory) and return its path."""
        path = Path(directory)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(f"{path} exists and is not empty: name another directory, or remove it first")
        path.mkdir(parents=True, exist_ok=True)
        self._model.save(path)
        return path


def _is_conversation(prompts: Any) -> bool:
    """Whether a list is one conversation, and not a list of rows."""
    return bool(prompts) and all(isinstance(item, Mapping) and "role" in item for item in prompts)


def _loss_record(loss: LossLike) -> Loss:
    if isinstance(loss, str):
        return build_policy_loss(algorithm_from_preset(loss), None)
    if hasattr(loss, "needs") and hasattr(loss, "scope"):
        return cast(Loss, loss)
    name = getattr(loss, "__name__", "function")
    return PolicyLoss(ratio="none", clip="none", loss=name, custom=loss)


def _token_weights(batch: Batch, loss: LossLike, aggregation: str | None, horizon: int | None) -> Tensor:
    preset = algorithm_from_preset(loss).aggregation if isinstance(loss, str) else None
    mode = aggregation or (preset.name if preset is not None else "token-mean")
    horizon = horizon or (preset.horizon if preset is not None else None)
    if mode not in AGGREGATIONS:
        raise unknown_name_error("aggregation", mode, AGGREGATIONS)
    if mode == "seq-mean-token-sum-norm" and horizon is None:
        raise UserError(
            f"aggregation {mode} divides by a constant: give horizon, such as the max_tokens of the samples"
        )
    return sequence_aggregation_weights(batch, mode, horizon)


def _with_clip_columns(batch: Batch, loss: Loss) -> Batch:
    """The batch with the columns that a clip takes from the whole mini-batch."""
    if not isinstance(loss, PolicyLoss) or loss.clip != "second_moment":
        return batch
    if "old_logp" not in batch.token:
        raise UserError(
            "clip second_moment compares the policy's log-probs with the engine's: add batch.with_token(old_logp=policy.logprobs(batch))"
        )
    return with_second_moment_mask(batch, SecondMomentClip(**loss.clip_options))


def _check_columns(batch: Batch, loss: Loss) -> None:
    """Refuse a batch without the columns that a policy loss reads."""
    if not isinstance(loss, PolicyLoss):
        return
    there = batch.token.keys() | batch.sequence.keys()
    if "advantages" not in there:
        raise UserError("the batch has no advantages: add them, as batch.with_sequence(advantages=...)")
    if loss.kl_coef > 0 and "ref_logp" not in there:
        raise UserError(
            "this loss has a KL term: add the reference's log-probs, as batch.with_token(ref_logp=reference.logprobs(batch)), or use a "
            "loss without one"
        )


def _row(record: dict[str, Any], where: str, source: Source, index: int) -> Row:
    """A row of data that is given in Python, with its images at their marks."""
    return prompt_row(inline_media(record, prompt_columns(source), where, None), where, source, index)
