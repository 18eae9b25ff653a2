"""The text of a completion and its tool calls: streamed pieces are final and join to the whole, stop strings are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.environments.tools.call_formats import FORMATS, ParsedCall
from burnish.gateway.completion_text import (
    ToolCallStream,
    VisibleText,
    completion_text,
    partial_match,
    split_tool_calls,
    stop_position,
)
from burnish.models.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("abSTO the é漢😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abSTO é漢"), min_size=1, max_size=4), max_size=3)


def pieces(tokenizer: Tokenizer, tokens: list[int], ends: tuple[int, ...], stops: list[str]) -> list[str]:
    shown = VisibleText(tokenizer, ends, stops)
    return [*(shown.push([token]) for token in tokens), shown.finish()]


@given(tokens=st.lists(st.integers(0, 259), max_size=40), stops=STOPS)
def test_pieces_join_to_the_whole_also_of_bytes_that_are_no_text(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str]
) -> None:
    whole = completion_text(tokens, tokenizer, (), stops)
    assert "".join(pieces(tokenizer, tokens, (), stops)) == whole
    several = VisibleText(tokenizer, (), stops)
    assert "".join([several.push(tokens[k : k + 7]) for k in range(0, len(tokens), 7)]) + several.finish() == whole


@settings(max_examples=300)
@given(data=st.data())
def test_so_do_those_of_long_runs_of_bytes_that_are_no_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Bytes that begin or continue characters, mostly incomplete ones, with special tokens in between."""
    letters = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
    broken = [token for token in letters if "\ufffd" in tokenizer.decode([token])]
    markup = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)]
    kinds = st.one_of(st.sampled_from(broken), st.sampled_from(broken), st.sampled_from(letters + markup))
    tokens = data.draw(st.lists(kinds, min_size=20, max_size=150))
    whole = tokenizer.decode(tokens)
    assert "".join(pieces(tokenizer, tokens, (), [])) == whole
    assert "".join(tokenizer.pieces(tokens)) == whole
    # Each token decoded behind those before it gives the same as its text from the table.
    with pytest.MonkeyPatch.context() as patch:
        fast = tokenizer.pieces(tokens), pieces(tokenizer, tokens, (), [])
        patch.setattr(tokenizer, "plain_pieces", dict.fromkeys(range(tokenizer.vocab_size)))
        assert fast == (tokenizer.pieces(tokens), pieces(tokenizer, tokens, (), []))


def test_bytes_that_are_no_text_do_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    (token,) = [t for t in range(256) if tokenizer.decode([t, t]) == "\ufffd\ufffd"][:1]
    found = pieces(tokenizer, [token] * 400, (), [])
    assert "".join(found) == "\ufffd" * 400
    assert max(len(piece) for piece in found) < 20
    assert max(len(piece) for piece in tokenizer.pieces([token] * 400)) < 20


@given(text=TEXTS, stops=STOPS)
def test_what_is_shown_stays_and_has_no_stop_string_in_it(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode(text)
    whole = completion_text(tokens, tokenizer, (), stops)
    shown = ""
    for piece in pieces(tokenizer, tokens, (), stops):
        shown += piece
        assert whole.startswith(shown)
        assert "\ufffd" not in piece
    assert shown == whole
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)
    assert (whole == text) == (not any(stop in text for stop in stops))


def test_text_is_held_only_while_a_stop_string_may_follow(tokenizer: Tokenizer) -> None:
    found = pieces(tokenizer, tokenizer.encode("a\nUser:b\nUsed\nUser"), (), ["\nUser:!"])
    assert found[:4] == ["a", "", "", ""]
    assert "\nUser:b" in found  # it was no stop after all, and comes out at once
    assert found[-1] == "\nUser"


def test_the_string_that_is_complete_first_decides() -> None:
    assert stop_position("xabcd", ["bc", "abcd"]) == 2
    assert stop_position("xabcd", ["bcd", "abcd"]) == 1  # complete at once: the longer
    assert stop_position("xabcd", ["y"]) is None
    assert stop_position("xabcd", []) is None


