"""Columns of images and videos, put where their marks stand in the prompt.

verl, Easy-R1, ShareGPT and LLaMA-Factory write `<image>` and `<video>` into the text of a prompt, and the images into the columns
`images` and `videos`. TRL writes blocks `{"type": "image"}` without content, or nothing: then the images stand before the text of the
first user message. The marks of a row and its images must be equal in number. In a row without such a column `<image>` is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.images import (
    IMAGE_MARK,
    VIDEO_MARK,
    ImageInput,
    content_text,
    image_input,
    media_of,
    video_input,
)
from burnish.data.row import ROLES, checked_block, typed_repr

IMAGE_COLUMNS, VIDEO_COLUMNS = ("images", "image"), ("videos", "video")
MARK = re.compile(f"({IMAGE_MARK}|{VIDEO_MARK})")
MARK_KINDS = {IMAGE_MARK: "image", VIDEO_MARK: "video"}
READERS: dict[str, Callable[..., Any]] = {"image": image_input, "video": video_input}
MESSAGE_COLUMNS = ("prompt", "messages", "conversations", "context_messages", "completion", "chosen", "rejected")
"""Columns that may hold messages with blocks."""

Record = dict[str, Any]


def inline_media(record: Record, prompt_columns: tuple[str, ...], where: str, folder: Path | None) -> Record:
    """The record with its images and videos inside the messages of the prompt, the first of `prompt_columns` that it has.

    Relative paths are tried from `folder` first, the one of the data file.
    """
    columns = [key for key in (*IMAGE_COLUMNS, *VIDEO_COLUMNS) if key in record]
    found = {key: value for key, value in record.items() if key not in columns}
    for key in MESSAGE_COLUMNS:
        if isinstance(found.get(key), list):
            found[key] = _opened_messages(found[key], f"{where}: {key}", folder, bool(columns))
    if not columns:
        return found
    given = {
        "image": _column_items(record, IMAGE_COLUMNS, "image", where, folder),
        "video": _column_items(record, VIDEO_COLUMNS, "video", where, folder),
    }
    named = [key for key in dict.fromkeys(prompt_columns) if found.get(key) is not None]
    if any(given.values()) and (
        not named or ("prompt" in named and isinstance(found[named[-1]], list) and len(named) > 1)
    ):
        both = (
            f"the prompt may be {' or '.join(named)}: leave one of them"
            if named
            else "the row has no prompt to put it into"
        )
        raise UserError(f"{where}: column {columns[0]!r} has a value, but {both}")
    if not named:
        return found
    key = named[0]
    found[key] = _with_media(found[key], key, given, where)
    return found


def _opened_messages(messages: list[Any], where: str, folder: Path | None, has_columns: bool) -> list[Any]:
    """Messages with the images of their blocks opened; blocks without content wait for a column."""
    found = []
    for index, message in enumerate(messages):
        key = "value" if isinstance(message, dict) and "value" in message else "content"
        if isinstance(message, dict) and isinstance(message.get(key), list):
            place = f"{where}[{index}].{key}"
            parts = [
                block if has_columns and _is_empty(block) else checked_block(block, f"{place}[{i}]", folder)
                for i, block in enumerate(message[key])
            ]
            message = {**message, key: parts}
        found.append(message)
    return found


def _is_empty(block: Any) -> bool:
    """Whether a block is only the place of an image or a video."""
    if not isinstance(block, Mapping) or block.get("type") not in READERS:
        return False
    return all(value is None for key, value in block.items() if key != "type")


def _column_items(record: Record, columns: tuple[str, str], kind: str, where: str, folder: Path | None) -> list[Any]:
    named = [key for key in columns if record.get(key) not in (None, [], "")]
    if len(named) > 1:
        raise UserError(f"{where}: columns {named[0]!r} and {named[1]!r} both have a value; leave one of them")
    if not named:
        return []
    value, key = record[named[0]], named[0]
    items = value if isinstance(value, list | tuple) else [value]
    return [READERS[kind](item, f"{where}: {key}[{index}]", folder) for index, item in enumerate(items)]


def _with_media(prompt: Any, key: str, given: dict[str, list[Any]], where: str) -> Any:
    """The prompt as messages with the images and videos at their marks; a prompt without marks and media is unchanged."""
    if not isinstance(prompt, str | list):
        return prompt  # the reader of the row says what is wrong
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    marks = {kind: sum(1 for one in _marked_kinds(messages) if one == kind) for kind in READERS}
    if not any(marks.values()) and not any(given.values()):
        return prompt
    if not any(marks.values()):
        return _before_the_first_question(messages, given, key, where)
    for kind, column in (("image", "images"), ("video", "videos")):
        if marks[kind] != len(given[kind]):
            raise UserError(
                f"{where}: {key} has {marks[kind]} {kind} marks (<{kind}> or a block of type {kind}), and column {column!r} has "
                f"{len(given[kind])} {kind}s; they must be equal in number"
            )
    waiting = {kind: iter(items) for kind, items in given.items()}
    return [_filled(message, waiting) for message in messages]


def _marked_kinds(messages: list[Any]) -> Iterator[str]:
    """The kind of every mark in messages, in order. The assistant's text has none."""
    for message in messages:
        content = _content_of(message)
        if isinstance(content, str) and _role_of(message) != "assistant":
            yield from (MARK_KINDS[mark] for mark in MARK.findall(content))
        elif isinstance(content, list):
            yield from (block["type"] for block in content if _is_empty(block))


