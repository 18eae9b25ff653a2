"""The wire format of Protocol Buffers: fields of a message read and written one by one.

The stock client sends `forward_backward` requests and reads samples and training outputs in this format. A message is a sequence
of fields, each a varint tag (field number and wire type) and a value (https://protobuf.dev/programming-guides/encoding). The few
messages of the API need no generated code and no `protobuf` package; `requests.py` and `responses.py` have their field numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import TypeAlias

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types. Groups (3 and 4) are obsolete and refused."""
MAX_VARINT_BYTES = 10
Value: TypeAlias = int | memoryview
"""A varint or fixed number as its bits, or the bytes of a string, message or packed list."""


class MalformedMessage(ValueError):
    """Bytes that are no message."""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The unsigned number at an index, and the index after it."""
    number = shift = 0
    for index in range(at, min(at + MAX_VARINT_BYTES, len(data))):
        byte = data[index]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & (1 << 64) - 1, index + 1
        shift += 7
    raise MalformedMessage(f"a number at byte {at} does not end")


def read_fields(data: bytes | bytearray | memoryview) -> Iterator[tuple[int, Value]]:
    """Yield (field number, value) of every field of a message, in the order of the bytes."""
    view = memoryview(data)
    at = 0
    while at < len(view):
        tag, at = read_varint(view, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise MalformedMessage(f"field number 0 at byte {at}")
        if kind == VARINT:
            value, at = read_varint(view, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = read_varint(view, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise MalformedMessage(f"field {number} has the wire type {kind}, which is not known")
        if at + size > len(view):
            raise MalformedMessage(f"field {number} has {size} bytes, and {len(view) - at} are left")
        part = view[at : at + size]
        yield number, part if kind == BYTES else int.from_bytes(part, "little")
        at += size


def bytes_of(value: Value) -> memoryview:
    """The value of a field that holds bytes."""
    if isinstance(value, int):
        raise MalformedMessage("a field holds a number where bytes are expected")
    return value


def text_of(value: Value) -> str:
    """The value of a string field."""
    try:
        return str(bytes_of(value), "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"a text is not UTF-8: {error}") from error


def int_of(value: Value) -> int:
    """The value of a signed integer field (int32 or int64)."""
    if not isinstance(value, int):
        raise MalformedMessage("a field holds bytes where a number is expected")
    return value - (1 << 64) if value >= 1 << 63 else value


def double_of(value: Value) -> float:
    """The value of a field of type double."""
    if not isinstance(value, int):
        raise MalformedMessage("a field holds bytes where a number is expected")
    number: float = struct.unpack("<d", value.to_bytes(8, "little"))[0]
    return number


def ints_of(value: Value) -> list[int]:
    """The numbers of a repeated integer field: one, or a packed list."""
    if isinstance(value, int):
        return [int_of(value)]
    found, at = list[int](), 0
    while at < len(value):
        number, at = read_varint(value, at)
        found.append(int_of(number))
    return found


# --- writing -----------------------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """A number as a varint; a negative one in 64 bits."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def int_field(number: int, value: int) -> bytes:
    """An integer, enum or bool field."""
    return varint(number << 3 | VARINT) + varint(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """A field of bytes, a string or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def double_field(number: int, value: float) -> bytes:
    """A field of type double."""
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)


def ints_field(number: int, values: list[int]) -> bytes:
    """A packed list of integers; nothing for an empty one."""
    return bytes_field(number, b"".join(map(varint, values))) if values else b""


def map_field(number: int, entries: Mapping[str, bytes]) -> bytes:
    """A map with string keys; the values are encoded fields of number 2."""
    return b"".join(bytes_field(number, bytes_field(1, key) + value) for key, value in entries.items())
