"""What a server can do, found out before a run starts: by asking, and where no endpoint says it, by trying.

A server does not say under which distribution its log-probs are, and it differs: after temperature, or before it where the
server runs with SGLANG_RETURN_ORIGINAL_LOGPROB. The likeliest next token's log-prob tells: it moves with temperature, or it
does not. They are of the whole vocabulary whatever top-p and top-k leave of it (0.4 renormalised over top-p alone); only
`return_sampling_mask`, in versions of 2026, gives log-probs renormalised over the tokens that could be drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.rollout.sglang.http import ServerError, call
from burnish.rollout.sglang.wire import GENERATE, NEUTRAL

ASK_S = 60.0
"""Deadline of a question that takes no work, or one token; a server that has just started compiles its kernels for it."""
MOVED = 0.02
"""A difference of log-probs that rounding in bfloat16 does not make."""
TEMPERATURES = (1 / 8, 100.0)
"""At one of them any distribution but a flat or a certain one has another likeliest log-prob than at 1."""


MODEL_INFO, SERVER_INFO = ("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")
"""The endpoints by their present and by their first names."""


@dataclass(frozen=True)
class Facts:
    """A server as it answered."""

    url: str
    version: str
    context: int | None
    """Positions of a prompt and its completion that it has room for; None where it does not say."""
    longest_input: int | None
    """Most tokens of a prompt, likewise."""
    is_tempered: bool
    """Log-probs are after temperature; else of temperature 1."""
    has_mask: bool
    """It can give log-probs of a truncated distribution,"""
    mask_tokens: int | None
    """of so many tokens at most (--sampling-mask-max-tokens); None where there is no limit."""
    can_sleep: bool
    """It runs with --enable-memory-saver."""


def examine(url: str, vocab_size: int) -> Facts:
    """A server's facts, or the error for one that cannot be used with a model of so many tokens."""
    try:
        return _examine(url, vocab_size)
    except ServerError as error:
        if error.kind == "unreachable":
            raise UserError(
                f"{error}; start one (python -m sglang.launch_server --model-path DIRECTORY --port 30000) or correct rollout.sglang.urls"
            ) from error
        raise UserError(str(error)) from error


def weight_label(url: str) -> str | None:
    """The label of the weights a server has."""
    label = _first(url, MODEL_INFO).get("weight_version")
    return None if label is None else str(label)


def _examine(url: str, vocab_size: int) -> Facts:
    model = _first(url, MODEL_INFO)
    server = _first(url, SERVER_INFO)
    version = str(server.get("version", "of an unknown version"))
    if not model.get("is_generation", True):
        raise UserError(f"SGLang server {url} serves {model.get('model_path')}, which does not generate text")
    if "weight_version" not in model:
        raise UserError(
            f"SGLang server {url} (SGLang {version}) is too old: it does not label its weights (weight_version in /model_info), "
            "so a completion of weights from before an update could not be told from one after it; use SGLang 0.5 or later"
        )
    usual = _likeliest(url)
    _check_vocabulary(url, vocab_size, str(model.get("model_path")))
    moved = [_likeliest(url, temperature=t) - usual for t in TEMPERATURES]
    longest = _number(server, "max_req_input_len")
    return Facts(
        url=url,
        version=version,
        context=min(
            (n for n in (_context(url), _number(server, "max_total_num_tokens")) if n is not None), default=None
        ),
        longest_input=None if longest is None else longest - 1,  # it refuses a prompt of as many
        is_tempered=any(abs(m) > MOVED for m in moved),
        has_mask=_has_mask(url, vocab_size),
        mask_tokens=_number(server, "sampling_mask_max_tokens"),
        can_sleep=bool(server.get("enable_memory_saver")),
    )


def _first(url: str, paths: tuple[str, ...]) -> dict[str, Any]:
    """The answer at the first of several paths that there is."""
    for path in paths:
        try:
            answer = call(url, path, ASK_S)
        except ServerError as error:
            if error.kind == "refused" and path != paths[-1]:
                continue
            raise
        if isinstance(answer, dict):
            return answer
    raise ServerError("refused", url, paths[-1], "no JSON object; is this an SGLang server?")


def _number(info: dict[str, Any], key: str) -> int | None:
    found = info.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _context(url: str) -> int | None:
    try:
        return int(call(url, "/v1/models", ASK_S)["data"][0]["max_model_len"])
    except (ServerError, TypeError, KeyError, IndexError, ValueError):
        return None  # not every version says it; a request that does not fit is refused by the server


def _probe(url: str, with_mask: bool = False, **changes: Any) -> dict[str, Any]:
    """The meta_info of one token after token 0; `changes` are of its sampling parameters."""
    body = {
        "input_ids": [0],
        "sampling_params": NEUTRAL | {"max_new_tokens": 1, "ignore_eos": True} | changes,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "stream": False,
    }
    answer = call(url, GENERATE, ASK_S, body | {"return_sampling_mask": True} if with_mask else body)
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise ServerError("refused", url, GENERATE, "its answer has no meta_info; is this an SGLang server?")
    return meta


def _likeliest(url: str, **changes: Any) -> float:
    """The log-prob a server gives to the likeliest token after token 0."""
    try:
        return float(_probe(url, **changes)["output_top_logprobs"][0][0][0])
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"SGLang server {url} gives no log-probs (meta_info.output_top_logprobs of a request with return_logprob); "
            "without them nothing can be learnt from its samples"
        ) from error


def _check_vocabulary(url: str, vocab_size: int, model: str) -> None:
    """Raise unless the server's model has as many tokens as the policy's.

    A bias on a token past the vocabulary is refused where requests are checked, and it is the only field with that check in
    every version. A prompt with such a token would reach the GPU, and end the server.
    """
    for token, is_ours in ((vocab_size - 1, True), (vocab_size, False)):
        said = ""
        try:
            _probe(url, logit_bias={str(token): 0.0})
        except ServerError as error:
            if error.kind != "refused":
                raise
            said = f" ({error.what})"
        if is_ours == bool(said):
            has = "has no" if is_ours else "has a"
            raise UserError(
                f"SGLang server {url} serves another model ({model}): it {has} token {token}, and the policy has {vocab_size} tokens{said}"
            )


def _has_mask(url: str, vocab_size: int) -> bool:
    """Whether a server gives log-probs renormalised over the tokens that could be drawn; one that cannot ignores the field,
    or refuses it."""
    try:
        meta = _probe(url, with_mask=True, top_k=min(2, vocab_size))
    except ServerError as error:
        if error.kind == "refused":
            return False
        raise
    found = meta.get("output_token_sampling_logprobs")
    return isinstance(found, list) and len(found) == 1 and isinstance(found[0], float | int)
