"""What each place in the configuration holds, read off the schema: the one walk that merging, errors and help share.

A `Shape` is a field's annotation in plain words. Nothing here knows a particular key: a record, a slot (a choice of
records told apart by `name`), a list, a mapping or a value are recognised by their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator
from pydantic_core import PydanticUndefined

from burnish.config.records import Plugin, Record, Slot

WORDS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false", Any: "any value"}
REQUIRED = PydanticUndefined
"""The default of a key that has none."""


@dataclass(frozen=True)
class Shape:
    """What a place holds: `expected` says it in words, `records` are the sections it may be."""

    form: Literal["value", "record", "choice", "list", "mapping"]
    expected: str
    records: tuple[type[Record], ...] = ()
    item: Shape | None = None
    """Of a list or a mapping: what its members are."""
    short: str | None = None
    """The key that a bare word stands for (`advantage: grpo` is `advantage: {name: grpo}`)."""
    words: tuple[str, ...] = ()
    """The words a value may be, for suggestions."""

    @property
    def is_text(self) -> bool:
        return self.form == "value" and self.expected.removesuffix(", or null").endswith("text")

    def child(self, part: str | int) -> Shape | None:
        """What is under this key or index; None where the schema has nothing there."""
        if self.item is not None:
            return self.item
        holder = next((r for r in self.records if part in r.model_fields), None)
        return None if holder is None else field_shape(holder, str(part))


@dataclass(frozen=True)
class Key:
    """One key of the schema, at one position."""

    path: str
    """Dotted; a list's index is `<i>`, a mapping's key `<name>`."""
    shape: Shape
    doc: str
    default: Any
    record: type[Record]
    """The section's type, whose field it is."""
    choice: str = ""
    """The slot choice this option belongs to, or empty outside the slots."""

    @property
    def is_leaf(self) -> bool:
        return self.shape.form == "value" or (self.shape.item is not None and not self.shape.item.records)


@cache
def root_shape(kind: type[Record]) -> Shape:
    """The whole configuration as one place."""
    return _record(kind, ())


@cache
def field_shape(kind: type[Record], name: str) -> Shape:
    """What one field of a record holds."""
    field = kind.model_fields[name]
    return shape_of(field.annotation, tuple(field.metadata))


def shape_of(annotation: Any, metadata: Sequence[Any] = ()) -> Shape:
    """A type annotation in plain words."""
    while get_origin(annotation) is Annotated:
        annotation, *extra = get_args(annotation)
        metadata = (*extra, *metadata)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return _union([a for a in args if a is not NoneType], NoneType in args, metadata)
    if origin is Literal:
        return Shape("value", f"one of {', '.join(map(str, args))}", words=tuple(map(str, args)))
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return _record(annotation, metadata)
    if origin is list:
        item = shape_of(args[0])
        return Shape("list", f"a list of {_members(item)}", item=item)
    if origin is dict:
        item = shape_of(args[1])
        return Shape("mapping", "a section of named entries" if item.records else "a section of options", item=item)
    if origin is tuple:
        return Shape("value", f"a list of {len(args)} numbers")
    return Shape("value", WORDS[annotation] + _bounds(metadata))


def _union(members: list[Any], optional: bool, metadata: Sequence[Any]) -> Shape:
    shapes = [shape_of(m, metadata) for m in members]
    if len(shapes) == 1:
        shape = shapes[0]
    elif all(s.form == "record" for s in shapes):
        records = tuple(s.records[0] for s in shapes)
        shape = Shape("choice", f"one of {', '.join(map(label, records))}", records, short="name")
    else:
        shape = Shape("value", " or ".join(s.expected for s in shapes))
    return replace(shape, expected=f"{shape.expected}, or null") if optional else shape


def _record(kind: type[Record], metadata: Sequence[Any]) -> Shape:
    keys = ", ".join(kind.model_fields)
    takes_a_word = any(isinstance(m, BeforeValidator) for m in metadata)
    short = "preset" if "preset" in kind.model_fields else "name" if takes_a_word else None
    words = field_shape(kind, short).words if short else ()
    return Shape("record", f"a section with the keys {keys}", (kind,), short=short, words=words)


def label(record: type[Record]) -> str:
    """How a slot's choice is named in a config."""
    return "path/to/file.py:function" if issubclass(record, Plugin) else str(record.model_fields["name"].default)


def _members(item: Shape) -> str:
    if item.form == "choice":
        return f"choices ({item.expected})"
    if item.words:
        return f"any of {', '.join(item.words)}"
    return "sections" if item.records else "texts" if item.is_text else "values"


def _bounds(metadata: Sequence[Any]) -> str:
    low = next((m for m in metadata if isinstance(m, (Ge, Gt))), None)
    high = next((m for m in metadata if isinstance(m, (Le, Lt))), None)
    parts = []
    if low is not None:
        parts.append(f"above {low.gt}" if isinstance(low, Gt) else f"of {low.ge} or more")
    if high is not None:
        parts.append(f"below {high.lt}" if isinstance(high, Lt) else f"at most {high.le}")
    return " " + ", ".join(parts) if parts else ""


def plain(record: Record) -> dict[str, Any]:
    """What a record states beyond its type's own defaults; a slot always states its name."""
    name = {"name": record.name} if isinstance(record, Slot) and hasattr(record, "name") else {}
    return name | record.model_dump(exclude_unset=True)


def default_of(kind: type[Record], name: str) -> Any:
    """A field's default value, or REQUIRED."""
    return kind.model_fields[name].get_default(call_default_factory=True)


def walk(kind: type[Record], prefix: str = "", instance: Record | None = None, choice: str = "") -> Iterator[Key]:
    """Every key in the order of the schema, but a section's own values before the sections in it.

    `instance` holds the defaults of a section at this position, where they differ from its type's.
    """
    keys = []
    for name, field in kind.model_fields.items():
        if choice and name == "name":
            continue  # the choice itself, which the slot's own key shows
        default = default_of(kind, name) if instance is None else getattr(instance, name)
        keys.append(Key(prefix + name, field_shape(kind, name), field.description or "", default, kind, choice))
    for key in sorted(keys, key=lambda k: not k.is_leaf):
        yield key
        yield from _inside(key.shape, key.path, key.default, choice)


def _inside(shape: Shape, path: str, default: Any, choice: str) -> Iterator[Key]:
    if shape.item is not None:
        yield from _inside(shape.item, path + (".<i>" if shape.form == "list" else ".<name>"), None, choice)
        return
    for record in shape.records:
        is_slot = issubclass(record, Slot)
        instance = default if isinstance(default, record) else None
        yield from walk(record, f"{path}.", instance, label(record) if is_slot and shape.form == "choice" else choice)


def keys_named(kind: type[Record], name: str) -> list[str]:
    """Where in the whole schema a key of this name exists."""
    return list(dict.fromkeys(k.path for k in walk(kind) if k.path.rpartition(".")[2] == name))
