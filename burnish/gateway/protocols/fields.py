"""Reading the JSON body of a request field by field.

Agents send fields that no version of an API has, so unknown fields are ignored here, unlike in `openai_schema`. What is read is checked:
a wrong type, a number out of range or a list that is too long is an `ApiError` that names the field by its path. `null` means that a
field is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from burnish.gateway.openai_schema import INT64_LIMIT, MAX_FIELDS, MAX_NAME, ApiError, bad_value, json_object

Json = dict[str, Any]
MAX_RECORDED = 65536
"""Most characters of a client's value that is only recorded."""


class Fields:
    """One JSON object of a request. `path` is its place in the body; it is empty for the body itself."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise self._wrong(path, "an object", value)
        if len(value) > MAX_FIELDS:
            raise bad_value(path or "body", f"got {len(value)} fields; expected {MAX_FIELDS} at most")
        self.values: Json = value
        self.path = path

    @classmethod
    def of_body(cls, body: bytes | bytearray) -> Fields:
        """Parse a body; raise an `ApiError` unless it is a JSON object."""
        return cls(json_object(body))

    def where(self, name: str) -> str:
        """The path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def error(self, name: str, message: str, code: str = "invalid_value") -> ApiError:
        """The error for a field with an invalid value."""
        return bad_value(self.where(name), message, code)

    def missing(self, name: str) -> ApiError:
        """The error for a field that must be there."""
        where = self.where(name)
        return ApiError(400, f"missing required parameter: {where}", param=where, code="missing_required_parameter")

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.values.get(name) is not None

    def text(self, name: str, max_length: int | None = None) -> str | None:
        """A text, or None if it is left out."""
        value = self._typed(name, str, "a text")
        if value is not None and max_length is not None and len(value) > max_length:
            raise self.error(name, f"got {len(value)} characters; expected {max_length} at most")
        return value

    def required_text(self, name: str, max_length: int | None = None) -> str:
        """A text that must be there."""
        value = self.text(name, max_length)
        if value is None:
            raise self.missing(name)
        return value

    def required_name(self, name: str) -> str:
        """A short text that must be there and not be empty."""
        value = self.required_text(name, MAX_NAME)
        if not value:
            raise self.error(name, "expected a text that is not empty")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false if it is left out."""
        return bool(self._typed(name, bool, "true or false"))

    def integer(self, name: str, least: int, most: int = INT64_LIMIT - 1) -> int | None:
        """An integer within bounds. A float without a fraction counts as one: some clients write 1.0."""
        value = self.values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(self.where(name), "an integer", value)
        if not least <= value <= most:
            shown = value if abs(value) < INT64_LIMIT else "a number beyond 64 bits"
            raise self.error(name, f"got {shown}; expected {least} to {most}")
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(self.where(name), "a number", value)
        if abs(value) >= INT64_LIMIT or not math.isfinite(value):
            raise self.error(name, "expected a finite number of less than 64 bits")
        return float(value)

    def child(self, name: str) -> Fields | None:
        """An object, or None if it is left out."""
        return Fields(self.values[name], self.where(name)) if self.has(name) else None

    def required_child(self, name: str) -> Fields:
        """An object that must be there."""
        found = self.child(name)
        if found is None:
            raise self.missing(name)
        return found

    def items(self, name: str, most: int, what: str) -> list[Any]:
        """A list, empty if it is left out."""
        found = self._typed(name, list, "a list") or []
        if len(found) > most:
            raise self.error(name, f"got {len(found)} {what}; expected {most} at most")
        return found

    def objects(self, name: str, most: int, what: str) -> list[Fields]:
        """A list of objects, empty if it is left out."""
        return [Fields(value, f"{self.where(name)}[{i}]") for i, value in enumerate(self.items(name, most, what))]

    def texts(self, name: str, most: int, max_length: int, what: str) -> tuple[str, ...]:
        """A text or a list of texts that are not empty."""
        value = self.values.get(name)
        items = [value] if isinstance(value, str) else self.items(name, most, what)
        for i, item in enumerate(items):
            where = f"{self.where(name)}[{i}]"
            if not isinstance(item, str):
                raise self._wrong(where, "a text", item)
            if not 1 <= len(item) <= max_length:
                raise bad_value(where, f"got {len(item)} characters; expected 1 to {max_length}")
        return tuple(items)

    def free_object(self, name: str) -> Json:
        """An object of any content, such as a JSON schema, as it is; empty if it is left out. Its numbers are finite."""
        value = self._typed(name, dict, "an object") or {}
        self._dump(name)
        return value

    def recorded(self, *names: str) -> Json:
        """Those of the fields that are there, in a form that can be logged."""
        found: Json = {}
        for name in names:
            if not self.has(name):
                continue
            size = len(self._dump(name))
            if size > MAX_RECORDED:
                raise self.error(name, f"got {size} characters of JSON; expected {MAX_RECORDED} at most")
            found[name] = self.values[name]
        return found

    def _dump(self, name: str) -> str:
        try:
            return json.dumps(self.values.get(name), allow_nan=False)
        except ValueError as error:  # JSON's 1e999 is read as infinity
            raise self.error(name, "a number in it is too large") from error

    def _typed(self, name: str, kind: type, expected: str) -> Any:
        value = self.values.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._wrong(self.where(name), expected, value)
        return value

    @staticmethod
    def _wrong(where: str, expected: str, value: Any) -> ApiError:
        kinds: Mapping[type, str] = {
            str: "a text", bool: "a boolean", int: "an integer", float: "a number", list: "a list", dict: "an object",
        }  # fmt: skip
        return bad_value(where, f"expected {expected}, got {kinds.get(type(value), 'null')}", "invalid_type")
