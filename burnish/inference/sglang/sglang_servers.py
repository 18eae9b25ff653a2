"""SGLang servers: what each can do, found by inspection before a run, and which of them gets the next request.

No endpoint says under which distribution a server's log-probs are. They are after temperature, or before it where the server
runs with SGLANG_RETURN_ORIGINAL_LOGPROB. The log-prob of the likeliest next token tells which: only the first kind changes with
the temperature. Log-probs are over the whole vocabulary whatever top-p and top-k are (version 0.4 renormalised over top-p alone).
Only `return_sampling_mask`, in versions of 2026, gives log-probs renormalised over the tokens that could be drawn.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.engine_common import check_bias, check_prompt, is_truncated, needs_scoring
from burnish.inference.picture_inputs import check_images_only
from burnish.inference.server_client import ServerClient, ServerError

SGLANG = ServerClient("SGLang", "rollout.sglang.urls", "http://host:30000", connect_s=5.0)
GENERATE = "/generate"
MODEL_INFO, SERVER_INFO = ("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")
"""The endpoints under their present and their first names."""
NEUTRAL_SAMPLING: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""All parameters that shape a distribution, without effect. They are always sent: a server fills in what is left out from its --preferred-sampling-params."""
QUERY_TIMEOUT_S = 60.0
"""Deadline of a query without work, or of one token: a server that has just started compiles its kernels for it."""
LOGP_TOLERANCE = 0.02
"""A difference of log-probs larger than rounding in bfloat16."""
PROBE_TEMPERATURES = (1 / 8, 100.0)
"""At one of them the likeliest log-prob differs from that at 1, unless the distribution is flat or certain."""
SPARE_POSITIONS = 2
"""Positions that a server leaves free: it cuts a completion that would need them."""
LOST_AFTER_S = 3.0
"""A server that is unreachable for this long is lost; a single refused connection is not enough."""
RECONNECT_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SglangServerInfo:
    """What a server can do, by its answers."""

    url: str
    version: str
    context: int | None
    """Most positions of a prompt and its completion; None if it does not say."""
    longest_input: int | None
    """Most tokens of a prompt; None if it does not say."""
    is_tempered: bool
    """Log-probs are after temperature; otherwise they are of temperature 1."""
    has_mask: bool
    """It can give log-probs of a truncated distribution."""
    mask_tokens: int | None
    """Most tokens of such a distribution (--sampling-mask-max-tokens); None without a limit."""
    can_sleep: bool
    """It runs with --enable-memory-saver."""


def inspect_server(url: str, vocab_size: int) -> SglangServerInfo:
    """Inspect a server; raise if it cannot be used with a model of `vocab_size` tokens."""
    try:
        return _inspect_server(url, vocab_size)
    except ServerError as error:
        if error.kind == "unreachable":
            raise UserError(
                f"{error}; start one (python -m sglang.launch_server --model-path DIRECTORY --port 30000) or correct rollout.sglang.urls"
            ) from error
        raise UserError(str(error)) from error


def weight_label(url: str) -> str | None:
    """The label of the weights a server has."""
    label = _first_answer(url, MODEL_INFO).get("weight_version")
    return None if label is None else str(label)


def _inspect_server(url: str, vocab_size: int) -> SglangServerInfo:
    model = _first_answer(url, MODEL_INFO)
    server = _first_answer(url, SERVER_INFO)
    version = str(server.get("version", "of an unknown version"))
    if not model.get("is_generation", True):
        raise UserError(f"SGLang server {url} serves {model.get('model_path')}, which does not generate text")
    if "weight_version" not in model:
        raise UserError(
            f"SGLang server {url} (SGLang {version}) is too old: it does not label its weights (weight_version in /model_info), "
            "so a completion of weights from before an update could not be told from one after it; use SGLang 0.5 or later"
        )
    at_one = _top_logprob(url)
    _check_vocabulary(url, vocab_size, str(model.get("model_path")))
    differences = [_top_logprob(url, temperature=t) - at_one for t in PROBE_TEMPERATURES]
    longest = _integer(server, "max_req_input_len")
    return SglangServerInfo(
        url=url,
        version=version,
        context=min(
            (n for n in (_context_length(url), _integer(server, "max_total_num_tokens")) if n is not None), default=None
        ),
        longest_input=None if longest is None else longest - 1,  # it refuses a prompt of that many
        is_tempered=any(abs(d) > LOGP_TOLERANCE for d in differences),
        has_mask=_has_mask(url, vocab_size),
        mask_tokens=_integer(server, "sampling_mask_max_tokens"),
        can_sleep=bool(server.get("enable_memory_saver")),
    )


