"""The line between the judge and the program: the judge asks, the program answers, and only plain values cross.

    {"ask": "get", "name": "f"}                              a name of the program
    {"ask": "call", "of": 3, "positional": [...], "named": {...}}   also attribute, iterate, next, length, item, truth, text

An answer is {"value": ...}, with the positional arguments where the call has changed them, or {"raised": class, "text": ...}.

An exception of the program's is raised in the test, where the test may expect it. StopIteration is the exception: raised by a function
under `map` or `filter` it would end the loop in silence, and `all(map(f, cases))` would be true. It arrives as a RuntimeError, as it does out
of a generator (PEP 479), unless the test asked an iterator for its next item.
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

# --- Values on their way between the program's process and the judge's, as JSON with tags.
#
# No pickle: whoever reads one can be made to call things. Here a decoded value is of a plain type, whatever its sender
# did, so that `==` in a test is Python's own and not a method that the program brought. A subclass travels as the plain type it
# extends; anything else stays where it is and is sent as a number that stands for it.

NAMED_TYPES = {
    t.__name__: t
    for t in (int, float, str, bool, bytes, list, tuple, dict, set, frozenset, complex, object, type, range, bytearray)
}
"""Types that travel by name."""


def encode_value(value: Any, stand_for: Callable[[Any], int]) -> Any:
    """A value in terms of JSON; `stand_for` gives the number for something that is not plain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode_value(item, stand_for) for item in value]
    if kind is type(...):
        return {"ellipsis": None}
    if isinstance(value, type):
        name: str = value.__name__
        return {"type": name} if NAMED_TYPES.get(name) is value else {"other": stand_for(value)}
    return _encode_tagged(value, stand_for)


def _encode_tagged(value: Any, stand_for: Callable[[Any], int]) -> Any:
    def items(values: Any) -> list[Any]:
        return [encode_value(item, stand_for) for item in values]

    def pairs(mapping: Any) -> list[Any]:
        return [[encode_value(key, stand_for), encode_value(item, stand_for)] for key, item in mapping.items()]

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
    return {"other": stand_for(value)}


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


def decode_value(data: Any, stood_for: Callable[[int], Any]) -> Any:
    """The value that was encoded; `stood_for` makes something of a number. Anything malformed raises."""
    if type(data) is list:
        return [decode_value(item, stood_for) for item in data]
    if type(data) is not dict:
        return data
    ((tag, inside),) = data.items()
    if tag == "other":
        return stood_for(int(inside))
    return DECODERS[tag](inside, lambda item: decode_value(item, stood_for))


def nearest_builtin_exception(error: BaseException) -> str:
    """The name of the nearest built-in class of an exception, so that a test can expect it."""
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            return kind.__name__
    return "Exception"


# --- burnish.sandbox.rpc

HEADER = struct.Struct("!I")


def frame(body: bytes) -> bytes:
    """A message as it goes over the socket."""
    return HEADER.pack(len(body)) + body


MAX_MESSAGE_BYTES = 1 << 25
MAX_TEXT_CHARS = 300
MUTABLE = (list, dict, set, bytearray)


class ProgramGone(BaseException):
    """The program ended, or speaks no sense, while a test was waiting for it: no test may catch that as its own error."""


def receive_exactly(channel: socket.socket, size: int) -> bytes:
    """This many bytes and not one more; EOFError if the other side ends first."""
    parts = bytearray()
    while len(parts) < size:
        data = channel.recv(min(size - len(parts), 1 << 20))
        if not data:
            raise EOFError("the other side has ended")
        parts += data
    return bytes(parts)


def receive_message(channel: socket.socket) -> Any:
    """The next message."""
    (size,) = HEADER.unpack(receive_exactly(channel, HEADER.size))
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(receive_exactly(channel, size))


def send_message(channel: socket.socket, message: Any) -> None:
    """Say something to the other side."""
    body = json.dumps(message).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a value of more than {MAX_MESSAGE_BYTES >> 20} MiB")
    channel.sendall(frame(body))


# --- the judge's side ------------------------------------------------------------------------------------------------


