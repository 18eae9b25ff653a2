"""Load a configuration from a YAML file and dotted overrides, and write it back as YAML.

`extends: other.yaml` (relative to the file) or `extends: dapo` (a recipe that comes with burnish) starts from another recipe. Overrides are
`a.b.c=value` with a YAML value. A longer key wins over a shorter one, so the order of overrides does not matter. `algorithm: dapo` names a preset whose slots can be overridden one by one.
Precedence, lowest first: defaults, preset, extended file, file, `--shrink`, overrides.

Trees are merged deeply, with one exception. When the `name` of a slot or the `preset` of an algorithm changes, the options of the old
choice are dropped. Lists are replaced as a whole. No tree is changed in place.
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
from burnish.config.default_correction import NO_CORRECTION_NOTE, chooses_correction, with_default_correction
from burnish.config.errors import UserError, did_you_mean
from burnish.config.foreign_keys import translate_verl_keys
from burnish.config.plugins import is_plugin_file
from burnish.config.recipe_names import is_recipe_name, recipe_path, same_name_hint
from burnish.config.records import Record, SchemaNode, Slot, default_of, explicit_values, field_node, root_node
from burnish.config.shrink import shrink
from burnish.config.validation_errors import to_user_error
from burnish.config.yaml_text import parse_yaml, render_yaml

log = logging.getLogger(__name__)

ConfigType = TypeVar("ConfigType", bound=Record)
Tree = Any
"""Dictionaries, lists and scalars, as YAML gives them."""


class Loaded(NamedTuple, Generic[ConfigType]):
    """A configuration with its plain values and the folder of its recipe."""

    config: ConfigType
    resolved: dict[str, Any]
    base: Path
    """Relative paths are tried from here first, then from the working directory."""


def load(config_type: type[ConfigType], path: Path | None, overrides: Sequence[str] = ()) -> Loaded[ConfigType]:
    """The configuration of a file (or the defaults) with overrides. All problems are reported in one UserError."""
    tree = with_defaults(config_type, {} if path is None else read_recipe(config_type, path))
    return _load_with_overrides(config_type, tree, path, overrides, _written(config_type, path))


def load_tree(
    config_type: type[ConfigType],
    tree: dict[str, Any],
    path: Path | None,
    overrides: Sequence[str] = (),
    written: dict[str, Any] | None = None,
) -> Loaded[ConfigType]:
    """The configuration of a tree that was made from the file `path`, or by a program. `written` is the tree without defaults, if it has any."""
    own = tree if written is None else written
    return _load_with_overrides(config_type, with_defaults(config_type, tree), path, overrides, own)


def load_shrunk(
    config_type: type[ConfigType], path: Path, overrides: Sequence[str] = ()
) -> tuple[Loaded[ConfigType], list[str]]:
    """The configuration of a file for `--shrink`, and the changes that no override sets again."""
    plain = _load_with_overrides(
        config_type, with_defaults(config_type, read_recipe(config_type, path)), path, (), None
    )
    tree, changes = shrink(plain.resolved)
    given = tuple(f"{text.partition('=')[0].strip()}:" for text in overrides)
    return _load_with_overrides(config_type, tree, path, overrides, _written(config_type, path)), [
        change for change in changes if not change.startswith(given)
    ]


def _load_with_overrides(
    config_type: type[ConfigType],
    tree: dict[str, Any],
    path: Path | None,
    overrides: Sequence[str],
    written: dict[str, Any] | None,
) -> Loaded[ConfigType]:
    """`written` is what files and programs set, without defaults; None if the default correction is not to be set."""
    node = root_node(config_type)
    for key, value in sorted((_parse_override(node, text) for text in overrides), key=lambda o: len(o[0])):
        tree = set_key(node, tree, key, value)
        written = None if written is None else set_key(node, written, key, value)
    tree, notes = translate_verl_keys(tree)
    tree = with_defaults(config_type, tree)
    corrected, note = (tree, None) if written is None or chooses_correction(written) else with_default_correction(tree)
    config, is_refused = None, False
    if note is not None:
        try:
            config = config_type.model_validate(_inherit_max_tokens(corrected))
            notes = [*notes, note]
        except ValidationError:  # of the correction, or of something else, which the next call raises again
            is_refused = True
    for text in notes:
        log.warning("note: %s", text)
    try:
        config = config or config_type.model_validate(_inherit_max_tokens(tree))
    except ValidationError as error:
        raise to_user_error(error, config_type, str(path) if path else "configuration") from error
    if is_refused:
        log.warning("note: %s", NO_CORRECTION_NOTE)
    return Loaded(config, to_plain_values(config), Path.cwd() if path is None else path.resolve().parent)


def _written(config_type: type[Record], path: Path | None) -> dict[str, Any]:
    """What a file and those that it extends set, without defaults."""
    return {} if path is None else read_recipe(config_type, path, with_default_values=False)


def algorithm_from_preset(name: str) -> Algorithm:
    """The algorithm of a preset."""
    return Algorithm.model_validate(with_defaults(Algorithm, {"preset": name}))


def dump(config: Record) -> str:
    """The whole configuration as YAML. Loading it gives an equal configuration."""
    return render_yaml(to_plain_values(config))


def to_plain_values(config: Record) -> dict[str, Any]:
    """A configuration as dictionaries, lists and scalars."""
    return _tuples_to_lists(config.model_dump())


def add_missing_defaults(config_type: type[Record], tree: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with the defaults of keys that did not exist when it was written.

    If this version does not accept it, it is returned unchanged, so that the caller can name the keys that differ.
    """
    tree = _renamed_keys(tree)
    try:
        return to_plain_values(config_type.model_validate(tree))
    except ValidationError:
        return tree


