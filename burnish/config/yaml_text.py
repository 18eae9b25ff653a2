"""Strict YAML and JSON parsing, YAML output, and text that is safe to print on a terminal.

PyYAML silently keeps the last of two equal keys, and reads `1e-6` as text because YAML 1.1 requires a dot. Here duplicate keys are errors,
and `1e-6` is a number. Errors name the file, the line and the column. Valid text is read by libyaml, if PyYAML has it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from burnish.config.errors import UserError

EXPONENT = re.compile(r"^[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$")
FLOAT_TAG = "tag:yaml.org,2002:float"
MERGE_TAG = "tag:yaml.org,2002:merge"
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Terminal control characters, with which escape sequences begin, and characters that change the direction of text."""


class StrictMappings(yaml.constructor.SafeConstructor):
    """Refuses duplicate keys and keys that are not text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == MERGE_TAG:
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is not text; put it in quotes", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice, first in line {seen[key]}", key_node.start_mark
                )
            seen[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


class Loader(StrictMappings, yaml.SafeLoader):
    """Safe loader in Python. Its errors say what is wrong."""


if yaml.__with_libyaml__:

    class FastLoader(StrictMappings, yaml.CSafeLoader):
        """Safe loader in C, eight times as fast. It crashes on values that are nested too deeply."""

else:
    FastLoader = None  # type: ignore[assignment,misc]


class Dumper(yaml.SafeDumper):
    """Safe dumper without aliases. It quotes text that `Loader` would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


LINE_SEPARATORS = "\x85\u2028\u2029"  # YAML folds these like newlines unless they are written as escapes

for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))
if FastLoader is not None:
    FastLoader.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))


MAX_FAST_LEVELS = 400
"""Levels of nesting up to which a text goes to `FastLoader`. With 500, reading and checking it crash on a thread with a stack of 256 kB."""
MAX_NODES = 100_000
"""Maximum number of values that a document with aliases may expand to. A few lines of nested aliases can expand to billions."""


def parse_yaml(text: str, where: str) -> Any:
    """Parse a YAML document. Error messages start with `where` (a file, an override)."""
    if FastLoader is not None and _most_levels(text) <= MAX_FAST_LEVELS:
        try:
            return _load(FastLoader, text)
        except yaml.constructor.ConstructorError as error:
            # The text is well-formed: both loaders make this error, if the one in Python does not stop before it at what libyaml allows.
            raise _error_at_mark(error, where) from error
        except (yaml.YAMLError, ValueError, RecursionError):
            pass  # the loader in Python finds the same error and describes it
    try:
        return _load(Loader, text)
    except RecursionError as error:
        raise UserError(f"{where}: not valid YAML: values are nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        raise _error_at_mark(error, where) from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; an impossible date
        raise UserError(f"{where}: not valid YAML: {error}") from error


def _error_at_mark(error: yaml.MarkedYAMLError, where: str) -> UserError:
    mark = error.problem_mark or error.context_mark
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return UserError(f"{where}{place}: {error.problem or error.context}")


def _most_levels(text: str) -> int:
    """A bound of the levels of nesting: each begins with one of these characters."""
    return sum(map(text.count, "[{-:?"))


def _load(loader_type: type[Loader | FastLoader], text: str) -> Any:
    loader = loader_type(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_aliases(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _check_aliases(root: yaml.Node) -> None:
    """Refuse recursive aliases, and aliases that expand to more than `MAX_NODES` values."""
    sizes: dict[int, int | None] = {}  # by node; None while the values inside it are counted

    def size_of(node: yaml.Node) -> int:
        if id(node) in sizes:
            size = sizes[id(node)]
            if size is None:
                raise yaml.constructor.ConstructorError(
                    None, None, "an alias refers to a value that contains it", node.start_mark
                )
            return size
        sizes[id(node)] = None
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        size = 1 + sum(size_of(n) for item in inside for n in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = size
        return size

    size = size_of(root)
    if size > max(MAX_NODES, len(sizes)):
        problem = f"aliases expand to {size:,} values, more than {MAX_NODES:,}"
        raise yaml.constructor.ConstructorError(None, None, problem, root.start_mark)


def render_yaml(tree: Any) -> str:
    """A tree of plain values as YAML, with keys in the given order. `parse_yaml` restores the same tree."""
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    if any(mark in text for mark in LINE_SEPARATORS):
        text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=100)
    return text


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse a JSON value. Error messages start with `where` (a file and its line)."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{where}: not valid JSON: values are nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object."""
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def check_file_name(name: Any, where: Path) -> str:
    """A file name that the file `where` gives for a file in its own folder. A path that could leave the folder is refused."""
    if not isinstance(name, str) or not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise UserError(f"{where} names {name!r}: expected the name of a file in the same folder, without a path")
    return name


def printable(text: str) -> str:
    """The text with every character that could control a terminal replaced by a symbol or its code."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else f"<{code:04X}>"

    return UNPRINTABLE.sub(shown, text)
