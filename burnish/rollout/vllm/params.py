"""Our sampling options in vLLM's words, the same for an engine in this process and for a server.

The order of vLLM's truncation is min-p, top-k, top-p, each on what the one before has left; ours is top-k, top-p, min-p. Any
one of them alone keeps the same tokens, and so do top-k with top-p and top-k with min-p; min-p with top-p may keep fewer
here. Log-probs are in every case those of what was drawn from. Greedy tokens are never truncated.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.keys import fold
from burnish.rollout.native.shared import check_bias

COLDEST, HOTTEST = 0.01, 2.0
"""vLLM raises a lower temperature to this one in silence, and refuses a higher one."""
SEED_BITS = 63
PROBE = Request("probe", (0,), SamplingOptions(top_k=1, max_tokens=1), key=0)
"""A first request: the only token that can be drawn is certain."""
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True}
"""Sampling from the model itself. `ignore_eos`: a request ends at the stop tokens it names, at no other."""


def sampling(request: Request) -> dict[str, Any]:
    """The parameters of a request, with the log-prob of every token that is drawn.

    vLLM's noise of a request follows from its seed, so the tokens follow (key, generated), as long as vLLM's own logits do.
    """
    options = request.sampling
    return PLAIN | {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "logit_bias": dict(options.logit_bias) or None,
        "max_tokens": options.max_tokens,
        "stop_token_ids": list(options.stop_tokens),
        "seed": fold("vllm", request.key, request.generated) & ((1 << SEED_BITS) - 1),
        "logprobs": 0,
    }


def scoring(last: int) -> dict[str, Any]:
    """The parameters of a pass that gives the model's own log-probs: of each token of the prompt, and of `last` behind it."""
    return PLAIN | {"max_tokens": 1, "seed": 0, "prompt_logprobs": 0, "logprobs": 1, "logprob_token_ids": [last]}


def needs_scoring(options: SamplingOptions) -> bool:
    """Whether raw log-probs are asked for that are not those of the distribution that is sampled from."""
    is_truncated = options.top_p < 1 or options.top_k > 0 or options.min_p > 0
    is_plain = not options.logit_bias and (options.temperature == 0 or (options.temperature == 1 and not is_truncated))
    return options.raw_logprobs and not is_plain


def check(requests: Sequence[Request], known: Set[str], vocab: int, positions: int) -> None:
    """Raise for a request that can never run, or not beside the `known` ones."""
    fresh = set[str]()
    for request in requests:
        _check_one(request, vocab, positions)
        if request.id in known:
            raise ValueError(f"request {request.id} is already running")
        if request.id in fresh:
            raise ValueError(f"two of the requests are called {request.id}")
        fresh.add(request.id)


def _check_one(request: Request, vocab: int, positions: int) -> None:
    options = request.sampling
    if not request.tokens:
        raise UserError(f"request {request.id}: the prompt has no tokens")
    if strange := [token for token in request.tokens if not 0 <= token < vocab]:
        raise UserError(f"request {request.id}: token {strange[0]} is not one of the model's, 0 to {vocab - 1}")
    longest = len(request.tokens) + options.max_tokens
    if longest > positions:
        raise UserError(
            f"request {request.id}: {len(request.tokens)} prompt tokens + {options.max_tokens} new ones = {longest}, "
            f"but vLLM is made for {positions} positions; lower max_tokens"
        )
    if options.temperature and not COLDEST <= options.temperature <= HOTTEST:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}, and vLLM samples at 0 or at {COLDEST:g} to {HOTTEST:g}"
        )
    check_bias(request, vocab)


def check_probe(logp: Sequence[float], who: str) -> None:
    """Raise unless what came of the probe is under the distribution that is sampled from: there its only token has log-prob 0."""
    if len(logp) != 1 or abs(logp[0]) > 1e-6:
        raise UserError(
            f"{who} gives the log-prob {logp[0] if logp else None} to a token that alone can be drawn, and not 0: its log-probs are not of "
            "the distribution that it samples from (logprobs_mode=processed_logprobs)"
        )