def _first_answer(url: str, paths: tuple[str, ...]) -> dict[str, Any]:
    """The answer at the first of several paths that exists."""
    for path in paths:
        try:
            answer = SGLANG.call(url, path, QUERY_TIMEOUT_S)
        except ServerError as error:
            if error.kind == "refused" and path != paths[-1]:
                continue
            raise
        if isinstance(answer, dict):
            return answer
    raise SGLANG.error("refused", url, paths[-1], "no JSON object; is this an SGLang server?")


def _integer(info: dict[str, Any], key: str) -> int | None:
    found = info.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _context_length(url: str) -> int | None:
    try:
        return int(SGLANG.call(url, "/v1/models", QUERY_TIMEOUT_S)["data"][0]["max_model_len"])
    except (ServerError, TypeError, KeyError, IndexError, ValueError):
        return None  # not every version has it; the server refuses a request that does not fit


def _probe(url: str, with_mask: bool = False, **changes: Any) -> dict[str, Any]:
    """The meta_info of a request for one token after token 0, with changed sampling parameters."""
    body = {
        "input_ids": [0],
        "sampling_params": NEUTRAL_SAMPLING | {"max_new_tokens": 1, "ignore_eos": True} | changes,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "stream": False,
    }
    answer = SGLANG.call(url, GENERATE, QUERY_TIMEOUT_S, body | {"return_sampling_mask": True} if with_mask else body)
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise SGLANG.error("refused", url, GENERATE, "its answer has no meta_info; is this an SGLang server?")
    return meta


def _top_logprob(url: str, **changes: Any) -> float:
    """The log-prob of the likeliest token after token 0."""
    try:
        return float(_probe(url, **changes)["output_top_logprobs"][0][0][0])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"SGLang server {url} gives no log-probs (meta_info.output_top_logprobs of a request with return_logprob); "
            "without them nothing can be learnt from its samples"
        ) from error


def _check_vocabulary(url: str, vocab_size: int, model: str) -> None:
    """Raise unless the server's model has as many tokens as the policy's.

    A server refuses a bias on a token past the vocabulary. It is the only field with that check in every version. A prompt with
    such a token would reach the GPU and end the server.
    """
    for token, is_ours in ((vocab_size - 1, True), (vocab_size, False)):
        message = ""
        try:
            _probe(url, logit_bias={str(token): 0.0})
        except ServerError as error:
            if error.kind != "refused":
                raise
            message = f" ({error.reason})"
        if is_ours == bool(message):
            has = "has no" if is_ours else "has a"
            raise UserError(
                f"SGLang server {url} serves another model ({model}): it {has} token {token}, and the policy has {vocab_size} tokens{message}"
            )


def _has_mask(url: str, vocab_size: int) -> bool:
    """Whether a server gives log-probs renormalised over the tokens that could be drawn. Others ignore or refuse the field."""
    try:
        meta = _probe(url, with_mask=True, top_k=min(2, vocab_size))
    except ServerError as error:
        if error.kind == "refused":
            return False
        raise
    found = meta.get("output_token_sampling_logprobs")
    return isinstance(found, list) and len(found) == 1 and isinstance(found[0], float | int)


