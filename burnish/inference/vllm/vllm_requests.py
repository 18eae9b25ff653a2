"""What a vLLM server can do, found out before a run starts: by its list of endpoints, and by trying."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.core.http import connection_to, is_server_url
from burnish.core.random_keys import fold
from burnish.inference.engine_common import check_bias

# --- One HTTP call of a vLLM server, with a deadline.

CONNECT_S = 10.0
MAX_SHOWN = 400
"""Characters of a server's own words in an error."""


class ServerError(UserError):
    """A server did not do what it was asked; the text says which, what it was asked, and what came of it."""

    def __init__(self, url: str, path: str, what: str, status: int | None = None) -> None:
        super().__init__(f"vLLM server {url}, {path}: {what}")
        self.status = status
        """Of its answer; None where there was none."""


def check_url(url: str) -> str:
    """The address of a server, without a slash at its end."""
    if not is_server_url(url):
        raise UserError(
            f"rollout.vllm.url: {url!r} is no address of a server; write it as http://host:8000, with a number for the port"
        )
    return url.rstrip("/")


def call(url: str, path: str, timeout_s: float, body: dict[str, Any] | None = None) -> Any:
    """What a server answers at a path within `timeout_s` in all: JSON if it is, else text. GET, or POST with a body."""
    connection = connection_to(url, timeout_s, CONNECT_S)
    try:
        connection.connect()
        sent = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if sent is not None else {}
        connection.request("GET" if sent is None else "POST", urlsplit(url).path + path, sent, headers)
        response = connection.getresponse()
        status, data = response.status, response.read()
    except TimeoutError as error:
        raise ServerError(url, path, f"no answer within {timeout_s:g} s") from error
    except (OSError, HTTPException) as error:
        raise ServerError(url, path, f"no answer ({type(error).__name__}: {error})") from error
    finally:
        connection.close()
    text = data.decode(errors="replace")
    if status >= 300:
        raise ServerError(url, path, f"status {status}: {_error_message(text)}", status)
    try:
        return json.loads(text)
    except ValueError:
        return text


def _error_message(text: str) -> str:
    """The message in an error's body, or the body."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    words = " ".join(str(found).split()) or "no reason given"
    return words if len(words) <= MAX_SHOWN else words[:MAX_SHOWN] + " ..."


# --- Our sampling options in vLLM's words, the same for an engine in this process and for a server.
#
# The order of vLLM's truncation is min-p, top-k, top-p, each on what the one before has left; ours is top-k, top-p, min-p. Any
# one of them alone keeps the same tokens, and so do top-k with top-p and top-k with min-p; min-p with top-p may keep fewer
# here. Log-probs are in every case those of what was drawn from. Greedy tokens are never truncated.

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM raises a lower temperature to this one in silence, and refuses a higher one."""
SEED_BITS = 63
PROBE_REQUEST = Request("probe", (0,), SamplingOptions(top_k=1, max_tokens=1), key=0)
"""A first request: the only token that can be drawn is certain."""
NEUTRAL_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True}
"""Sampling from the model itself. `ignore_eos`: a request ends at the stop tokens it names, at no other."""


def sampling_params(request: Request) -> dict[str, Any]:
    """The parameters of a request, with the log-prob of every token that is drawn.

    vLLM's noise of a request follows from its seed, so the tokens follow (key, generated), as long as vLLM's own logits do.
    """
    options = request.sampling
    return NEUTRAL_SAMPLING | {
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


def scoring_params(last: int) -> dict[str, Any]:
    """The parameters of a pass that gives the model's own log-probs: of each token of the prompt, and of `last` behind it."""
    return NEUTRAL_SAMPLING | {
        "max_tokens": 1,
        "seed": 0,
        "prompt_logprobs": 0,
        "logprobs": 1,
        "logprob_token_ids": [last],
    }


def needs_scoring(options: SamplingOptions) -> bool:
    """Whether raw log-probs are asked for that are not those of the distribution that is sampled from."""
    is_truncated = options.top_p < 1 or options.top_k > 0 or options.min_p > 0
    is_plain = not options.logit_bias and (options.temperature == 0 or (options.temperature == 1 and not is_truncated))
    return options.raw_logprobs and not is_plain


def check_vllm_requests(requests: Sequence[Request], known: Set[str], vocab: int, positions: int) -> None:
    """Raise for a request that can never run, or not beside the `known` ones."""
    fresh = set[str]()
    for request in requests:
        _check_request(request, vocab, positions)
        if request.id in known:
            raise ValueError(f"request {request.id} is already running")
        if request.id in fresh:
            raise ValueError(f"two of the requests are called {request.id}")
        fresh.add(request.id)


def _check_request(request: Request, vocab: int, positions: int) -> None:
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
    if options.temperature and not MIN_TEMPERATURE <= options.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}, and vLLM samples at 0 or at {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
    check_bias(request, vocab)


def check_logprobs_mode(logp: Sequence[float], who: str) -> None:
    """Raise unless what came of the probe is under the distribution that is sampled from: there its only token has log-prob 0."""
    if len(logp) != 1 or abs(logp[0]) > 1e-6:
        raise UserError(
            f"{who} gives the log-prob {logp[0] if logp else None} to a token that alone can be drawn, and not 0: its log-probs are not of "
            "the distribution that it samples from (logprobs_mode=processed_logprobs)"
        )


COMPLETIONS, ABORT_REQUESTS, RESET_PREFIX_CACHE = "/v1/completions", "/abort_requests", "/reset_prefix_cache"
COLLECTIVE_RPC = "/collective_rpc"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SET_LABEL, GET_LABEL = "/update_weight_version", "/weight_info"
QUERY_TIMEOUT_S = 120.0
"""Deadline of a question that takes no work, or one token; a server that has just started compiles for it."""
START_HINT = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs (for model.lora also --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), see docs/engines.md"
)


