"""Reads the values inside tool calls: JSON, Python calls and raw texts with a schema's type, all within limits.

The texts come from a model, so anything may be in them. Every function here raises `BadCall`, and nothing else, for a text that it
cannot read. Nothing is evaluated: Python is parsed to a syntax tree, and only literals are taken from it.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_CALLS = 128
"""Most calls that are read in one answer."""
MAX_DEPTH = 32
"""Deepest nesting of a value."""
MAX_JSON_CHARS = 1 << 18
"""Longest JSON value of a call."""
MAX_PYTHON_CHARS = 1 << 16
"""Longest Python text of a call."""
MAX_DIGITS = 300
"""Most digits of an integer. Python refuses to print integers of more than 4,300 digits."""

Schema = Mapping[str, Any]
"""The schema of a tool in OpenAI's form, with or without `{"type": "function", "function": ...}` around it."""

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]++|\\[\s\S])*+"?+|[\[\]{}]')
"""Possessive, so that a text of many quotes without an end is scanned once."""
PYTHON_SOURCE = "<tool call>"
"""The file name that Python's parser gives to the text of a call."""
# An invalid escape such as "\d" in a string of a call is the model's business, not a warning for the user's screen.
warnings.filterwarnings("ignore", module=re.escape(PYTHON_SOURCE))


@dataclass(frozen=True)
class ParsedCall:
    """A call of a tool. Whether there is such a tool, and whether it takes these arguments, is not checked here."""

    name: str
    arguments: dict[str, Any]
    id: str | None = field(default=None, compare=False)
    """The id that the model wrote, in the formats that have one (Mistral's)."""


@dataclass(frozen=True)
class MalformedCall:
    """A text inside the marks of a call that is no call."""

    text: str
    problem: str
    """What is wrong, in words for the model."""


Call = ParsedCall | MalformedCall


class BadCall(ValueError):
    """A text that is not a call. The message says what is wrong, in words for the model."""


