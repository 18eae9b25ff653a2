"""Anthropic's messages.

A turn has content blocks: text, `tool_use`, `thinking`, and in a user's turn `image` and `tool_result`. Results become messages of role tool, in
their order among the texts. A last turn of the assistant, which Anthropic's models continue, is refused: an answer here always begins
a new message. Threads, which Anthropic's server stores, are not: a request that continues one gets the error after which Anthropic's
client sends the whole history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from burnish.gateway.calls import CallAnswer, ModelCall
from burnish.gateway.chat_messages import template_call, template_message
from burnish.gateway.image_parts import content_of, image_block
from burnish.gateway.openai_schema import MAX_MESSAGES, MAX_PARTS, MAX_STOP_LENGTH, ApiError
from burnish.gateway.protocols.base import (
    MAX_STOPS,
    NO_GRAMMAR,
    CallProtocol,
    common_fields,
    overridden_fields,
    reasoning_of,
    sse,
    strategy_field,
    template_variables,
    with_limit,
)
from burnish.gateway.protocols.chat_completions import part_text, read_content, read_text, unreadable_part
from burnish.gateway.protocols.fields import Fields, Json
from burnish.gateway.protocols.tools import offered_tools

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
ROLES = ("user", "assistant", "system")
TEXT_BLOCKS = {"text": "text"}
BLOCK_SEPARATOR = "\n"
"""Between the text blocks of a turn. Clients such as Claude Code put unrelated texts into blocks without line ends."""
THREAD_NOT_FOUND = "thread_not_found"
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class Messages(CallProtocol):
    """`POST /v1/messages`."""

    path = "/messages"
    count_path = "/messages/count_tokens"

    def parse(self, body: bytes | bytearray, headers: Mapping[str, str]) -> ModelCall:
        fields = Fields.of_body(body)
        _refuse_unsupported(fields)
        overridden = overridden_fields(fields, "thinking", "strategy")
        return ModelCall(
            messages=tuple(_read_messages(fields)),
            tools=offered_tools(fields, overridden, _tool_choice(fields)),
            template_variables=template_variables(fields),
            max_tokens=with_limit(fields, "max_tokens"),
            stop=fields.texts("stop_sequences", MAX_STOPS, MAX_STOP_LENGTH, "stop sequences"),
            overridden=overridden,
            **common_fields(fields, headers),
        )

    def whole(self, call: ModelCall, answer: CallAnswer) -> Json:
        content = {"content": _blocks(answer)}
        return _start(call, answer) | content | _end(answer) | {"usage": _usage(answer)} | _extra(call, answer)

    def events(self, call: ModelCall, answer: CallAnswer) -> Iterator[str]:
        for event in _events(call, answer):
            yield sse(event, event["type"])

    def token_count(self, num_tokens: int) -> Json:
        return {"input_tokens": num_tokens}

    def error(self, error: ApiError) -> tuple[int, Json]:
        kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        found: Json = {"type": kind, "message": error.message}
        if error.code == THREAD_NOT_FOUND:
            found["details"] = {"error_code": error.code}
        return error.status, {"type": "error", "error": found}

    def error_event(self, error: ApiError) -> str:
        return sse(self.error(error)[1], "error")


# --- requests --------------------------------------------------------------------------------------------------------


def _refuse_unsupported(fields: Fields) -> None:
    thread = fields.child("thread")
    if thread is not None and thread.values.get("type") != "create":
        message = "thread: no conversation is stored here; send the whole history"
        raise ApiError(404, message, param="thread", code=THREAD_NOT_FOUND)
    config = fields.child("output_config")
    for owner, name in ((config, "format"), (fields, "output_format")):
        if owner is not None and owner.has(name):
            raise owner.error(name, f"the server cannot do that: {NO_GRAMMAR}", "unsupported_parameter")
    for name in ("mcp_servers", "container"):
        if fields.values.get(name):
            raise fields.error(name, "the server runs no tools of its own; leave it out", "unsupported_parameter")


def _tool_choice(fields: Fields) -> str | Json | None:
    choice = fields.child("tool_choice")
    if choice is None:
        return None
    kind = choice.required_text("type")
    if kind not in ("auto", "any", "tool", "none"):
        raise choice.error("type", f"got {kind[:50]!r}; expected auto, any, tool or none")
    is_plain = kind in ("auto", "none") and not choice.flag("disable_parallel_tool_use")
    return kind if is_plain or kind == "none" else fields.recorded("tool_choice")["tool_choice"]


def _read_messages(fields: Fields) -> list[Json]:
    found: list[Json] = []
    if fields.has("system"):
        found.append(template_message("system", _read_text(fields, "system"), where="system"))
    turns = fields.objects("messages", MAX_MESSAGES, "messages")
    if not turns:
        raise (
            fields.error("messages", "expected one message at least")
            if fields.has("messages")
            else fields.missing("messages")
        )
    num_parts = sum(len(turn.values["content"]) for turn in turns if isinstance(turn.values.get("content"), list))
    if num_parts > MAX_PARTS:
        raise fields.error("messages", f"the contents have {num_parts} blocks together; expected {MAX_PARTS} at most")
    for turn in turns:
        role = turn.required_text("role")
        if role not in ROLES:
            raise turn.error("role", f"got {role[:50]!r}; expected {', '.join(ROLES)}")
        if not turn.has("content"):
            raise turn.missing("content")
        if role == "assistant":
            found.append(_assistant_turn(turn))
        else:
            found += _other_turn(turn, role)
    if found[-1]["role"] == "assistant":
        message = "the last message is the assistant's; an answer always begins a new one, so end with a user's"
        raise fields.error("messages", message, "unsupported_parameter")
    return found


def _read_text(fields: Fields, name: str) -> str:
    return read_text(fields, name, TEXT_BLOCKS, BLOCK_SEPARATOR)


def _blocks_of(turn: Fields) -> list[tuple[str, Fields]]:
    """The blocks of a turn with their types; a plain text is one block."""
    value: Any = turn.values["content"]
    if isinstance(value, str):
        return [("text", Fields({"type": "text", "text": value}, turn.where("content")))]
    blocks = turn.objects("content", MAX_PARTS, "blocks")
    return [(block.required_text("type"), block) for block in blocks]


def _assistant_turn(turn: Fields) -> Json:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for kind, block in _blocks_of(turn):
        if kind == "thinking":
            thoughts.append(block.required_text("thinking"))
        elif kind == "tool_use":
            arguments = block.free_object("input")
            calls.append(template_call(block.required_name("id"), block.required_name("name"), arguments))
        elif kind != "redacted_thinking":  # which is encrypted: it was not said by this model
            texts.append(part_text(block, TEXT_BLOCKS))
    text, thinking = BLOCK_SEPARATOR.join(texts), BLOCK_SEPARATOR.join(thoughts)
    found = template_message("assistant", text, reasoning_content=thinking or None, where=turn.path)
    return found | ({"tool_calls": calls} if calls else {})


def _other_turn(turn: Fields, role: str) -> list[Json]:
    """The messages of a turn: a message for each result, and one for the texts and images between two results."""
    found: list[Json] = []
    parts: list[str | Json] = []

    def flush() -> None:
        if parts:
            found.append(template_message(role, content_of(parts, BLOCK_SEPARATOR), where=turn.path))
            parts.clear()

    for kind, block in _blocks_of(turn):
        if kind == "text":
            parts.append(block.required_text("text"))
        elif kind == "image" and role == "user":
            parts.append(image_block(block, kind))
        elif kind == "tool_result" and role == "user":
            flush()
            name = block.required_name("tool_use_id")
            result = read_content(block, "content", TEXT_BLOCKS, BLOCK_SEPARATOR)
            found.append(template_message("tool", result, tool_call_id=name, where=block.path))
        else:
            raise unreadable_part(block, kind)
    flush()
    if not found:
        raise turn.error("content", "expected one block at least")
    return found


# --- answers ---------------------------------------------------------------------------------------------------------


def _start(call: ModelCall, answer: CallAnswer) -> Json:
    """The message before any content."""
    found: Json = {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": call.model, "content": []}
    ids = {"prompt_token_ids": list(answer.prompt_tokens)} if call.wants_token_ids else {}
    return found | {"stop_reason": None, "stop_sequence": None} | ids


def _end(answer: CallAnswer) -> Json:
    choice = answer.choices[0]
    is_stop_string = choice.finish == "stop" and choice.stop_string is not None
    reason = "stop_sequence" if is_stop_string else STOP_REASONS[choice.finish]
    return {"stop_reason": reason, "stop_sequence": choice.stop_string if is_stop_string else None}


def _usage(answer: CallAnswer, num_sampled: int | None = None) -> Json:
    return {
        "input_tokens": len(answer.prompt_tokens),
        "output_tokens": answer.num_sampled if num_sampled is None else num_sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _extra(call: ModelCall, answer: CallAnswer) -> Json:
    """What Anthropic's messages do not have, known at the end."""
    sampled = {"token_ids": list(answer.choices[0].tokens)} if call.wants_token_ids else {}
    return sampled | strategy_field(answer)


