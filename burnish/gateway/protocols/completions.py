"""OpenAI's completions: one prompt without a chat template, as text or token ids.

`logprobs` may be 0 or 1 and gives those of the sampled tokens alone. More alternatives, `echo` and several prompts are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall
from burnish.gateway.openai_schema import MAX_TOKENS
from burnish.gateway.protocols.base import (
    NO_GRAMMAR,
    ONE_LOGPROB,
    SSE_DONE,
    CallProtocol,
    common_fields,
    openai_sampling,
    overridden_fields,
    plain_finish,
    sse,
    token_names,
    usage,
    with_limit,
)
from burnish.gateway.protocols.fields import Fields, Json

DEFAULT_MAX_TOKENS = 16
"""As at OpenAI."""


class Completions(CallProtocol):
    """`POST /v1/completions`."""

    path = "/completions"

    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        fields = Fields.of_body(body)
        sampling = openai_sampling(fields)
        if fields.flag("echo"):
            raise fields.error("echo", "the prompt is not scored here; leave it out", "unsupported_parameter")
        if fields.text("suffix"):
            raise fields.error("suffix", "the model continues a text only; leave it out", "unsupported_parameter")
        if fields.integer("best_of", 1) not in (None, sampling["n"]):
            raise fields.error("best_of", "completions are not ranked; leave it out", "unsupported_parameter")
        form = fields.child("response_format")
        if form is not None and form.values.get("type") != "text":
            raise fields.error("response_format", f"the server cannot do that: {NO_GRAMMAR}", "unsupported_parameter")
        num_top = fields.integer("logprobs", 0)
        if num_top is not None and num_top > 1:
            raise fields.error("logprobs", f"{ONE_LOGPROB}; give 0 or 1", "unsupported_parameter")
        return ModelCall(
            **_prompt(fields),
            max_tokens=with_limit(fields, "max_tokens") or DEFAULT_MAX_TOKENS,
            logprobs=num_top is not None,
            overridden=overridden_fields(fields, "logit_bias"),
            **sampling,
            **common_fields(fields, headers),
        )

    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        choices = [_choice(call, answer, i) for i in range(len(answer.choices))]
        return _frame(call, answer, choices) | {"usage": usage(answer)}

    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        no_usage: Json = {"usage": None} if call.includes_usage else {}
        for i in range(len(answer.choices)):
            yield sse(_frame(call, answer, [_choice(call, answer, i)]) | no_usage)
        if call.includes_usage:
            yield sse(_frame(call, answer, []) | {"usage": usage(answer)})
        yield SSE_DONE


def _prompt(fields: Fields) -> Json:
    """`text` or `token_ids` of the one prompt, which may be in a list."""
    prompt: Any = fields.values.get("prompt")
    if prompt is None:
        raise fields.missing("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise fields.error("prompt", f"got {len(prompt)} prompts; give each in a request of its own")
        prompt = prompt[0]
    if isinstance(prompt, str):
        if not prompt:
            raise fields.error("prompt", "the prompt is empty", "empty_prompt")
        return {"text": prompt}
    return {"token_ids": read_tokens(prompt, fields, "prompt", "a text or token ids")}


def read_tokens(tokens: Any, fields: Fields, name: str, expected: str = "token ids") -> tuple[int, ...]:
    """Token ids, one at least. Whether the model has them is for its vocabulary to say."""
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise fields.error(name, f"expected {expected}", "invalid_type")
    if not tokens:
        raise fields.error(name, "the prompt is empty", "empty_prompt")
    if len(tokens) > MAX_TOKENS:
        raise fields.error(name, f"got {len(tokens)} tokens; expected {MAX_TOKENS} at most")
    return tuple(tokens)


def _frame(call: ModelCall, answer: CallAnswer, choices: list[Json]) -> Json:
    head = {"id": f"cmpl-{answer.id}", "object": "text_completion", "created": answer.created, "model": call.model}
    return head | {"choices": choices}


def _choice(call: ModelCall, answer: CallAnswer, index: int) -> Json:
    choice = answer.choices[index]
    text = choice.message.get("content") or ""
    found: Json = {
        "index": index,
        "text": text,
        "finish_reason": plain_finish(choice),
        "logprobs": _logprobs(call, choice),
    }
    if call.wants_token_ids:
        found |= {"prompt_token_ids": list(answer.prompt_tokens), "token_ids": list(choice.tokens)}
    return found


def _logprobs(call: ModelCall, choice: CallChoice) -> Json | None:
    if not call.logprobs:
        return None
    names = token_names(choice)
    end = len(choice.message.get("content") or "")
    starts = itertools.accumulate(map(len, names[:-1]), initial=0) if names else []
    return {
        "tokens": names,
        "token_logprobs": list(choice.logp),
        "top_logprobs": [{name: logp} for name, logp in zip(names, choice.logp, strict=True)],
        "text_offset": [min(at, end) for at in starts],
    }
