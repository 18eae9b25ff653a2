"""Engine for architectures without a native decoder: `generate` of transformers.

It runs static batches and shares no prompts, so it is slower than the native engines. Tokens are drawn by the native sampler from
the requests' keys, inside a logits processor that leaves `generate` a single choice. Randomness and log-probs therefore mean the
same as in the other engines. Requests with pictures run together if the model's inputs have equal shapes; tokens that stand for pixels are
never drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request
from burnish.core.pictures import Picture
from burnish.core.random_keys import to_int64, uniforms
from burnish.inference.engine_common import StopStrings, check_bias, copy_weights, empty_completion
from burnish.inference.native.sampler import add_bias, sample
from burnish.models.kernels.exact import log_softmax_at_temperature
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.vision.transformers_processor import Signature


class TransformersEngine:
    """Samples in batches of at most `max_rows` requests with equal sampling options."""

    def __init__(
        self, model: TransformersPolicy, max_rows: int, decode: Callable[[list[int]], str], pad_id: int
    ) -> None:
        self.model, self.max_rows, self.pad_id = model.inner, max_rows, pad_id
        self.stop_strings = StopStrings(decode)
        self.pixel_inputs = model.pixel_inputs
        self.device = next(model.parameters()).device
        self.waiting: deque[Request] = deque()
        self.ready: deque[Completion] = deque()  # finished, not yielded by `stream` yet
        self.version = 0
        self._interrupted = False

    def submit(self, requests: Sequence[Request]) -> None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        ids = {r.id for r in self.waiting} | {completion.id for completion in self.ready}
        for request in requests:
            if request.id in ids:
                raise ValueError(f"request {request.id} is already waiting")
            ids.add(request.id)
            longest = len(request.tokens) + request.sampling.max_tokens
            check_bias(request, self.model.get_input_embeddings().num_embeddings)
            if request.pictures and self.pixel_inputs is None:
                raise UserError(f"request {request.id} has images, but {type(self.model).__name__} reads text only")
            if not request.tokens:
                raise UserError(f"request {request.id}: the prompt has no tokens")
            if limit is not None and longest > limit:
                raise UserError(
                    f"request {request.id} may need {longest} positions, but the model has {limit}; lower max_tokens"
                )
        self.waiting = deque(sorted([*self.waiting, *requests], key=lambda r: -r.priority))

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self.waiting and not self._interrupted):
            if not self.ready:
                options, shapes = self.waiting[0].sampling, self._input_shapes(self.waiting[0])
                fitting = (r for r in self.waiting if r.sampling == options and self._input_shapes(r) == shapes)
                batch = list(islice(fitting, self.max_rows))
                chosen = {r.id for r in batch}
                self.waiting = deque(r for r in self.waiting if r.id not in chosen)
                self.ready.extend(self._generate(batch))
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        """Takes effect between two batches: `generate` cannot be interrupted."""
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        """Abort waiting and finished requests. Those inside `generate` cannot be aborted."""
        wanted = set(ids)
        stopped = [r for r in self.waiting if r.id in wanted]
        self.waiting = deque(r for r in self.waiting if r.id not in wanted)
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        return kept + [empty_completion(r, self.version) for r in stopped] if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self.model, named_tensors)
        self.version = version

    def sleep(self) -> None:
        """Nothing to do: no memory is kept between batches."""

    def wake(self) -> None:
        """Nothing to do."""

    def _input_shapes(self, request: Request) -> Signature:
        """What the inputs of two requests' pictures must have in common to be one batch."""
        return () if self.pixel_inputs is None else self.pixel_inputs.signature(pictures_of(request))

    @torch.no_grad()
    def _generate(self, batch: list[Request]) -> list[Completion]:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        options = batch[0].sampling
        width = max(len(r.tokens) for r in batch)
        prompts = torch.full((len(batch), width), self.pad_id, device=self.device)
        real = torch.zeros_like(prompts)
        for i, request in enumerate(batch):
            prompts[i, width - len(request.tokens) :] = torch.tensor(request.tokens, device=self.device)
            real[i, width - len(request.tokens) :] = 1
        extra, never = dict[str, Tensor](), None
        if self.pixel_inputs is not None:
            never = torch.tensor(sorted(self.pixel_inputs.placeholder_tokens), device=self.device)
            if batch[0].pictures:
                extra = self.pixel_inputs.joined([pictures_of(request) for request in batch], prompts, self.model.dtype)
        draw = _SamplingProcessor(batch, width, self.device, never)
        config = GenerationConfig(
            do_sample=False, max_new_tokens=options.max_tokens, pad_token_id=self.pad_id, use_cache=True
        )
        with _only_this_config(self.model, config):
            self.model.generate(
                inputs=prompts,
                attention_mask=real,
                **extra,
                generation_config=config,
                logits_processor=LogitsProcessorList([draw]),
                stopping_criteria=StoppingCriteriaList([_StopCriteria(batch, draw, self.stop_strings)]),
            )
        return draw.completions(self.version)


