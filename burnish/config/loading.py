"""A configuration from a YAML file and dotted overrides, and back to YAML.

`extends: other.yaml` (relative to the file) starts from another recipe. Overrides are `a.b.c=value`, the value being
YAML; a more specific key always wins over a shorter one, so their order does not matter. `algorithm: dapo` names a
preset whose slots can be overridden one by one. The order of precedence is: defaults, preset, extended file, file, `--shrink`,
overrides.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from burnish.algorithms.presets import preset_slots
from burnish.algorithms.spec import Algorithm
from burnish.config.errors import UserError, did_you_mean
from burnish.config.foreign_keys import translate_verl_keys
from burnish.config.records import Record, SchemaNode, Slot, default_of, explicit_values, field_node, root_node
from burnish.config.shrink import shrink
from burnish.config.validation_errors import to_user_error
from burnish.config.yaml_text import parse_yaml, render_yaml

# --- Configuration as plain trees: laying one over another, setting one dotted key, laying defaults under.
#
# Merging is deep, with one exception: a slot whose `name` changes (or an algorithm whose `preset` changes) drops the
# options of the old choice, since they mean nothing to the new one. Lists are replaced whole. No tree is changed in place.

Tree = Any
"""Dictionaries, lists and scalars, as YAML gives them."""


def merge_trees(node: SchemaNode | None, base: Tree, over: Tree) -> Tree:
    """`over` laid on `base`, both of them values of the place `node` describes."""
    base, over = _expand_short_form(node, base), _expand_short_form(node, over)
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    if node is not None and node.short:
        old, new = base.get(node.short), over.get(node.short)
        base = base if old is None or new is None or old == new else _keys_kept_on_rename(node, base)
    result = dict(base)
    for key, value in over.items():
        child = node.child(key) if node is not None else None
        result[key] = merge_trees(child, base[key], value) if key in base else value
    return result


def set_key(node: SchemaNode | None, tree: Tree, parts: Sequence[str], value: Tree, done: str = "") -> Tree:
    """The tree with `value` merged in at a dotted key; `done` is the part of the key already walked, for errors."""
    if not parts:
        return merge_trees(node, tree, value)
    part, rest = parts[0], parts[1:]
    here = f"{done}.{part}" if done else part
    if isinstance(tree, list) or (node is not None and node.form == "list" and part.isdecimal()):
        return _set_item(node, tree, parts, value, done)
    if node is not None and node.form == "list":
        node = node.item  # one section standing for a list of one
    tree = {} if tree is None else _expand_short_form(node, tree)
    if not isinstance(tree, dict):
        raise UserError(f"{here} cannot be set: {done} is {tree!r}, not a section")
    if node is not None and part == node.short and not rest:
        return merge_trees(node, tree, {part: value})
    child = node.child(part) if node is not None else None
    return {**tree, part: set_key(child, tree.get(part), rest, value, here)}


def _set_item(node: SchemaNode | None, tree: Tree, parts: Sequence[str], value: Tree, done: str) -> list[Any]:
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
    item = node.item if node is not None else None
    items[index] = set_key(item, items[index], rest, value, f"{done}.{part}")
    return items


def with_defaults(config_type: type[Record], tree: Tree) -> Tree:
    """The tree with the defaults that belong to a *position* laid under it, and the algorithm's preset.

    Needed because a section that is given in part must keep the rest of its own default: `sft.optimizer.eps=1e-9` keeps
    the learning rate of `sft`, not that of the optimizer's type.
    """
    if not isinstance(tree, dict):
        return tree
    if issubclass(config_type, Algorithm):
        tree = _apply_preset(tree)
    result = dict(tree)
    for name, node, default in _fields(config_type):
        if isinstance(default, Record):
            result[name] = merge_trees(node, explicit_values(default), result.get(name, {}))
        elif isinstance(default, (list, dict)) and default and name not in result:
            result[name] = _plain_members(default)
        if name in result:
            result[name] = _with_inner_defaults(node, result[name])
    return result


@cache
def _fields(config_type: type[Record]) -> tuple[tuple[str, SchemaNode, Any], ...]:
    """A record's keys, what each holds and its default, which is only read: found once, a configuration has hundreds."""
    return tuple(
        (name, field_node(config_type, name), default_of(config_type, name)) for name in config_type.model_fields
    )


