"""Requests in vLLM's terms, for the engine in this process and for a server, and inspection of a server before a run.

vLLM truncates by min-p, top-k, top-p, each on what the one before has left; our order is top-k, top-p, min-p. One of them alone
keeps the same tokens, and so do top-k with top-p and top-k with min-p; min-p with top-p may keep fewer tokens in vLLM. Log-probs
are always those of the distribution that is sampled from. Greedy tokens are never truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import Completion, CompletionFinish, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.engine_common import StopStrings, check_bias, check_prompt
from burnish.inference.picture_inputs import check_images_only, placeholder_bias
from burnish.inference.server_client import ServerClient, ServerError

VLLM = ServerClient("vLLM", "rollout.vllm.url", "http://host:8000, with a number for the port", connect_s=10.0)
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises a lower temperature to the first, and refuses a higher one than the second."""
SEED_BITS = 63
PROBE_REQUEST = Request("probe", (0,), SamplingOptions(top_k=1, max_tokens=1), key=0)
"""A first request. Only one token can be drawn, so its log-prob must be 0."""
NEUTRAL_SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "ignore_eos": True}
"""Sampling from the model itself. With `ignore_eos` a request ends only at the stop tokens that it names."""

COMPLETIONS, ABORT_REQUESTS, RESET_PREFIX_CACHE = "/v1/completions", "/abort_requests", "/reset_prefix_cache"
COLLECTIVE_RPC = "/collective_rpc"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SET_LABEL, GET_LABEL = "/update_weight_version", "/weight_info"
QUERY_TIMEOUT_S = 120.0
"""Deadline of a query without work, or of one token: a server that has just started compiles for it."""
START_HINT = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs (for model.lora also --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), see docs/engines.md"
)


# --- requests and completions --------------------------------------------------------------------------------------------


def sampling_params(request: Request) -> dict[str, Any]:
    """The sampling parameters of a request, with the log-prob of every drawn token.

    vLLM's noise follows from the seed, so the tokens follow from (key, generated) as far as vLLM's logits are reproducible.
    """
    options = request.sampling
    return NEUTRAL_SAMPLING | {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "logit_bias": dict(options.logit_bias) | placeholder_bias(request) or None,
        "max_tokens": options.max_tokens,
        "stop_token_ids": list(options.stop_tokens),
        "seed": fold("vllm", request.key, request.generated) & ((1 << SEED_BITS) - 1),
        "logprobs": 0,
    }


def scoring_params(last: int) -> dict[str, Any]:
    """The parameters of a pass for the model's own log-probs: of each token of the prompt, and of token `last` after it."""
    return NEUTRAL_SAMPLING | {
        "max_tokens": 1,
        "seed": 0,
        "prompt_logprobs": 0,
        "logprobs": 1,
        "logprob_token_ids": [last],
    }


def expert_params() -> dict[str, Any]:
    """The parameters of a pass that returns the recorded experts of a prompt."""
    return NEUTRAL_SAMPLING | {"max_tokens": 1, "seed": 0, "logprobs": 0}


def check_vllm_request(request: Request, vocab_size: int, max_positions: int) -> None:
    """Raise for a request that vLLM can never run."""
    options = request.sampling
    check_prompt(request, vocab_size)
    check_images_only(request, "vLLM")
    longest = len(request.tokens) + options.max_tokens
    if longest > max_positions:
        raise UserError(
            f"request {request.id}: {len(request.tokens)} prompt tokens + {options.max_tokens} new ones = {longest}, "
            f"but vLLM is made for {max_positions} positions; lower max_tokens"
        )
    if options.temperature and not MIN_TEMPERATURE <= options.temperature <= MAX_TEMPERATURE:
        raise UserError(
            f"request {request.id}: temperature {options.temperature:g}, and vLLM samples at 0 or at {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )
    check_bias(request, vocab_size)


def check_server_request(request: Request, vocab_size: int, max_positions: int) -> None:
    """Raise for a request that a vLLM server can never run."""
    if request.pictures:
        raise UserError(
            f"request {request.id}: a vLLM server takes token ids or images, not both; use vLLM in this process (rollout.vllm without url), "
            "an SGLang server or rollout.engine=native"
        )
    check_vllm_request(request, vocab_size, max_positions)


@dataclass
class PartialCompletion:
    """Tokens of a request so far. No more are drawn once `finish` is set; scoring may still follow."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Set by scoring; None while they are those of `logp`."""
    experts: np.ndarray | None = None
    """int16 [tokens of the prompt and drawn, layers, k] (`core/routed_experts.py`), if vLLM records them."""
    finish: CompletionFinish | None = None

    def extend(self, tokens: Sequence[int], logp: Sequence[float], stop_strings: StopStrings) -> list[int]:
        """Append drawn tokens up to a stop string; return those that were appended."""
        stop, before = self.request.sampling.stop, len(self.tokens)
        for token, value in zip(tokens, logp, strict=True):
            self.tokens.append(token)
            self.logp.append(value)
            if stop and stop_strings.are_complete(stop, token, lambda size: self.tokens[-size:]):
                self.finish = "stop"
                break
        return self.tokens[before:]

    def completion(self, version: int) -> Completion:
        raw = None
        if self.request.sampling.raw_logprobs:
            raw = np.array(self.logp if self.raw_logp is None else self.raw_logp, dtype=np.float32)
        return Completion(
            self.request.id,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.logp, dtype=np.float32),
            self.finish or "aborted",
            version,
            raw_logp=raw,
            experts=self.experts,
        )


