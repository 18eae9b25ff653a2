"""YAML in and out (and JSON objects in), strict where the standard loader is lax.

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


LINE_MARKS = "\x85\u2028\u2029"  # YAML folds these like newlines unless they are written as escapes

for _cls in (Loader, Dumper):
    _cls.add_implicit_resolver(FLOAT_TAG, EXPONENT, list("-+.0123456789"))


def parse(text: str, where: str) -> Any:
    """A YAML document; `where` (a file, an override) starts the message of a syntax error."""
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{where}{place}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:  # a control character; an impossible date
        raise UserError(f"{where}: not valid YAML: {error}") from error


def render(tree: Any) -> str:
    """A tree of plain values as YAML in the given order; `parse` gives the same tree back."""
    text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)
    if any(mark in text for mark in LINE_MARKS):
        text = yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=False, width=100)
    return text


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, not a {type(content).__name__}")
    return content
