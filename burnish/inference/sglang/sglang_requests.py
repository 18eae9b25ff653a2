"""Requests to SGLang servers: the bodies of `/generate`, what its answers say, and calls with retries until a deadline.

Token ids go both ways; no text is sent or read. Of a prompt with images a server decodes and encodes the token ids again. The length
of its prompt is compared with ours.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.core.random_keys import fold
from burnish.inference.engine_common import StopStrings, is_truncated, needs_scoring
from burnish.inference.picture_inputs import check_expansion, data_urls, marked_tokens, placeholder_bias
from burnish.inference.server_client import ServerError
from burnish.inference.sglang.sglang_servers import GENERATE, NEUTRAL_SAMPLING, SGLANG, ServerPool, ServerState

SEED_BITS = 31
"""The first versions with seeds keep them in 32 bits, with a sign."""
MAX_TRIES = 4
"""How often a call may fail on reachable servers."""
RETRY_WAIT_S = 0.25
"""Wait before the second try. Each further wait is twice as long, up to `MAX_RETRY_WAIT_S`."""
MAX_RETRY_WAIT_S = 2.0
ABORT_TIMEOUT_S = 20.0
"""How long a server may take to answer an aborted request."""


@dataclass
class GenerateResult:
    """The result of one call of `/generate`: some or all tokens of a completion."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    reason: str = "abort"
    """stop, length or abort."""
    url: str = ""
    """The server."""


def sampling_seed(request: Request) -> int:
    """The seed of a request, which a server mixes with each token's position.

    A continued request has the seed of its first part: its prompt and its number of generated tokens grow by the same number.
    """
    return fold(request.key, len(request.tokens) - request.generated) & ((1 << SEED_BITS) - 1)


