"""Messages between the grader and the program: the grader asks, the program answers, and only plain values are transferred.

    {"ask": "get", "name": "f"}                                     a name of the program
    {"ask": "call", "of": 3, "positional": [...], "named": {...}}   also attribute, iterate, next, length, item, truth, text, equal

An answer is {"value": ...}, with the positional arguments if the call has changed them, or {"raised": class, "text": ...}.

An exception of the program is raised in the test, which may expect it. StopIteration is different: raised by a function under `map` or
`filter`, it would silently end the loop, and `all(map(f, cases))` would be true. It becomes a RuntimeError, as it does out of a generator
(PEP 479), unless the test asked an iterator for its next item.

Values are JSON with tags, not pickle: unpickling can be made to call anything. A decoded value has a plain type, whatever its sender did,
so `==` in a test is Python's own and not a method of the program. A subclass is sent as the plain type it extends. Any other object stays
where it is and is sent as a number that stands for it.
"""

from __future__ import annotations

import builtins
import datetime
import json
import socket
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

HEADER = struct.Struct("!I")
MAX_MESSAGE_BYTES = 1 << 25
MAX_TEXT_CHARS = 300
MUTABLE = (list, dict, set, bytearray)
NAMED_TYPES = {
    t.__name__: t
    for t in (int, float, str, bool, bytes, list, tuple, dict, set, frozenset, complex, object, type, range, bytearray)
}
"""Types that are sent by name."""


# --- values ----------------------------------------------------------------------------------------------------------


def encode_value(value: Any, reference: Callable[[Any], int]) -> Any:
    """Encode a value as JSON. `reference` gives the number that stands for an object that is not plain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode_value(item, reference) for item in value]
    if kind is type(...):
        return {"ellipsis": None}
    if isinstance(value, type):
        name: str = value.__name__
        return {"type": name} if NAMED_TYPES.get(name) is value else {"other": reference(value)}
    return _encode_tagged(value, reference)


def _encode_tagged(value: Any, reference: Callable[[Any], int]) -> Any:
    def items(values: Any) -> list[Any]:
        return [encode_value(item, reference) for item in values]

    def pairs(mapping: Any) -> list[Any]:
        return [[encode_value(key, reference), encode_value(item, reference)] for key, item in mapping.items()]

    match value:
        case bool() | int():
            return int(value)
        case float():
            return float(value)
        case str():
            return str.__str__(value)
        case tuple():
            return {"tuple": items(value)}
        case list():
            return items(value)
        case set():
            return {"set": items(value)}
        case frozenset():
            return {"frozenset": items(value)}
        case Counter():
            return {"counter": pairs(value)}
        case OrderedDict():
            return {"ordered": pairs(value)}
        case dict():
            return {"dict": pairs(value)}
        case deque():
            return {"deque": [items(value), value.maxlen]}
        case bytes():
            return {"bytes": value.hex()}
        case bytearray():
            return {"bytearray": value.hex()}
        case complex():
            return {"complex": [value.real, value.imag]}
        case Decimal():
            return {"decimal": str(value)}
        case Fraction():
            return {"fraction": [value.numerator, value.denominator]}
        case range():
            return {"range": [value.start, value.stop, value.step]}
        case datetime.timedelta():
            return {"timedelta": [value.days, value.seconds, value.microseconds]}
        case datetime.datetime():
            return {"datetime": value.isoformat()}
        case datetime.date():
            return {"date": value.isoformat()}
        case datetime.time():
            return {"time": value.isoformat()}
    return {"other": reference(value)}


DECODERS: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    "ellipsis": lambda data, of: ...,
    "type": lambda data, of: NAMED_TYPES[data],
    "tuple": lambda data, of: tuple(of(item) for item in data),
    "set": lambda data, of: {of(item) for item in data},
    "frozenset": lambda data, of: frozenset(of(item) for item in data),
    "counter": lambda data, of: Counter({of(key): of(item) for key, item in data}),
    "ordered": lambda data, of: OrderedDict((of(key), of(item)) for key, item in data),
    "dict": lambda data, of: {of(key): of(item) for key, item in data},
    "deque": lambda data, of: deque((of(item) for item in data[0]), data[1]),
    "bytes": lambda data, of: bytes.fromhex(data),
    "bytearray": lambda data, of: bytearray.fromhex(data),
    "complex": lambda data, of: complex(*data),
    "decimal": lambda data, of: Decimal(data),
    "fraction": lambda data, of: Fraction(*data),
    "range": lambda data, of: range(*data),
    "timedelta": lambda data, of: datetime.timedelta(*data),
    "datetime": lambda data, of: datetime.datetime.fromisoformat(data),
    "date": lambda data, of: datetime.date.fromisoformat(data),
    "time": lambda data, of: datetime.time.fromisoformat(data),
}


def decode_value(data: Any, resolve: Callable[[int], Any]) -> Any:
    """Decode a value. `resolve` gives the object that a number stands for. Anything malformed raises."""
    if type(data) is list:
        return [decode_value(item, resolve) for item in data]
    if type(data) is not dict:
        return data
    ((tag, inside),) = data.items()
    if tag == "other":
        return resolve(int(inside))
    return DECODERS[tag](inside, lambda item: decode_value(item, resolve))


def nearest_builtin_exception(error: BaseException) -> str:
    """The name of the nearest built-in class of an exception, so that a test can expect it."""
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            return kind.__name__
    return "Exception"


# --- messages --------------------------------------------------------------------------------------------------------


def frame(body: bytes) -> bytes:
    """A message with its length prefix."""
    return HEADER.pack(len(body)) + body


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    """Receive exactly this many bytes; EOFError if the other side closes first."""
    parts = bytearray()
    while len(parts) < size:
        data = channel.recv(min(size - len(parts), 1 << 20))
        if not data:
            raise EOFError("the other side has closed the connection")
        parts += data
    return bytes(parts)


def receive_message(channel: socket.socket) -> Any:
    """Receive the next message."""
    (size,) = HEADER.unpack(receive_exactly(channel, HEADER.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(receive_exactly(channel, size))


def send_message(channel: socket.socket, message: Any) -> None:
    """Send a message."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES >> 20} MiB")
    channel.sendall(frame(body))