@settings(max_examples=200)
@given(text=st.text("ab", max_size=8), marks=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_undecided_is_the_longest_end_that_begins_a_mark(text: str, marks: list[str]) -> None:
    begins = {mark[:k] for mark in marks for k in range(1, len(mark))}
    assert partial_match(text, marks) == max((k for k in range(1, len(text) + 1) if text[-k:] in begins), default=0)


def test_an_end_token_is_no_text_even_if_it_has_one(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab!")
    assert completion_text(tokens, tokenizer, tokens[-1:], []) == "ab"
    assert "".join(pieces(tokenizer, tokens, tuple(tokens[-1:]), [])) == "ab"
    assert completion_text([], tokenizer, tokens[-1:], []) == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_short_is_shown_as_the_decoder_writes_it(tokenizer: Tokenizer, cut: int) -> None:
    tokens = tokenizer.encode("a😀")[:-cut]
    found = pieces(tokenizer, tokens, (), [])
    assert found[0] == "a"
    assert found[1:-1] == [""] * (len(tokens) - 1)
    assert "".join(found) == tokenizer.decode(tokens) == "a\ufffd"


# --- tool calls ---------------------------------------------------------------------------------------------------------

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é </tool_call> \\" }"}}\n</tool_call>'
OTHER = '<tool_call>{"arguments": {}, "name": "now"}</tool_call>'


def named(calls: list[dict]) -> list[tuple[str, object]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_calls_are_read_with_what_was_said_before_them() -> None:
    text, calls = split_tool_calls(f"Let me see.\n\n{CALL}\n{OTHER}\n")
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
    assert split_tool_calls(text) == (text, [])
    stream = ToolCallStream()
    shown = stream.push(text)
    rest, calls = stream.finish()
    assert (shown + rest, calls) == (text, [])


@given(
    text=st.lists(st.sampled_from([CALL, OTHER, "<tool_", "call>", "a", " ", "\n", "{"]), max_size=5).map("".join),
    cuts=st.lists(st.integers(0, 300)),
)
def test_streamed_in_any_pieces_it_is_the_same(text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    stream = ToolCallStream()
    shown = "".join(stream.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    rest, calls = stream.finish()
    whole_text, whole_calls = split_tool_calls(text)
    assert shown + rest == whole_text
    assert named(calls) == named(whole_calls)


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=40)
@given(data=st.data())
def test_every_format_is_streamed_in_any_pieces_as_it_is_whole(name: str, data: st.DataObject) -> None:
    chosen = FORMATS[name]
    call = chosen.write([ParsedCall("add", {"a": "1", "b": "x"})])
    parts = st.sampled_from([call, chosen.marks[0], "<think>", "</think>", "a", " ", "\n", "{", "<", "[", "`"])
    text = data.draw(st.lists(parts, max_size=6).map("".join))
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9))), len(text)]
    stream = ToolCallStream(chosen)
    shown = "".join(stream.push(text[a:b]) for a, b in zip(bounds, bounds[1:], strict=False))
    rest, calls = stream.finish()
    whole_text, whole_calls = split_tool_calls(text, chosen)
    assert shown + rest == whole_text
    assert named(calls) == named(whole_calls)
    if text == call:
        assert named(calls) == [("add", {"a": "1", "b": "x"})]


def test_a_bare_call_behind_text_stays_text() -> None:
    bare = FORMATS["llama3"]
    call = bare.write([ParsedCall("add", {"a": "1"})])
    for before in ("a ", "a<think>"):
        assert split_tool_calls(before + call, bare) == (before + call, [])
    assert named(split_tool_calls(f"<think>a</think>{call}", bare)[1]) == [("add", {"a": "1"})]


def test_calls_in_reasoning_stay_text() -> None:
    text = f"<think>{CALL}</think>"
    assert split_tool_calls(text) == (text, [])
    said, calls = split_tool_calls(f"{text}\n{OTHER}")
    assert (said, named(calls)) == (text, [("now", {})])


def test_special_tokens_of_calls_are_shown_and_no_others(tokenizer: Tokenizer) -> None:
    start, end = (tokenizer.encode(name)[0] for name in ("<|im_start|>", "<|im_end|>"))
    tokens = [start, *tokenizer.encode("a"), end, *tokenizer.encode("b"), end]
    shown_ids = tokenizer.special_ids(["<|im_start|>", "a", "<nothing>"])
    assert shown_ids == {start}
    assert completion_text(tokens, tokenizer, (end,), [], shown_ids) == "<|im_start|>ab"
    stream = VisibleText(tokenizer, (), [], shown_ids)
    assert "".join([*(stream.push([token]) for token in tokens), stream.finish()]) == "<|im_start|>ab"


def test_text_before_a_call_comes_at_once() -> None:
    stream = ToolCallStream()
    assert stream.push("I think ") == "I think"
    assert stream.push("so. <tool") == " so."
    assert stream.push("box>") == " <toolbox>"
