"""Configuration as plain trees: laying one over another, setting one dotted key, laying defaults under.

Merging is deep, with one exception: a slot whose `name` changes (or an algorithm whose `preset` changes) drops the
options of the old choice, since they mean nothing to the new one. Lists are replaced whole. No tree is changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from burnish.config.algorithm import Algorithm
from burnish.config.errors import UserError
from burnish.config.presets import preset
from burnish.config.shape import Shape, default_of, field_shape, plain, root_shape
from burnish.config.slots import Record, Slot

Tree = Any
"""Dictionaries, lists and scalars, as YAML gives them."""


def merge(shape: Shape | None, base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`, both of them values of the place `shape` describes."""
    base, over = _long(shape, base), _long(shape, over)
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    if shape is not None and shape.short:
        old, new = base.get(shape.short), over.get(shape.short)
        base = base if old is None or new is None or old == new else _kept(shape, base)
    result = dict(base)
    for key, value in over.items():
        child = shape.child(key) if shape is not None else None
        result[key] = merge(child, base[key], value) if key in base else value
    return result


def set_key(shape: Shape | None, tree: Tree, parts: Sequence[str], value: Tree, done: str = "") -> Tree:
    """The tree with `value` merged in at a dotted key; `done` is the part of the key already walked, for errors."""
    if not parts:
        return merge(shape, tree, value)
    part, rest = parts[0], parts[1:]
    here = f"{done}.{part}" if done else part
    if isinstance(tree, list) or (shape is not None and shape.form == "list" and part.isdecimal()):
        return _set_item(shape, tree, parts, value, done)
    if shape is not None and shape.form == "list":
        shape = shape.item  # one section standing for a list of one
    tree = {} if tree is None else _long(shape, tree)
    if not isinstance(tree, dict):
        raise UserError(f"{here} cannot be set: {done} is {tree!r}, not a section")
    if shape is not None and part == shape.short and not rest:
        return merge(shape, tree, {part: value})
    child = shape.child(part) if shape is not None else None
    return {**tree, part: set_key(child, tree.get(part), rest, value, here)}


def _set_item(shape: Shape | None, tree: Tree, parts: Sequence[str], value: Tree, done: str) -> list[Any]:
    part, rest = parts[0], parts[1:]
    items = list(tree) if isinstance(tree, list) else [] if tree is None else [tree]
    if not part.isdecimal():
        key = ".".join([done, "0", *parts])
        raise UserError(f"{done} is a list, so {done}.{part} needs an index: the first item's is {key}")
    index = int(part)
    if index > len(items):
        raise UserError(f"{done}.{part}: {done} has {len(items)} items, so the next index is {len(items)}")
    if index == len(items):
        items.append(None)
    item = shape.item if shape is not None else None
    items[index] = set_key(item, items[index], rest, value, f"{done}.{part}")
    return items


def complete(kind: type[Record], tree: Tree) -> Tree:
    """The tree with the defaults that belong to a *position* laid under it, and the algorithm's preset.

    Needed because a section that is given in part must keep the rest of its own default: `sft.optimizer.eps=1e-9` keeps
    the learning rate of `sft`, not that of the optimizer's type.
    """
    if not isinstance(tree, dict):
        return tree
    if issubclass(kind, Algorithm):
        tree = _on_preset(tree)
    result = dict(tree)
    for name, shape, default in _fields(kind):
        if isinstance(default, Record):
            result[name] = merge(shape, plain(default), result.get(name, {}))
        elif isinstance(default, (list, dict)) and default and name not in result:
            result[name] = _plain_members(default)
        if name in result:
            result[name] = _complete_inside(shape, result[name])
    return result


@cache
def _fields(kind: type[Record]) -> tuple[tuple[str, Shape, Any], ...]:
    """A record's keys, what each holds and its default, which is only read: found once, a configuration has hundreds."""
    return tuple((name, field_shape(kind, name), default_of(kind, name)) for name in kind.model_fields)


def _complete_inside(shape: Shape, value: Tree) -> Tree:
    value = _long(shape, value)
    if shape.form == "record":
        return complete(shape.records[0], value)
    if shape.item is not None and shape.item.records:
        if isinstance(value, list):
            return [_complete_inside(shape.item, v) for v in value]
        if isinstance(value, dict) and shape.form == "mapping":
            return {k: _complete_inside(shape.item, v) for k, v in value.items()}
    return value


def _on_preset(tree: dict[str, Any]) -> dict[str, Any]:
    name = tree.get("preset", Algorithm.model_fields["preset"].default)
    if not isinstance(name, str):
        return tree  # the schema says what is wrong with it
    return merge(root_shape(Algorithm), preset(name), tree)


def _plain_members(default: Any) -> Tree:
    members = default.items() if isinstance(default, dict) else enumerate(default)
    values = {k: plain(v) if isinstance(v, Record) else v for k, v in members}
    return values if isinstance(default, dict) else list(values.values())


def _long(shape: Shape | None, value: Tree) -> Tree:
    """A bare word written out: `grpo` as `{name: grpo}`."""
    return {shape.short: value} if shape is not None and shape.short and isinstance(value, str) else value


def _kept(shape: Shape, base: dict[str, Any]) -> dict[str, Any]:
    """What survives a change of name: nothing of a slot or a preset, all but `options` of a section that has them."""
    if issubclass(shape.records[0], (Slot, Algorithm)):
        return {}
    return {k: v for k, v in base.items() if k != "options"}
