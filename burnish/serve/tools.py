"""Tool calls in the text of an answer, in the format of Hermes and Qwen:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

An answer is read as calls only if everything from the first `<tool_call>` on is such blocks, one or several, and nothing else.
Otherwise all of it stays text: a call that is cut short or malformed is never guessed at.
"""

from __future__ import annotations

import json
import uuid
from typing import Any

from burnish.serve.text import undecided

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_no_constant)


def split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    """What an answer says before its calls, and the calls as OpenAI writes them; all of it and none where it has none."""
    at = text.find(OPEN)
    calls = _read_blocks(text[at:]) if at >= 0 else None
    if not calls:
        return text, []
    return text[:at].rstrip(), [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for name, arguments in calls
    ]


def _read_blocks(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """The name and arguments of each block; None unless the text is blocks throughout."""
    calls = []
    rest = text.strip()
    while rest:
        if not rest.startswith(OPEN):
            return None
        try:
            # Read as JSON, not up to the closing tag: an argument may contain one.
            value, end = DECODER.raw_decode(rest[len(OPEN) :].lstrip())
        except (ValueError, RecursionError):
            return None
        rest = rest[len(OPEN) :].lstrip()[end:].lstrip()
        is_call = isinstance(value, dict) and set(value) == {"name", "arguments"}
        if not (is_call and isinstance(value["name"], str) and isinstance(value["arguments"], dict)):
            return None
        if not rest.startswith(CLOSE):
            return None
        rest = rest[len(CLOSE) :].lstrip()
        calls.append((value["name"], value["arguments"]))
    return calls


class CallStream:
    """Splits an answer as it comes: text goes through until it may be the beginning of a call."""

    def __init__(self) -> None:
        self._pending = ""

    def push(self, text: str) -> str:
        """The text that is sure to stand before any call."""
        self._pending += text
        at = self._pending.find(OPEN)
        if at < 0:
            at = len(self._pending) - undecided(self._pending, [OPEN])
        at = len(self._pending[:at].rstrip())  # space before a call is no part of what is said
        shown, self._pending = self._pending[:at], self._pending[at:]
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left: text, or calls."""
        return split_calls(self._pending)
