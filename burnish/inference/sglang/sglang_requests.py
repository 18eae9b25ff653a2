"""A request as `/generate` takes it, and what its answer says. Token ids both ways: no text is read or sent."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from typing import Any, Literal
from urllib.parse import urlsplit

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.http import connection_to, is_server_url
from burnish.core.random_keys import fold

# --- One HTTP call with a deadline, and what can go wrong with it.

CONNECT_S = 5.0
MAX_SHOWN = 300
"""Characters of a server's own words in an error."""

Kind = Literal["refused", "failed", "unreachable", "late"]


class ServerError(Exception):
    """A server did not do what it was asked. The text says which server, what it was asked, and what came of it.

    `refused`: asking again is of no use. `failed`: it may pass. `unreachable`: nobody is there, or no more. `late`: the
    deadline has passed.
    """

    def __init__(self, kind: Kind, url: str, path: str, what: str) -> None:
        super().__init__(f"SGLang server {url}, {path}: {what}")
        self.kind, self.url, self.what = kind, url, what


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    if not is_server_url(url):
        raise UserError(f"rollout.sglang.urls: {url!r} is no address of a server; write it as http://host:30000")
    return url.rstrip("/")


def call(url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
    """What `url` answers at `path`: JSON if it is, else text. GET, or POST with a body; a status past 299 is an error."""
    connection = connection_to(url, timeout_s, CONNECT_S)
    try:
        connection.connect()
    except OSError as error:
        raise ServerError("unreachable", url, path, _describe(error)) from error
    try:
        name = method or ("GET" if body is None else "POST")
        status, data = _exchange(connection, name, urlsplit(url).path + path, body)
    except TimeoutError as error:
        raise ServerError("late", url, path, f"no answer within {round(timeout_s, 1):g} s") from error
    except (OSError, HTTPException) as error:
        raise ServerError("unreachable", url, path, _describe(error)) from error
    finally:
        connection.close()
    return _answer(url, path, status, data)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _exchange(connection: HTTPConnection, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    sent = None if body is None else json.dumps(body).encode()
    connection.request(method, path, sent, {"Content-Type": "application/json"} if sent else {})
    response = connection.getresponse()
    return response.status, response.read()


def _answer(url: str, path: str, status: int, data: bytes) -> Any:
    text = data.decode(errors="replace")
    if status >= 300:
        kind: Kind = "failed" if status >= 500 or status in (408, 429) else "refused"
        raise ServerError(kind, url, path, f"status {status}: {_error_message(text)}")
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except ValueError as error:
        raise ServerError("failed", url, path, f"its answer breaks off after {len(data)} bytes") from error


def _error_message(text: str) -> str:
    """The message in an error's body, in the forms servers write it, or the body."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    words = " ".join(str(found).split()) or "no reason given"
    return words if len(words) <= MAX_SHOWN else words[:MAX_SHOWN] + " ..."


GENERATE = "/generate"
SEED_BITS = 31
"""A server of the first versions with seeds keeps them in 32 bits, with a sign."""


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
"""Everything that shapes a distribution, without effect. It is always sent: what a request leaves open a server fills in
from its --preferred-sampling-params."""


@dataclass
class GenerateResult:
    """What one call of `/generate` gave: some tokens of a completion, perhaps all."""

    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    reason: str = "abort"
    """stop, length or abort."""
    url: str = ""
    """Whose it is."""


def is_truncated(options: SamplingOptions) -> bool:
    """Whether only part of the vocabulary can be drawn. Greedy tokens are reported under the whole distribution."""
    return options.temperature > 0 and (options.top_p < 1 or options.top_k > 0 or options.min_p > 0)


def needs_scoring(options: SamplingOptions) -> bool:
    """Whether raw log-probs are wanted that are not those of the draw."""
    plain = options.temperature == 0 or (options.temperature == 1 and not is_truncated(options))
    return options.raw_logprobs and (bool(options.logit_bias) or not plain)


def sampling_seed(request: Request) -> int:
    """The seed of a request's noise, which a server mixes with each token's place in the sequence.

    A continued request has the seed it began with, because its prompt and the tokens drawn of it grow alike.
    """
    return fold(request.key, len(request.tokens) - request.generated) & ((1 << SEED_BITS) - 1)


def generate_body(request: Request, drawn: list[int], rid: str, vocab_size: int, with_mask: bool) -> dict[str, Any]:
    """The call that goes on with a request after the tokens it has.

    `with_mask` asks for log-probs of the truncated distribution. The first versions that have them want a top-k then; the
    whole vocabulary is one that changes nothing.
    """
    options = request.sampling
    sampling = NEUTRAL_SAMPLING | {
        "temperature": options.temperature,
        "max_new_tokens": options.max_tokens - len(drawn),
        # Without it a server ends at tokens of its own, with it at none, `stop_token_ids` included.
        "ignore_eos": not options.stop_tokens,
        "sampling_seed": sampling_seed(request),
    }
    if with_mask:
        sampling |= {"top_p": options.top_p, "top_k": options.top_k or vocab_size, "min_p": options.min_p}
    if options.stop_tokens:
        sampling["stop_token_ids"] = list(options.stop_tokens)
    if options.stop:
        sampling["stop"] = list(options.stop)
    if options.logit_bias:
        sampling["logit_bias"] = {str(token): value for token, value in options.logit_bias}
    body = {
        "rid": rid,
        "input_ids": [*request.tokens, *drawn],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": False,
    }
    return body | {"return_sampling_mask": True} if with_mask else body


def scoring_body(request: Request, drawn: list[int], rid: str) -> dict[str, Any]:
    """The call that scores the tokens of a completion under the model itself, as a prompt that nothing follows."""
    return {
        "rid": rid,
        "input_ids": [*request.tokens, *drawn],
        "sampling_params": NEUTRAL_SAMPLING | {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(request.tokens) - 1,
        "stream": False,
    }


def read_generation(url: str, answer: Any, with_mask: bool) -> tuple[GenerateResult, str | None]:
    """The tokens with their log-probs, and the label of the weights that wrote them.

    They come from `output_token_logprobs`, which has the stop token in every version.
    """
    meta, kind, weights = _meta_info(url, answer)
    pairs = meta.get("output_token_logprobs")
    if pairs is None:
        if kind == "abort":  # it had not begun
            return GenerateResult(reason=kind, url=url), weights
        raise ServerError("refused", url, GENERATE, "its answer has no log-probs (meta_info.output_token_logprobs)")
    try:
        tokens, logp = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
        if with_mask and tokens:
            logp = [float(value) for value in meta["output_token_sampling_logprobs"]]
    except (TypeError, KeyError, ValueError) as error:
        raise ServerError("refused", url, GENERATE, f"its log-probs cannot be read ({error!r})") from error
    if kind == "abort":  # it may be stopped between a token and its log-prob
        shorter = min(len(tokens), len(logp))
        return GenerateResult(tokens[:shorter], logp[:shorter], kind, url), weights
    count = meta.get("completion_tokens", len(tokens))
    if len(logp) != len(tokens) or count != len(tokens):
        what = f"it speaks of {count} tokens and gives {len(tokens)}, with {len(logp)} log-probs"
        raise ServerError("refused", url, GENERATE, what)
    return GenerateResult(tokens, logp, kind, url), weights


def read_scores(url: str, answer: Any) -> tuple[list[float], str | None]:
    """The log-probs of the scored tokens; the first entry is of the prompt's last token, and has none."""
    meta, _, weights = _meta_info(url, answer)
    try:
        return [float(pair[0]) for pair in meta["input_token_logprobs"][1:]], weights
    except (TypeError, KeyError, ValueError) as error:
        raise ServerError("refused", url, GENERATE, f"its scores cannot be read ({error!r})") from error


def _meta_info(url: str, answer: Any) -> tuple[dict[str, Any], str, str | None]:
    try:
        meta = answer["meta_info"]
        return meta, str(meta["finish_reason"]["type"]), meta.get("weight_version")
    except (TypeError, KeyError) as error:
        raise ServerError("refused", url, GENERATE, f"its answer has no {error} of an SGLang answer") from error