def _filled(message: Any, waiting: Mapping[str, Iterator[Any]]) -> Any:
    content = _content_of(message)
    if isinstance(content, str) and _role_of(message) != "assistant" and MARK.search(content):
        parts = [part for part in MARK.split(content) if part]
        blocks = [
            {"type": kind, kind: next(waiting[kind])}
            if (kind := MARK_KINDS.get(part))
            else {"type": "text", "text": part}
            for part in parts
        ]
    elif isinstance(content, list):
        blocks = [
            {"type": block["type"], block["type"]: next(waiting[block["type"]])} if _is_empty(block) else block
            for block in content
        ]
    else:
        return message
    return {**message, "value" if "value" in message else "content": blocks}


def _before_the_first_question(messages: list[Any], given: dict[str, list[Any]], key: str, where: str) -> list[Any]:
    """TRL's rows without marks: all images stand before the text of the first user message."""
    first = next((i for i, message in enumerate(messages) if _role_of(message) == "user"), None)
    content = None if first is None else _content_of(messages[first])
    if first is None or not isinstance(content, str | list):
        raise UserError(
            f"{where}: {key} has no message of the user to put the images before, got {typed_repr(messages)}"
        )
    media = [{"type": kind, kind: item} for kind in ("image", "video") for item in given[kind]]
    text = [{"type": "text", "text": content}] if isinstance(content, str) else content
    asked = {**messages[first], "value" if "value" in messages[first] else "content": [*media, *text]}
    return [*messages[:first], asked, *messages[first + 1 :]]


def _content_of(message: Any) -> Any:
    return message.get("value" if "value" in message else "content") if isinstance(message, Mapping) else None


def _role_of(message: Any) -> Any:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    return ROLES.get(role, role) if isinstance(role, str) else None


def with_media_columns(record: Mapping[str, Any], as_text: bool) -> Record:
    """The reverse of `inline_media`, for writing: marks in the text of the messages, and the column `images`.

    `as_text`: images are paths and data URLs, for JSON; else objects with `bytes` and `path`, for parquet.
    """
    found, images = dict(record), list[Any]()
    for key in MESSAGE_COLUMNS:
        messages = found.get(key)
        if not isinstance(messages, list) or not any(isinstance(_content_of(message), list) for message in messages):
            continue
        media = media_of([{"content": _content_of(message)} for message in messages if isinstance(message, Mapping)])
        if key in ("completion", "chosen", "rejected") or not all(isinstance(item, ImageInput) for item in media):
            raise UserError(f"column {key!r} has images or videos that cannot be written to a file of rows")
        images += [_written(item, as_text) for item in media if isinstance(item, ImageInput)]
        found[key] = [
            {**message, "value" if "value" in message else "content": content_text(_content_of(message))}
            for message in messages
        ]
    return found | ({"images": images} if images else {})


def _written(image: ImageInput, as_text: bool) -> Any:
    is_file = isinstance(image.content, Path)
    if as_text:
        return str(image.content) if is_file else image.data_url()
    return {"bytes": None if is_file else image.encoded(), "path": str(image.content) if is_file else None}