def _blocks(answer: CallAnswer) -> list[Json]:
    """The content of an answer. There is a text block unless there are calls without text."""
    choice = answer.choices[0]
    calls = choice.message.get("tool_calls") or []
    found: list[Json] = []
    if thinking := reasoning_of(choice):
        found.append({"type": "thinking", "thinking": thinking, "signature": ""})
    if (text := choice.message.get("content")) or not calls:
        found.append({"type": "text", "text": text or ""})
    for one in calls:
        # Anthropic's input is an object, so the text of the arguments is not kept: spaces and escapes may come back otherwise.
        arguments = from_json(one["function"]["arguments"])
        found.append({"type": "tool_use", "id": one["id"], "name": one["function"]["name"], "input": arguments})
    return found


def _events(call: ModelCall, answer: CallAnswer) -> Iterator[Json]:
    yield {"type": "message_start", "message": _start(call, answer) | {"usage": _usage(answer, 0)}}
    choice = answer.choices[0]
    texts = iter([one["function"]["arguments"] for one in choice.message.get("tool_calls") or []])
    for index, block in enumerate(_blocks(answer)):
        at = {"index": index}
        empty: Json
        if block["type"] == "text":
            empty, delta = {"text": ""}, {"type": "text_delta", "text": block["text"]}
        elif block["type"] == "thinking":
            empty, delta = {"thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        else:
            empty, delta = {"input": {}}, {"type": "input_json_delta", "partial_json": next(texts)}
        yield {"type": "content_block_start", **at, "content_block": block | empty}
        yield {"type": "content_block_delta", **at, "delta": delta}
        yield {"type": "content_block_stop", **at}
    yield {"type": "message_delta", "delta": _end(answer), "usage": _usage(answer)} | _extra(call, answer)
    yield {"type": "message_stop"}
