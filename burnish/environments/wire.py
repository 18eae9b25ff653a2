"""Messages between the runner and the processes that host environments and tools: JSON with a length prefix.

Values are plain data, images (`image_values.py`) and the records of `base.py` and `tools/base.py`. Anything else that an object returns is refused with a text that
names the method, the place inside the value, and the type. JSON is used because nothing that user code returns may run code in the runner.

    {"id": 7, "do": "call", "object": 3, "method": "step", "arguments": [...], "deadline_s": 30.0}      a request
    {"id": 7, "value": ...}   {"id": 7, "failed": "raised", "message": ..., "traceback": ...}           its reply
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any, Literal

from burnish.environments.base import AgentTask, Answer, End, Episode, Event, Observation
from burnish.environments.image_values import (
    IMAGE_TYPES,
    image_from_json,
    image_to_json,
    is_image,
    video_from_json,
    video_to_json,
)
from burnish.environments.tools.base import ToolResult

MAX_REPLY_BYTES = 16 << 20
MAX_DEPTH = 100
HEADER = struct.Struct("!I")
MARK = struct.Struct("=q")
"""The request that a worker's event loop is running, in memory that it shares with the runner."""
NO_REQUEST = -1
RECORD = "__record__"
"""The key with the name of a record. A dictionary that has this key itself is sent as the record `dict`."""
IMAGE, VIDEO = "image", "video"
"""The names of images and videos as records."""
_MEDIA = {"ImageInput", "VideoInput"}
"""Names of the classes of `data/images.py`, which is not loaded without images."""
RECORDS: dict[str, type[Any]] = {
    r.__name__: r for r in (Episode, AgentTask, Answer, Observation, End, Event, ToolResult)
}
_FIELDS = {record: tuple(f.name for f in fields(record)) for record in RECORDS.values()}
_TUPLE_FIELDS = {"messages", "tools", "stop", "events", "bodies", "images"}
"""Fields of records that are tuples; JSON has lists."""

_RETURNED = (Observation, End, Event, ToolResult)
"""Records that user code makes. Their fields are checked, because a wrong one would fail in the runner, far from its cause."""


_NEVER_NONE = {(ToolResult, "text"), (Observation, "reward")}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_number(item) for item in value.values())


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in value
    )


def _are(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _are_bodies(value: Any) -> bool:
    return _are(list)(value) and all(
        len(body) == 4 and isinstance(body[0], str) and all(isinstance(number, int) for number in body[1:])
        for body in value
    )


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


FIELD_CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "messages": ("a tuple of messages with a role each, or None", _or_none(_are_messages)),
    "text": ("a text", _or_none(_is_text)),
    "reward": ("a number", _or_none(_is_number)),
    "rewards": ("a dictionary of numbers, or None", _or_none(_are_numbers)),
    "answer": ("a text or None", _or_none(_is_text)),
    "call_rewards": ("a dictionary of numbers, or None", _or_none(_are_numbers)),
    "bodies": ("a tuple of `Body`, or None", _or_none(_are_bodies)),
    "metrics": ("a dictionary of numbers", _are_numbers),
    "state": ("a text or None", _or_none(_is_text)),
    "role": ("a text or None", _or_none(_is_text)),
    "tools": ("a tuple of JSON schemas, or None", _or_none(_are(dict))),
    "stop": ("a tuple of texts, or None", _or_none(_are(str))),
    "success": ("a boolean or None", _or_none(lambda value: isinstance(value, bool))),
    "successes": (
        "a dictionary of booleans, or None",
        _or_none(lambda value: isinstance(value, dict) and all(isinstance(v, bool) for v in value.values())),
    ),
    "record": ("a dictionary or None", _or_none(lambda value: isinstance(value, dict))),
    "new_conversation": ("a boolean", lambda value: isinstance(value, bool)),
    "events": ("a tuple of `Event`", _are(dict)),
    "images": ("a tuple of images", lambda value: _are(dict)(value) and all(one.get(RECORD) == IMAGE for one in value)),
    "kind": ("a text", _is_text),
    "what": ("a text", _is_text),
    "message": ("a text", _is_text),
    "traceback": ("a text", _is_text),
}
"""For each field of a record that user code makes: what it must be in words, and the check of its encoded value."""

FailureKind = Literal["raised", "timed_out", "died", "bad_reply"]


class CallFailed(Exception):
    """A call of an object failed for a reason that the model did not cause.

    - `raised`: the method raised; `traceback` shows where.
    - `timed_out`: the method did not return before its deadline.
    - `died`: the worker process ended during the call, perhaps because of another object in it.
    - `bad_reply`: the method returned something that is neither plain data nor a record, or is too large.
    """

    def __init__(self, kind: FailureKind, message: str, traceback: str = "", has_neighbours: bool = False) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind: FailureKind = kind
        self.message = message
        self.traceback = traceback
        self.has_neighbours = has_neighbours
        """Only for `died`: whether other objects were in the process, so that one of them may be the cause."""


class UnsendableValue(ValueError):
    """A value that cannot be sent. The text says which part of it, and why."""


# --- values ----------------------------------------------------------------------------------------------------------


