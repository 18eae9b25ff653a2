"""`TextStream`: the pieces of a streamed completion join to the decoded text, and no incomplete character is shown."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.gateway.completion_text import TextStream
from burnish.models.tokenizer import REPLACEMENT_CHARACTER, Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
DIRECTORIES = [DATA / "models" / "stories260k", DATA / "tokenizers" / "qwen2.5", DATA / "tokenizers" / "smollm2"]


@pytest.fixture(scope="module", params=DIRECTORIES, ids=lambda p: p.name)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if not request.param.is_dir():
        pytest.skip(f"no tokenizer at {request.param}")
    return Tokenizer.load(request.param)


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(t) for t in tokens), stream.finish()]


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT_CHARACTER), max_size=40))
def test_pieces_join_to_the_decoded_whole(tokenizer: Tokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    shown, whole = pieces(tokenizer, tokens), tokenizer.decode(tokens)
    assert "".join(shown) == whole
    # A tokenizer without some bytes loses characters for good; no others may ever look broken on the way.
    assert sum(piece.count(REPLACEMENT_CHARACTER) for piece in shown) == whole.count(REPLACEMENT_CHARACTER)


def test_a_character_of_several_tokens_comes_out_once_and_whole(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a 🜁 ok")
    shown = pieces(tokenizer, tokens)
    assert sum("🜁" in piece for piece in shown) == 1
    assert shown[:-1].count("") >= 2  # it was really split, and its first tokens showed nothing


def test_words_come_out_as_soon_as_they_are_drawn(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("once upon a time")
    stream = TextStream(tokenizer)
    so_far = ""
    for count, token in enumerate(tokens, start=1):
        so_far += stream.push(token)
        assert so_far == tokenizer.decode(tokens[:count])


def test_markup_between_words_takes_no_space_away(tokenizer: Tokenizer) -> None:
    tokens = [*tokenizer.encode("one"), tokenizer.eos_ids[0], *tokenizer.encode(" two")]
    assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_bytes_that_never_become_a_character_are_shown_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a 🜁")[:-1]
    shown = pieces(tokenizer, tokens)
    assert "".join(shown) == tokenizer.decode(tokens)
    assert shown[-1].endswith(REPLACEMENT_CHARACTER)