class ProgramClient:
    """The program, as the judge talks to it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self.gone: str | None = None
        """Why the program can answer no more; a test with a bare `except` may have caught the ProgramGone that said so."""
        self.raised: str | None = None
        """The last exception that ended a call."""

    def _lose(self, why: str) -> ProgramGone:
        self.gone = why
        return ProgramGone(why)

    def receive(self) -> Any:
        """What the program says next, as it stands."""
        try:
            return receive_message(self._channel)
        except (OSError, EOFError, ValueError, RecursionError, MemoryError) as error:
            raise self._lose(f"{type(error).__name__}: {error}") from None

    def ask(self, question: str, **details: Any) -> Any:
        """The value of the program's answer; the exception it had, as the nearest built-in one."""
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
                value = decode_value(answer["value"], self._thing)
                for before, after in zip(
                    positional, decode_value(answer.get("positional", []), self._thing), strict=False
                ):
                    _update_in_place(before, after)
        except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise self._lose(f"an answer that makes no sense ({type(error).__name__})") from None
        if raised is not None:
            if question == "call":
                self.raised = ": ".join(raised).rstrip(": ")
            raise _exception(*raised, is_end_of_loop_meant=question == "next")
        return value

    def _number(self, value: Any) -> int:
        if isinstance(value, RemoteObject):
            return value._number
        raise Untransferable(f"the tests give the program a {type(value).__name__}, which cannot cross to its process")

    def _thing(self, number: int) -> RemoteObject:
        return RemoteObject(self, number)


class Untransferable(BaseException):
    """A test passes something that only exists in the judge: a mistake in the data, not in the program."""


def _exception(name: str, text: str, is_end_of_loop_meant: bool) -> Exception:
    """The program's exception as a test may expect it; never one that would end the judge, or a loop of the test's."""
    kind = getattr(builtins, name, None)
    ends_loops = (StopIteration, StopAsyncIteration) if not is_end_of_loop_meant else ()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, ends_loops):
        try:
            return kind(text)
        except TypeError:  # the few that are made of more than a text
            return RuntimeError(f"{name}: {text}")
    return RuntimeError(f"{name}: {text}")


def _update_in_place(before: Any, after: Any) -> None:
    """Give an argument that the program has changed its new contents."""
    if type(before) is not type(after) or not isinstance(before, MUTABLE):
        return
    before.clear()
    if isinstance(before, dict | set):
        before.update(after)
    else:
        before.extend(after)


class RemoteObject:
    """Something of the program's that stays there: a function, an instance, a generator.

    It never equals a plain value: a class whose `__eq__` says yes to everything gains nothing.
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
    """Answer the judge about the program's names until it hangs up."""
    things: list[Any] = []

    def stand_for(value: Any) -> int:
        things.append(value)
        return len(things) - 1

    while True:
        try:
            question = receive_message(channel)
        except EOFError:
            return
        try:
            answer = _handle_question(question, names, things, stand_for)
        except BaseException as error:  # noqa: BLE001 - whatever a program raises is the answer
            answer = {"raised": nearest_builtin_exception(error), "text": _exception_text(error)}
        try:
            send_message(channel, answer)
        except ValueError as error:
            send_message(channel, {"raised": "ValueError", "text": str(error)})


def _exception_text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT_CHARS]
    except Exception:  # noqa: BLE001 - a program's exception may not even have a text
        return ""


def _handle_question(
    question: dict[str, Any], names: dict[str, Any], things: list[Any], stand_for: Any
) -> dict[str, Any]:
    kind = question["ask"]
    if kind == "get":
        if question["name"] not in names:
            raise NameError(f"name {question['name']!r} is not defined")
        return {"value": encode_value(names[question["name"]], stand_for)}
    thing = things[question["of"]]
    positional = decode_value(question.get("positional", []), things.__getitem__)
    changed: dict[str, Any] = {}
    match kind:
        case "call":
            named = decode_value(question["named"], things.__getitem__)
            value = thing(*positional, **named)
            if any(isinstance(argument, MUTABLE) for argument in positional):
                after = encode_value(positional, stand_for)
                changed = {"positional": after} if after != question["positional"] else {}
        case "attribute":
            value = getattr(thing, question["name"])
        case "iterate":
            value = iter(thing)
        case "next":
            value = next(thing)
        case "length":
            value = len(thing)
        case "item":
            value = thing[positional[0]]
        case "truth":
            value = bool(thing)
        case "text":
            value = str(thing)
        case "equal":
            value = bool(thing == positional[0])
        case _:
            raise ValueError(kind)
    return {"value": encode_value(value, stand_for)} | changed
