"""Requests that no server could answer as the engine's contract wants it, found before they are sent."""

from __future__ import annotations

from collections.abc import Sequence

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.rollout.native.shared import check_bias
from burnish.rollout.sglang.check import Facts
from burnish.rollout.sglang.wire import is_truncated, needs_score

SPARE = 2
"""Positions that a server leaves free: it cuts a completion that would need them."""


def check_request(request: Request, servers: Sequence[Facts], vocab_size: int) -> None:
    """Raise for a request that can never run on one of the servers: it may be sent to any."""
    who, num = f"request {request.id}", len(request.tokens)
    if not request.tokens:
        raise UserError(f"{who}: the prompt has no tokens")
    if strange := [t for t in request.tokens if not 0 <= t < vocab_size]:  # it would end a server
        raise UserError(f"{who}: token {strange[0]} is not one of the model's, 0 to {vocab_size - 1}")
    longest = num + request.sampling.max_tokens
    for facts in servers:
        if facts.context is not None and longest > facts.context - SPARE:
            raise UserError(
                f"{who}: {num} prompt tokens + {request.sampling.max_tokens} new ones = {longest}, but SGLang server {facts.url} "
                f"has {facts.context} positions, {SPARE} of which it leaves free; lower max_tokens, or start it with a larger "
                "--context-length"
            )
        sent = longest if needs_score(request.sampling) else num  # a completion is scored as a prompt
        if facts.longest_input is not None and sent > facts.longest_input:
            raise UserError(
                f"{who}: SGLang server {facts.url} takes {facts.longest_input} positions of a prompt at most, and this needs {sent}; "
                "start it with a larger --context-length"
            )
    check_bias(request, vocab_size)
    check_options(request.sampling, servers, who)
    for facts in servers:
        support = request.sampling.top_k or vocab_size
        if is_truncated(request.sampling) and facts.mask_tokens is not None and support > facts.mask_tokens:
            raise UserError(
                f"{who}: up to {support} tokens can be drawn, and SGLang server {facts.url} gives log-probs of a truncated distribution of "
                f"{facts.mask_tokens} at most; set top_k, or start it with --sampling-mask-max-tokens {support}"
            )


def check_options(options: SamplingOptions, servers: Sequence[Facts], who: str) -> None:
    """Raise for options of which a server would report the wrong log-probs; `who` has them, in the error."""
    for facts in servers:
        if not facts.is_tempered and options.temperature not in (0, 1):
            raise UserError(
                f"{who}: temperature is {options.temperature:g}, but SGLang server {facts.url} gives log-probs of temperature 1; "
                "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if options.temperature > 0 and options.top_k and options.top_p < 1:
            raise UserError(
                f"{who}: top_k and top_p together mean something else to SGLang, whose top_p is of the whole distribution and not of "
                "what top_k leaves; use one of them"
            )
        if is_truncated(options) and not facts.has_mask:
            raise UserError(
                f"{who}: top_p, top_k or min_p is on, and SGLang server {facts.url} (SGLang {facts.version}) gives log-probs of the "
                "whole distribution, not of the one it draws from; turn them off, or use a version with return_sampling_mask"
            )
