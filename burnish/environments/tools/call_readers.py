"""Readers and writers of tool calls, two functions for each syntax.

A reader gets the text of an answer and the position of an opening mark. It returns the calls that begin there with the position behind
them, or None if the mark turns out to be plain text. A block that is no call becomes a `MalformedCall`; readers do not raise. A writer
returns the text that a model writes for some calls.
"""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from burnish.environments.tools.call_values import (
    MAX_CALLS,
    BadCall,
    Call,
    MalformedCall,
    ParsedCall,
    Schema,
    check_encodable,
    function_of,
    parameter_schemas,
    read_json,
    read_python_calls,
    skip_space,
    typed_value,
)

MAX_QUOTED_CHARS = 2000
"""Characters of a malformed block that a `MalformedCall` keeps."""
Found = tuple[list[Call], int]
Reader = Callable[[str, int, Sequence[Schema]], Found | None]
Writer = Callable[[Sequence[ParsedCall]], str]


def malformed(text: str, start: int, end: int, problem: str) -> MalformedCall:
    """A malformed call of the text from `start` to `end`."""
    return MalformedCall(text[start : min(end, start + MAX_QUOTED_CHARS)], problem)


def call_from_object(value: Any, keys: Sequence[str] = ("arguments",), optional: Sequence[str] = ()) -> ParsedCall:
    """The call of a JSON object: `name`, one of `keys` for the arguments, and perhaps some `optional` keys."""
    if not isinstance(value, dict):
        raise BadCall(f'expected a JSON object with the keys "name" and "{keys[0]}"')
    key = next((key for key in keys if key in value), None)
    if "name" not in value or key is None:
        raise BadCall(f'the JSON object has no key "{"name" if "name" not in value else keys[0]}"')
    unknown = sorted(set(value) - {"name", key, *optional})
    if unknown:
        raise BadCall(f'the JSON object has a key {unknown[0][:80]!r} besides "name" and "{key}"')
    if not isinstance(value["name"], str) or not value["name"]:
        raise BadCall('"name" is not a text')
    if not isinstance(value[key], dict):
        raise BadCall(f'"{key}" is not a JSON object')
    identity = value.get("id") if "id" in optional else None
    return ParsedCall(value["name"], value[key], identity if isinstance(identity, str) and identity else None)


def call_json(call: ParsedCall, key: str = "arguments") -> str:
    """A call as a JSON object."""
    return json.dumps({"name": call.name, key: call.arguments}, ensure_ascii=False)


def read_arguments(text: str, at: int) -> tuple[dict[str, Any], int]:
    value, end = read_json(text, at)
    if not isinstance(value, dict):
        raise BadCall("the arguments are not a JSON object")
    return value, end


def _block_end(text: str, at: int, marks: Iterable[str], close: str) -> int:
    """Where a malformed block ends that begins at `at`: behind its closing mark, before the next opening mark, or at the end."""
    closing = text.find(close, at)
    ends = [closing + len(close)] if closing >= 0 else [len(text)]
    ends += [found for mark in marks if (found := text.find(mark, at, ends[0])) >= 0]
    return min(ends)


def between(
    mark: str, close: str, read: Callable[[str, int], tuple[Any, int]], make: Callable[[Any], list[Call]]
) -> Reader:
    """A reader of `mark`, a value and `close`. The value is read before the closing mark is looked for, as it may contain one."""

    def reader(text: str, at: int, tools: Sequence[Schema]) -> Found:
        inside = at + len(mark)
        try:
            value, end = read(text, skip_space(text, inside))
            end = skip_space(text, end)
            if not text.startswith(close, end):
                raise BadCall(f"expected {close} behind the call")
        except BadCall as error:
            end = _block_end(text, inside, [mark], close)
            return [malformed(text, at, end, str(error))], end
        end += len(close)
        try:
            return make(value), end
        except BadCall as error:
            return [malformed(text, at, end, str(error))], end

    return reader


# --- JSON in <tool_call>: Hermes, Qwen2.5, Qwen3, SmolLM2 ---------------------------------------------------------------

TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
read_hermes = between(TOOL_CALL, END_TOOL_CALL, read_json, lambda value: [call_from_object(value)])


def write_hermes(calls: Sequence[ParsedCall]) -> str:
    """One block for each call."""
    return "\n".join(f"{TOOL_CALL}\n{call_json(call)}\n{END_TOOL_CALL}" for call in calls)


def _calls_of_list(value: Any) -> list[Call]:
    """Calls of a JSON list, or of one object. A bad item does not spoil the others."""
    found: list[Call] = []
    for item in value if isinstance(value, list) else [value]:
        try:
            found.append(call_from_object(item, optional=("id",)))
        except BadCall as error:
            found.append(MalformedCall(json.dumps(item, ensure_ascii=False)[:MAX_QUOTED_CHARS], str(error)))
    return found


read_smollm2 = between(TOOL_CALL, END_TOOL_CALL, read_json, _calls_of_list)


def write_smollm2(calls: Sequence[ParsedCall]) -> str:
    """One block with a list of all calls."""
    return f"{TOOL_CALL}[{', '.join(call_json(call) for call in calls)}]{END_TOOL_CALL}"


# --- tags in <tool_call>: Qwen3-Coder, GLM ------------------------------------------------------------------------------

_FUNCTION = re.compile(r"<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.{0,262144}?)</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_GLM_NAME = re.compile(r"([^\s<{]+)\s*")
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(.{0,999}?)</arg_key>\s*<arg_value>(.{0,262144}?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)


def _one_newline_less(value: str) -> str:
    """A value without the newline that the format writes on each side of it."""
    return value.removeprefix("\n").removesuffix("\n")


def _tagged_call(name: str, pairs: Sequence[tuple[str, str]], tools: Sequence[Schema]) -> ParsedCall:
    schemas = parameter_schemas(name, tools)
    arguments: dict[str, Any] = {}
    for key, value in pairs:
        if key in arguments:
            raise BadCall(f"the parameter {key[:80]!r} stands twice")
        arguments[key] = typed_value(value, schemas.get(key), key)
    return ParsedCall(name, arguments)


def _read_pairs(pattern: re.Pattern[str], text: str, at: int) -> tuple[list[tuple[str, str]], int]:
    pairs = []
    while found := pattern.match(text, at):
        pairs.append((found[1], found[2]))
        at = found.end()
    return pairs, at


def _qwen3_coder_inside(text: str, at: int) -> tuple[Any, int]:
    function = _FUNCTION.match(text, at)
    if not function:
        raise BadCall("expected <function=name> behind <tool_call>")
    pairs, end = _read_pairs(_PARAMETER, text, function.end())
    if not text.startswith("</function>", end):
        raise BadCall("expected <parameter=name>value</parameter> or </function>")
    return (function[1].strip(), [(key, _one_newline_less(value)) for key, value in pairs]), end + len("</function>")


def _glm_inside(text: str, at: int) -> tuple[Any, int]:
    name = _GLM_NAME.match(text, at)
    if not name:
        raise BadCall("expected the name of a tool behind <tool_call>")
    pairs, end = _read_pairs(_GLM_ARGUMENT, text, name.end())
    return (name[1], [(key.strip(), value) for key, value in pairs]), end


def _tagged(inside: Callable[[str, int], tuple[Any, int]]) -> Reader:
    def reader(text: str, at: int, tools: Sequence[Schema]) -> Found | None:
        def make(found: tuple[str, list[tuple[str, str]]]) -> list[Call]:
            return [_tagged_call(*found, tools)]

        return between(TOOL_CALL, END_TOOL_CALL, inside, make)(text, at, tools)

    return reader


read_qwen3_coder, read_glm = _tagged(_qwen3_coder_inside), _tagged(_glm_inside)


def raw_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_qwen3_coder(calls: Sequence[ParsedCall]) -> str:
    """One block for each call, with a tag for each parameter."""
    blocks = []
    for call in calls:
        parameters = "".join(
            f"<parameter={key}>\n{raw_value(value)}\n</parameter>\n" for key, value in call.arguments.items()
        )
        blocks.append(f"{TOOL_CALL}\n<function={call.name}>\n{parameters}</function>\n{END_TOOL_CALL}")
    return "\n".join(blocks)


def write_glm(calls: Sequence[ParsedCall]) -> str:
    """One block for each call, with two tags for each argument."""
    return "\n".join(
        f"{TOOL_CALL}{call.name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{raw_value(value)}</arg_value>\n"
            for key, value in call.arguments.items()
        )
        + END_TOOL_CALL
        for call in calls
    )


# --- bare JSON and <|python_tag|>: Llama 3 ------------------------------------------------------------------------------

PYTHON_TAG = "<|python_tag|>"
CODE_TOOL = "code_interpreter"
"""The tool that Llama 3 calls by writing code behind its tag."""
_BARE_CALL = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"')
_BUILT_IN = re.compile(r"\w+\.call\(")


def _bare_call(text: str, at: int, keys: Sequence[str]) -> Found | None:
    """The call of a JSON object without marks. Another object is plain text, since answers may be JSON."""
    if not text.startswith("{", at):
        return None
    try:
        value, end = read_json(text, at)
    except BadCall as error:
        looks_like_call = _BARE_CALL.match(text, at) and any(f'"{key}"' in text[at:] for key in keys)
        return ([malformed(text, at, len(text), str(error))], len(text)) if looks_like_call else None
    if not isinstance(value, dict) or "name" not in value or not any(key in value for key in keys):
        return None
    try:
        return [call_from_object(value, keys, optional=("type",))], end
    except BadCall as error:
        return [malformed(text, at, end, str(error))], end


def read_llama3_bare(text: str, at: int, tools: Sequence[Schema]) -> Found | None:
    """`{"name": ..., "parameters": {}}` at the beginning of an answer, perhaps several with semicolons between them."""
    found = _bare_call(text, at, ("parameters",))
    if found is None:
        return None
    calls, end = found
    while len(calls) <= MAX_CALLS:
        following = skip_space(text, end)
        following = skip_space(text, following + 1) if text.startswith(";", following) else following
        found = _bare_call(text, following, ("parameters",))
        if found is None:
            break
        calls, end = calls + found[0], found[1]
    return calls, end


def read_llama3(text: str, at: int, tools: Sequence[Schema]) -> Found:
    """What follows `<|python_tag|>`: JSON calls, `tool.call(...)`, or code."""
    inside = skip_space(text, at + len(PYTHON_TAG))
    found = read_llama3_bare(text, inside, tools)
    if found is not None:
        return found
    end = text.find(PYTHON_TAG, inside)
    end = len(text) if end < 0 else end
    body = text[inside:end].strip()
    try:
        if not body:
            raise BadCall(f"there is nothing behind {PYTHON_TAG}")
        if _BUILT_IN.match(body):
            named = read_python_calls(body, tools)
            return [ParsedCall(call.name.removesuffix(".call"), call.arguments) for call in named], end
        check_encodable(body)
        return [ParsedCall(_code_tool(tools), {"code": body})], end
    except BadCall as error:
        return [malformed(text, at, end, str(error))], end


def _code_tool(tools: Sequence[Schema]) -> str:
    """The tool that runs code: `code_interpreter`, or else the only tool with a parameter `code`."""
    names = [str(function_of(tool).get("name")) for tool in tools]
    takers = [name for name in names if "code" in parameter_schemas(name, tools)]
    return takers[0] if CODE_TOOL not in names and len(takers) == 1 else CODE_TOOL


def write_llama3(calls: Sequence[ParsedCall]) -> str:
    """A bare JSON object; several calls stand behind the tag."""
    texts = [call_json(call, "parameters") for call in calls]
    return texts[0] if len(texts) == 1 else PYTHON_TAG + "; ".join(texts)


# --- [TOOL_CALLS]: Mistral ----------------------------------------------------------------------------------------------

TOOL_CALLS = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")


def read_mistral(text: str, at: int, tools: Sequence[Schema]) -> Found:
    """A JSON list of calls, or `name[ARGS]{}` (tokenizers from v11 on)."""
    inside = skip_space(text, at + len(TOOL_CALLS))
    try:
        if text.startswith("[", inside) and not text.startswith(TOOL_CALLS, inside):
            value, end = read_json(text, inside)
            return _calls_of_list(value), end
        name = _MISTRAL_NAME.match(text, inside)
        if not name:
            raise BadCall(f"expected a JSON list of calls, or name[ARGS]{{...}}, behind {TOOL_CALLS}")
        arguments, end = read_arguments(text, name.end())
        return [ParsedCall(name[1], arguments)], end
    except BadCall as error:
        end = text.find(TOOL_CALLS, inside)
        end = len(text) if end < 0 else end
        return [malformed(text, at, end, str(error))], end


def write_mistral(calls: Sequence[ParsedCall]) -> str:
    """One list of all calls."""
    return f"{TOOL_CALLS}[{', '.join(call_json(call) for call in calls)}]"


# --- Python calls: Gemma 3 -----------------------------------------------------------------------------------------------

FENCE, TOOL_CODE, JSON_FENCE = "```", "```tool_code", "```json"
MAX_FENCES = 16
"""Closing fences that are tried, since an argument may contain one."""


def _python_or_json(body: str, tools: Sequence[Schema]) -> list[Call]:
    body = body.strip()
    if not body.startswith(("{", "[{")):
        return list(read_python_calls(body, tools))
    value, end = read_json(body, 0)
    if end < len(body):
        raise BadCall("there is text behind the JSON object")
    return [
        call_from_object(item, ("parameters", "arguments")) for item in (value if isinstance(value, list) else [value])
    ]


def read_to_first_close(text: str, at: int, mark: str, close: str, tools: Sequence[Schema]) -> Found:
    """Read up to the first closing mark with which the text before it is valid."""
    inside, closing, problem = at + len(mark), at + len(mark), ""
    first_end = len(text)
    for _ in range(MAX_FENCES):
        closing = text.find(close, closing)
        if closing < 0:
            break
        end = closing + len(close)
        try:
            return _python_or_json(text[inside:closing], tools), end
        except BadCall as error:
            problem = problem or str(error)
            first_end = min(first_end, end)
        closing = end
    return [malformed(text, at, first_end, problem or f"expected {close} behind the call")], first_end


def read_gemma3(text: str, at: int, tools: Sequence[Schema]) -> Found | None:
    """A fenced block of Python calls or of a JSON object. A block of other JSON is plain text."""
    if text.startswith(TOOL_CODE, at):
        return read_to_first_close(text, at, TOOL_CODE, FENCE, tools)
    found = read_gemma3_bare(text, skip_space(text, at + len(JSON_FENCE)), tools)
    if found is None:
        return None
    closing = skip_space(text, found[1])
    return found[0], closing + len(FENCE) if text.startswith(FENCE, closing) else found[1]


def read_gemma3_bare(text: str, at: int, tools: Sequence[Schema]) -> Found | None:
    """A JSON object without a fence."""
    return _bare_call(text, at, ("parameters", "arguments"))


def python_call(call: ParsedCall) -> str | None:
    """A call as Python writes it; None if a name in it is no Python name."""
    names = [*call.name.split("."), *call.arguments]
    if not all(name.isidentifier() and name.isascii() and not keyword.iskeyword(name) for name in names):
        return None
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"


def python_or_json_text(calls: Sequence[ParsedCall], as_list: bool, key: str) -> str:
    texts = [python_call(call) for call in calls]
    if None in texts:
        return f"[{', '.join(call_json(call, key) for call in calls)}]"
    known = [text for text in texts if text is not None]
    return f"[{', '.join(known)}]" if as_list else "\n".join(known)


def write_gemma3(calls: Sequence[ParsedCall]) -> str:
    """A fenced block with a line for each call."""
    return f"{TOOL_CODE}\n{python_or_json_text(calls, False, 'parameters')}\n{FENCE}"