@dataclass(frozen=True)
class VllmServerInfo:
    """A server as it answered."""

    url: str
    version: str
    positions: int
    """Most tokens of a prompt and its completion."""
    has_labels: bool
    """It can be told, and tells, which version its weights are."""
    has_priorities: bool
    """It runs with --scheduling-policy priority."""
    can_sleep: bool
    """It runs with --enable-sleep-mode."""
    dtype: str | None
    """The type of its weights; None where it does not say."""


def inspect_server(url: str, vocab: int, adapter: bool) -> VllmServerInfo:
    """A server's facts, or the error for one that cannot be used with a model of so many tokens."""
    version = _version(url)
    paths = call(url, "/openapi.json", QUERY_TIMEOUT_S).get("paths", {})
    wanted = [
        COMPLETIONS,
        ABORT_REQUESTS,
        RESET_PREFIX_CACHE,
        *([LOAD_ADAPTER, UNLOAD_ADAPTER] if adapter else [COLLECTIVE_RPC]),
    ]
    if missing := [path for path in wanted if path not in paths]:
        raise UserError(
            f"vLLM server {url} (vLLM {version}) has no {', '.join(missing)}; {START_HINT}. 0.32.0 then has all"
        )
    check_logprobs_mode(_logprobs(url), f"vLLM server {url} (started without --logprobs-mode processed_logprobs?)")
    if not _accepts(url, logit_bias={str(vocab - 1): 0.0}) or _accepts(url, logit_bias={str(vocab): 0.0}):
        raise UserError(f"vLLM server {url} serves another model: its vocabulary is not the policy's {vocab} tokens")
    config = _model_config(url)
    return VllmServerInfo(
        url=url,
        version=version,
        positions=int(call(url, "/v1/models", QUERY_TIMEOUT_S)["data"][0]["max_model_len"]),
        has_labels=SET_LABEL in paths and GET_LABEL in paths,
        has_priorities=_accepts(url, priority=-1),
        can_sleep="/sleep" in paths and bool(config.get("enable_sleep_mode")),
        dtype=str(config["dtype"]).removeprefix("torch.") if "dtype" in config else None,
    )


def completion_body(options: dict[str, Any], tokens: list[int], name: str, model: str | None = None) -> dict[str, Any]:
    """A call of `/v1/completions`: token ids in and out. What is left open a server fills with the model's own defaults."""
    body = dict(options)
    if (bias := body.pop("logit_bias", None)) is not None:
        body["logit_bias"] = {str(token): value for token, value in bias.items()}
    fixed = {
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_tokens": 0,
        "stream": False,
    }
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    return body | fixed | ids | {"prompt": tokens, "request_id": name} | ({} if model is None else {"model": model})


def _version(url: str) -> str:
    try:
        return str(call(url, "/version", QUERY_TIMEOUT_S)["version"])
    except ServerError as error:
        if error.status is not None:
            raise UserError(f"{error}; is this a vLLM server?") from error
        raise UserError(f"{error}; {START_HINT}, or correct rollout.vllm.url") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{url} does not say its version; is this a vLLM server?") from error


def _probe(url: str, **changes: Any) -> Any:
    return call(
        url,
        COMPLETIONS,
        QUERY_TIMEOUT_S,
        completion_body(sampling_params(PROBE_REQUEST), list(PROBE_REQUEST.tokens), "burnish-probe") | changes,
    )


def _logprobs(url: str) -> list[float]:
    choice = _probe(url)["choices"][0]
    if "token_ids" not in choice or choice["token_ids"] is None:
        raise UserError(f"vLLM server {url} does not give token ids (return_token_ids): update vLLM, 0.32.0 does")
    return [float(value) for value in choice["logprobs"]["token_logprobs"]]


def _accepts(url: str, **changes: Any) -> bool:
    """Whether a request with these parameters is not refused."""
    try:
        _probe(url, **changes)
    except ServerError as error:
        if error.status is not None and 400 <= error.status < 500:
            return False
        raise
    return True


def _model_config(url: str) -> dict[str, Any]:
    """Its model's settings; none where it does not tell."""
    try:
        return dict(call(url, "/server_info?config_format=json", QUERY_TIMEOUT_S)["vllm_config"]["model_config"])
    except (ServerError, KeyError, TypeError, ValueError):
        return {}
