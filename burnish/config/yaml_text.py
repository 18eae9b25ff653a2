"""YAML in and out, JSON in, strict where the standard loader is lax; and text as a terminal may see it.

PyYAML keeps the last of two equal keys in silence, and reads `1e-6` as text because YAML 1.1 wants a dot. Here the
first is an error with its line, and the second a number. Errors name the file, the line and the column.
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
"""Controls of a terminal (escape sequences begin with one), and letters that turn the direction of those around them."""


class Loader(yaml.SafeLoader):
    """The safe loader, refusing duplicate keys and keys that are not text."""

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


class Dumper(yaml.SafeDumper):
    """The safe dumper, quoting what the loader above would read as a number."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


LINE_SEPARATORS = "\x85\u2028\u2029"  # YAML folds these like newlines unless they are written as escapes

for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))


MAX_NODES = 100_000
"""Values that a document with aliases may stand for: a few lines of aliases of aliases stand for billions."""


def parse_yaml(text: str, where: str) -> Any:
    """A YAML document; `where` (a file, an override) starts the message of a syntax error."""
    try:
        loader = Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_aliases(node)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except RecursionError as error:
        raise UserError(f"{where}: not valid YAML: values are nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; an impossible date
        raise UserError(f"{where}: not valid YAML: {error}") from error


def _check_aliases(root: yaml.Node) -> None:
    """Refuse aliases that stand for a value around them, or for more than `MAX_NODES` values in all."""
    sizes: dict[int, int | None] = {}  # of the nodes seen; None while a node's own values are counted

    def size_of(node: yaml.Node) -> int:
        if id(node) in sizes:
            size = sizes[id(node)]
            if size is None:
                raise yaml.constructor.ConstructorError(
                    None, None, "an alias stands for a value around it", node.start_mark
                )
            return size
        sizes[id(node)] = None
        inside = node.value if isinstance(node, yaml.CollectionNode) else []
        size = 1 + sum(size_of(n) for item in inside for n in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = size
        return size

    size = size_of(root)
    if size > max(MAX_NODES, len(sizes)):
        problem = f"aliases stand for {size:,} values, more than {MAX_NODES:,}"
        raise yaml.constructor.ConstructorError(None, None, problem, root.start_mark)


def render_yaml(tree: Any) -> str:
    """A tree of plain values as YAML in the given order; `parse` gives the same tree back."""
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    if any(mark in text for mark in LINE_SEPARATORS):
        text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=100)
    return text


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON value; `where` (a file and its line) starts the message of an error."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{where}: not valid JSON: values are nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    content = parse_json(path.read_bytes(), str(path))
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content


def check_file_name(name: Any, where: Path) -> str:
    """The name of a file or folder beside `where`, which gives it; a path that could leave the folder is refused."""
    if not isinstance(name, str) or not name or name in (".", "..") or re.search(r"[/\\\0]", name):
        raise UserError(f"{where} names {name!r}: expected the plain name of a file beside it, without folders")
    return name


def printable(text: str) -> str:
    """The text with every letter that would steer a terminal shown as a picture or a number."""

    def shown(match: re.Match[str]) -> str:
        code = ord(match[0])
        return chr(0x2400 + code) if code < 32 else "\u2421" if code == 127 else f"<{code:04X}>"

    return UNPRINTABLE.sub(shown, text)
