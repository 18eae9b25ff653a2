"""What a vLLM server can do, found out before a run starts: by its list of endpoints, and by trying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.rollout.vllm.http import ServerError, call
from burnish.rollout.vllm.params import PROBE, check_probe, sampling

COMPLETIONS, ABORT, RESET = "/v1/completions", "/abort_requests", "/reset_prefix_cache"
CALL_WORKERS = "/collective_rpc"
LOAD_ADAPTER, UNLOAD_ADAPTER = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
SET_LABEL, GET_LABEL = "/update_weight_version", "/weight_info"
ASK_S = 120.0
"""Deadline of a question that takes no work, or one token; a server that has just started compiles for it."""
START = (
    "start it with VLLM_SERVER_DEV_MODE=1 and --logprobs-mode processed_logprobs (for model.lora also --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1), see docs/engines.md"
)


@dataclass(frozen=True)
class Facts:
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


def examine(url: str, vocab: int, adapter: bool) -> Facts:
    """A server's facts, or the error for one that cannot be used with a model of so many tokens."""
    version = _version(url)
    paths = call(url, "/openapi.json", ASK_S).get("paths", {})
    wanted = [COMPLETIONS, ABORT, RESET, *([LOAD_ADAPTER, UNLOAD_ADAPTER] if adapter else [CALL_WORKERS])]
    if missing := [path for path in wanted if path not in paths]:
        raise UserError(f"vLLM server {url} (vLLM {version}) has no {', '.join(missing)}; {START}. 0.32.0 then has all")
    check_probe(_logprobs(url), f"vLLM server {url} (started without --logprobs-mode processed_logprobs?)")
    if not _takes(url, logit_bias={str(vocab - 1): 0.0}) or _takes(url, logit_bias={str(vocab): 0.0}):
        raise UserError(f"vLLM server {url} serves another model: its vocabulary is not the policy's {vocab} tokens")
    config = _config(url)
    return Facts(
        url=url,
        version=version,
        positions=int(call(url, "/v1/models", ASK_S)["data"][0]["max_model_len"]),
        has_labels=SET_LABEL in paths and GET_LABEL in paths,
        has_priorities=_takes(url, priority=-1),
        can_sleep="/sleep" in paths and bool(config.get("enable_sleep_mode")),
        dtype=str(config["dtype"]).removeprefix("torch.") if "dtype" in config else None,
    )


def body_of(options: dict[str, Any], tokens: list[int], name: str, model: str | None = None) -> dict[str, Any]:
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
        return str(call(url, "/version", ASK_S)["version"])
    except ServerError as error:
        if error.status is not None:
            raise UserError(f"{error}; is this a vLLM server?") from error
        raise UserError(f"{error}; {START}, or correct rollout.vllm.url") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{url} does not say its version; is this a vLLM server?") from error


def _probe(url: str, **changes: Any) -> Any:
    return call(url, COMPLETIONS, ASK_S, body_of(sampling(PROBE), list(PROBE.tokens), "burnish-probe") | changes)


def _logprobs(url: str) -> list[float]:
    choice = _probe(url)["choices"][0]
    if "token_ids" not in choice or choice["token_ids"] is None:
        raise UserError(f"vLLM server {url} does not give token ids (return_token_ids): update vLLM, 0.32.0 does")
    return [float(value) for value in choice["logprobs"]["token_logprobs"]]


def _takes(url: str, **changes: Any) -> bool:
    """Whether a request with these parameters is not refused."""
    try:
        _probe(url, **changes)
    except ServerError as error:
        if error.status is not None and 400 <= error.status < 500:
            return False
        raise
    return True


def _config(url: str) -> dict[str, Any]:
    """Its model's settings; none where it does not tell."""
    try:
        return dict(call(url, "/server_info?config_format=json", ASK_S)["vllm_config"]["model_config"])
    except (ServerError, KeyError, TypeError, ValueError):
        return {}
