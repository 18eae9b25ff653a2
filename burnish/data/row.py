"""A row of data, and the chat messages in it.

A message is a dictionary with `role` and `content`. ShareGPT's `from` and `value` are converted. The content is a text, or a list of
blocks if it has images or videos (`data/images.py`). Everything else is an error that names its place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images import Message, content_text, image_input, video_input

TextOrMessages = str | list[Message]
MAX_ANSWER_CHARS = 20_000
ROLE = re.compile(r"[\w-]+")
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}
"""The role of each value of ShareGPT's `from`."""


@dataclass(frozen=True)
class Row:
    """A prompt with what is needed to score an answer to it.

    `id` is `<source name>/<index in the source>`. It is the same for every run over the same data, because sampling randomness is keyed by
    it. `extra` holds every other column.
    """

    id: str
    prompt: TextOrMessages
    data_source: str
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)
    completion: TextOrMessages | None = None
    messages: list[Message] | None = None
    nested: tuple[str, ...] = ()
    """Keys of `extra` that came from verl's `extra_info`; they are not columns of the row."""
    text: str | None = None
    """A text that no template changes. All of it is trained on, or only `completion` if the row has one."""
    style: str | None = None
    """verl's `reward_model.style`: what scores the row."""
    where: str = field(default="", compare=False)
    """The file and line that the row was read from."""

    @property
    def place(self) -> str:
        """Where to find the row, for errors."""
        return self.where or f"row {self.id!r} of {self.data_source!r}"


def answer_text(answer: Any) -> str:
    """The text by which files of completions name an answer: the answer, or of a long one its beginning and its checksum.

    The tests of one program can be megabytes, and every completion names its answer.
    """
    text = str(answer)
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    return f"{text[:MAX_ANSWER_CHARS]}... ({len(text):,} characters, sha256 {digest})"


def text_or_messages(value: Any, key: str, where: str) -> str | list[Message]:
    """Check a column that holds text or messages; anything else is an error that names its place."""
    if isinstance(value, str):
        if not value.strip():
            raise UserError(f"{where}: {key} is empty")
        return _checked_text(value, f"{where}: {key}")
    if isinstance(value, list):
        return checked_messages(value, key, where)
    raise UserError(f"{where}: {key} should be text or a list of messages, got {typed_repr(value)}")


def checked_messages(value: Any, key: str, where: str) -> list[Message]:
    """Check a column that holds messages, each with role and content, at least one of them not empty."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} should be a list of messages, got {typed_repr(value)}")
    messages = [_message(m, f"{where}: {key}[{i}]") for i, m in enumerate(value)]
    if not any(content_text(m["content"]).strip() or "tool_calls" in m for m in messages):
        raise UserError(f"{where}: {key} is empty: no message has any content")
    return messages


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise UserError(f"{where} should be an object with role and content, got {typed_repr(value)}")
    message = _normalize_message(value, where)
    if "tool_calls" in message:
        message.setdefault("content", "")
    if not isinstance(message.get("role"), str):
        raise UserError(f"{where}.role should be text, got {typed_repr(value.get('role'))}")
    if not isinstance(message.get("content"), str | list):
        raise UserError(
            f"{where}.content should be text, or blocks of text and images, got {typed_repr(value.get('content'))}"
        )
    _checked_text(content_text(message["content"]), f"{where}.content")
    if not ROLE.fullmatch(
        message["role"]
    ):  # a chat template writes the role next to its control tokens, so it must not contain any
        raise UserError(f"{where}.role should be a word such as user or assistant, got {typed_repr(message['role'])}")
    return message


def _checked_text(text: str, where: str) -> str:
    """Check that a text can be encoded: half of a surrogate pair (`\\ud800` in JSON) can be neither tokenised nor saved."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(
            f"{where} has half of a surrogate pair ({half!r}) at character {error.start + 1}; remove it"
        ) from error
    return text


def checked_content(content: Any, where: str, folder: Path | None = None) -> Any:
    """The content of a message: blocks of text are joined to a text, unless there are images or videos among them.

    Paths of images are tried from `folder` first.
    """
    if not isinstance(content, list):
        return content
    blocks = [checked_block(block, f"{where}[{index}]", folder) for index, block in enumerate(content)]
    if all(block["type"] == "text" for block in blocks):
        return "".join(block["text"] for block in blocks)
    return blocks


def checked_block(block: Any, where: str, folder: Path | None) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else type(block).__name__
    if kind == "text" and isinstance(block.get("text"), str):
        return {"type": "text", "text": block["text"]}
    if kind not in ("image", "image_url", "video", "video_url"):
        raise UserError(
            f"{where} is a block of type {kind!r}; burnish reads blocks of type text, image and video: leave such rows out of the file"
        )
    given = {key: value for key, value in block.items() if value is not None and key != "type"}
    if not given:
        raise UserError(f'{where} is a block of type {kind!r} without content: give "image", or a column of images')
    if kind.startswith("image"):
        return {"type": "image", "image": image_input(given, where, folder)}
    return {"type": "video", "video": video_input(given.get("video_url", given), where, folder)}


def _normalize_message(value: Mapping[str, Any], where: str) -> Message:
    """A message with `role` and `content`, converted from ShareGPT's `from` and `value` if needed. Null fields are dropped."""
    message = {key: field for key, field in value.items() if field is not None}
    if "from" in message and "role" not in message:
        role = message.pop("from")
        if role not in ROLES:
            raise UserError(
                f"{where}.from is {role!r}; expected one of {', '.join(ROLES)} (a tool call is an assistant message with tool_calls)"
            )
        message = {"role": ROLES[role], "content": message.pop("value", None), **message}
    if "content" in message:
        message["content"] = checked_content(message["content"], f"{where}.content")
    for key in ("weight", "train"):
        if key in message and not message[key]:
            raise UserError(
                f"{where}.{key} excludes this turn from training, but burnish trains on every assistant turn of a conversation: give a row "
                "with `prompt` (the turns before) and `completion` (the turn to train on)"
            )
    return message


def short_repr(value: Any) -> str:
    """A value for an error message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def typed_repr(value: Any) -> str:
    """The type of a value and the value, for an error message."""
    return f"{type(value).__name__} {short_repr(value)}"


LIKELY_ANSWER_COLUMNS = (
    "answer",
    "solution",
    "ground_truth",
    "final_answer",
    "expected_answer",
    "label",
    "target",
    "response",
    "output",
)
"""Columns that probably hold the expected answer if `answer_key` names no column of the row; the most likely first."""


VERL_MODEL_STYLE = "model"
"""verl's `reward_model.style` of rows that a reward model scores."""


def _is_given(value: Any) -> bool:
    """Whether a column has a value; parquet fills missing fields with nulls."""
    if isinstance(value, Mapping):
        return any(_is_given(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return any(_is_given(inner) for inner in value)
    return value is not None and value is not False and value != ""


def likely_answer(columns: Mapping[str, Any]) -> str | None:
    """The column of a row that probably holds its expected answer, or None."""
    return next((key for key in LIKELY_ANSWER_COLUMNS if _is_given(columns.get(key))), None)