def _with_inner_defaults(node: SchemaNode, value: Tree) -> Tree:
    value = _expand_short_form(node, value)
    if node.form == "record":
        return with_defaults(node.records[0], value)
    if node.item is not None and node.item.records:
        if isinstance(value, list):
            return [_with_inner_defaults(node.item, v) for v in value]
        if isinstance(value, dict) and node.form == "mapping":
            return {k: _with_inner_defaults(node.item, v) for k, v in value.items()}
    return value


def _apply_preset(tree: dict[str, Any]) -> dict[str, Any]:
    name = tree.get("preset", Algorithm.model_fields["preset"].default)
    if not isinstance(name, str):
        return tree  # the schema says what is wrong with it
    return merge_trees(root_node(Algorithm), preset_slots(name), tree)


def _plain_members(default: Any) -> Tree:
    members = default.items() if isinstance(default, dict) else enumerate(default)
    values = {k: explicit_values(v) if isinstance(v, Record) else v for k, v in members}
    return values if isinstance(default, dict) else list(values.values())


def _expand_short_form(node: SchemaNode | None, value: Tree) -> Tree:
    """A bare word written out: `grpo` as `{name: grpo}`."""
    return {node.short: value} if node is not None and node.short and isinstance(value, str) else value


def _keys_kept_on_rename(node: SchemaNode, base: dict[str, Any]) -> dict[str, Any]:
    """What survives a change of name: nothing of a slot or a preset, all but `options` of a section that has them."""
    if issubclass(node.records[0], (Slot, Algorithm)):
        return {}
    return {k: v for k, v in base.items() if k != "options"}


log = logging.getLogger(__name__)

ConfigType = TypeVar("ConfigType", bound=Record)


class Loaded(NamedTuple, Generic[ConfigType]):
    """A configuration, the same as plain values, and the folder its relative paths are tried from first."""

    config: ConfigType
    resolved: dict[str, Any]
    base: Path


def load(config_type: type[ConfigType], path: Path | None, overrides: Sequence[str] = ()) -> Loaded[ConfigType]:
    """The configuration of a file (or of nothing) with overrides on top; everything wrong with it is one UserError."""
    return _load_with_overrides(
        config_type, with_defaults(config_type, {} if path is None else read_recipe(config_type, path)), path, overrides
    )


def load_tree(
    config_type: type[ConfigType], tree: dict[str, Any], path: Path, overrides: Sequence[str] = ()
) -> Loaded[ConfigType]:
    """The configuration of a tree that was made of a file."""
    return _load_with_overrides(config_type, with_defaults(config_type, tree), path, overrides)


def load_shrunk(
    config_type: type[ConfigType], path: Path, overrides: Sequence[str] = ()
) -> tuple[Loaded[ConfigType], list[str]]:
    """The same of a file that was made a job of seconds (`burnish.config.shrink`), and what was changed in it that no override changes back."""
    tree, changes = shrink(load(config_type, path).resolved)
    given = tuple(f"{text.partition('=')[0].strip()}:" for text in overrides)
    return _load_with_overrides(config_type, tree, path, overrides), [
        change for change in changes if not change.startswith(given)
    ]


def _load_with_overrides(
    config_type: type[ConfigType], tree: dict[str, Any], path: Path | None, overrides: Sequence[str]
) -> Loaded[ConfigType]:
    node = root_node(config_type)
    for key, value in sorted((_parse_override(node, text) for text in overrides), key=lambda o: len(o[0])):
        tree = set_key(node, tree, key, value)
    tree, notes = translate_verl_keys(tree)
    for note in notes:
        log.warning("note: %s", note)
    try:
        config = config_type.model_validate(_inherit_max_tokens(with_defaults(config_type, tree)))
    except ValidationError as error:
        raise to_user_error(error, config_type, str(path) if path else "configuration") from error
    return Loaded(config, to_plain_values(config), Path.cwd() if path is None else path.resolve().parent)


def algorithm_from_preset(name: str) -> Algorithm:
    """A row of the preset table as an algorithm."""
    return Algorithm.model_validate(with_defaults(Algorithm, {"preset": name}))


