"""Short forms in YAML: a name for a record, one thing for a list of it."""

from __future__ import annotations

from typing import Any


def named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]
