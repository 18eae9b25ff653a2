"""Pydantic's findings as one message for people: the dotted key, what was given, what was expected, what to do."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from burnish.config.errors import UserError, nearest
from burnish.config.other_words import counterparts
from burnish.config.shape import Shape, keys_named, label, root_shape
from burnish.config.slots import Plugin, Record


def user_error(error: ValidationError, kind: type[Record], where: str) -> UserError:
    """All problems of one configuration in one error, a line each."""
    lines = dict.fromkeys(_line(kind, e) for e in error.errors(include_url=False))
    if len(lines) == 1:
        return UserError(f"{where}: {next(iter(lines))}")
    return UserError(f"{where}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))


def _line(kind: type[Record], error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        *above, key = error["loc"]
        path, shape, choice = _locate(kind, tuple(above))
        return _unknown_key(kind, path, shape, choice, str(key), error["input"])
    path, shape, _ = _locate(kind, error["loc"])
    if error["type"] == "value_error":  # a combination the schema refuses; its text names the keys itself
        text = error["msg"].removeprefix("Value error, ")
        return f"{path}: {text}" if path else text
    if error["type"] == "missing" and path.endswith(str(error["loc"][-1])):
        return f"{path}: missing; expected {shape.expected}"
    return f"{path}: {_mismatch(shape, error['input'])}"


def _locate(kind: type[Record], loc: tuple[int | str, ...]) -> tuple[str, Shape, Shape | None]:
    """The dotted key of a finding, its shape, and the slot it is a choice of.

    Pydantic puts the tag of a chosen union member, and the name of each tried member, among the keys; both are dropped.
    """
    shape, path = root_shape(kind), list[str]()
    choice: Shape | None = None
    for part in loc:
        if shape.form == "choice":
            choice = shape
            chosen = [
                r for r in shape.records if label(r) == part or (part == "plugin" and "options" in r.model_fields)
            ]
            shape = Shape("record", "", tuple(chosen))
            continue
        child = shape.child(part)
        if child is None or part == "[key]":
            break
        if shape.form == "list" and not isinstance(part, int):
            break
        shape = child
        path.append(str(part))
    return ".".join(path), shape, choice if shape.form == "record" and not shape.expected else None


def _unknown_key(kind: type[Record], path: str, shape: Shape, choice: Shape | None, key: str, given: Any) -> str:
    full = f"{path}.{key}" if path else key
    others = counterparts(kind, full, given)
    if choice is not None:
        option = _unknown_option(choice, shape.records[0], path.rpartition(".")[2], key)
        return "; ".join([f"{full}: {option}", *others])
    if others:
        return "; ".join([f"{full}: unknown key", *others])
    known = list(shape.records[0].model_fields)
    elsewhere = keys_named(kind, key)
    hint = nearest(key, known)
    if elsewhere:
        hint += f"; {key!r} is a key elsewhere: {', '.join(elsewhere[:3])}"
    return f"{full}: unknown key" + (hint or f" (keys here: {', '.join(known)})")


def _unknown_option(choice: Shape, record: type[Record], slot: str, key: str) -> str:
    options = [k for k in record.model_fields if k != "name"]
    owner = next((r for r in choice.records if key in r.model_fields), None)
    hint = f"; it belongs to {slot} {label(owner)}" if owner else nearest(key, options)
    name = "a plug-in" if issubclass(record, Plugin) else label(record)
    takes = f"takes {', '.join(options)}" if options else "takes none"
    return f"{name} has no option {key!r}{hint} ({takes})"


def _mismatch(shape: Shape, given: Any) -> str:
    if shape.short and isinstance(given, dict) and shape.form == "choice":
        given = given.get(shape.short)
    words = [label(r) for r in shape.records] if shape.form == "choice" else list(shape.words)
    hint = nearest(given, words) if isinstance(given, str) and words else ""
    if shape.is_text and isinstance(given, (bool, int, float)):
        hint = "; put it in quotes to make it text"
    return f"got {shown(given)}, expected {shape.expected}{hint}"


def shown(value: Any) -> str:
    """A given value as the user would have written it, cut short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
