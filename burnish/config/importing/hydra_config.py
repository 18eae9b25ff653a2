"""Reads Hydra configs as verl uses them: YAML files with interpolations, and command lines of `key=value` overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.yaml_text import parse_yaml

INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")
MISSING = "???"
"""OmegaConf's mark of a value that must be given."""
MAX_INTERPOLATIONS = 100
"""Most rounds of interpolation of one value, because a key may refer to itself."""


class HydraConfig(NamedTuple):
    """The leaves of a config by their dotted keys, the keys that were removed (`~key`), and notes."""

    values: dict[str, Any]
    removed: list[str]
    notes: list[str]


def read_yaml_config(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """The leaves of a YAML file, or of a list of overrides. The entry `defaults` stays a leaf: it names verl's own files."""
    tree = parse_yaml(read_text(path), str(path))
    if isinstance(tree, list) and all(isinstance(word, str) for word in tree):  # Hydra's .hydra/overrides.yaml
        return apply_overrides({}, tree).values
    if not isinstance(tree, dict):
        raise UserError(f"{path}: expected a verl config with sections such as data and actor_rollout_ref")
    values = dict(leaves(tree))
    resolved = {key: resolve(value, key, values, environment) for key, value in values.items()}
    return {key: value for key, value in resolved.items() if value != MISSING}


def read_text(path: Path) -> str:
    """The text of a script or config."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8 text") from error


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are not sections, with their dotted keys. An empty section is a value."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def resolve(value: Any, key: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    """A value with `${a.b}`, `${.relative}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}` replaced."""
    if isinstance(value, list):
        return [resolve(item, key, values, environment) for item in value]
    for _ in range(MAX_INTERPOLATIONS):
        match = INTERPOLATION.search(value) if isinstance(value, str) else None
        if match is None:
            return value
        found = _reference(match[1], key, values, environment)
        if match[0] == value:
            value = found
        else:
            value = value[: match.start()] + ("" if found is None else str(found)) + value[match.end() :]
    raise UserError(f"{key}: its interpolation refers to itself: {value}")


def _reference(text: str, key: str, values: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
    resolver, colon, body = text.partition(":")
    name, comma, default = (body if colon else text).partition(",")
    name, default = name.strip(), default.strip()
    fallback = parse_yaml(default, key) if comma else None
    if resolver == "oc.env":
        return environment.get(name, fallback)
    if colon and resolver != "oc.select":
        return f"$({text})"  # a resolver of the user's: its value is not known here
    if name.startswith("."):
        levels = len(name) - len(name.lstrip("."))
        name = ".".join([*key.split(".")[:-levels], name.lstrip(".")])
    value = values.get(name, fallback)
    return fallback if value is None or value == MISSING else value


def apply_overrides(base: Mapping[str, Any], words: list[str]) -> HydraConfig:
    """A config with the overrides of a command line: `a.b=1`, `+a.b=1`, `++a.b=1` and `~a.b`. Other words are noted."""
    values, removed, notes = dict(base), list[str](), list[str]()
    for word in words:
        if word.startswith("~"):
            gone = word[1:].partition("=")[0]
            removed.append(gone)
            values = {key: value for key, value in values.items() if key != gone and not key.startswith(f"{gone}.")}
            continue
        key, equals, text = word.partition("=")
        key = key.lstrip("+")
        if not equals or not re.fullmatch(r"[\w.@/-]+", key):
            if word:
                notes.append(f"{word!r} is no key=value and is left out")
            continue
        if not text:  # such as that of a variable without a value; null would switch things off
            notes.append(f"{key} has no value in the script, so its default counts")
            continue
        value = override_value(text)
        if isinstance(value, dict) and value:
            values |= dict(leaves(value, f"{key}."))
        else:
            values[key] = value
    return HydraConfig(values, removed, notes)


def override_value(text: str) -> Any:
    """The value of an override. Text that is no YAML, such as a path with a colon, stays text."""
    try:
        value = parse_yaml(text, "")
    except UserError:
        return text
    return text if value is None and text.strip().lower() not in ("", "null", "~", "none") else value
