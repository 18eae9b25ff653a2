"""Pydantic's validation errors as one message: the dotted key, what was given, what was expected, and the nearest valid name."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from burnish.config.errors import UserError, did_you_mean
from burnish.config.foreign_keys import counterparts
from burnish.config.records import Plugin, Record, SchemaNode, choice_name, find_keys, root_node


def to_user_error(error: ValidationError, config_type: type[Record], where: str) -> UserError:
    """One error with all problems of a configuration, one line each."""
    lines = dict.fromkeys(_describe_error(config_type, e) for e in error.errors(include_url=False))
    if len(lines) == 1:
        return UserError(f"{where}: {next(iter(lines))}")
    return UserError(f"{where}: {len(lines)} problems\n" + "\n".join(f"  {line}" for line in lines))


def _describe_error(config_type: type[Record], error: ErrorDetails) -> str:
    if error["type"] == "extra_forbidden":
        *above, key = error["loc"]
        path, node, choice = _locate(config_type, tuple(above))
        return _unknown_key(config_type, path, node, choice, str(key), error["input"])
    path, node, _ = _locate(config_type, error["loc"])
    if error["type"] == "value_error":  # raised by our validators, whose messages name the keys
        text = error["msg"].removeprefix("Value error, ")
        return f"{path}: {text}" if path else text
    if error["type"] == "missing" and path.endswith(str(error["loc"][-1])):
        return f"{path}: missing; expected {node.expected}"
    return f"{path}: {_mismatch(node, error['input'])}"


def _locate(config_type: type[Record], loc: tuple[int | str, ...]) -> tuple[str, SchemaNode, SchemaNode | None]:
    """The dotted key of a pydantic error, its node, and the node of the slot whose choice it belongs to.

    Pydantic adds the tag of the chosen union member and the names of the tried members to the location. Both are dropped.
    """
    node, path = root_node(config_type), list[str]()
    choice: SchemaNode | None = None
    for part in loc:
        if node.form == "choice":
            choice = node
            chosen = [
                r for r in node.records if choice_name(r) == part or (part == "plugin" and "options" in r.model_fields)
            ]
            node = SchemaNode("record", "", tuple(chosen))
            continue
        child = node.child(part)
        if child is None or part == "[key]":
            break
        if node.form == "list" and not isinstance(part, int):
            break
        node = child
        path.append(str(part))
    return ".".join(path), node, choice if node.form == "record" and not node.expected else None


def _unknown_key(
    config_type: type[Record], path: str, node: SchemaNode, choice: SchemaNode | None, key: str, given: Any
) -> str:
    full = f"{path}.{key}" if path else key
    suggestions = counterparts(config_type, full, given)
    if choice is not None:
        option = _unknown_option(choice, node.records[0], path.rpartition(".")[2], key)
        return "; ".join([f"{full}: {option}", *suggestions])
    if suggestions:
        return "; ".join([f"{full}: unknown key", *suggestions])
    known = list(node.records[0].model_fields)
    elsewhere = find_keys(config_type, key)
    hint = did_you_mean(key, known)
    if elsewhere:
        hint += f"; {key!r} is a key elsewhere: {', '.join(elsewhere[:3])}"
    return f"{full}: unknown key" + (hint or f" (keys here: {', '.join(known)})")


def _unknown_option(choice: SchemaNode, record: type[Record], slot: str, key: str) -> str:
    options = [k for k in record.model_fields if k != "name"]
    owner = next((r for r in choice.records if key in r.model_fields), None)
    hint = f"; it belongs to {slot} {choice_name(owner)}" if owner else did_you_mean(key, options)
    name = "a plug-in" if issubclass(record, Plugin) else choice_name(record)
    takes = f"takes {', '.join(options)}" if options else "takes none"
    return f"{name} has no option {key!r}{hint} ({takes})"


def _mismatch(node: SchemaNode, given: Any) -> str:
    if node.short and isinstance(given, dict) and node.form == "choice":
        given = given.get(node.short)
    allowed = [choice_name(r) for r in node.records] if node.form == "choice" else list(node.words)
    hint = did_you_mean(given, allowed) if isinstance(given, str) and allowed else ""
    if node.is_text and isinstance(given, (bool, int, float)):
        hint = "; put it in quotes to make it text"
    return f"got {format_value(given)}, expected {node.expected}{hint}"


def format_value(value: Any) -> str:
    """A value as it is written in YAML, truncated."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
