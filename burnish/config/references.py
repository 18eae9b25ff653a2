"""References of one stage to another: `stage:NAME`, what a stage makes, and `run:NAME`, the folder of its run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

REFERENCE = re.compile(r"(stage|run):([\w-]+)")


def references(tree: Any) -> Iterator[tuple[str, str]]:
    """Every `stage:NAME` and `run:NAME` among the values of a tree."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from references(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from references(value)
    elif isinstance(tree, str) and (found := REFERENCE.fullmatch(tree)):
        yield found[1], found[2]


def resolved(tree: Any, made: dict[str, str]) -> Any:
    """The tree with every reference replaced by the path it stands for."""
    if isinstance(tree, dict):
        return {key: resolved(value, made) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [resolved(value, made) for value in tree]
    if isinstance(tree, str) and REFERENCE.fullmatch(tree):
        return made[tree]
    return tree


def is_reference(value: Any) -> bool:
    """Whether a value stands for what a stage makes."""
    return isinstance(value, str) and REFERENCE.fullmatch(value) is not None
