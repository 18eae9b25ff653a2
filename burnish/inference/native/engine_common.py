"""What both native engines do alike: counting their work, judging requests, taking weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import MIN_TEMPERATURE, Request
from burnish.memory_plan.kv_cache import CachePlan
from burnish.models.decoder import Decoder

MAX_BIASES = 256  # of one request: a row's table on the device
MAX_TOP_K = 2**31 - 1


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
        _check_request(request, model, decode)
        if request.id in known:
            raise ValueError(f"request {request.id} is already running")
        if request.id in fresh:
            raise ValueError(f"two of the requests are called {request.id}")
        fresh.add(request.id)
    return fresh


def _check_request(request: Request, model: Decoder, decode: Callable[[list[int]], str] | None) -> None:
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
    if 0 < options.temperature < MIN_TEMPERATURE:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}; expected 0, for the likeliest token, or at least "
            f"{MIN_TEMPERATURE:g}"
        )
    if options.top_k > MAX_TOP_K:
        raise UserError(f"request {request.id}: top_k {options.top_k}; expected {MAX_TOP_K} at most, or 0 for no limit")
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


def copy_weights(model: Decoder, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors into the parameters of their names; an engine on the learner's own tensors is given none."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in named_tensors:
            parameters[name].copy_(tensor)


# --- Drawing tokens: one uniform number a row, by inversion of the cumulative distribution.
#
# The log-prob returned is of the drawn token under the very distribution it was drawn from, after bias, temperature, top-k,
# top-p and min-p. Greedy rows (temperature 0) take the most likely token and report its untempered log-prob.

Bias = Sequence[tuple[int, float]]
"""(token, what is added to its logit) of one row."""


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their log-probs [n] from logits [n, V]; options are [n] tensors, None where no row uses one: temperature 1."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    greedy = None if temperature is None else temperature == 0
    scale = None if temperature is None else temperature.masked_fill(temperature == 0, 1.0)
    if not (top_k is None and top_p is None and min_p is None):
        one = torch.ones(logits.shape[0], dtype=torch.float64, device=logits.device)
        logits = truncate(logits, one if scale is None else scale, top_k, top_p, min_p)
    logp = (logits if scale is None else logits / scale.to(logits.dtype)[:, None]).log_softmax(-1)
    cumulative = logp.exp().cumsum(-1, dtype=torch.float64)
    # The total may miss 1 by rounding; scaling by it keeps every draw inside the support.
    tokens = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None]).squeeze(1)
    tokens = tokens.clamp_(
        max=logits.shape[1] - 1
    )  # NaN logits find no place: the log-prob says so, not an index error
    if greedy is not None and bool(greedy.any()):
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, logp.gather(1, tokens[:, None]).squeeze(1)


def truncate(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None = None
) -> Tensor:
    """Logits that are -inf outside each row's top-k tokens, then outside the smallest set of them with mass top-p, then
    where a token is less than `min_p` times as likely as the likeliest.

    Of equal logits the first count as the larger ones, so that exactly k tokens are kept. Probabilities are those at the
    `temperature` [n]. `burnish.models.kernels.triton.truncation` keeps the same tokens without sorting.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    best, scale = ordered[:, :1], temperature[:, None]
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(logits.shape[1], device=logits.device)
        keep &= (rank < top_k[:, None]) | (top_k[:, None] == 0)
    if top_p is not None:
        weight = ((ordered - best) / scale.to(logits.dtype)).exp().masked_fill(~keep, 0.0).double()
        mass = weight.cumsum(-1)
        # The first token is always kept: nothing stands before it. A row without top-p keeps all, whatever the sum rounds to.
        keep &= (mass - weight < top_p[:, None] * mass[:, -1:]) | (top_p[:, None] >= 1)
    if min_p is not None:
        least = best.double() + scale * min_p[:, None].log()
        keep &= (ordered.double() >= least) | (min_p[:, None] == 0)
    kept = torch.zeros_like(keep).scatter(1, order, keep)
    return torch.where(kept, logits, -torch.inf)


def add_bias(logits: Tensor, biases: Sequence[Bias]) -> Tensor:
    """Logits [n, V] with each row's bias added, in float32 at least; the given ones stay as they are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    entries = [(row, token, value) for row, pairs in enumerate(biases) for token, value in pairs]
    rows, tokens, values = zip(*entries, strict=True)
    where = (torch.tensor(rows, device=logits.device), torch.tensor(tokens, device=logits.device))
    return wide.index_put_(where, torch.tensor(values, dtype=wide.dtype, device=logits.device), accumulate=True)
