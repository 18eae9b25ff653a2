"""Tools of a request in OpenAI's nested form, which chat templates expect."""

from __future__ import annotations

from typing import Any

from burnish.gateway.openai_schema import MAX_TOOLS, ApiError
from burnish.gateway.protocols.fields import Fields, Json

HOSTED = (
    "web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp",
    "tool_search",
)  # fmt: skip
"""Tools that the provider's own server runs. Their types may end in a version."""


def function_schema(name: str, description: str | None, parameters: Json) -> Json:
    """A tool as chat templates expect it. `strict` is left out: it asks for constrained sampling."""
    found: Json = {"name": name}
    if description is not None:
        found["description"] = description
    if parameters:
        found["parameters"] = parameters
    return {"type": "function", "function": found}


def offered_tools(body: Fields, overridden: Json, choice: str | Json | None) -> tuple[Json, ...]:
    """The tools of a request; none if its choice is "none".

    Tools come nested (`function`, chats), flat (`parameters`, responses) or as Anthropic's (`input_schema`). Tools that a provider's
    server would run are left out and noted in `overridden`. So is a choice that the sampler does not enforce.
    """
    found: list[Json] = []
    hosted: list[str] = []
    for tool in body.objects("tools", MAX_TOOLS, "tools"):
        kind = tool.text("type") or ("custom" if tool.has("input_schema") else "function")
        if kind.startswith(HOSTED):
            hosted.append(kind)
        else:
            found.append(_tool(tool, kind))
    if hosted:
        overridden["tools"] = hosted
    if choice == "none":
        return ()
    if choice not in (None, "auto"):
        overridden["tool_choice"] = choice
    return tuple(found)


def _tool(tool: Fields, kind: str) -> Json:
    if kind == "function" and tool.has("function"):
        return _schema(tool.required_child("function"), "parameters")
    if kind == "function":
        return _schema(tool, "parameters")
    if kind == "custom" and tool.has("input_schema"):
        return _schema(tool, "input_schema")
    raise _unknown_tool(tool, kind)


def _schema(function: Fields, parameters: str) -> Json:
    return function_schema(
        function.required_name("name"), function.text("description"), function.free_object(parameters)
    )


def _unknown_tool(tool: Fields, kind: str) -> ApiError:
    message = f"got a tool of type {kind[:50]!r}; expected functions with a JSON schema, which the model can be told of"
    return tool.error("type", message, "unsupported_parameter")


def checked_choice(body: Fields, names: tuple[str, ...]) -> Any:
    """`tool_choice` of OpenAI's APIs: one of the names, or an object that names a function."""
    choice = body.values.get("tool_choice")
    if choice is None or (isinstance(choice, str) and choice in names):
        return choice
    if isinstance(choice, dict):
        named = body.required_child("tool_choice")
        named.required_name("type")
        return body.recorded("tool_choice")["tool_choice"]
    raise body.error("tool_choice", f"expected {', '.join(names)} or an object that names a function")
