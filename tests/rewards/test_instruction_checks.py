"""IFEval's instructions, each with responses that follow it and responses that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.rewards.instruction_checks import INSTRUCTIONS, follows_instruction, ifeval
from burnish.rewards.language_id import STOP_WORDS, detect_language, may_be_language
from burnish.rewards.verifiers import VERIFIERS, check_verifier

IFEVAL = Path(__file__).parents[2] / "../shared/data/ifeval.jsonl"
Case = tuple[str, dict[str, Any], list[str], list[str]]
CASES: list[Case] = [
    # (instruction, arguments, responses that follow it, responses that do not)
    ("keywords:existence", {"keywords": ["mom", "Mother"]}, ["My MOM is a mother."], ["My mom.", ""]),
    ("keywords:frequency", {"keyword": "war", "frequency": 2, "relation": "at least"}, ["War, war."], ["One war."]),
    ("keywords:frequency", {"keyword": "c++", "frequency": 2, "relation": "less than"}, ["C++ once."], ["c++ c++"]),
    ("keywords:forbidden_words", {"forbidden_words": ["rock"]}, ["A rocket."], ["We ROCK!", "rock"]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 3, "let_relation": "at least"}, ["Qq q"], ["qq"]),
    ("keywords:letter_frequency", {"letter": "!", "let_frequency": 2, "let_relation": "less than"}, ["a!"], ["a!!"]),
    ("language:response_language", {"language": "de"}, ["Das ist nicht der Hund und die Katze."], ["This is the dog."]),
    ("language:response_language", {"language": "kn"}, ["ಇದು ಕನ್ನಡ ವಾಕ್ಯ."], ["This is not."]),
    ("language:response_language", {"language": "mr"}, ["हे पुस्तक माझे आहे आणि ते येथे आहे."], ["यह किताब मेरी है और यह यहाँ है।"]),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, ["One. Two!", "Dr. No came. He left."],
     ["Mr. Smith went out", "One."]),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "less than"}, ["It costs 3.50 here. Yes?"], ["Go on. Stop! Why?"]),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["One\n***\nTwo", "One\n***\nTwo\n***"],
     ["One\n\nTwo", "One\n***\n***\nTwo", "1\n***\n2\n***\n3"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["one two three"], ["one two"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
     ["Hello.\n\n\"Weekend, it is.\""], ["Weekend.\n\nHello.", "Hello.\n\nWeekend\n\nMore.", "Weekend"]),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name], [address]"], ["[name]", "[]  []"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye\nP.S. one more", "Bye\np. s. more"], ["Bye PS", "Bye\nPS more"]),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ["Bye\nP.P.S more", "Bye\nP.P.S. more"], ["Bye\nP.S. more"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["Points:\n* one\n* two", "- one\n- two"],
     ["* one", "* one\n* two\n* three", "**bold**\n* one"]),
    ("detectable_format:constrained_response", {}, ["My answer is maybe."], ["my answer is yes", "Yes."]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*one* and *two*", "**one** and *two*"],
     ["*one*", "** ** and *one*", "*one"]),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2}, ["SECTION 1\na\nSECTION 2\nb"],
     ["SECTION 1\na", "SECTION one SECTION two"]),
    ("detectable_format:json_format", {}, ['{"a": [1]}', '```json\n{"a": 1}\n```'], ["a: 1", '{"a": 1} and more']),
    ("detectable_format:title", {}, ["<<My day>>\nIt was fine."], ["<My day>", "<<>>", "<<\n>>"]),
    ("combination:two_responses", {}, ["One.\n******\nTwo."], ["One.", "Same******Same", "1******2******3"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write it."}, ["write it. Here:"], ["Sure. Write it."]),
    ("startend:end_checker", {"end_phrase": "Is there more?"}, ['So... is there more?"', "Is there more?"], ["Is there more? Yes."]),
    ("startend:quotation", {}, ['"All of it."'], ['"Some" of it.', '"']),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["GO NOW please"], ["GO now Please"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, ["GO now"], ["WELL-KNOWN FACT"]),
    ("change_case:english_capital", {}, ["THIS IS THE END."], ["This is the end.", "ДА И НЕТ"]),
    ("change_case:english_lowercase", {}, ["this is the end."], ["This is the end.", "das ist nicht der hund"]),
    ("punctuation:no_comma", {}, ["No such thing."], ["One, two."]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_an_instruction_is_told_followed_from_not(
    name: str, arguments: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    for response in good:
        assert follows_instruction(response, {"id": name, **arguments}, "strict"), response
    for response in bad:
        assert not follows_instruction(response, {"id": name, **arguments}, "strict"), response


def test_every_instruction_has_a_case() -> None:
    assert {name for name, *_ in CASES} == set(INSTRUCTIONS)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_empty_response_follows_nothing(name: str) -> None:
    arguments = next(arguments for case, arguments, *_ in CASES if case == name)
    assert not follows_instruction("  \n", {"id": name, **arguments}, "loose")


def test_loose_looks_past_the_first_line_the_last_line_and_asterisks() -> None:
    answer = json.dumps([{"id": "startend:quotation"}])
    wrapped = 'Sure, here it is:\n*"All of it."*\nAnything else?'
    assert ifeval(wrapped, answer, {}) == 0.0
    assert ifeval(wrapped, answer, {}, mode="loose") == 1.0
    assert ifeval('Two\nlines before\n"All."', answer, {}, mode="loose") == 0.0


@pytest.mark.parametrize("piece", [".", "\n", "<", "*", "[", " ", "* ", "-", '"', "{", "a.", "P.", ".)"])
def test_a_response_made_to_be_slow_is_judged_at_once(piece: str) -> None:
    text = piece * (20_000 // len(piece)) + "x"  # a pattern that reads the rest at every character would take minutes
    for name, arguments, *_ in CASES:
        assert follows_instruction(text, {"id": name, **arguments}, "strict") in (True, False)


def test_all_instructions_must_be_followed_and_partial_gives_the_share() -> None:
    answer = json.dumps([{"id": "punctuation:no_comma"}, {"id": "keywords:existence", "keywords": ["sun"]}])
    assert ifeval("The sun", answer, {}) == 1.0
    assert ifeval("The sun, again", answer, {}) == 0.0
    assert ifeval("The sun, again", answer, {}, partial=True) == 0.5
    assert ifeval("The sun", answer, {}, partial=True) == 1.0


def test_an_unknown_instruction_is_a_mistake_in_the_data_and_raises() -> None:
    with pytest.raises(ValueError, match="instruction 'keywords:rhyme' is not one of"):
        ifeval("text", '[{"id": "keywords:rhyme"}]', {})
    with pytest.raises(ValueError, match="relation 'around'"):
        ifeval("text", '[{"id": "length_constraints:number_words", "num_words": 1, "relation": "around"}]', {})


def test_the_verifier_is_in_the_table_with_its_options_checked() -> None:
    assert VERIFIERS["ifeval"] is ifeval
    check_verifier("ifeval", {"mode": "loose", "partial": True}, "here")
    with pytest.raises(Exception, match="mode 'lax' is unknown"):
        check_verifier("ifeval", {"mode": "lax"}, "here")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The cat is on the mat and it was not there for long.", "en"),
        ("Die Katze ist auf der Matte und das ist nicht neu.", "de"),
        ("El gato está en la casa y los perros son para ti.", "es"),
        ("Il gatto è sul tappeto e non è per gli altri, ma anche per te.", "it"),
        ("O gato não está em casa, mas os cães são para você e uma vez mais.", "pt"),
        ("Kissa on matolla ja se ei ole uusi, mutta hän oli täällä.", "fi"),
        ("Paka ni mnyama wa nyumbani na watu wengi wanampenda kwa sababu ya uzuri wake.", "sw"),
        ("Con mèo là một con vật của gia đình và không có người nào ghét.", "vi"),
        ("यह किताब मेरी है और मैं इसे पढ़ रहा हूँ।", "hi"),
        ("यो किताब मेरो हो र म यसलाई पढ्छु, तपाईं पनि गर्न सक्नुहुन्छ।", "ne"),
        ("هذا كتاب عن الحياة التي كان في المدينة", "ar"),
        ("این کتاب برای شما است و از آن استفاده می شود", "fa"),
        ("یہ کتاب میری ہے اور میں اس کو پڑھتا ہوں", "ur"),
        ("Это книга, и я не знаю, что они из неё взяли.", "ru"),
        ("Това е книга, която ще се чете от всички и не само.", "bg"),
        ("これは本です。", "ja"),
        ("이것은 책입니다.", "ko"),
        ("ఇది ఒక పుస్తకం", "te"),
    ],
)  # fmt: skip
def test_languages_are_told_apart(text: str, language: str) -> None:
    assert detect_language(text) == language
    assert may_be_language(text, language)
    other = "en" if language != "en" else "de"
    assert not may_be_language(text, other)


def test_a_text_that_tells_nothing_could_be_any_language_of_its_script() -> None:
    assert may_be_language("Ok 42", "de")
    assert may_be_language("42", "hi")
    assert not may_be_language("Ok", "hi")
    with pytest.raises(ValueError, match="language 'xx'"):
        may_be_language("Ok", "xx")
    assert all(len(words.split()) >= 15 for words in STOP_WORDS.values())


@pytest.mark.skipif(not IFEVAL.is_file(), reason="the published data set is not here")
def test_every_published_instruction_can_be_judged() -> None:
    seen = set()
    for line in IFEVAL.read_text().splitlines():
        record = json.loads(line)
        for name, arguments in zip(record["instruction_id_list"], record["kwargs"], strict=True):
            given = {key: value for key, value in arguments.items() if value is not None}
            assert follows_instruction(record["prompt"], {"id": name, **given}, "loose") in (True, False)
            seen.add(name)
    assert seen == set(INSTRUCTIONS)
