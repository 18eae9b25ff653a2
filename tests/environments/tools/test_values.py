"""Arguments of models against JSON schemas, and what tools return as text."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.environments.tools.values import (
    MAX_RESULT_CHARS,
    WrongArguments,
    check_arguments,
    convert,
    cut_middle,
    result_text,
    tool_schema,
)

SCHEMA = tool_schema(
    "book",
    "Book a table.",
    {
        "guests": {"type": "integer"},
        "name": {"type": "string"},
        "wine": {"type": "string", "enum": ["red", "white"]},
        "tags": {"type": "array", "items": {"type": "integer"}},
    },
    ["guests", "name"],
)


@pytest.mark.parametrize(
    ("value", "schema", "converted"),
    [
        ("3", {"type": "integer"}, 3),
        (3.0, {"type": "integer"}, 3),
        ("-2.5", {"type": "number"}, -2.5),
        ("7", {"type": "number"}, 7),
        ("True", {"type": "boolean"}, True),
        (42, {"type": "string"}, "42"),
        ("[1, 2]", {"type": "array", "items": {"type": "integer"}}, [1, 2]),
        ('{"a": "1"}', {"type": "object", "properties": {"a": {"type": "integer"}}}, {"a": 1}),
        ({"a": "1"}, {"type": "object", "additionalProperties": {"type": "number"}}, {"a": 1}),
        (None, {"type": "integer", "nullable": True}, None),
        ("3", {"type": ["integer", "string"]}, "3"),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "boolean"}]}, 3),
        (["1", "x"], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1, "x"]),
    ],
)
def test_values_that_leave_no_doubt_are_converted(value: Any, schema: dict[str, Any], converted: Any) -> None:
    result = convert(value, schema)
    assert result == converted
    assert type(result) is type(converted)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("three", {"type": "integer"}),
        (2.5, {"type": "integer"}),
        (True, {"type": "integer"}),
        ("nan", {"type": "number"}),
        ("inf", {"type": "number"}),
        (1, {"type": "boolean"}),
        (None, {"type": "string"}),
        (["a"], {"type": "string"}),
        ("[1", {"type": "array"}),
        ("[" * 100_000, {"type": "array"}),
        ([1], {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]}),
        ({}, {"type": "object", "required": ["a"]}),
        ("green", {"type": "string", "enum": ["red", "white"]}),
    ],
)
def test_other_values_are_refused(value: Any, schema: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the caller writes the message
        convert(value, schema)


def test_an_error_names_every_mistake_and_what_was_expected() -> None:
    with pytest.raises(WrongArguments) as raised:
        check_arguments(SCHEMA, {"guest": 2, "name": "Ann", "wine": "green", "tags": ["x"]})
    assert str(raised.value) == (
        "wrong arguments for book: unexpected argument 'guest'; did you mean 'guests'?; "
        '\'wine\' must be one of "red", "white", got "green"; '
        "'tags' must be an array of integers, got [\"x\"]; 'guests' is missing (it must be an integer). "
        'It takes: guests (an integer), name (a string), wine (one of "red", "white", optional), '
        "tags (an array of integers, optional)."
    )
    with pytest.raises(WrongArguments, match="takes an object of arguments, got 5"):
        check_arguments(SCHEMA, 5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"caf\xc3\xa9 \xff", "café \ufffd"),
        ({"a": [1, float("nan")]}, '{"a": [1, NaN]}'),
        ({(1, 2): "key"}, "{(1, 2): 'key'}"),
        ([{1, 2}], '["{1, 2}"]'),
        ("a\ud800b", "a?b"),
        (None, "None"),
        (float("nan"), "nan"),
        ((1, 2), "(1, 2)"),
    ],
)
def test_any_result_becomes_text_that_utf8_can_hold(value: Any, text: str) -> None:
    assert result_text(value) == text
    assert text.encode().decode() == text


def test_a_list_that_holds_itself_becomes_text() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert result_text(loop) == "[[...]]"


def test_a_long_text_loses_its_middle_and_says_how_much() -> None:
    assert cut_middle("abcdefghij", 6) == "abcd\n... (4 characters left out) ...\nij"
    assert cut_middle("abcdef", 6) == "abcdef"
    assert len(result_text("x" * 5_000_000)) < MAX_RESULT_CHARS + 100
