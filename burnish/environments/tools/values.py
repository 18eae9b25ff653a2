"""Values that cross the border of a tool: arguments checked against a JSON schema, results made into text.

Models write numbers as text, lists as JSON text and texts as numbers. Such a value is converted where the schema leaves no doubt. Any other
mistake is an error text that says what was expected, so that the model can try again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from burnish.config.errors import did_you_mean
from burnish.environments.image_values import are_content_parts, is_image, split_parts
from burnish.environments.tools.base import ToolResult

MAX_RESULT_CHARS = 1_000_000
"""The longest text that a tool returns. The environment cuts it further, at its limit of tokens."""
MAX_SHOWN_CHARS = 80
INTEGER = re.compile(r"[+-]?\d{1,400}")
ARTICLES = {"integer": "an", "array": "an", "object": "an"}


class WrongArguments(Exception):
    """The model's arguments do not fit the schema. The message says what was expected."""


def tool_schema(name: str, description: str, properties: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """A schema in OpenAI's form."""
    parameters = {"type": "object", "properties": dict(properties), "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def error_result(message: str, kind: str = "errors") -> ToolResult:
    """The result of a call that failed because of what the model wrote. It is counted in the episode's metrics under `tool/<kind>`."""
    return ToolResult(f"Error: {message}", metrics={f"tool/{kind}": 1.0})


# --- arguments -------------------------------------------------------------------------------------------------------


def check_arguments(schema: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """The arguments with their values converted to the types of the schema; WrongArguments names every mistake."""
    function = schema["function"]
    parameters = function.get("parameters") or {}
    properties: Mapping[str, Any] = parameters.get("properties") or {}
    required = parameters.get("required") or []
    if not isinstance(arguments, dict):
        raise WrongArguments(
            f"{function['name']} takes an object of arguments, got {_shown(arguments)}{_signature(properties, required)}"
        )
    checked, problems = {}, []
    for key, value in arguments.items():
        if key not in properties:
            if parameters.get("additionalProperties", False) is False:
                problems.append(f"unexpected argument {key!r}{did_you_mean(str(key), properties)}")
            else:
                checked[key] = value
            continue
        try:
            checked[key] = convert(value, properties[key])
        except ValueError:
            problems.append(f"{key!r} must be {describe(properties[key])}, got {_shown(value)}")
    problems += [
        f"{key!r} is missing (it must be {describe(properties.get(key, {}))})"
        for key in required
        if key not in arguments
    ]
    if problems:
        raise WrongArguments(
            f"wrong arguments for {function['name']}: {'; '.join(problems)}{_signature(properties, required)}"
        )
    return checked


def convert(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value as the schema wants it; ValueError if it does not fit."""
    if value is None and (schema.get("nullable") or ("default" in schema and schema["default"] is None)):
        return None
    if "anyOf" in schema or "oneOf" in schema:
        return _convert_to_any(value, schema.get("anyOf") or schema["oneOf"])
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return _convert_to_any(value, [{**schema, "type": kind} for kind in kinds])
    if kinds is not None:
        value = _convert_to_kind(value, kinds, schema)
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError("not one of the choices")
    if "const" in schema and value != schema["const"]:
        raise ValueError("not the constant")
    return value


def _convert_to_any(value: Any, choices: list[Mapping[str, Any]]) -> Any:
    """The value as the first choice that it fits as it is, or otherwise the first that it can be converted to."""
    fitting = []
    for choice in choices:
        try:
            converted = convert(value, choice)
        except ValueError:
            continue
        if type(converted) is type(value) and converted == value:
            return value
        fitting.append(converted)
    if not fitting:
        raise ValueError("none of the choices")
    return fitting[0]


def _convert_to_kind(value: Any, kind: str, schema: Mapping[str, Any]) -> Any:
    is_text, is_number = isinstance(value, str), isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "integer":
            if is_text and INTEGER.fullmatch(value.strip()):
                return int(value)
            if is_number and (isinstance(value, int) or value.is_integer()):
                return int(value)
        case "number":
            if is_text:
                value = int(value) if INTEGER.fullmatch(value.strip()) else float(value)
                is_number = True
            if is_number and (isinstance(value, int) or math.isfinite(value)):
                return value
        case "boolean":
            if isinstance(value, bool):
                return value
            if is_text and value.strip().lower() in ("true", "false"):
                return value.strip().lower() == "true"
        case "string":
            if is_text:
                return value
            if is_number or isinstance(value, bool):
                return json.dumps(value)
        case "null":
            if value is None:
                return None
        case "array":
            value = _from_json(value) if is_text else value
            if isinstance(value, list):
                return _convert_items(value, schema)
        case "object":
            value = _from_json(value) if is_text else value
            if isinstance(value, dict):
                return _convert_fields(value, schema)
        case _:
            return value  # a type that this module does not know: the tool must judge it
    raise ValueError(f"not {kind}")


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("too deep") from None


def _convert_items(values: list[Any], schema: Mapping[str, Any]) -> list[Any]:
    if "prefixItems" in schema:
        if len(values) != len(schema["prefixItems"]):
            raise ValueError("wrong number of items")
        return [convert(value, item) for value, item in zip(values, schema["prefixItems"], strict=True)]
    items = schema.get("items")
    return [convert(value, items) for value in values] if isinstance(items, Mapping) else values


def _convert_fields(values: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    if any(key not in values for key in schema.get("required") or []):
        raise ValueError("a field is missing")
    others = schema.get("additionalProperties")
    converted = {}
    for key, value in values.items():
        field = properties.get(key, others if isinstance(others, Mapping) else None)
        if field is None and others is False:
            raise ValueError(f"unexpected field {key!r}")
        converted[key] = convert(value, field) if field is not None else value
    return converted


def describe(schema: Mapping[str, Any]) -> str:
    """The kind of value that a schema wants, in words."""
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(choice, ensure_ascii=False) for choice in schema["enum"])
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return " or ".join(describe(choice) for choice in choices)
    kinds = schema.get("type") or "any value"
    words = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        items = schema.get("items")
        inside = f" of {items['type']}s" if kind == "array" and isinstance(items, Mapping) and "type" in items else ""
        words.append(f"{ARTICLES.get(kind, 'a')} {kind}{inside}" if kind != "any value" else kind)
    return " or ".join(words)


def _signature(properties: Mapping[str, Any], required: list[str]) -> str:
    """The end of an error text: all parameters with their types."""
    if not properties:
        return ". It takes no arguments."
    words = [
        f"{key} ({describe(schema)}{'' if key in required else ', optional'})" for key, schema in properties.items()
    ]
    return f". It takes: {', '.join(words)}."


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


# --- results ---------------------------------------------------------------------------------------------------------


def tool_result(value: Any) -> ToolResult | str:
    """What a tool returned: a `ToolResult` if there are images in it, else a text.

    An image, a list of content blocks, and a list or tuple of texts and images count as images.
    """
    if isinstance(value, ToolResult):
        return value
    if is_image(value):
        return ToolResult("", images=(value,))
    if isinstance(value, list | tuple):
        if are_content_parts(value):
            text, images = split_parts(value, "the result of a tool")
            return ToolResult(text, images=images) if images else text
        images = tuple(item for item in value if is_image(item))
        if images and all(isinstance(item, str) or is_image(item) for item in value):
            return ToolResult("".join(item for item in value if isinstance(item, str)), images=images)
    return result_text(value)


def result_text(value: Any) -> str:
    """What a tool returned, as text: JSON for lists and dicts, UTF-8 for bytes, `str` for everything else."""
    if isinstance(value, bytes | bytearray | memoryview):
        text = bytes(value).decode(errors="replace")
    elif isinstance(value, list | dict):
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except (TypeError, ValueError, RecursionError):  # keys that are not texts, or a list that holds itself
            text = str(value)
    else:
        text = str(value)
    return cut_middle(text.encode(errors="replace").decode(errors="replace"), MAX_RESULT_CHARS)


def cut_middle(text: str, max_chars: int) -> str:
    """The text with its middle left out if it is longer than `max_chars`. A mark says how much is missing."""
    if len(text) <= max_chars:
        return text
    head = max_chars * 2 // 3
    tail = max_chars - head
    return f"{text[:head]}\n... ({len(text) - max_chars} characters left out) ...\n{text[len(text) - tail :]}"
