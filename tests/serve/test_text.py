"""The text of a completion: streamed pieces are final and join to the whole, stop strings are cut out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.models.tokenizer import Tokenizer
from burnish.serve.responses import ShownText, stop_position, undecided, whole_text

TEXTS = st.text(st.sampled_from("abSTO the é漢😀"), max_size=30)
STOPS = st.lists(st.text(st.sampled_from("abSTO é漢"), min_size=1, max_size=4), max_size=3)


def pieces(tokenizer: Tokenizer, tokens: list[int], ends: tuple[int, ...], stops: list[str]) -> list[str]:
    shown = ShownText(tokenizer, ends, stops)
    return [*(shown.push(token) for token in tokens), shown.finish()]


@given(tokens=st.lists(st.integers(0, 259), max_size=40), stops=STOPS)
def test_pieces_join_to_the_whole_also_of_bytes_that_are_no_text(
    tokenizer: Tokenizer, tokens: list[int], stops: list[str]
) -> None:
    assert "".join(pieces(tokenizer, tokens, (), stops)) == whole_text(tokens, tokenizer, (), stops)


@settings(max_examples=300)
@given(data=st.data())
def test_so_do_those_of_long_runs_of_bytes_that_are_no_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Bytes that begin or continue a character, few of which come to its end; and markup in between."""
    letters = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_special(token)]
    broken = [token for token in letters if "\ufffd" in tokenizer.decode([token])]
    markup = [token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)]
    kinds = st.one_of(st.sampled_from(broken), st.sampled_from(broken), st.sampled_from(letters + markup))
    tokens = data.draw(st.lists(kinds, min_size=20, max_size=150))
    whole = tokenizer.decode(tokens)
    assert "".join(pieces(tokenizer, tokens, (), [])) == whole
    assert "".join(tokenizer.pieces(tokens)) == whole


def test_bytes_that_are_no_text_do_not_wait_for_ever(tokenizer: Tokenizer) -> None:
    (token,) = [t for t in range(256) if tokenizer.decode([t, t]) == "\ufffd\ufffd"][:1]
    found = pieces(tokenizer, [token] * 400, (), [])
    assert "".join(found) == "\ufffd" * 400
    assert max(len(piece) for piece in found) < 20
    assert max(len(piece) for piece in tokenizer.pieces([token] * 400)) < 20


@given(text=TEXTS, stops=STOPS)
def test_what_is_shown_stays_and_has_no_stop_string_in_it(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    tokens = tokenizer.encode(text)
    whole = whole_text(tokens, tokenizer, (), stops)
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
    assert undecided(text, marks) == max((k for k in range(1, len(text) + 1) if text[-k:] in begins), default=0)


def test_an_end_token_is_no_text_even_if_it_has_one(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("ab!")
    assert whole_text(tokens, tokenizer, tokens[-1:], []) == "ab"
    assert "".join(pieces(tokenizer, tokens, tuple(tokens[-1:]), [])) == "ab"
    assert whole_text([], tokenizer, tokens[-1:], []) == ""


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_short_is_shown_as_the_decoder_writes_it(tokenizer: Tokenizer, cut: int) -> None:
    tokens = tokenizer.encode("a😀")[:-cut]
    found = pieces(tokenizer, tokens, (), [])
    assert found[0] == "a"
    assert found[1:-1] == [""] * (len(tokens) - 1)
    assert "".join(found) == tokenizer.decode(tokens) == "a\ufffd"
