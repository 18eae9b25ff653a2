"""OpenAI's responses and Anthropic's messages at `burnish serve`: each is served as the chat that it describes.

Sampling options have their effect here, unlike in sessions of training. What the server cannot do is refused, as it is for a chat.
The server stores nothing, so there is no `previous_response_id`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from burnish.core.engine import Request
from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall
from burnish.gateway.completion_text import matched_stop
from burnish.gateway.openai_responses import ChoiceDelta
from burnish.gateway.openai_schema import ChatRequest, bad_value, validate_fields
from burnish.models.tokenizer import Tokenizer

HONOURED = frozenset({"temperature", "top_p", "top_k", "min_p", "logit_bias", "strategy"})
"""Options of `ModelCall.overridden` that have an effect here."""
HINTS = frozenset({"reasoning", "thinking"})
"""Options that ask for more or less effort of models that were trained to read them."""


def chat_request(call: ModelCall) -> ChatRequest:
    """The chat that a call describes; an `ApiError` for what a chat cannot do."""
    if call.previous_id is not None:
        raise bad_value(
            "previous_response_id", "this server stores no responses; send all items", "unsupported_parameter"
        )
    fields: dict[str, Any] = {"model": call.model, "messages": [_openai_message(one) for one in call.messages or ()]}
    for name, value in call.overridden.items():
        if name in HONOURED:
            # Clients may write a number without a fraction as a float and the other way round.
            fields[name] = int(value) if name == "top_k" and float(value).is_integer() else value
        elif name not in HINTS:
            raise bad_value(name, "this server cannot do that; leave it out", "unsupported_parameter")
    given = {
        "tools": list(call.tools),
        "max_completion_tokens": call.max_tokens,
        "stop": list(call.stop),
        "logprobs": call.logprobs,
        "return_token_ids": call.wants_token_ids,
        "chat_template_kwargs": dict(call.template_variables),
    }
    return validate_fields(ChatRequest, fields | {name: value for name, value in given.items() if value})


def without_messages(call: ModelCall) -> ModelCall:
    """The call without the messages that the answer does not repeat, to free their memory while tokens are sampled."""
    return replace(call, messages=(call.messages or ())[: call.num_instructions])


def call_answer(
    name: str, request: Request, delta: ChoiceDelta, tokenizer: Tokenizer, wants_pieces: bool
) -> CallAnswer:
    """The answer of an engine's one completion, which `delta` has as a whole."""
    message: dict[str, Any] = {"role": "assistant", "content": (delta.text or None) if delta.calls else delta.text}
    if delta.calls:
        message["tool_calls"] = delta.calls
    finish: Any = delta.finish
    choice = CallChoice(
        message,
        finish,
        _stop_string(request, delta, tokenizer),
        tuple(delta.tokens),
        tuple(delta.logp or ()),
        tuple(tokenizer.pieces(delta.tokens)) if wants_pieces else (),
    )
    return CallAnswer(name, int(time.time()), (choice,), tuple(request.tokens))


def _stop_string(request: Request, delta: ChoiceDelta, tokenizer: Tokenizer) -> str | None:
    """The stop string that ended a completion; None if an end token or the limit did."""
    options = request.sampling
    if delta.finish != "stop" or not options.stop or delta.tokens[-1] in options.stop_tokens:
        return None
    return matched_stop(tokenizer.decode(delta.tokens), options.stop)


def _openai_part(block: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": block["image"]}} if block["type"] == "image" else block


def _openai_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a template in OpenAI's form, with arguments as JSON texts."""
    calls: Sequence[dict[str, Any]] = message.get("tool_calls", ())
    if isinstance(message.get("content"), list):
        message = message | {"content": [_openai_part(block) for block in message["content"]]}
    if not calls:
        return message
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    return message | {
        "tool_calls": [
            call | {"function": call["function"] | {"arguments": text}} for call, text in zip(calls, texts, strict=True)
        ]
    }