def check_logprobs_mode(logp: Sequence[float], who: str) -> None:
    """Raise unless the probe's log-prob is of the distribution that is sampled from, where its only token has log-prob 0."""
    if len(logp) != 1 or abs(logp[0]) > 1e-6:
        raise UserError(
            f"{who} gives the log-prob {logp[0] if logp else None} to the only token that can be drawn; expected 0: its log-probs are not "
            "of the distribution that it samples from (logprobs_mode=processed_logprobs)"
        )


def completion_body(options: dict[str, Any], tokens: list[int], name: str, model: str | None = None) -> dict[str, Any]:
    """The body of a call of `/v1/completions` with token ids in and out.

    Every option is set: a server fills those left out with the model's own defaults.
    """
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


# --- server inspection ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VllmServerInfo:
    """What a server can do, by its answers."""

    url: str
    version: str
    max_positions: int
    """Most tokens of a prompt and its completion."""
    has_labels: bool
    """It keeps a label of its weights that can be set and read."""
    has_priorities: bool
    """It runs with --scheduling-policy priority."""
    can_sleep: bool
    """It runs with --enable-sleep-mode."""
    dtype: str | None
    """The type of its weights; None if it does not say."""


def inspect_server(url: str, vocab_size: int, adapter: bool) -> VllmServerInfo:
    """Inspect a server by its list of endpoints and by trial requests; raise if it cannot serve the policy's model."""
    version = _version(url)
    paths = VLLM.call(url, "/openapi.json", QUERY_TIMEOUT_S).get("paths", {})
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
    if not _accepts(url, logit_bias={str(vocab_size - 1): 0.0}) or _accepts(url, logit_bias={str(vocab_size): 0.0}):
        raise UserError(
            f"vLLM server {url} serves another model: its vocabulary is not the policy's {vocab_size} tokens"
        )
    config = _model_config(url)
    return VllmServerInfo(
        url=url,
        version=version,
        max_positions=int(VLLM.call(url, "/v1/models", QUERY_TIMEOUT_S)["data"][0]["max_model_len"]),
        has_labels=SET_LABEL in paths and GET_LABEL in paths,
        has_priorities=_accepts(url, priority=-1),
        can_sleep="/sleep" in paths and bool(config.get("enable_sleep_mode")),
        dtype=str(config["dtype"]).removeprefix("torch.") if "dtype" in config else None,
    )


def _version(url: str) -> str:
    try:
        return str(VLLM.call(url, "/version", QUERY_TIMEOUT_S)["version"])
    except ServerError as error:
        if error.status is not None:
            raise UserError(f"{error}; is this a vLLM server?") from error
        raise UserError(f"{error}; {START_HINT}, or correct rollout.vllm.url") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{url} does not say its version; is this a vLLM server?") from error


def _probe(url: str, **changes: Any) -> Any:
    body = completion_body(sampling_params(PROBE_REQUEST), list(PROBE_REQUEST.tokens), "burnish-probe")
    return VLLM.call(url, COMPLETIONS, QUERY_TIMEOUT_S, body | changes)


def _logprobs(url: str) -> list[float]:
    choice = _probe(url)["choices"][0]
    if "token_ids" not in choice or choice["token_ids"] is None:
        raise UserError(f"vLLM server {url} does not give token ids (return_token_ids): update vLLM, 0.32.0 does")
    return [float(value) for value in choice["logprobs"]["token_logprobs"]]


def _accepts(url: str, **changes: Any) -> bool:
    """Whether the server accepts the probe with changed parameters."""
    try:
        _probe(url, **changes)
    except ServerError as error:
        if error.status is not None and 400 <= error.status < 500:
            return False
        raise
    return True


def _model_config(url: str) -> dict[str, Any]:
    """The server's settings of its model; empty if it does not tell."""
    try:
        return dict(VLLM.call(url, "/server_info?config_format=json", QUERY_TIMEOUT_S)["vllm_config"]["model_config"])
    except (ServerError, KeyError, TypeError, ValueError):
        return {}
