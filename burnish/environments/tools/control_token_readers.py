"""Readers and writers of calls between control tokens: LFM2, DeepSeek, Kimi, Gemma 4. They follow the rules of `call_readers`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from burnish.environments.tools.call_readers import (
    FENCE,
    Found,
    Reader,
    between,
    malformed,
    python_or_json_text,
    raw_value,
    read_arguments,
    read_to_first_close,
)
from burnish.environments.tools.call_values import (
    MAX_CALLS,
    MAX_DEPTH,
    BadCall,
    Call,
    ParsedCall,
    Schema,
    check_encodable,
    read_json,
    skip_space,
)

# --- Python calls: LFM2 -------------------------------------------------------------------------------------------------

LFM2_CALL, END_LFM2_CALL = "<|tool_call_start|>", "<|tool_call_end|>"


def read_lfm2(text: str, at: int, tools: Sequence[Schema]) -> Found:
    """A list of Python calls."""
    return read_to_first_close(text, at, LFM2_CALL, END_LFM2_CALL, tools)


def write_lfm2(calls: Sequence[ParsedCall]) -> str:
    """A list of all calls."""
    return f"{LFM2_CALL}{python_or_json_text(calls, True, 'arguments')}{END_LFM2_CALL}"


# --- sections of calls: DeepSeek, Kimi ----------------------------------------------------------------------------------

_DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end"))
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_KIMI = tuple(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end"))
_KIMI_SEPARATOR = "<|tool_call_argument_begin|>"
DEEPSEEK_SECTION, KIMI_SECTION = _DEEPSEEK[0], _KIMI[0]
DEEPSEEK_TOKENS, KIMI_TOKENS = (*_DEEPSEEK, _DEEPSEEK_SEPARATOR), (*_KIMI, _KIMI_SEPARATOR)
_DEEPSEEK_HEAD = re.compile(rf"\s*function{_DEEPSEEK_SEPARATOR}([^\n<]+)\n```json\s*")
_DEEPSEEK_PLAIN_HEAD = re.compile(rf"\s*([^\n<]+){_DEEPSEEK_SEPARATOR}\s*")
_KIMI_HEAD = re.compile(rf"\s*(?:functions\.)?([^\s<]+?)(?::\d+)?\s*{re.escape(_KIMI_SEPARATOR)}\s*")


def _deepseek_item(text: str, at: int) -> tuple[ParsedCall, int]:
    head = _DEEPSEEK_HEAD.match(text, at) or _DEEPSEEK_PLAIN_HEAD.match(text, at)
    if not head:
        raise BadCall(f"expected function{_DEEPSEEK_SEPARATOR}name and a block of JSON")
    arguments, end = read_arguments(text, head.end())
    end = skip_space(text, end)
    return ParsedCall(head[1].strip(), arguments), end + len(FENCE) if text.startswith(FENCE, end) else end


def _kimi_item(text: str, at: int) -> tuple[ParsedCall, int]:
    head = _KIMI_HEAD.match(text, at)
    if not head:
        raise BadCall(f"expected functions.name:0{_KIMI_SEPARATOR} and a JSON object")
    arguments, end = read_arguments(text, head.end())
    return ParsedCall(head[1], arguments), end


def _section(marks: Sequence[str], read_item: Callable[[str, int], tuple[ParsedCall, int]]) -> Reader:
    """A reader of several calls between two marks, each between two marks of its own."""
    begin, section_end, item_begin, item_end = marks
    one = between(item_begin, item_end, read_item, lambda call: [call])

    def reader(text: str, at: int, tools: Sequence[Schema]) -> Found:
        calls: list[Call] = []
        end = skip_space(text, at + len(begin))
        while text.startswith(item_begin, end) and len(calls) <= MAX_CALLS:
            found = one(text, end, tools)
            assert found is not None
            calls += found[0]
            end = skip_space(text, found[1])
        if text.startswith(section_end, end):
            end += len(section_end)
        if not calls:
            calls = [malformed(text, at, end, f"expected {item_begin} behind {begin}")]
        return calls, end

    return reader


read_deepseek, read_kimi = _section(_DEEPSEEK, _deepseek_item), _section(_KIMI, _kimi_item)


def write_deepseek(calls: Sequence[ParsedCall]) -> str:
    """One section, with a block of JSON for each call (V3, R1)."""
    begin, section_end, item_begin, item_end = _DEEPSEEK
    items = [
        f"{item_begin}function{_DEEPSEEK_SEPARATOR}{call.name}\n```json\n{raw_value(call.arguments)}\n```{item_end}"
        for call in calls
    ]
    return begin + "\n".join(items) + section_end


def write_kimi(calls: Sequence[ParsedCall]) -> str:
    """One section, with an index for each call."""
    begin, section_end, item_begin, item_end = _KIMI
    items = [
        f"{item_begin}functions.{call.name}:{index}{_KIMI_SEPARATOR}{raw_value(call.arguments)}{item_end}"
        for index, call in enumerate(calls)
    ]
    return begin + "".join(items) + section_end


# --- Gemma 4 ------------------------------------------------------------------------------------------------------------

GEMMA4_CALL, END_GEMMA4_CALL, GEMMA4_QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
_GEMMA4_HEAD = re.compile(r"call:([^\s{]+)\s*(?=\{)")
_GEMMA4_SCALAR = re.compile(r"[^,:{}\[\]<]+")


def _gemma4_value(text: str, at: int, depth: int = 1) -> tuple[Any, int]:
    """A value: a quoted text, an object with bare keys, a list, or a JSON scalar."""
    if depth > MAX_DEPTH:
        raise BadCall(f"the arguments are nested more than {MAX_DEPTH} levels deep")
    if text.startswith(GEMMA4_QUOTE, at):
        closing = text.find(GEMMA4_QUOTE, at + len(GEMMA4_QUOTE))
        if closing < 0:
            raise BadCall(f"a text has no closing {GEMMA4_QUOTE}")
        return text[at + len(GEMMA4_QUOTE) : closing], closing + len(GEMMA4_QUOTE)
    if text.startswith(("{", "["), at):
        return _gemma4_items(text, at, depth)
    scalar = _GEMMA4_SCALAR.match(text, at)
    if not scalar:
        raise BadCall("expected a value")
    word = scalar[0].strip()
    if word == "None":  # some versions of the template write it so
        return None, scalar.end()
    value, end = read_json(word, 0)
    if end < len(word):
        raise BadCall(f"{word[:80]!r} is not a value")
    return value, scalar.end()


def _gemma4_items(text: str, at: int, depth: int) -> tuple[Any, int]:
    close = "}" if text[at] == "{" else "]"
    items: list[Any] = []
    pairs: dict[str, Any] = {}
    at = skip_space(text, at + 1)
    while not text.startswith(close, at):
        if items or pairs:
            if not text.startswith(",", at):
                raise BadCall(f"expected a comma or {close}")
            at = skip_space(text, at + 1)
        if close == "]":
            value, at = _gemma4_value(text, at, depth + 1)
            items.append(value)
        else:
            key, at = _gemma4_key(text, at)
            if key in pairs:
                raise BadCall(f"the key {key[:80]!r} stands twice")
            pairs[key], at = _gemma4_value(text, at, depth + 1)
        at = skip_space(text, at)
    return (pairs if close == "}" else items), at + 1


def _gemma4_key(text: str, at: int) -> tuple[str, int]:
    if text.startswith(GEMMA4_QUOTE, at):
        key, end = _gemma4_value(text, at)
    else:
        found = _GEMMA4_SCALAR.match(text, at)
        if not found:
            raise BadCall("expected a key")
        key, end = found[0].strip(), found.end()
    if not text.startswith(":", end):
        raise BadCall("expected a colon behind a key")
    return key, skip_space(text, end + 1)


def _gemma4_inside(text: str, at: int) -> tuple[ParsedCall, int]:
    head = _GEMMA4_HEAD.match(text, at)
    if not head:
        raise BadCall(f"expected call:name{{...}} behind {GEMMA4_CALL}")
    arguments, end = _gemma4_value(text, head.end())
    check_encodable(arguments)
    return ParsedCall(head[1], arguments), end


read_gemma4 = between(GEMMA4_CALL, END_GEMMA4_CALL, _gemma4_inside, lambda call: [call])


def _gemma4_text(value: Any) -> str:
    if isinstance(value, str):
        return f"{GEMMA4_QUOTE}{value}{GEMMA4_QUOTE}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma4_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma4_text, value)) + "]"
    return json.dumps(value)


def write_gemma4(calls: Sequence[ParsedCall]) -> str:
    """One block for each call."""
    return "".join(f"{GEMMA4_CALL}call:{call.name}{_gemma4_text(call.arguments)}{END_GEMMA4_CALL}" for call in calls)