def check_request(request: Request, servers: Sequence[SglangServerInfo], vocab_size: int) -> None:
    """Raise for a request that some server can never run: it may be sent to any of them."""
    who, num = f"request {request.id}", len(request.tokens)
    check_prompt(request, vocab_size)  # an unknown token would end a server
    check_images_only(request, "SGLang")
    longest = num + request.sampling.max_tokens
    for info in servers:
        if info.context is not None and longest > info.context - SPARE_POSITIONS:
            raise UserError(
                f"{who}: {num} prompt tokens + {request.sampling.max_tokens} new ones = {longest}, but SGLang server {info.url} "
                f"has {info.context} positions, {SPARE_POSITIONS} of which it leaves free; lower max_tokens, or start it with a larger "
                "--context-length"
            )
        sent = (
            longest if needs_scoring(request.sampling) else num
        )  # scoring sends the completion as a part of the prompt
        if info.longest_input is not None and sent > info.longest_input:
            raise UserError(
                f"{who}: SGLang server {info.url} takes {info.longest_input} positions of a prompt at most, and this needs {sent}; "
                "start it with a larger --context-length"
            )
    check_bias(request, vocab_size)
    check_options(request.sampling, servers, who)
    for info in servers:
        support = request.sampling.top_k or vocab_size
        if is_truncated(request.sampling) and info.mask_tokens is not None and support > info.mask_tokens:
            raise UserError(
                f"{who}: up to {support} tokens can be drawn, and SGLang server {info.url} gives log-probs of a truncated distribution of "
                f"{info.mask_tokens} at most; set top_k, or start it with --sampling-mask-max-tokens {support}"
            )


def check_options(options: SamplingOptions, servers: Sequence[SglangServerInfo], who: str) -> None:
    """Raise for options with which a server would report the wrong log-probs. `who` names their owner in the error."""
    for info in servers:
        if not info.is_tempered and options.temperature not in (0, 1):
            raise UserError(
                f"{who}: temperature is {options.temperature:g}, but SGLang server {info.url} gives log-probs of temperature 1; "
                "start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )
        if options.temperature > 0 and options.top_k and options.top_p < 1:
            raise UserError(
                f"{who}: top_k and top_p together mean something else to SGLang, whose top_p is of the whole distribution and not of "
                "what top_k leaves; use one of them"
            )
        if is_truncated(options) and not info.has_mask:
            raise UserError(
                f"{who}: top_p, top_k or min_p is on, and SGLang server {info.url} (SGLang {info.version}) gives log-probs of the "
                "whole distribution, not of the one it draws from; turn them off, or use a version with return_sampling_mask"
            )


# --- the pool of servers -------------------------------------------------------------------------------------------------


def retry_while_unreachable(action: Callable[[], None]) -> None:
    """Run an action; repeat it while the server is unreachable, for at most `LOST_AFTER_S`."""
    deadline = time.monotonic() + LOST_AFTER_S
    while True:
        try:
            action()
            return
        except ServerError as error:
            if error.kind != "unreachable" or time.monotonic() > deadline:
                raise
        time.sleep(RECONNECT_S)


@dataclass
class ServerState:
    """A server, its load and its failures."""

    info: SglangServerInfo
    num_requests: int = 0
    down_since: float | None = None
    is_lost: bool = False
    last_error: str = ""


class ServerPool:
    """The servers of an engine. The caller holds the engine's lock."""

    def __init__(self, servers: Sequence[SglangServerInfo]) -> None:
        self.servers = [ServerState(info) for info in servers]

    @property
    def present(self) -> list[ServerState]:
        """The servers that are not lost."""
        return [server for server in self.servers if not server.is_lost]

    def pick(self, avoid: ServerState | None = None) -> ServerState:
        """The server with the least work. `avoid` and servers that just failed come last."""
        if not self.present:
            errors = "; ".join(f"{s.info.url}: {s.last_error}" for s in self.servers)
            raise UserError(f"no SGLang server is left ({errors}); look at its log, start it again, and resume the run")
        return min(self.present, key=lambda s: (s is avoid, s.down_since is not None, s.num_requests))

    def mark_answered(self, server: ServerState) -> None:
        server.down_since = None

    def mark_failed(self, server: ServerState, error: ServerError) -> None:
        """Record a failure. A server that is unreachable for `LOST_AFTER_S` is lost."""
        server.last_error = error.reason
        if error.kind != "unreachable":
            return
        now = time.monotonic()
        if server.down_since is None:
            server.down_since = now
        elif now - server.down_since > LOST_AFTER_S:
            self.mark_lost(server)

    def mark_lost(self, server: ServerState) -> None:
        """Do not use a server until it has been sent new weights."""
        if not server.is_lost:
            server.is_lost = True
            logger.warning(
                "SGLang server %s is lost (%s); %d other servers remain",
                server.info.url,
                server.last_error,
                len(self.present),
            )

    def mark_updated(self, server: ServerState, info: SglangServerInfo) -> None:
        """Use a server again."""
        server.info, server.is_lost, server.down_since = info, False, None
