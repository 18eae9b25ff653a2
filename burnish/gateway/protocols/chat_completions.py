"""OpenAI's chat completions, with vLLM's `return_token_ids` and `chat_template_kwargs`.

`logprobs` are those of all sampled tokens. `top_logprobs` may be 1 and then lists the sampled token alone, which is what clients ask
it for; more are refused. `tool_choice: required` and a named tool are sampled freely and noted in `overridden`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from burnish.gateway.calls import CallAnswer, CallChoice, ModelCall
from burnish.gateway.chat_messages import template_message
from burnish.gateway.image_parts import IMAGE_PARTS, content_of, image_block
from burnish.gateway.openai_schema import MAX_MESSAGES, MAX_NAME, MAX_PARTS, MAX_TOOLS, ApiError, bad_value
from burnish.gateway.protocols.base import (
    NO_GRAMMAR,
    ONE_LOGPROB,
    SSE_DONE,
    TEXT_ONLY,
    CallProtocol,
    common_fields,
    logprob_entry,
    openai_sampling,
    overridden_fields,
    reasoning_of,
    sse,
    template_variables,
    token_names,
    usage,
    with_limit,
)
from burnish.gateway.protocols.fields import Fields, Json
from burnish.gateway.protocols.tools import checked_choice, offered_tools

ROLES = ("system", "developer", "user", "assistant", "tool")
SEEING_ROLES = ("user", "tool")
"""Roles whose messages may have images."""
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and the field that has it."""


class ChatCompletions(CallProtocol):
    """`POST /v1/chat/completions`."""

    path = "/chat/completions"

    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        fields = Fields.of_body(body)
        _refuse_unsupported(fields)
        overridden = overridden_fields(fields, "reasoning_effort", "verbosity", "logit_bias")
        tools = offered_tools(fields, overridden, checked_choice(fields, ("auto", "none", "required")))
        num_top = fields.integer("top_logprobs", 0)
        if num_top is not None and num_top > 1:
            raise fields.error("top_logprobs", f"{ONE_LOGPROB}; give 0 or 1", "unsupported_parameter")
        return ModelCall(
            messages=read_messages(fields),
            tools=tools,
            template_variables=template_variables(fields),
            max_tokens=with_limit(fields, "max_completion_tokens", "max_tokens"),
            logprobs=fields.flag("logprobs"),
            overridden=overridden,
            **openai_sampling(fields),
            **common_fields(fields, headers),
        )

    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        choices = []
        for i, choice in enumerate(answer.choices):
            around = {"index": i, "finish_reason": choice.finish, "logprobs": _logprobs(call, choice)}
            choices.append(around | {"message": _message(choice)} | _token_ids(call, choice))
        return _frame(call, answer, "chat.completion", choices) | _prompt_ids(call, answer) | {"usage": usage(answer)}

    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        # Clients expect `usage` in each chunk where they asked for it: null but for the last one.
        no_usage: Json = {"usage": None} if call.includes_usage else {}

        def chunk(index: int, delta: Json, finish: str | None = None, others: Json | None = None) -> Json:
            part = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish} | (others or {})
            return _frame(call, answer, "chat.completion.chunk", [part]) | no_usage

        for i, choice in enumerate(answer.choices):
            yield sse(chunk(i, {"role": "assistant", "content": ""}) | (_prompt_ids(call, answer) if i == 0 else {}))
            if reasoning := reasoning_of(choice):
                yield sse(chunk(i, {"reasoning_content": reasoning}))
            if text := choice.message.get("content"):
                yield sse(chunk(i, {"content": text}))
            for k, one in enumerate(choice.message.get("tool_calls") or []):
                yield sse(chunk(i, {"tool_calls": [{"index": k, **one}]}))
            sampled = {"logprobs": _logprobs(call, choice)} | _token_ids(call, choice)
            yield sse(chunk(i, {}, choice.finish, sampled))
        if call.includes_usage:
            yield sse(_frame(call, answer, "chat.completion.chunk", []) | {"usage": usage(answer)})
        yield SSE_DONE


# --- requests --------------------------------------------------------------------------------------------------------


def _refuse_unsupported(fields: Fields) -> None:
    form = fields.child("response_format")
    if form is not None and form.values.get("type") != "text":
        raise fields.error("response_format", f"the server cannot do that: {NO_GRAMMAR}", "unsupported_parameter")
    if "audio" in fields.items("modalities", 8, "modalities") or fields.has("audio"):
        raise fields.error("audio", f"{TEXT_ONLY} and writes text only", "unsupported_parameter")
    for name in ("functions", "function_call"):
        if fields.values.get(name) not in (None, [], "none", "auto"):
            raise fields.error(name, "is the old form of tools; give tools", "unsupported_parameter")


def read_messages(fields: Fields) -> tuple[Json, ...]:
    """The messages of a chat in the form of templates."""
    found = fields.objects("messages", MAX_MESSAGES, "messages")
    if not found:
        raise (
            bad_value("messages", "expected one message at least")
            if fields.has("messages")
            else fields.missing("messages")
        )
    num_parts = sum(len(one.values["content"]) for one in found if isinstance(one.values.get("content"), list))
    if num_parts > MAX_PARTS:
        raise bad_value("messages", f"the contents have {num_parts} parts together; expected {MAX_PARTS} at most")
    return tuple(_read_message(message) for message in found)


