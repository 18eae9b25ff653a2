"""Tokens of two tokenizers that spell the same: groups, bytes inside characters, markup, and the vocabulary that both have."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from burnish.config.errors import UserError
from burnish.models.token_alignment import Spelling, align, matching_groups, shared_vocabulary
from burnish.models.tokenizer import Tokenizer
from tests.made_tokenizers import byte_level, merging, sentence_piece, wrapped
from tests.models.test_tokenizer import real

CHARACTERS = Tokenizer.from_characters("abc >")
PAIRS = merging("abc> ", ("a", "b"), ("b", "c"))
BYTES = byte_level(("Ġ", "a"), ("Ã", "©"), additional_special_tokens=["<|call|>"])
PIECES = sentence_piece("▁a", "a", "b", "▁", "e")


def spelling(tokenizer: Tokenizer) -> Spelling:
    return Spelling(tokenizer, "it")


def groups(student: Tokenizer, teacher: Tokenizer, tokens: list[int]) -> list[tuple[str, str]]:
    """The tokens of each group on both sides, as the vocabularies write them."""
    own, other = spelling(student), spelling(teacher)
    found = align(tokens, own, other)
    assert found.teacher_groups == sorted(found.teacher_groups)
    assert len(found.student_groups) == len(tokens)

    def pieces(side: Spelling, ids: list[int], of: list[int], group: int) -> str:
        return "|".join(side.pieces[i] for i, g in zip(ids, of, strict=True) if g == group)

    return [
        (
            pieces(own, tokens, found.student_groups, g),
            pieces(other, found.teacher_tokens, found.teacher_groups, g),
        )
        for g in range(max(found.student_groups, default=-1) + 1)
    ]


def test_the_smallest_groups_that_spell_the_same() -> None:
    tokens = CHARACTERS.encode("cabc>")
    assert groups(CHARACTERS, PAIRS, tokens) == [("c", "c"), ("a|b", "ab"), ("c", "c"), (">", ">")]
    assert groups(PAIRS, CHARACTERS, PAIRS.encode("abbc")) == [("ab", "a|b"), ("bc", "b|c")]
    third = merging("abc", ("b", "c"))
    assert groups(PAIRS, third, PAIRS.encode("abc")) == [
        ("ab|c", "a|bc")
    ]  # neither border of one is a border of the other
    assert matching_groups([b"a", b"b"], [b"ab", b"c"]) == [(0, 2, 0, 1)]
    assert matching_groups([b"ab"], [b"a", b"c"]) == []


@given(st.lists(st.sampled_from(["a", "b", "c", "ab", "bc", ">"]), max_size=12))
def test_groups_cover_both_sides_and_cannot_be_cut(pieces: list[str]) -> None:
    own, other = spelling(PAIRS), spelling(CHARACTERS)
    names = {piece: i for i, piece in own.pieces.items()}
    tokens = [names[piece] for piece in pieces]
    found = align(tokens, own, other)
    assert other.tokenizer.decode(found.teacher_tokens) == "".join(pieces)
    assert found.student_groups == sorted(found.student_groups)
    assert -1 not in found.student_groups
    assert len(set(found.student_groups)) == len(tokens)  # against single characters every token is a group


def test_borders_inside_a_character() -> None:
    single = byte_level()
    eacute = [spelling(single).keys(1000)["text", bytes([b])] for b in "é".encode()]
    assert groups(single, BYTES, eacute) == [("Ã|©", "Ã©")]
    assert groups(single, PIECES, eacute) == [("Ã", "▁|<0xC3>"), ("©", "<0xA9>")]
    assert groups(single, PIECES, eacute[:1]) == []  # half of a character is no text that a teacher could read
    a = single.encode("a")
    assert groups(single, BYTES, [*a, *eacute[1:], *a]) == [("a", "a")]  # what follows is left out


def test_spaces_of_sentence_piece() -> None:
    assert groups(BYTES, PIECES, BYTES.encode("a a")) == [("a", "▁a"), ("Ġa", "▁a")]
    assert groups(PIECES, BYTES, PIECES.encode("b a")) == [("▁|b", "b"), ("▁a", "Ġa")]


def test_markup_and_ends() -> None:
    other = byte_level(eos="</s>")
    end, call = BYTES.eos_ids[0], spelling(BYTES).markup["<|call|>"]
    assert groups(BYTES, other, [*BYTES.encode("b"), end]) == [("b", "b"), ("<|end|>", "</s>")]
    assert groups(BYTES, other, [call, *BYTES.encode("b")]) == [("b", "b")]  # the other has no such token
    assert groups(BYTES, BYTES, [call, end]) == [("<|call|>", "<|call|>"), ("<|end|>", "<|end|>")]
    assert groups(BYTES, other, BYTES.encode(BYTES.literal("</s>"))) == [
        (c, c) for c in "</s>"
    ]  # its name as text stays text


def test_a_teacher_reads_up_to_what_it_cannot_spell() -> None:
    assert groups(BYTES, CHARACTERS, BYTES.encode("abxab")) == [("a", "a"), ("b", "b")]
    assert groups(BYTES, merging("ab"), BYTES.encode("abxab")) == [
        ("a", "a"),
        ("b", "b"),
    ]  # BPE drops what it does not know


def test_the_vocabulary_that_both_have() -> None:
    found = shared_vocabulary(spelling(CHARACTERS), spelling(PAIRS), 7, 9)
    pairs = {
        (spelling(CHARACTERS).pieces[i], spelling(PAIRS).pieces[k])
        for i, k in zip(found.student.tolist(), found.teacher.tolist(), strict=True)
    }
    assert pairs == {(c, c) for c in ("<pad>", "<eos>", *"abc >")}
    assert found.student_only.tolist() == []
    assert found.teacher_only.tolist() == [7, 8]
    assert found.share == pytest.approx(7 / 9)
    assert shared_vocabulary(spelling(CHARACTERS), spelling(PAIRS), 7, 8).teacher_only.tolist() == [
        7
    ]  # no row, no entry
    across = shared_vocabulary(spelling(BYTES), spelling(PIECES), 1000, 1000)
    names = dict(zip(across.student.tolist(), across.teacher.tolist(), strict=True))
    keys = spelling(BYTES).keys(1000)
    assert spelling(PIECES).pieces[names[keys["text", b" a"]]] == "▁a"
    assert spelling(PIECES).pieces[names[keys["text", b"a"]]] == "a"  # and not the byte token
    assert spelling(PIECES).pieces[names[keys["text", b"x"]]] == "<0x78>"
    assert names[BYTES.eos_ids[0]] == PIECES.eos_ids[0]
    assert len(set(names.values())) == len(names)


def test_a_tokenizer_whose_tokens_do_not_spell_is_refused() -> None:
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="it decodes with WordPiece, whose tokens do not spell a text by themselves"):
        Spelling(wrapped(backend), "it")


@pytest.mark.parametrize(
    ("student", "teacher"),
    [("qwen2.5", "smollm2"), ("smollm2", "qwen2.5"), ("qwen2.5", "stories260k"), ("stories260k", "smollm2")],
)
def test_real_tokenizers(student: str, teacher: str) -> None:
    own, other = spelling(real(student)), spelling(real(teacher))

    @settings(max_examples=40, deadline=None)
    @example("Let x = 12345 + 678; naïve café 漢字 👩‍🔬 <think>\n\n  code()\t</think>")
    @given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
    def check(text: str) -> None:
        tokens, written = (side.tokenizer.encode(side.tokenizer.literal(text)) for side in (own, other))
        # Some normalise a text, and SmolLM2 lacks a few rare bytes.
        assume(own.tokenizer.decode(tokens) == other.tokenizer.decode(written) == text)
        found = align([*tokens, own.tokenizer.eos_ids[0]], own, other)
        assert found.teacher_tokens == [*written, other.end]
        assert -1 not in found.student_groups
        assert {*found.student_groups} == {*found.teacher_groups}

    check()
