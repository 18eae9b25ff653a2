"""Stop strings end a completion at the token that completes them, whatever the tokenizer."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.inference.engine_common import StopStrings
from burnish.models.tokenizer import Tokenizer
from tests.made_tokenizers import byte_level, merging, sentence_piece

TOKENIZERS = {
    "characters": merging("ab \nü", ("a", "b"), ("\n", "\n"), (" ", "a")),
    "bytes": byte_level(("Ċ", "Ċ"), ("a", "b"), ("Ġ", "a"), ("Ã", "¼")),
    "sentence pieces": sentence_piece("a", "b", "▁", "▁a", "ab", "▁b"),
}
STOPS = ("\n\n", "b", "a b", "ü", "ab ", "\nü", "b\n")


def first_by_whole_text(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    texts = (tokenizer.decode(tokens[:end]) for end in range(1, len(tokens) + 1))
    return next((k for k, text in enumerate(texts) if any(s in text for s in stop)), None)


def first_by_stop_strings(stops: StopStrings, tokens: Sequence[int], stop: Sequence[str]) -> int | None:
    ends = range(1, len(tokens) + 1)
    found = (
        stops.are_complete(stop, tokens[end - 1], lambda n, end=end: list(tokens[max(0, end - n) : end]))
        for end in ends
    )
    return next((k for k, is_complete in enumerate(found) if is_complete), None)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_stop_string_ends_at_the_token_that_completes_it(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    words = st.sampled_from(["a", "b", " ", "\n", "ü", "ab", "\n\n", " a"])
    tokens = tokenizer.encode("".join(data.draw(st.lists(words, min_size=1, max_size=12))))
    stop = tuple(data.draw(st.lists(st.sampled_from(STOPS), min_size=1, max_size=2, unique=True)))
    stops = StopStrings(tokenizer.decode)
    assert first_by_stop_strings(stops, tokens, stop) == first_by_whole_text(tokenizer, tokens, stop)


def test_tokens_without_the_last_character_are_decoded_once_and_alone() -> None:
    tokenizer = TOKENIZERS["bytes"]
    decoded: list[int] = []

    def decode(tokens: list[int]) -> str:
        decoded.append(len(tokens))
        return tokenizer.decode(tokens)

    tokens = tokenizer.encode("abab" * 50 + "\n\n")
    end = first_by_stop_strings(StopStrings(decode), tokens, ("\n\n",))
    assert end == len(tokens) - 1
    assert len(decoded) == len(set(tokens)) + 1, "each kind of token once, and the text before the newlines once"