class _Encoder:
    """Turns one value into JSON's types. It counts characters, so that a huge value is refused before a text is made of it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size = 0

    def encode(self, value: Any, place: str, depth: int = 0) -> Any:
        self.size += 2
        if value is None or value is True or value is False:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, int):
            return self.integer(value, place)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise UnsendableValue(f"{place} is {value}; a number must be finite")
            return value
        if depth > MAX_DEPTH:
            raise UnsendableValue(f"{place} is nested more than {MAX_DEPTH} levels deep, or contains itself")
        if isinstance(value, list | tuple):
            return [self.encode(item, f"{place}[{k}]", depth + 1) for k, item in enumerate(value)]
        if isinstance(value, Mapping):
            return self.mapping(value, place, depth)
        for kind in _FIELDS:
            if isinstance(value, kind):
                return self.record(value, kind, place, depth)
        if is_image(value) or type(value).__name__ in _MEDIA:
            return self.media(value, place)
        if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
            return self.encode(value.item(), place, depth + 1)
        raise UnsendableValue(f"{place} is of type {_type_name(value)}; {_advice(value)}")

    def record(self, value: Any, kind: type[Any], place: str, depth: int) -> dict[str, Any]:
        encoded: dict[str, Any] = {RECORD: kind.__name__}
        for name in _FIELDS[kind]:
            encoded[name] = item = self.encode(getattr(value, name), f"{place}.{name}", depth + 1)
            if kind in _RETURNED:
                expected, is_right = FIELD_CHECKS[name]
                if not is_right(item) or (item is None and (kind, name) in _NEVER_NONE):
                    raise UnsendableValue(
                        f"{place}.{name} is of type {_type_name(getattr(value, name))}; it must be {expected}"
                    )
        return encoded

    def media(self, value: Any, place: str) -> dict[str, Any]:
        """An image or a video as the record `image` or `video`."""
        is_video = type(value).__name__ == "VideoInput"
        encoded = video_to_json(value, place) if is_video else image_to_json(value, place)
        for image in encoded["frames"] if is_video else [encoded]:
            self.add(len(image.get("data", "")))
        return {RECORD: VIDEO if is_video else IMAGE, **encoded}

    def add(self, size: int) -> None:
        self.size += size
        if self.size > self.max_bytes:
            raise UnsendableValue(f"the value has more than {self.max_bytes / 2**20:g} MiB, the limit of one reply")

    def text(self, value: str) -> str:
        """A text that is valid Unicode: half characters of UTF-16 become question marks, because no tokenizer takes them."""
        self.add(len(value))
        if not value.isascii():
            encoded = value.encode("utf-8", "replace")
            self.add(len(encoded) - len(value))
            return encoded.decode()
        return str(value)

    def integer(self, value: int, place: str) -> int:
        if value.bit_length() > 4096:
            raise UnsendableValue(f"{place} is an integer of {value.bit_length()} bits; the limit is 4096")
        return int(value)

    def mapping(self, value: Mapping[Any, Any], place: str, depth: int) -> dict[str, Any]:
        found = {}
        holds_image = value.get("type") in IMAGE_TYPES
        for key, item in value.items():
            if not isinstance(key, str):
                raise UnsendableValue(f"{place} has the key {key!r} of type {_type_name(key)}; keys must be texts")
            if holds_image and isinstance(item, bytes | bytearray | PurePath):  # the content of a file, or its place
                found[key] = self.media(item, f"{place}[{key!r}]")
            else:
                found[self.text(key)] = self.encode(item, f"{place}[{key!r}]", depth + 1)
        return {RECORD: "dict", "items": found} if RECORD in found else found


def _type_name(value: Any) -> str:
    kind = type(value)
    return str(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def _advice(value: Any) -> str:
    if isinstance(value, bytes | bytearray):
        return "decode bytes to a text first"
    if isinstance(value, set | frozenset):
        return "make a sorted list of it"
    if hasattr(value, "tolist"):
        return "make a list of it with .tolist()"
    return f"only texts, numbers, booleans, None, lists, dictionaries, images and {', '.join(RECORDS)} can be sent"


def encode_value(value: Any, place: str = "the value", max_bytes: int = MAX_REPLY_BYTES) -> Any:
    """Turn a value into JSON's types; `UnsendableValue` if it is neither plain data nor a record, or too large."""
    return _Encoder(max_bytes).encode(value, place)


def decode_value(value: Any) -> Any:
    """Undo `encode_value`. Tuples in plain data have become lists."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get(RECORD)
    if name is None:
        return {key: decode_value(item) for key, item in value.items()}
    if name == "dict":
        return {key: decode_value(item) for key, item in value["items"].items()}
    if name in (IMAGE, VIDEO):
        return (image_from_json if name == IMAGE else video_from_json)(value)
    made = {key: decode_value(item) for key, item in value.items() if key != RECORD}
    for key in _TUPLE_FIELDS & made.keys():
        if isinstance(made[key], list):
            made[key] = tuple(made[key])
    return RECORDS[name](**made)


# --- messages --------------------------------------------------------------------------------------------------------


def frame(message: Mapping[str, Any]) -> bytes:
    """A message with its length prefix. Its values are encoded already."""
    body = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return HEADER.pack(len(body)) + body


class MessageReader:
    """Splits a stream of bytes into messages, and hands each to a function."""

    def __init__(self, handle: Callable[[dict[str, Any]], None], max_bytes: int | None = None) -> None:
        self._buffer = bytearray()
        self._handle = handle
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> None:
        """Take bytes that have arrived; ValueError for a message that is too long or not JSON."""
        self._buffer += data
        at = 0
        while len(self._buffer) - at >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer, at)
            if self._max_bytes is not None and size > self._max_bytes:
                raise ValueError(f"a message of {size} bytes")
            if len(self._buffer) - at - HEADER.size < size:
                break
            at += HEADER.size
            body = bytes(self._buffer[at : at + size])
            at += size
            message = json.loads(body)
            if not isinstance(message, dict):
                raise ValueError("a message that is no JSON object")
            self._handle(message)
        del self._buffer[:at]