def generate_body(request: Request, drawn: list[int], rid: str, vocab_size: int, with_mask: bool) -> dict[str, Any]:
    """The body of a call that continues a request after the tokens drawn so far.

    `with_mask` asks for log-probs of the truncated distribution. The first versions that have it require a top-k; one of the
    whole vocabulary has no effect.
    """
    options = request.sampling
    sampling = NEUTRAL_SAMPLING | {
        "temperature": options.temperature,
        "max_new_tokens": options.max_tokens - len(drawn),
        # Without it a server also ends at the model's end tokens; with it at none, not even at `stop_token_ids`.
        "ignore_eos": not options.stop_tokens,
        "sampling_seed": sampling_seed(request),
    }
    if with_mask:
        sampling |= {"top_p": options.top_p, "top_k": options.top_k or vocab_size, "min_p": options.min_p}
    if options.stop_tokens:
        sampling["stop_token_ids"] = list(options.stop_tokens)
    if options.stop:
        sampling["stop"] = list(options.stop)
    if bias := dict(options.logit_bias) | placeholder_bias(request):
        sampling["logit_bias"] = {str(token): value for token, value in bias.items()}
    body = {
        "rid": rid,
        **prompt_fields(request, drawn),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    return body | {"return_sampling_mask": True} if with_mask else body


def prompt_fields(request: Request, drawn: list[int]) -> dict[str, Any]:
    """The prompt of a call, with its images if there are any. A server decodes and encodes again a prompt with images."""
    found: dict[str, Any] = {"input_ids": marked_tokens([*request.tokens, *drawn], request.pictures)}
    return found | {"image_data": data_urls(request.pictures)} if request.pictures else found


def scoring_body(request: Request, drawn: list[int], rid: str) -> dict[str, Any]:
    """The body of a call that scores a completion under the model itself, as part of a prompt without new tokens."""
    return {
        "rid": rid,
        **prompt_fields(request, drawn),
        "sampling_params": NEUTRAL_SAMPLING | {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(request.tokens) - 1,
        "stream": False,
    }


def read_generation(url: str, answer: Any, with_mask: bool) -> tuple[GenerateResult, str | None]:
    """Read the tokens with their log-probs, and the label of the weights that wrote them.

    Tokens are read from `output_token_logprobs`, which has the stop token in every version.
    """
    meta, kind, weights = _meta_info(url, answer)
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if kind == "abort":  # aborted before its first token
            return GenerateResult(reason=kind, url=url), weights
        raise SGLANG.error("refused", url, GENERATE, "its answer has no log-probs (meta_info.output_token_logprobs)")
    try:
        tokens, logp = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
        if with_mask and tokens:
            logp = [float(value) for value in meta["output_token_sampling_logprobs"]]
    except (TypeError, KeyError, ValueError) as error:
        raise SGLANG.error("refused", url, GENERATE, f"its log-probs cannot be read ({error!r})") from error
    if kind == "abort":  # the abort may come between a token and its log-prob
        shorter = min(len(tokens), len(logp))
        return GenerateResult(tokens[:shorter], logp[:shorter], kind, url), weights
    count = meta.get("completion_tokens", len(tokens))
    if len(logp) != len(tokens) or count != len(tokens):
        reason = f"it counts {count} tokens and gives {len(tokens)}, with {len(logp)} log-probs"
        raise SGLANG.error("refused", url, GENERATE, reason)
    return GenerateResult(tokens, logp, kind, url), weights


def read_scores(url: str, answer: Any) -> tuple[list[float], str | None]:
    """Read the log-probs of the scored tokens, and the label of the weights. The first entry is of the prompt's last token."""
    meta, _, weights = _meta_info(url, answer)
    try:
        return [float(pair[0]) for pair in meta["input_token_logprobs"][1:]], weights
    except (TypeError, KeyError, ValueError) as error:
        raise SGLANG.error("refused", url, GENERATE, f"its scores cannot be read ({error!r})") from error


def _meta_info(url: str, answer: Any) -> tuple[dict[str, Any], str, str | None]:
    try:
        meta = answer["meta_info"]
        return meta, str(meta["finish_reason"]["type"]), meta.get("weight_version")
    except (TypeError, KeyError) as error:
        raise SGLANG.error("refused", url, GENERATE, f"its answer has no {error} of an SGLang answer") from error


Result = TypeVar("Result", GenerateResult, list[float])


@dataclass(eq=False)
class InFlightRequest:
    """A request in flight and its tokens so far."""

    request: Request
    version: int
    label: str | None
    """Label of the weights that may write it; None while the servers have the weights of their start."""
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Set by scoring; None while they are those of `logp` or not asked for."""
    aborted: threading.Event = field(default_factory=threading.Event)
    sent: tuple[ServerState, str] | None = None
    """The server that works on it, and the id there."""

    def completion(self, finish: CompletionFinish) -> Completion:
        tokens, logp = np.array(self.tokens, dtype=np.int64), np.array(self.logp, dtype=np.float32)
        raw = None
        if self.raw_logp is not None:
            raw = np.array(self.raw_logp, dtype=np.float32)
        elif self.request.sampling.raw_logprobs:  # NaN if the tokens were never scored
            raw = np.full_like(logp, np.nan) if needs_scoring(self.request.sampling) else logp.copy()
        return Completion(self.request.id, tokens, logp, finish, self.version, raw_logp=raw)


class RequestSender:
    """Sends requests until they are complete. `lock` guards the pool and `InFlightRequest.sent`."""

    def __init__(
        self,
        pool: ServerPool,
        lock: threading.Condition,
        vocab_size: int,
        decode: Callable[[list[int]], str],
        timeout_s: float,
    ) -> None:
        self.pool, self.lock, self.vocab_size, self.timeout_s = pool, lock, vocab_size, timeout_s
        self.stop_strings = StopStrings(decode)

    def run(self, state: InFlightRequest) -> Completion:
        """Complete a request in as many calls as it takes; raise an error that names request and server if that fails."""
        request, deadline, num_empty = state.request, time.monotonic() + self.timeout_s, 0
        finish: CompletionFinish | None = None
        with_mask = is_truncated(request.sampling)
        while finish is None and not state.aborted.is_set():
            result = self._ask(
                state,
                lambda rid: generate_body(request, state.tokens, rid, self.vocab_size, with_mask),
                lambda url, answer: self._read(state, url, answer, with_mask),
                deadline,
            )
            if result is None:
                break
            state.tokens += result.tokens
            state.logp += result.logp
            finish = self._finish(state, result)
            num_empty += not result.tokens
            if finish is None and num_empty >= MAX_TRIES:
                raise UserError(f"request {request.id}: SGLang servers abort it repeatedly")
        if state.tokens and needs_scoring(request.sampling):
            state.raw_logp = self._ask(
                state, lambda rid: scoring_body(request, state.tokens, rid), read_scores, deadline, is_abortable=False
            )
        return state.completion(finish or "aborted")

    def _read(
        self, state: InFlightRequest, url: str, answer: Any, with_mask: bool
    ) -> tuple[GenerateResult, str | None]:
        found = read_generation(url, answer, with_mask)
        if state.request.pictures:
            num_tokens = len(state.request.tokens) + len(state.tokens)
            check_expansion(state.request, num_tokens, answer["meta_info"].get("prompt_tokens"), f"SGLang server {url}")
        return found

    def abort(self, server: ServerState, rid: str, timeout_s: float = ABORT_TIMEOUT_S) -> None:
        """Tell a server to abort a request. The answer to the request shows whether it did."""
        try:
            SGLANG.call(server.info.url, "/abort_request", timeout_s, {"rid": rid})
        except ServerError as error:
            server.last_error = error.reason

    def _ask(
        self,
        state: InFlightRequest,
        body: Callable[[str], dict[str, Any]],
        read: Callable[[str, Any], tuple[Result, str | None]],
        deadline: float,
        is_abortable: bool = True,
    ) -> Result | None:
        """Call `/generate` on one server after another until one answers; None if the request was aborted between two tries."""
        failed, wait = 0, RETRY_WAIT_S
        avoid: ServerState | None = None
        while not (is_abortable and state.aborted.is_set()):
            # All ids have one length: a server aborts every request whose id begins with the given one.
            rid = uuid.uuid4().hex
            with self.lock:
                server = self.pool.pick(avoid)
                server.num_requests += 1
                state.sent = (server, rid) if is_abortable else None
            try:
                return self._call(state, server, rid, body(rid), read, deadline)
            except ServerError as error:
                with self.lock:
                    self.pool.mark_failed(server, error)
                avoid = server
                failed += error.kind != "unreachable"  # an unreachable server is tried until it is lost
                if error.kind in ("refused", "late") or failed >= MAX_TRIES or time.monotonic() + wait > deadline:
                    tried = f" (tried {failed} times)" if failed > 1 else ""
                    raise UserError(f"request {state.request.id}: {error}{tried}") from error
            state.aborted.wait(wait)
            wait = min(2 * wait, MAX_RETRY_WAIT_S)
        return None

    def _call(
        self,
        state: InFlightRequest,
        server: ServerState,
        rid: str,
        body: dict[str, Any],
        read: Callable[[str, Any], tuple[Result, str | None]],
        deadline: float,
    ) -> Result:
        url = server.info.url
        try:
            answer = SGLANG.call(url, GENERATE, max(0.001, deadline - time.monotonic()), body)
            result, weights = read(url, answer)
        except ServerError as error:
            if error.kind == "late":
                self.abort(server, rid)
            raise
        finally:
            with self.lock:
                server.num_requests -= 1
                state.sent = None
        with self.lock:
            self.pool.mark_answered(server)
            if state.label is not None and weights != state.label:
                server.last_error = f"it has weights {weights!r} where {state.label!r} were sent: it was restarted, or another process updated it"
                self.pool.mark_lost(server)
                raise SGLANG.error("unreachable", url, GENERATE, server.last_error)
        return result

    def _finish(self, state: InFlightRequest, result: GenerateResult) -> CompletionFinish | None:
        """The finish reason after this result; None if the request must continue."""
        options, tokens = state.request.sampling, state.tokens
        if tokens and (
            tokens[-1] in options.stop_tokens
            or (options.stop and self.stop_strings.are_complete(options.stop, tokens[-1], lambda size: tokens[-size:]))
        ):
            return "stop"  # also at the limit, where a server reports `length`
        if len(tokens) >= options.max_tokens:
            return "length"
        if result.reason == "length":
            raise UserError(
                f"request {state.request.id}: SGLang server {result.url} ended it after {len(tokens)} of {options.max_tokens} tokens; "
                "start it with a larger --context-length, or a larger --mem-fraction-static if its cache is smaller than that"
            )
        if result.reason == "abort" and state.aborted.is_set():
            return "aborted"
        return None  # aborted by another client, or ended at a token that the request does not name
