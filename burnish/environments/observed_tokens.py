"""Which tokens of an observation are the body of what the environment said, and who said it (`core/observations.py`).

The bodies are marked in the messages before the chat template renders them, with noncharacters that no text has. The template is rendered with and
without marks. If both give the same text apart from the marks, these show where the bodies are. If not, nothing is marked: a template that counts or
cuts characters would put the marks in wrong places. Spaces at the edges of a body are not part of it, because templates strip them.

A token belongs to a body if all of its characters do. One that joins the end of a body with the template's text does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from burnish.config.errors import UserError
from burnish.core.observations import OBSERVED_ROLES, ROLE_NUMBERS
from burnish.data.row import Message
from burnish.environments.base import Body
from burnish.environments.chat_images import IMAGE, VIDEO
from burnish.models.tokenizer import Tokenizer

CLOSE = "\ufdd4"
OPEN = {role: chr(ord(CLOSE) + number) for role, number in ROLE_NUMBERS.items()}
"""Unicode noncharacters, reserved for use inside a program, beside those of `models/tokenizer.py`."""
MARKS = re.compile(f"[{CLOSE}{''.join(OPEN.values())}]")
TAGGED = re.compile(r"\s*<(\w[\w-]*)>(?P<body>.*)</\1>\s*|\s*```\w*\n(?P<output>.*)```\s*", re.DOTALL)
TEXT_PARTS = re.compile(f"[^{IMAGE}{VIDEO}]+")
"""The parts of a content between its images."""
TEXT_ROLE = "tool"
"""The role of text inside the assistant's turn, which is what a tool returned."""


class MarkedText(NamedTuple):
    """A text, and where the bodies in it are."""

    text: str
    spans: list[tuple[int, int, int]]
    """Start, end and number of the role of each body, in order."""


def default_bodies(messages: Sequence[Message]) -> list[Body]:
    """Return the bodies of messages whose environment does not name them: all of each content but its images."""
    return [
        Body(message["role"], *part.span(), index)
        for index, message in enumerate(messages)
        if isinstance(message.get("content"), str) and message["role"] in OBSERVED_ROLES
        for part in TEXT_PARTS.finditer(message["content"])
    ]


def text_bodies(text: str) -> list[Body]:
    """Return the body of a text inside the assistant's turn: what is between its tags or in its block, or all of it."""
    found = TAGGED.fullmatch(text)
    if found is None:
        return [Body(TEXT_ROLE, 0, len(text))]
    return [Body(TEXT_ROLE, *found.span("output" if found["body"] is None else "body"))]


def mark_bodies(messages: Sequence[Message], bodies: Sequence[Body] | None = None) -> list[Message]:
    """Return messages with marks around the bodies. Without `bodies` all of each content is one."""
    found = list(messages)
    given = default_bodies(messages) if bodies is None else [Body(*body) for body in bodies]
    for role, start, end, index in sorted(given, key=_last_first):
        content = found[index]["content"] if 0 <= index < len(found) else ""
        if not 0 <= start <= end <= len(content):
            raise UserError(
                f"Observation.bodies names the characters {start} to {end} of message {index}, which are not there; a body is "
                "(role, start, end, message)"
            )
        found[index] = {**found[index], "content": _marked(content, role, start, end)}
    return found


def _last_first(body: Body) -> tuple[int, int]:
    return body.message, -body.start


def _marked(text: str, role: str, start: int, end: int) -> str:
    """Return a text with marks around one body, without the spaces at its edges. Empty bodies and unknown roles get none."""
    body = text[start:end]
    inside = body.strip()
    if not inside or role not in OPEN:
        return text
    first = start + len(body) - len(body.lstrip())
    return f"{text[:first]}{OPEN[role]}{inside}{CLOSE}{text[first + len(inside) :]}"


def without_marks(text: str) -> MarkedText:
    """Return a text without its marks, and the bodies that they show."""
    pieces, spans, at, last = list[str](), list[tuple[int, int, int]](), 0, 0
    opened: tuple[int, int] | None = None
    for found in MARKS.finditer(text):
        pieces.append(text[last : found.start()])
        at, last = at + len(pieces[-1]), found.end()
        if found[0] != CLOSE:
            opened = at, ord(found[0]) - ord(CLOSE)
        elif opened is not None:
            spans.append((opened[0], at, opened[1]))
            opened = None
    return MarkedText("".join([*pieces, text[last:]]), spans)


def observed_tokens(tokens: Sequence[int], text: str, marked: str, tokenizer: Tokenizer) -> np.ndarray | None:
    """[n] int8: for each token of an observation 0, or the number of the role of whose message it is a part; None without any.

    `tokens` end with those of `text`; `marked` is the same text with marks. The tokens may begin otherwise: the end of an answer that the text repeats
    is left out, and a branch begins with the rest of the conversation.
    """
    plain, spans = without_marks(marked)
    if plain != text or not spans:
        return None
    ids, offsets = tokenizer.encode_with_offsets(text)
    found, start = np.zeros(len(tokens), dtype=np.int8), 0
    places = list[tuple[int, int]]()
    for begin, end in offsets:
        places.append((min(begin, start), end))  # a tokenizer may leave the space before a word out of its place
        start = end
    for back in range(1, min(len(ids), len(tokens)) + 1):
        if ids[-back] != tokens[-back]:
            break
        begin, end = places[-back]
        found[-back] = next((role for first, last, role in spans if first <= begin < end <= last), 0)
    return found if found.any() else None