# --- the grader's side -----------------------------------------------------------------------------------------------


class ProgramGone(BaseException):
    """The program ended or sent nonsense while a test waited for it. A BaseException, so that no test catches it as its own error."""


class Untransferable(BaseException):
    """A test passes an object that only exists in the grader: an error in the data, not in the program."""


class ProgramClient:
    """The grader's connection to the program."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.gone: str | None = None
        """Why the program can no longer answer. A test with a bare `except` may have caught the ProgramGone that said so."""
        self.raised: str | None = None
        """The last exception that a call raised."""

    def _lose(self, why: str) -> ProgramGone:
        self.gone = why
        return ProgramGone(why)

    def receive(self) -> Any:
        """Receive the next message of the program."""
        try:
            return receive_message(self._channel)
        except (OSError, EOFError, ValueError, RecursionError, MemoryError) as error:
            raise self._lose(f"{type(error).__name__}: {error}") from None

    def ask(self, question: str, **details: Any) -> Any:
        """Ask the program; return the value of its answer, or raise its exception as the nearest built-in class."""
        positional = details.get("positional", [])
        for key in ("positional", "named"):
            if key in details:
                details[key] = encode_value(details[key], self._number)
        try:
            send_message(self._channel, {"ask": question} | details)
        except OSError as error:
            raise self._lose(str(error)) from None
        answer = self.receive()
        try:
            if "raised" in answer:
                raised = (str(answer["raised"]), str(answer["text"])[:MAX_TEXT_CHARS])
            else:
                raised = None
                value = decode_value(answer["value"], self._resolve)
                for before, after in zip(
                    positional, decode_value(answer.get("positional", []), self._resolve), strict=False
                ):
                    _update_in_place(before, after)
        except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise self._lose(f"malformed answer ({type(error).__name__})") from None
        if raised is not None:
            if question == "call":
                self.raised = ": ".join(raised).rstrip(": ")
            raise _exception(*raised, is_end_of_loop_meant=question == "next")
        return value

    def _number(self, value: Any) -> int:
        if isinstance(value, RemoteObject):
            return value._number
        raise Untransferable(
            f"the tests pass a {type(value).__name__} to the program, which cannot be sent to its process"
        )

    def _resolve(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)


def _exception(name: str, text: str, is_end_of_loop_meant: bool) -> Exception:
    """The program's exception as a test may expect it, but never one that would end the grader or a loop of the test."""
    kind = getattr(builtins, name, None)
    ends_loops = (StopIteration, StopAsyncIteration) if not is_end_of_loop_meant else ()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
        try:
            return kind(text)
        except TypeError:  # a few classes need more than a text
            return RuntimeError(f"{name}: {text}")
    return RuntimeError(f"{name}: {text}")


