"""Code that the engines share: request checks, stop strings, statistics, and weights copied in place."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.engine import MIN_TEMPERATURE, Completion, Request, SamplingOptions
from burnish.inference.picture_requests import check_pictures, longest_position
from burnish.memory_plan.kv_cache import CachePlan
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import REPLACEMENT_CHARACTER

MAX_BIASES = 256
"""Most entries of a request's logit bias: the size of a row's table on the device."""
MAX_TOP_K = 2**31 - 1
TEXTLESS_TAIL = 8
"""Tokens without text that a stop string may span, besides one token for each of its bytes."""

Decode = Callable[[list[int]], str]


@dataclass
class EngineStats:
    """Work of a native engine since its start."""

    prefilled_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Rows decoded, summed over steps; a step that verifies drafts counts once, too. The prefill gives each sample's first token. The paged engine also counts the steps of a
    launch that a row did not need."""
    tokens: int = 0
    drafted_tokens: int = 0
    """Draft tokens that were verified (`rollout.speculation`)."""
    accepted_tokens: int = 0
    """Those of them that were drawn."""
    preemptions: int = 0
    """Rows that lost their blocks and went back to the waiting queue."""
    waited_s: float = 0.0
    """Seconds the host waited for the device; 0 where the device waits for the host, or is the host."""
    compile_s: float = 0.0
    """Seconds to compile the kernels or to load compiled ones; 0 without kernels."""
    capture_s: float = 0.0
    """Seconds to capture CUDA graphs of decode steps."""
    graphs: int = 0
    plan: CachePlan | None = None
    """Plan of the current paged cache."""


def enqueue_by_priority(waiting: deque[Request], requests: Iterable[Request]) -> None:
    """Insert requests behind the waiting ones of the same or a higher priority. The cost does not grow with the queue, but for a search."""
    for request in requests:
        if not waiting or waiting[-1].priority >= request.priority:
            waiting.append(request)
        else:
            waiting.insert(bisect_right(waiting, -request.priority, key=lambda r: -r.priority), request)


def check_requests(
    requests: Sequence[Request], known: Sequence[Container[str]], check: Callable[[Request], None]
) -> set[str]:
    """Return the ids of the requests. Raise if `check` refuses one, or if an id occurs twice or in one of the containers `known`."""
    fresh = set[str]()
    for request in requests:
        check(request)
        if any(request.id in ids for ids in known):
            raise ValueError(f"request {request.id} is already running")
        if request.id in fresh:
            raise ValueError(f"two of the requests are called {request.id}")
        fresh.add(request.id)
    return fresh


def check_native_request(request: Request, model: Decoder, has_text: bool) -> None:
    """Raise for a request that can never run on a native engine of the model. `has_text`: the engine has a tokenizer for stop strings."""
    options = request.sampling
    check_prompt(request, model.arch.vocab_size)
    check_pictures(request, model)
    longest = longest_position(request, model)
    if longest > model.arch.max_positions:
        raise UserError(
            f"request {request.id}: {len(request.tokens)} prompt tokens + {options.max_tokens} new ones = {longest}, "
            f"but the model is made for {model.arch.max_positions} positions; lower max_tokens"
        )
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}; expected 0, for the likeliest token, or at least "
            f"{MIN_TEMPERATURE:g}"
        )
    if options.top_k > MAX_TOP_K:
        raise UserError(f"request {request.id}: top_k {options.top_k}; expected {MAX_TOP_K} at most, or 0 for no limit")
    check_bias(request, model.arch.vocab_size)
    if options.stop and not has_text:
        raise UserError(f"request {request.id}: stop strings need a tokenizer, and this engine has none")


def check_prompt(request: Request, vocab_size: int) -> None:
    """Raise for a prompt without tokens or with an unknown one: on a GPU an unknown token is an assertion without a cause."""
    if not request.tokens:
        raise UserError(f"request {request.id}: the prompt has no tokens")
    if min(request.tokens) < 0 or max(request.tokens) >= vocab_size:
        unknown = next(token for token in request.tokens if not 0 <= token < vocab_size)
        raise UserError(f"request {request.id}: token {unknown} is not one of the model's, 0 to {vocab_size - 1}")


def check_bias(request: Request, vocab_size: int) -> None:
    """Raise for a logit bias with too many, unknown or repeated tokens, or with values that are not finite."""
    pairs = request.sampling.logit_bias
    if len(pairs) > MAX_BIASES:
        raise UserError(f"request {request.id}: logit_bias names {len(pairs)} tokens; expected {MAX_BIASES} at most")
    if unknown := [token for token, _ in pairs if not 0 <= token < vocab_size]:
        raise UserError(
            f"request {request.id}: logit_bias names token {unknown[0]}, which is not one of the model's, 0 to {vocab_size - 1}"
        )
    if len({token for token, _ in pairs}) < len(pairs):
        raise UserError(f"request {request.id}: logit_bias names a token twice")
    if any(not math.isfinite(value) for _, value in pairs):
        raise UserError(f"request {request.id}: logit_bias must be finite numbers; -100 is as good as never")


def is_truncated(options: SamplingOptions) -> bool:
    """Whether only a part of the vocabulary can be drawn. Greedy tokens are reported under the whole distribution."""
    return options.temperature > 0 and (options.top_p < 1 or options.top_k > 0 or options.min_p > 0)


def needs_scoring(options: SamplingOptions) -> bool:
    """Whether raw log-probs are asked for and differ from those of the distribution that is sampled from."""
    is_plain = options.temperature == 0 or (options.temperature == 1 and not is_truncated(options))
    return options.raw_logprobs and (bool(options.logit_bias) or not is_plain)


class StopStrings:
    """Tells whether drawn tokens complete a stop string.

    The token that completes one has its last character. `table` says so of any token, and nearly all have none, so that few tokens need their
    predecessors decoded: a string of k bytes spans at most k tokens with text, and a few without.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tables: dict[tuple[str, ...], LastCharacters] = {}

    def table(self, stop: tuple[str, ...]) -> Mapping[int, bool]:
        """Return for each token whether it may complete one of `stop`."""
        if stop not in self._tables:
            self._tables[stop] = LastCharacters(self._decode, stop)
        return self._tables[stop]

    def are_complete(self, stop: tuple[str, ...], token: int, tail: Callable[[int], list[int]]) -> bool:
        """Whether the last tokens complete one of `stop`. `token` is the last one, and `tail(n)` returns the last n."""
        if not self.table(stop)[token]:
            return False
        text = self._decode(tail(max(len(s.encode()) for s in stop) + TEXTLESS_TAIL))
        return any(s in text for s in stop)


class LastCharacters(dict[int, bool]):
    """Whether the text of a token may have the last character of a stop string, computed when it is first asked for."""

    def __init__(self, decode: Decode, stop: tuple[str, ...]) -> None:
        super().__init__()
        self._decode, self._last = decode, {s[-1] for s in stop}

    def __missing__(self, token: int) -> bool:
        # Decoders strip spaces around a single token, and write a replacement for a part of a character.
        text = self._decode([token])
        found = any(c == " " or c in text or (not c.isascii() and REPLACEMENT_CHARACTER in text) for c in self._last)
        self[token] = found
        return found


def empty_completion(request: Request, version: int) -> Completion:
    """The completion of a request that was aborted before its first token."""
    raw = np.empty(0, dtype=np.float32) if request.sampling.raw_logprobs else None
    none = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    return Completion(request.id, *none, "aborted", version, raw_logp=raw)


def copy_weights(model: nn.Module, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into the parameters of their names. An engine on the learner's own tensors gets none."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
