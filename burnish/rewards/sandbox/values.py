"""Values on their way between the program's process and the judge's, as JSON with tags.

No pickle: whoever reads one can be made to call things. Here a decoded value is of a plain type, whatever its sender
did, so that `==` in a test is Python's own and not a method that the program brought. A subclass travels as the plain type it
extends; anything else stays where it is and is sent as a number that stands for it.
"""

from __future__ import annotations

import builtins
import datetime
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

TYPES = {
    t.__name__: t
    for t in (int, float, str, bool, bytes, list, tuple, dict, set, frozenset, complex, object, type, range, bytearray)
}
"""Types that travel by name."""


def encode(value: Any, stand_for: Callable[[Any], int]) -> Any:
    """A value in terms of JSON; `stand_for` gives the number for something that is not plain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, stand_for) for item in value]
    if kind is type(...):
        return {"ellipsis": None}
    if isinstance(value, type):
        name: str = value.__name__
        return {"type": name} if TYPES.get(name) is value else {"other": stand_for(value)}
    return _tagged(value, stand_for)


def _tagged(value: Any, stand_for: Callable[[Any], int]) -> Any:
    def items(values: Any) -> list[Any]:
        return [encode(item, stand_for) for item in values]

    def pairs(mapping: Any) -> list[Any]:
        return [[encode(key, stand_for), encode(item, stand_for)] for key, item in mapping.items()]

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
    "type": lambda data, of: TYPES[data],
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


def decode(data: Any, stood_for: Callable[[int], Any]) -> Any:
    """The value that was encoded; `stood_for` makes something of a number. Anything malformed raises."""
    if type(data) is list:
        return [decode(item, stood_for) for item in data]
    if type(data) is not dict:
        return data
    ((tag, inside),) = data.items()
    if tag == "other":
        return stood_for(int(inside))
    return DECODERS[tag](inside, lambda item: decode(item, stood_for))


def builtin_exception(error: BaseException) -> str:
    """The name of the nearest built-in class of an exception, so that a test can expect it."""
    for kind in type(error).__mro__:
        if getattr(builtins, kind.__name__, None) is kind:
            return kind.__name__
    return "Exception"
