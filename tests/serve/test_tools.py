"""Tool calls in an answer's text: read exactly, or left as text; streamed the same."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.serve.responses import CallStream, split_calls

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é </tool_call> \\" }"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {}, "name": "now"}</tool_call>'


def named(calls: list[dict]) -> list[tuple[str, object]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_calls_are_read_with_what_was_said_before_them() -> None:
    text, calls = split_calls(f"Let me see.\n\n{CALL}\n{OTHER}\n")
    assert text == "Let me see."
    assert named(calls) == [("add", {"a": 1, "b": 'é </tool_call> " }'}), ("now", {})]


@pytest.mark.parametrize(
    "text",
    [
        "no call at all",
        "",
        "  <tool_cal",
        CALL[:-1],
        CALL[:30],
        f"{CALL} and then text",
        f"{CALL} text {OTHER}",
        "<tool_call></tool_call>",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "more": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
        f"<tool_call>{'[' * 100_000}",
    ],
)
def test_anything_else_stays_text_to_the_letter(text: str) -> None:
    assert split_calls(text) == (text, [])
    stream = CallStream()
    shown = stream.push(text)
    rest, calls = stream.finish()
    assert (shown + rest, calls) == (text, [])


@given(
    text=st.lists(st.sampled_from([CALL, OTHER, "<tool_", "call>", "a", " ", "\n", "{"]), max_size=5).map("".join),
    cuts=st.lists(st.integers(0, 300)),
)
def test_streamed_in_any_pieces_it_is_the_same(text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stream = CallStream()
    shown = "".join(stream.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    rest, calls = stream.finish()
    whole_text, whole_calls = split_calls(text)
    assert shown + rest == whole_text
    assert named(calls) == named(whole_calls)


def test_text_before_a_call_comes_at_once() -> None:
    stream = CallStream()
    assert stream.push("I think ") == "I think"
    assert stream.push("so. <tool") == " so."
    assert stream.push("box>") == " <toolbox>"
