"""Shapes of messages and conversations: what a chat template can tell apart besides the wording of a message.

A template decides what it writes from the roles, from whether an answer has reasoning or tool calls, and from a few texts that it searches for
(`</think>`). The shape of a message holds these and nothing else. The shape of a conversation holds the distinct rounds of its messages, so a
dialogue of 128 turns has the shape of a short one. `stand_ins` writes a short conversation of a given shape; rendering it tells what the
template does with any conversation of that shape, whatever its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from burnish.data.row import Message

FILLER, SYSTEM_WORD = "StandInForText", "StandInForSystem"
"""Words of the messages of a history, and of a system message at its start. They are found again where a template repeats them."""
CALL_ID = "call00000"
"""Ids of calls have nine letters and digits, the only form that Mistral's templates accept."""


class Shape(NamedTuple):
    """What a template can tell about one message."""

    role: str
    is_empty: bool = False
    """Whether the content is empty."""
    start: str = ""
    """The searched text that the content begins with."""
    inside: tuple[str, ...] = ()
    """All searched texts in the content."""
    end: str = ""
    reasoning: str = ""
    """`some`, `empty`, or nothing if the message has no reasoning."""
    num_calls: int = 0
    """Tool calls, at most 2."""


USER, ANSWER, TOOL, SYSTEM = Shape("user"), Shape("assistant"), Shape("tool"), Shape("system")


class Shaper:
    """Finds the shapes of messages for one template."""

    def __init__(self, searched: Iterable[str]) -> None:
        self._searched = tuple(searched)
        self._pattern = re.compile("|".join(map(re.escape, self._searched)) or r"(?!)")

    def shape(self, message: Mapping[str, Any]) -> Shape:
        """Return the shape of a message."""
        role, content = message["role"], message.get("content") or ""
        marks: tuple[str, tuple[str, ...], str] = ("", (), "")
        if self._pattern.search(content):
            inside = tuple(text for text in self._searched if text in content)
            start = next((text for text in inside if content.startswith(text)), "")
            marks = (start, inside, next((text for text in inside if content.endswith(text)), ""))
        if role != "assistant":
            return Shape(role, not content, *marks)
        reasoning = message.get("reasoning_content")
        kind = "" if reasoning is None else "some" if reasoning else "empty"
        return Shape(role, not content, *marks, kind, min(len(message.get("tool_calls") or ()), 2))


def compressed(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Return a short sequence of shapes with the same distinct rounds and steps, each at its last place.

    A round begins with a user message, a step with an answer. Nothing a template does is known to depend on how often they repeat.
    """
    rounds = _split(shapes, "user")
    return tuple(shape for part in _distinct(tuple(_compressed_round(part)) for part in rounds) for shape in part)


def _compressed_round(shapes: Sequence[Shape]) -> list[Shape]:
    return [shape for step in _distinct(map(tuple, _split(shapes, "assistant"))) for shape in step]


def _split(shapes: Sequence[Shape], role: str) -> list[list[Shape]]:
    """Split before each message of a role. The first part may lack one."""
    parts: list[list[Shape]] = []
    for shape in shapes:
        if not parts or shape.role == role:
            parts.append([])
        parts[-1].append(shape)
    return parts


def _distinct(parts: Iterable[tuple[Shape, ...]]) -> list[tuple[Shape, ...]]:
    """Return the distinct parts in the order of their last occurrences, but the first part stays the first."""
    given = list(parts)
    return given[:1] + list(dict.fromkeys(reversed(given[1:])))[::-1]


def call_id(index: int) -> str:
    """Return the id of the index-th call of a conversation whose text has none."""
    return f"call{index % 100_000:05d}"


def tool_call(name: str, arguments: Any, identity: str = CALL_ID) -> dict[str, Any]:
    """Return a call as templates read it."""
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def stand_in(shape: Shape, text: str = "text", reasoning: str = "thought", argument: str = "value") -> Message:
    """Return a message of a shape. `text` is the last word of the content of an answer."""
    content = text
    if shape.is_empty:
        content = ""
    elif shape.inside and shape.role == "assistant":
        content = f"{reasoning}{''.join(shape.inside)}{text}"
    elif shape.inside:
        content = f"{shape.start}x{''.join(shape.inside)}{text}{shape.end}"
    message: Message = {"role": shape.role, "content": content}
    if shape.reasoning:
        message["reasoning_content"] = reasoning if shape.reasoning == "some" else ""
    if shape.num_calls:
        message["tool_calls"] = [tool_call("name", {"value": argument}, call_id(i)) for i in range(shape.num_calls)]
    if shape.role == "tool":
        message |= {"tool_call_id": CALL_ID, "name": "name"}
    return message


def stand_ins(shapes: Iterable[Shape]) -> list[Message]:
    """Return a conversation of these shapes."""
    # The words differ, because Mistral's templates compare whole messages to find the last one.
    return [
        stand_in(shape, SYSTEM_WORD if index == 0 and shape.role == "system" else f"{FILLER}{index}")
        for index, shape in enumerate(shapes)
    ]
