"""What a server can do, found out before a run starts: by asking, and where no endpoint says it, by trying.

A server does not say under which distribution its log-probs are, and it differs: after temperature, or before it where the
server runs with SGLANG_RETURN_ORIGINAL_LOGPROB. The likeliest next token's log-prob tells: it moves with temperature, or it
does not. They are of the whole vocabulary whatever top-p and top-k leave of it (0.4 renormalised over top-p alone); only
`return_sampling_mask`, in versions of 2026, gives log-probs renormalised over the tokens that could be drawn.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Request, SamplingOptions
from burnish.inference.engine_common import check_bias
from burnish.inference.sglang.sglang_requests import (
    GENERATE,
    NEUTRAL_SAMPLING,
    ServerError,
    call,
    is_truncated,
    needs_scoring,
)
from burnish.models.weight_files import FILE_BYTES, METADATA
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import TensorBytes, TensorFile, write_file

QUERY_TIMEOUT_S = 60.0
"""Deadline of a question that takes no work, or one token; a server that has just started compiles its kernels for it."""
LOGP_TOLERANCE = 0.02
"""A difference of log-probs that rounding in bfloat16 does not make."""
PROBE_TEMPERATURES = (1 / 8, 100.0)
"""At one of them any distribution but a flat or a certain one has another likeliest log-prob than at 1."""


MODEL_INFO, SERVER_INFO = ("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")
"""The endpoints by their present and by their first names."""


@dataclass(frozen=True)
class SglangServerInfo:
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


def inspect_server(url: str, vocab_size: int) -> SglangServerInfo:
    """A server's facts, or the error for one that cannot be used with a model of so many tokens."""
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
    usual = _top_logprob(url)
    _check_vocabulary(url, vocab_size, str(model.get("model_path")))
    moved = [_top_logprob(url, temperature=t) - usual for t in PROBE_TEMPERATURES]
    longest = _integer(server, "max_req_input_len")
    return SglangServerInfo(
        url=url,
        version=version,
        context=min(
            (n for n in (_context_length(url), _integer(server, "max_total_num_tokens")) if n is not None), default=None
        ),
        longest_input=None if longest is None else longest - 1,  # it refuses a prompt of as many
        is_tempered=any(abs(m) > LOGP_TOLERANCE for m in moved),
        has_mask=_has_mask(url, vocab_size),
        mask_tokens=_integer(server, "sampling_mask_max_tokens"),
        can_sleep=bool(server.get("enable_memory_saver")),
    )


def _first_answer(url: str, paths: tuple[str, ...]) -> dict[str, Any]:
    """The answer at the first of several paths that there is."""
    for path in paths:
        try:
            answer = call(url, path, QUERY_TIMEOUT_S)
        except ServerError as error:
            if error.kind == "refused" and path != paths[-1]:
                continue
            raise
        if isinstance(answer, dict):
            return answer
    raise ServerError("refused", url, paths[-1], "no JSON object; is this an SGLang server?")


def _integer(info: dict[str, Any], key: str) -> int | None:
    found = info.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _context_length(url: str) -> int | None:
    try:
        return int(call(url, "/v1/models", QUERY_TIMEOUT_S)["data"][0]["max_model_len"])
    except (ServerError, TypeError, KeyError, IndexError, ValueError):
        return None  # not every version says it; a request that does not fit is refused by the server


def _probe(url: str, with_mask: bool = False, **changes: Any) -> dict[str, Any]:
    """The meta_info of one token after token 0; `changes` are of its sampling parameters."""
    body = {
        "input_ids": [0],
        "sampling_params": NEUTRAL_SAMPLING | {"max_new_tokens": 1, "ignore_eos": True} | changes,
        "return_logprob": True,
        "top_logprobs_num": 1,
        "stream": False,
    }
    answer = call(url, GENERATE, QUERY_TIMEOUT_S, body | {"return_sampling_mask": True} if with_mask else body)
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise ServerError("refused", url, GENERATE, "its answer has no meta_info; is this an SGLang server?")
    return meta


def _top_logprob(url: str, **changes: Any) -> float:
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


# --- Requests that no server could answer as the engine's contract wants it, found before they are sent.

SPARE_POSITIONS = 2
"""Positions that a server leaves free: it cuts a completion that would need them."""