def read_json(text: str, at: int) -> tuple[Any, int]:
    """Read one JSON value that begins at `at`; return it with the position behind it."""
    end = _json_end(text, at)
    try:
        value, length = _DECODER.raw_decode(text[at:end])
    except json.JSONDecodeError as error:
        raise BadCall(f"not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except BadCall:
        raise
    except (ValueError, RecursionError) as error:
        raise BadCall(f"not valid JSON: {error}") from error
    check_encodable(value)
    return value, at + length


def skip_space(text: str, at: int) -> int:
    """Position of the first character from `at` on that is no white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def check_encodable(value: Any) -> None:
    """Raise for half of a surrogate pair (`\\ud800` in JSON), which is no character and cannot be tokenised."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise BadCall("a text has half of a surrogate pair, which is not a character") from error


def _json_end(text: str, at: int) -> int:
    """Position behind the object or list at `at`, or the end of the text for anything else, with the limits checked."""
    depth = 0
    limit = at + MAX_JSON_CHARS
    for found in _STRING_OR_BRACKET.finditer(text, at, min(len(text), limit + 1)):
        if found[0] in ("{", "["):
            depth += 1
            if depth > MAX_DEPTH:
                raise BadCall(f"the JSON is nested more than {MAX_DEPTH} levels deep")
        elif found[0] in ("}", "]"):
            depth -= 1
            if depth <= 0:
                return found.end()
        elif depth == 0:
            return found.end()
    if len(text) > limit:
        raise BadCall(f"the JSON has more than {MAX_JSON_CHARS:,} characters")
    return len(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadCall(f"the key {name[:80]!r} stands twice in one object")
        found[name] = value
    return found


def _no_constant(name: str) -> None:
    raise BadCall(f"{name} is not JSON")


def _float(digits: str) -> float:
    return _finite(float(digits))


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise BadCall(f"an integer has more than {MAX_DIGITS} digits")
    return int(digits)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise BadCall("a number is too large")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_float, parse_int=_int)


# --- Python calls -------------------------------------------------------------------------------------------------------


def read_python_calls(text: str, tools: Sequence[Schema]) -> list[ParsedCall]:
    """Read calls such as `add(a=1, b=2)`: one a line, or a list of them.

    Arguments are literals. Positional ones get the names of the tool's parameters, in the schema's order. A call may stand in `print()`.
    """
    if len(text) > MAX_PYTHON_CHARS:
        raise BadCall(f"the Python text has more than {MAX_PYTHON_CHARS:,} characters")
    try:
        body = ast.parse(text.strip(), PYTHON_SOURCE).body
    except SyntaxError as error:
        raise BadCall(f"not valid Python: {error.msg} in line {error.lineno}") from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadCall(f"not valid Python: {str(error) or 'too deeply nested'}") from error
    calls: list[ParsedCall] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else None
        for node in value.elts if isinstance(value, ast.List | ast.Tuple) else [value]:
            calls.append(_python_call(node, tools))
    if not calls:
        raise BadCall("there is no call")
    check_encodable([call.arguments for call in calls])
    return calls


def _python_call(node: ast.AST | None, tools: Sequence[Schema]) -> ParsedCall:
    if not isinstance(node, ast.Call):
        raise BadCall("expected only calls of the form name(argument=value)")
    if isinstance(node.func, ast.Name) and node.func.id == "print" and len(node.args) == 1 and not node.keywords:
        inner = node.args[0]
        if isinstance(inner, ast.Call):
            return _python_call(inner, tools)
    name = _dotted_name(node.func)
    arguments: dict[str, Any] = {}
    known = list(parameter_schemas(name, tools))
    if len(node.args) > len(known):
        raise BadCall(f"{name}: give each argument a name, as in {name}(argument=value)")
    named = [*zip(known, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
    for key, value in named:
        if key is None:
            raise BadCall(f"{name}: `**` is not allowed")
        if key in arguments:
            raise BadCall(f"{name}: the argument {key!r} is given twice")
        arguments[key] = literal(value)
    return ParsedCall(name, arguments)


def _dotted_name(node: ast.AST) -> str:
    """The name of a function, perhaps with dots (`module.function`)."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and len(parts) < MAX_DEPTH:
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        raise BadCall("the name of the function is not a plain name")
    return ".".join([node.id, *reversed(parts)])


def literal(node: ast.AST, depth: int = 1) -> Any:
    """The value of a literal that JSON can also express. JSON's `true`, `false` and `null` are accepted too."""
    if depth > MAX_DEPTH:
        raise BadCall(f"an argument is nested more than {MAX_DEPTH} levels deep")
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str | bool | int | float)):
        return _checked_number(node.value)
    if isinstance(node, ast.Name) and node.id in _JSON_WORDS:
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = literal(node.operand, depth + 1)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.List | ast.Tuple):
        return [literal(item, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [literal(key, depth + 1) for key in node.keys if key is not None]
        if len(keys) < len(node.keys) or not all(isinstance(key, str) for key in keys):
            raise BadCall("the keys of a dictionary are not all texts")
        return _object([(key, literal(value, depth + 1)) for key, value in zip(keys, node.values, strict=True)])
    raise BadCall("an argument is not a plain value (text, number, True, False, None, list or dictionary)")


_JSON_WORDS = {"true": True, "false": False, "null": None}


def _checked_number(value: Any) -> Any:
    if isinstance(value, float):
        return _finite(value)
    if isinstance(value, int) and value.bit_length() > MAX_DIGITS * 3.32:
        raise BadCall(f"an integer has more than {MAX_DIGITS} digits")
    return value


# --- values typed by a schema -------------------------------------------------------------------------------------------


def function_of(tool: Schema) -> Mapping[str, Any]:
    """The inner part of a schema: name, description and parameters."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def parameter_schemas(name: str, tools: Sequence[Schema]) -> Mapping[str, Any]:
    """The schemas of a tool's parameters by name, in the schema's order; empty for an unknown tool."""
    for tool in tools:
        function = function_of(tool)
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            return properties if isinstance(properties, Mapping) else {}
    return {}


def types_of(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema allows; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    found = {kind} if isinstance(kind, str) else {str(k) for k in kind} if isinstance(kind, list) else set()
    for key in ("anyOf", "oneOf"):
        for part in schema.get(key) or []:
            found |= types_of(part)
    if not found and isinstance(schema.get("enum"), list):
        found = {"string"} if all(isinstance(value, str) for value in schema["enum"]) else set()
    return found | ({"null"} if schema.get("nullable") is True else set())


def typed_value(text: str, schema: Any, key: str) -> Any:
    """The value of a raw text by its schema. A text without a type, or of type string, is taken as it is."""
    types = types_of(schema)
    word = text.strip()
    if ("null" in types or (types and "string" not in types)) and word in ("null", "None"):
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    value = _json_or_python(word)
    for kind, is_such in _IS_TYPE.items():
        if kind in types and is_such(value):
            return int(value) if kind == "integer" else value
    raise BadCall(f"{key}: {word[:80]!r} is not of type {' or '.join(sorted(types - {'null'}))}")


_MISSING = object()


def _json_or_python(word: str) -> Any:
    try:
        value, end = read_json(word, 0)
        if end == len(word):
            return value
    except BadCall:
        pass  # not JSON: it may be a Python literal
    if len(word) > MAX_PYTHON_CHARS:
        return _MISSING
    try:
        value = literal(ast.parse(word, PYTHON_SOURCE, mode="eval").body)
        check_encodable(value)
        return value
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _MISSING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_IS_TYPE = {
    "integer": lambda value: _is_number(value) and value == int(value),
    "number": _is_number,
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
}
