"""What the readers of published data sets have in common: the example that they make of a record, and columns by their usual names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from burnish.data.files import Record
from burnish.data.row import Message


class UnusableRow(Exception):
    """A row that cannot be used for training or evaluation; the text is the reason."""


@dataclass(frozen=True)
class PublishedExample:
    """The question of a record, the messages that ask it, and the answer."""

    question: str
    messages: list[Message]
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    images: tuple[Any, ...] = ()
    """The images of the marks `<image>` in the messages, as the record has them."""


def user_messages(text: str) -> list[Message]:
    """A text as one user message."""
    return [{"role": "user", "content": text}]


def first_value(record: Record, *names: str) -> Any:
    """The first of these columns that has a value, or None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def question_of(record: Record) -> str:
    """The question of a record; some files store it as a conversation of one turn."""
    value = first_value(record, "question", "problem", "Problem", "Question", "query", "prompt", "text")
    if isinstance(value, list):
        turns = [turn.get("content", turn.get("value")) for turn in value if isinstance(turn, dict)]
        if len(turns) != 1:
            raise ValueError(f"expected one turn in the prompt, got {len(turns)}")
        value = turns[0]
    if value is not None and not isinstance(value, str):
        raise TypeError(f"the question should be text, got {type(value).__name__}")
    if not value or not value.strip():
        raise UnusableRow("no question")
    return str(value).strip()


def renamed_columns(record: Record, **columns: str) -> dict[str, Any]:
    """The given columns of a record that have a value, under our names (ours=theirs)."""
    return {ours: record[theirs] for ours, theirs in columns.items() if record.get(theirs) is not None}