def _renamed_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration with the present names of keys that had others."""
    training = tree.get("training")
    if not isinstance(training, dict) or "compile" not in training:
        return tree
    kept = {key: value for key, value in training.items() if key != "compile"}
    return {**tree, "training": {**kept, "layers": "compiled" if training["compile"] else "plain"}}


def read_recipe(
    config_type: type[Record], path: Path, seen: tuple[Path, ...] = (), with_default_values: bool = True
) -> dict[str, Any]:
    """The tree of a YAML file, merged over the file that it extends."""
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
        raise UserError(f"{path}: extends: got {parent!r}, expected the path of one YAML file or the name of a recipe")
    parent_path = recipe_path(parent) if is_recipe_name(parent) else path.parent / parent
    # The extended file gets its defaults first: a slot without a name in it has the default choice, which this file may change.
    extended = read_recipe(config_type, parent_path, (*seen, resolved), with_default_values)
    extended = with_defaults(config_type, extended) if with_default_values else extended
    extended = with_plugin_folder(extended, parent_path.resolve().parent, resolved.parent)
    return merge_trees(root_node(config_type), extended, tree)


def with_plugin_folder(tree: Tree, folder: Path, base: Path) -> Tree:
    """A recipe of `folder` for use in a recipe of the folder `base`: the plug-in files beside it get absolute paths."""
    if folder == base:
        return tree
    if isinstance(tree, dict):
        return {key: with_plugin_folder(value, folder, base) for key, value in tree.items()}
    if isinstance(tree, list):
        return [with_plugin_folder(value, folder, base) for value in tree]
    if isinstance(tree, str) and is_plugin_file(tree) and (folder / tree.rpartition(":")[0]).is_file():
        return str(folder / tree)
    return tree


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        raise UserError(f"{path}: no such file{same_name_hint(path) or did_you_mean(path.name, siblings)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not a YAML file: byte {error.start} is not UTF-8 text") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_override(node: SchemaNode, text: str) -> tuple[list[str], Any]:
    """`a.b.c=value` as the parts of the key and the value."""
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
    """The value of a key that holds text. `{prompt}` and `7` stay text, although YAML reads them as a mapping and a number."""
    try:
        value = parse_yaml(raw, "")
    except UserError:
        return raw
    return value if value is None or isinstance(value, str) else raw


def _holds_text(node: SchemaNode, parts: list[str]) -> bool:
    child: SchemaNode | None = node
    for part in parts:
        child = _child_node(child, part)
    return child is not None and child.is_text


def _without_short_key(node: SchemaNode, parts: list[str]) -> list[str]:
    """`algorithm.preset=x` as `algorithm=x`, so that a choice is set before its options."""
    parent: SchemaNode | None = node
    for part in parts[:-1]:
        parent = _child_node(parent, part)
    return parts[:-1] if parent is not None and parent.short == parts[-1] else parts


def _child_node(node: SchemaNode | None, part: str) -> SchemaNode | None:
    if node is not None and node.form == "list" and not part.isdecimal():
        node = node.item
    return None if node is None else node.child(part)


def _inherit_max_tokens(tree: dict[str, Any]) -> dict[str, Any]:
    """Validation modes without max_tokens get that of rollout here, so that the saved configuration shows it."""
    validation, rollout = tree.get("validation"), tree.get("rollout")
    if not isinstance(validation, dict) or not isinstance(rollout, dict) or "max_tokens" not in rollout:
        return tree
    modes = validation.get("modes")
    if not isinstance(modes, dict):
        return tree
    inherited = {"max_tokens": rollout["max_tokens"]}
    filled = {name: inherited | mode if isinstance(mode, dict) else mode for name, mode in modes.items()}
    return {**tree, "validation": {**validation, "modes": filled}}


def _tuples_to_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples_to_lists(v) for k, v in value.items()}
    return [_tuples_to_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


# --- trees ------------------------------------------------------------------------------------------------------------------


def merge_trees(node: SchemaNode | None, base: Tree, over: Tree) -> Tree:
    """`base` updated by `over`; `node` is the schema node of both."""
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
    """The tree with `value` merged in at a dotted key. `done` is the part of the key that was walked already, for errors."""
    if not parts:
        return merge_trees(node, tree, value)
    part, rest = parts[0], parts[1:]
    here = f"{done}.{part}" if done else part
    if isinstance(tree, list) or (node is not None and node.form == "list" and part.isdecimal()):
        return _set_item(node, tree, parts, value, done)
    if node is not None and node.form == "list":
        node = node.item  # a single section stands for a list of one
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
    """The tree on top of the defaults of its *position* and of the algorithm's preset.

    A section that is given in part must keep the rest of its own default: `sft.optimizer.eps=1e-9` keeps the learning rate of `sft`, which
    differs from that of the optimizer's type.
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
    """The keys of a record with their nodes and defaults. Cached, because loading asks hundreds of times. Callers must not change the defaults."""
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
        return tree  # validation reports it
    return merge_trees(root_node(Algorithm), preset_slots(name), tree)


def _plain_members(default: Any) -> Tree:
    members = default.items() if isinstance(default, dict) else enumerate(default)
    values = {k: explicit_values(v) if isinstance(v, Record) else v for k, v in members}
    return values if isinstance(default, dict) else list(values.values())


def _expand_short_form(node: SchemaNode | None, value: Tree) -> Tree:
    """A bare string as a section: `grpo` as `{name: grpo}`."""
    return {node.short: value} if node is not None and node.short and isinstance(value, str) else value


def _keys_kept_on_rename(node: SchemaNode, base: dict[str, Any]) -> dict[str, Any]:
    """Keys that survive a change of `name`: none of a slot or a preset, all but `options` of another section."""
    if issubclass(node.records[0], (Slot, Algorithm)):
        return {}
    return {k: v for k, v in base.items() if k != "options"}