def pictures_of(request: Request) -> list[Picture]:
    """The pictures of a request in order."""
    return [span.picture for span in request.pictures]


@contextmanager
def _only_this_config(model: Any, config: Any) -> Iterator[None]:
    """Replace the model's generation config. `generate` fills open fields from it, and a penalty or an end token there would change
    the samples."""
    own, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = own


class _SamplingProcessor:
    """Logits processor that draws the next token of each row and masks all others."""

    def __init__(self, batch: list[Request], width: int, device: torch.device, never: Tensor | None = None) -> None:
        self.batch, self.width, self.never = batch, width, never
        self.keys = torch.tensor([to_int64(r.key) for r in batch], device=device)
        self.before = torch.tensor([r.generated for r in batch], device=device)
        self.biases = [r.sampling.logit_bias for r in batch]
        self.with_raw = batch[0].sampling.raw_logprobs
        options, rows = batch[0].sampling, len(batch)
        self.temperature = torch.full((rows,), options.temperature, dtype=torch.float64, device=device)
        self.top_k = torch.full((rows,), options.top_k, device=device) if options.top_k else None
        self.top_p = (
            torch.full((rows,), options.top_p, dtype=torch.float64, device=device) if options.top_p < 1 else None
        )
        self.min_p = (
            torch.full((rows,), options.min_p, dtype=torch.float64, device=device) if options.min_p > 0 else None
        )
        self.tokens: list[Tensor] = []
        self.logp: list[Tensor] = []
        self.raw_logp: list[Tensor] = []
        self.length = [0] * rows  # of ended rows
        self.finish = [""] * rows

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        position = self.before + (input_ids.shape[1] - self.width)
        biased = add_bias(scores, self.biases) if any(self.biases) else scores
        tokens, logp = sample(
            biased,
            uniforms(self.keys, position),
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            never=self.never,
        )
        self.tokens.append(tokens)
        self.logp.append(logp)
        if self.with_raw:
            self.raw_logp.append(log_softmax_at_temperature(scores, 1.0).gather(1, tokens[:, None])[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(1, tokens[:, None], 0.0)

    def completions(self, version: int) -> list[Completion]:
        """The tokens of each row up to its end."""
        tokens = torch.stack(self.tokens, 1).cpu().numpy().astype(np.int64)  # [rows, steps]
        logp = torch.stack(self.logp, 1).float().cpu().numpy()
        raw = torch.stack(self.raw_logp, 1).float().cpu().numpy() if self.with_raw else None
        return [
            Completion(
                request.id,
                tokens[k, :length].copy(),
                logp[k, :length].copy(),
                finish,  # type: ignore[arg-type]
                version,
                raw_logp=None if raw is None else raw[k, :length].copy(),
            )
            for k, (request, length, finish) in enumerate(zip(self.batch, self.length, self.finish, strict=True))
        ]


class _StopCriteria:
    """Stopping criterion that records where each row ends: at a stop token, a stop string, or its limit."""

    def __init__(self, batch: list[Request], draw: _SamplingProcessor, stop_strings: StopStrings) -> None:
        self.batch, self.draw, self.stop_strings = batch, draw, stop_strings

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        drawn = input_ids[:, self.draw.width :].tolist()
        for row, (request, tokens) in enumerate(zip(self.batch, drawn, strict=True)):
            if self.draw.finish[row]:
                continue
            options = request.sampling
            stopped = tokens[-1] in options.stop_tokens or self._has_stop_string(tokens, options.stop)
            if stopped or len(tokens) >= options.max_tokens:
                self.draw.finish[row], self.draw.length[row] = "stop" if stopped else "length", len(tokens)
        return torch.tensor([bool(f) for f in self.draw.finish], device=input_ids.device)

    def _has_stop_string(self, tokens: list[int], stop: tuple[str, ...]) -> bool:
        return bool(stop) and self.stop_strings.are_complete(stop, tokens[-1], lambda size: tokens[-size:])