def check_request(request: Request, servers: Sequence[SglangServerInfo], vocab_size: int) -> None:
    """Raise for a request that can never run on one of the servers: it may be sent to any."""
    who, num = f"request {request.id}", len(request.tokens)
    if not request.tokens:
        raise UserError(f"{who}: the prompt has no tokens")
    if strange := [t for t in request.tokens if not 0 <= t < vocab_size]:  # it would end a server
        raise UserError(f"{who}: token {strange[0]} is not one of the model's, 0 to {vocab_size - 1}")
    longest = num + request.sampling.max_tokens
    for facts in servers:
        if facts.context is not None and longest > facts.context - SPARE_POSITIONS:
            raise UserError(
                f"{who}: {num} prompt tokens + {request.sampling.max_tokens} new ones = {longest}, but SGLang server {facts.url} "
                f"has {facts.context} positions, {SPARE_POSITIONS} of which it leaves free; lower max_tokens, or start it with a larger "
                "--context-length"
            )
        sent = longest if needs_scoring(request.sampling) else num  # a completion is scored as a prompt
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


def check_options(options: SamplingOptions, servers: Sequence[SglangServerInfo], who: str) -> None:
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


# --- New weights for servers: a directory of safetensors that they read, labelled, checked, and their prefix caches emptied.
#
# `/update_weights_from_disk` needs a folder that this process writes and the servers read: on one machine any (one in memory,
# such as /dev/shm, is fastest), else a shared file system. `/update_weights_from_tensor` takes what SGLang's own serializer
# makes of GPU memory on the same machine, so it needs SGLang here.

UPDATE_WEIGHTS = "/update_weights_from_disk"
FLUSH_TIMEOUT_S = 30.0
FLUSH_POLL_S = 0.2


def write_weights(folder: Path, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
    """The files of a model's weights, in pieces of at most 4 GiB, with an index of them."""
    weight_map: dict[str, str] = {}
    held: dict[str, TensorBytes] = {}
    num_files = num_bytes = total = 0
    folder.mkdir(parents=True)
    for name, tensor in named_tensors:
        item = keep_in_place(tensor.detach())
        if held and num_bytes + item.num_bytes > FILE_BYTES:
            _write_file(folder, num_files, held, weight_map)
            held, num_bytes, num_files = {}, 0, num_files + 1
        held[name] = item
        num_bytes, total = num_bytes + item.num_bytes, total + item.num_bytes
    if not held:
        raise ValueError("an SGLang server has weights of its own, and was handed none")
    _write_file(folder, num_files, held, weight_map)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(folder, "model.safetensors.index.json", [json.dumps(index, indent=1).encode()])


def _write_file(folder: Path, number: int, held: dict[str, TensorBytes], weight_map: dict[str, str]) -> None:
    name = f"model-{number + 1:05d}.safetensors"
    TensorFile(name, held, METADATA).write(folder)
    weight_map.update(dict.fromkeys(held, name))


def update_server(url: str, folder: Path, label: str, timeout_s: float) -> None:
    """Make a server read the weights in a folder; when this returns it has them, under that label, and an empty cache."""
    body = {"model_path": str(folder), "weight_version": label, "flush_cache": True}
    try:
        answer = call(url, UPDATE_WEIGHTS, timeout_s, body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise ServerError("refused", url, UPDATE_WEIGHTS, f"no success: {answer}")
        flush_prefix_cache(url)
        found = weight_label(url)
    except ServerError as error:
        if error.kind == "refused":
            raise UserError(
                f"{error}; the server must be able to read {folder} (rollout.sglang.weights_dir), and serve the policy's model"
            ) from error
        raise
    if found != label:
        raise UserError(f"SGLang server {url} says that it has weights {found!r} after {label!r} were sent to it")


def flush_prefix_cache(url: str) -> None:
    """Empty a server's prefix cache; it refuses while it still works on something, such as an aborted request."""
    deadline = time.monotonic() + FLUSH_TIMEOUT_S
    while True:
        try:
            call(url, "/flush_cache", FLUSH_TIMEOUT_S, method="POST")
            return
        except ServerError as error:
            if error.kind != "refused" or time.monotonic() > deadline:
                raise
        time.sleep(FLUSH_POLL_S)


def remove(folder: Path) -> None:
    """A folder of weights that no server needs any more."""
    shutil.rmtree(folder, ignore_errors=True)
