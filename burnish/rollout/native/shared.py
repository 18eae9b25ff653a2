"""What both native engines do alike: counting their work, judging requests, taking weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import LEAST_TEMPERATURE, Request
from burnish.models.decoder import Decoder
from burnish.rollout.native.plan import CachePlan

MAX_BIASES = 256  # of one request: a row's table on the device
MOST_TOP_K = 2**31 - 1


@dataclass
class EngineStats:
    """Work done so far."""

    prefilled_tokens: int = 0
    decode_steps: int = 0
    row_steps: int = 0
    """Rows decoded, summed over steps: the tokens produced besides each sample's first, which the prefill gives, and in the
    paged engine the steps of a window that a row did not need."""
    tokens: int = 0
    preemptions: int = 0
    """Rows that gave their pages back and waited again."""
    waited_s: float = 0.0
    """Seconds the host waited for the device; 0 where the device waits for the host, or is the host."""
    compile_s: float = 0.0
    """Seconds until the kernels were compiled, or found compiled; 0 where there are none."""
    capture_s: float = 0.0
    """Seconds that graphs of decode steps took."""
    graphs: int = 0
    plan: CachePlan | None = None
    """The paged cache as it was made last."""


def check_requests(
    requests: Sequence[Request], known: Set[str], model: Decoder, decode: Callable[[list[int]], str] | None
) -> set[str]:
    """The ids of requests that can run beside the `known` ones; raises for one that cannot."""
    fresh = set[str]()
    for request in requests:
        _check(request, model, decode)
        if request.id in known:
            raise ValueError(f"request {request.id} is already running")
        if request.id in fresh:
            raise ValueError(f"two of the requests are called {request.id}")
        fresh.add(request.id)
    return fresh


def _check(request: Request, model: Decoder, decode: Callable[[list[int]], str] | None) -> None:
    """Raise for a request that can never run on the model."""
    if not request.tokens:
        raise UserError(f"request {request.id}: the prompt has no tokens")
    vocab = model.arch.vocab_size
    if (
        min(request.tokens) < 0 or max(request.tokens) >= vocab
    ):  # a GPU would only say that an assertion failed somewhere
        strange = next(token for token in request.tokens if not 0 <= token < vocab)
        raise UserError(f"request {request.id}: token {strange} is not one of the model's, 0 to {vocab - 1}")
    longest = len(request.tokens) + request.sampling.max_tokens
    if longest > model.arch.max_positions:
        raise UserError(
            f"request {request.id}: {len(request.tokens)} prompt tokens + {request.sampling.max_tokens} new ones = {longest}, "
            f"but the model is made for {model.arch.max_positions} positions; lower max_tokens"
        )
    options = request.sampling
    if 0 < options.temperature < LEAST_TEMPERATURE:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}; expected 0, for the likeliest token, or at least "
            f"{LEAST_TEMPERATURE:g}"
        )
    if options.top_k > MOST_TOP_K:
        raise UserError(
            f"request {request.id}: top_k {options.top_k}; expected {MOST_TOP_K} at most, or 0 for no limit"
        )
    check_bias(request, vocab)
    if request.sampling.stop and decode is None:
        raise UserError(f"request {request.id}: stop strings need a tokenizer, and this engine has none")


def check_bias(request: Request, vocab: int) -> None:
    """Raise for a logit bias that means nothing."""
    pairs = request.sampling.logit_bias
    if len(pairs) > MAX_BIASES:
        raise UserError(
            f"request {request.id}: logit_bias names {len(pairs)} tokens, and a row holds {MAX_BIASES} at most"
        )
    if strange := [token for token, _ in pairs if not 0 <= token < vocab]:
        raise UserError(
            f"request {request.id}: logit_bias names token {strange[0]}, which is not one of the model's, 0 to {vocab - 1}"
        )
    if len({token for token, _ in pairs}) < len(pairs):
        raise UserError(f"request {request.id}: logit_bias names a token twice")
    if any(not math.isfinite(value) for _, value in pairs):
        raise UserError(f"request {request.id}: logit_bias must be finite numbers; -100 is as good as never")


def take_weights(model: Decoder, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into the parameters of their names; an engine on the learner's own tensors is given none."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)
