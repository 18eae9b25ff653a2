"""Messages in the form that chat templates expect, from OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from burnish.gateway.openai_schema import bad_value

Json = dict[str, Any]

RESERVED_VARIABLES = frozenset(
    {
        "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
        "continue_final_message", "tokenize",
    }
)  # fmt: skip
"""Variables of a chat template that a client cannot set."""


def template_message(
    role: str,
    content: str | list[Json],
    *,
    name: str | None = None,
    reasoning_content: str | None = None,
    tool_call_id: str | None = None,
    tool_calls: Sequence[Json] = (),
    where: str,
) -> Json:
    """A message as chat templates expect it: arguments as objects, `developer` as `system`, absent fields left out.

    A content with images is a list of blocks. `tool_calls` are in OpenAI's form, with arguments as JSON texts. `where` is the place of the message in the request, for errors.
    """
    found: Json = {"role": "system" if role == "developer" else role, "content": content}
    optional = {"name": name, "reasoning_content": reasoning_content, "tool_call_id": tool_call_id}
    found |= {key: value for key, value in optional.items() if value is not None}
    if tool_calls:
        found["tool_calls"] = [
            template_call(
                call["id"],
                call["function"]["name"],
                parse_arguments(call["function"]["arguments"], f"{where}.tool_calls[{k}].function.arguments"),
            )
            for k, call in enumerate(tool_calls)
        ]
    return found


def template_call(call_id: str, name: str, arguments: Any) -> Json:
    """A tool call of a message, with its arguments as an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_message(message: Json) -> Json:
    """The assistant's message of a `CallChoice` as chat templates expect it."""
    return template_message(
        "assistant",
        message.get("content") or "",
        reasoning_content=message.get("reasoning_content"),
        tool_calls=message.get("tool_calls") or [],
        where="answer",
    )


def parse_arguments(text: str, where: str) -> Any:
    """The arguments of a call from their JSON text; an error names the field `where`."""
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise bad_value(where, f"not valid JSON: {error}") from error