def dump(config: Record) -> str:
    """The whole configuration as YAML, which loads to an equal one."""
    return render_yaml(to_plain_values(config))


def to_plain_values(config: Record) -> dict[str, Any]:
    """A configuration as dictionaries, lists and scalars."""
    return _tuples_to_lists(config.model_dump())


def add_missing_defaults(config_type: type[Record], tree: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with the defaults of keys that did not exist when it was written.

    One that this version does not accept is returned as it is, so that the keys that differ can be named.
    """
    try:
        return to_plain_values(config_type.model_validate(tree))
    except ValidationError:
        return tree


def read_recipe(config_type: type[Record], path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a YAML file laid over the one it extends."""
    resolved = path.resolve()
    if resolved in seen:
        raise UserError(f"{path}: extends itself, through {' -> '.join(p.name for p in (*seen, resolved))}")
    tree = parse_yaml(_read_text(path), str(path))
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected `key: value` lines, found {type(tree).__name__} at the top")
    if "stages" in tree and "stages" not in config_type.model_fields:
        raise UserError(f"{path} is a recipe of stages: `burnish stages {path}` runs it")
    if "extends" not in tree:
        return tree
    parent = tree.pop("extends")
    if not isinstance(parent, str):
        raise UserError(f"{path}: extends: got {parent!r}, expected the path of one YAML file")
    # The extended file is completed first: a slot it gives without its name has the default's, which the file may change.
    extended = with_defaults(config_type, read_recipe(config_type, path.parent / parent, (*seen, resolved)))
    return merge_trees(root_node(config_type), extended, tree)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        beside = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{did_you_mean(path.name, beside)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a YAML file: byte {error.start} is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_override(node: SchemaNode, text: str) -> tuple[list[str], Any]:
    """`a.b.c=value` as its key's parts and its value."""
    key, equals, raw = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UserError(f"override {text!r}: expected key=value, such as rollout.n=16 or algorithm.clip.high=0.28")
    if text.startswith("-"):
        raise UserError(f"override {text!r}: a key has no dashes before it; write {text.lstrip('-')}")
    if _holds_text(node, parts):
        return _without_short_key(node, parts), _as_text(raw)
    return _without_short_key(node, parts), parse_yaml(raw, f"override {text!r}")


def _as_text(raw: str) -> str | None:
    """The words of a key that holds text, as they are: `{prompt}` and `7` are text there, though YAML disagrees."""
    try:
        value = parse_yaml(raw, "")
    except UserError:
        return raw
    return value if value is None or isinstance(value, str) else raw


def _holds_text(node: SchemaNode, parts: list[str]) -> bool:
    place: SchemaNode | None = node
    for part in parts:
        place = _child_node(place, part)
    return place is not None and place.is_text


def _without_short_key(node: SchemaNode, parts: list[str]) -> list[str]:
    """`algorithm.preset=x` as `algorithm=x`, so that a choice sorts before its own options."""
    place: SchemaNode | None = node
    for part in parts[:-1]:
        place = _child_node(place, part)
    return parts[:-1] if place is not None and place.short == parts[-1] else parts


def _child_node(place: SchemaNode | None, part: str) -> SchemaNode | None:
    if place is not None and place.form == "list" and not part.isdecimal():
        place = place.item
    return None if place is None else place.child(part)


def _inherit_max_tokens(tree: dict[str, Any]) -> dict[str, Any]:
    """Validation modes that leave max_tokens unset take rollout's, here, so that the saved configuration says so."""
    validation, rollout = tree.get("validation"), tree.get("rollout")
    if not isinstance(validation, dict) or not isinstance(rollout, dict) or "max_tokens" not in rollout:
        return tree
    modes = validation.get("modes")
    if not isinstance(modes, dict):
        return tree
    followed = {"max_tokens": rollout["max_tokens"]}
    filled = {name: followed | mode if isinstance(mode, dict) else mode for name, mode in modes.items()}
    return {**tree, "validation": {**validation, "modes": filled}}


def _tuples_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples_to_lists(v) for k, v in value.items()}
    return [_tuples_to_lists(v) for v in value] if isinstance(value, (list, tuple)) else value