def _read_message(message: Fields) -> Json:
    role = message.required_text("role")
    if role not in ROLES:
        raise message.error("role", f"got {role[:50]!r}; expected {', '.join(ROLES)}")
    calls = [_read_call(call) for call in message.objects("tool_calls", MAX_TOOLS, "calls")]
    if calls and role != "assistant":
        raise message.error("tool_calls", "only a message of role assistant has them")
    if role in ("system", "developer", "user") and not message.has("content"):
        raise message.error("content", f"a message of role {role} needs content")
    if role == "tool" and not message.has("tool_call_id"):
        raise message.error("tool_call_id", "a message of role tool needs the id of the call that it answers")
    if message.has("function_call"):
        raise message.error("function_call", "is the old form of tool_calls; give these", "unsupported_parameter")
    return template_message(
        role,
        read_content(message, "content", TEXT_PARTS)
        if role in SEEING_ROLES
        else read_text(message, "content", TEXT_PARTS),
        name=message.text("name", MAX_NAME),
        reasoning_content=_reasoning(message) if role == "assistant" else None,
        tool_call_id=message.text("tool_call_id", MAX_NAME) if role == "tool" else None,
        tool_calls=calls,
        where=message.path,
    )


def _reasoning(message: Fields) -> str | None:
    """`reasoning_content`, or `reasoning` as vLLM and OpenRouter call it."""
    for name in ("reasoning_content", "reasoning"):
        if isinstance(message.values.get(name), str):
            return message.text(name) or None
    return None


def _read_call(call: Fields) -> Json:
    if (kind := call.text("type")) not in (None, "function"):
        raise call.error("type", f"got {kind!r}; expected 'function'")  # not a tool that this server offered
    function = call.required_child("function")
    arguments = read_arguments(function, "arguments")
    return {
        "id": call.required_name("id"),
        "function": {"name": function.required_name("name"), "arguments": arguments},
    }


def read_arguments(fields: Fields, name: str) -> str:
    """The arguments of a call as JSON text. An empty text, which some clients send for no arguments, is an empty object."""
    text = fields.required_text(name)
    if text and text.lstrip()[:1] != "{":
        raise fields.error(name, "expected a JSON object as text")
    return text or "{}"


def read_text(fields: Fields, name: str, kinds: Mapping[str, str], separator: str = "") -> str:
    """A content as one text: from a text, from a list of parts that are text, or empty if it is left out."""
    value = fields.values.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise fields.error(name, "expected a text or a list of parts", "invalid_type")
    return separator.join(part_text(part, kinds) for part in fields.objects(name, MAX_PARTS, "parts"))


def read_content(fields: Fields, name: str, kinds: Mapping[str, str], separator: str = "") -> str | list[Json]:
    """A content as `read_text` has it, or as blocks if it has images."""
    value = fields.values.get(name)
    if not isinstance(value, list):
        return read_text(fields, name, kinds)
    parts: list[str | Json] = []
    for part in fields.objects(name, MAX_PARTS, "parts"):
        kind = part.required_text("type")
        parts.append(image_block(part, kind) if kind in IMAGE_PARTS else part_text(part, kinds))
    return content_of(parts, separator)


def part_text(part: Fields, kinds: Mapping[str, str]) -> str:
    """The text of a part; an error for images and other parts."""
    kind = part.required_text("type")
    if kind not in kinds:
        raise unreadable_part(part, kind)
    return part.required_text(kinds[kind])


def unreadable_part(part: Fields, kind: str) -> ApiError:
    """The error for a part that is no text."""
    return part.error("type", f"got a part of type {kind[:50]!r}, but {TEXT_ONLY}", "unsupported_parameter")


# --- answers ---------------------------------------------------------------------------------------------------------


def _frame(call: ModelCall, answer: CallAnswer, kind: str, choices: list[Json]) -> Json:
    head = {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": call.model}
    return head | {"choices": choices}


def _message(choice: CallChoice) -> Json:
    found: Json = {"role": "assistant", "content": choice.message.get("content"), "refusal": None}
    if reasoning := reasoning_of(choice):
        found["reasoning_content"] = reasoning
    if calls := choice.message.get("tool_calls"):
        found["tool_calls"] = calls
    return found


def _prompt_ids(call: ModelCall, answer: CallAnswer) -> Json:
    return {"prompt_token_ids": list(answer.prompt_tokens)} if call.wants_token_ids else {}


def _token_ids(call: ModelCall, choice: CallChoice) -> Json:
    return {"token_ids": list(choice.tokens)} if call.wants_token_ids else {}


def _logprobs(call: ModelCall, choice: CallChoice) -> Json | None:
    if not call.logprobs:
        return None
    entries = [logprob_entry(name, logp) for name, logp in zip(token_names(choice), choice.logp, strict=True)]
    if call.overridden.get("top_logprobs"):
        entries = [
            entry | {"top_logprobs": [{k: entry[k] for k in ("token", "logprob", "bytes")}]} for entry in entries
        ]
    return {"content": entries, "refusal": None}