def _update_in_place(before: Any, after: Any) -> None:
    """Copy the new contents into an argument that the program has changed."""
    if type(before) is not type(after) or not isinstance(before, MUTABLE):
        return
    before.clear()
    if isinstance(before, dict | set):
        before.update(after)
    else:
        before.extend(after)


class RemoteObject:
    """An object that stays in the program's process: a function, an instance, a generator.

    It never equals a plain value, so a class whose `__eq__` always returns True gains nothing.
    """

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: ProgramClient, number: int) -> None:
        self._peer, self._number = peer, number

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._peer.ask("call", of=self._number, positional=list(positional), named=named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.ask("attribute", of=self._number, name=name)

    def __iter__(self) -> Iterator[Any]:
        iterator = self._peer.ask("iterate", of=self._number)
        while isinstance(iterator, RemoteObject):
            try:
                yield self._peer.ask("next", of=iterator._number)
            except StopIteration:
                return

    def __len__(self) -> int:
        return int(self._peer.ask("length", of=self._number))

    def __getitem__(self, key: Any) -> Any:
        return self._peer.ask("item", of=self._number, positional=[key])

    def __bool__(self) -> bool:
        return bool(self._peer.ask("truth", of=self._number))

    def __str__(self) -> str:
        return str(self._peer.ask("text", of=self._number))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteObject):
            return False
        return self._peer.ask("equal", of=self._number, positional=[other]) is True

    def __hash__(self) -> int:
        return hash(self._number)


# --- the program's side ----------------------------------------------------------------------------------------------


def serve_program(channel: socket.socket, names: dict[str, Any]) -> None:
    """Answer the grader's questions about the program's names until it closes the connection."""
    objects: list[Any] = []

    def reference(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    while True:
        try:
            question = receive_message(channel)
        except EOFError:
            return
        try:
            answer = _handle_question(question, names, objects, reference)
        except BaseException as error:  # noqa: BLE001 - what the program raises is the answer
            answer = {"raised": nearest_builtin_exception(error), "text": _exception_text(error)}
        try:
            send_message(channel, answer)
        except ValueError as error:
            send_message(channel, {"raised": "ValueError", "text": str(error)})


def _exception_text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT_CHARS]
    except Exception:  # noqa: BLE001 - `str` of a program's exception may itself raise
        return ""


def _handle_question(
    question: dict[str, Any], names: dict[str, Any], objects: list[Any], reference: Any
) -> dict[str, Any]:
    kind = question["ask"]
    if kind == "get":
        if question["name"] not in names:
            raise NameError(f"name {question['name']!r} is not defined")
        return {"value": encode_value(names[question["name"]], reference)}
    target = objects[question["of"]]
    positional = decode_value(question.get("positional", []), objects.__getitem__)
    changed: dict[str, Any] = {}
    match kind:
        case "call":
            named = decode_value(question["named"], objects.__getitem__)
            value = target(*positional, **named)
            if any(isinstance(argument, MUTABLE) for argument in positional):
                after = encode_value(positional, reference)
                changed = {"positional": after} if after != question["positional"] else {}
        case "attribute":
            value = getattr(target, question["name"])
        case "iterate":
            value = iter(target)
        case "next":
            value = next(target)
        case "length":
            value = len(target)
        case "item":
            value = target[positional[0]]
        case "truth":
            value = bool(target)
        case "text":
            value = str(target)
        case "equal":
            value = bool(target == positional[0])
        case _:
            raise ValueError(kind)
    return {"value": encode_value(value, reference)} | changed
