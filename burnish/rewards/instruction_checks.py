"""The `ifeval` verifier: instructions that a program can check, such as "at least 300 words" or "no commas".

These are the 25 instruction types of IFEval (Zhou et al. 2023, 2311.07911). Each check is a function of the response and the
instruction's arguments. Mode `strict` checks the response as it is. Mode `loose` also accepts it without its first line, without its
last line and without asterisks, because an answer that opens with "Sure, here it is:" may still follow the instruction.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from burnish.rewards.language_id import may_be_language
from burnish.rewards.score_types import require_answer

InstructionCheck = Callable[..., bool]
MODES = ("strict", "loose")
CONSTRAINED_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
ABBREVIATION = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|Inc|Ltd|No|e\.g|i\.e|a\.m|p\.m|U\.S|[A-Z])\.(?=\s+\S)"
)
# The pattern matches only at the start of a run of marks and stays on one line. Otherwise an answer of nothing but dots would cost one
# pass per dot.
SENTENCE_END = re.compile(r"(?<![.!?。！？।])[.!?。！？।]++[\"'”’)\]*]*+(?:\s+|$)")
RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, wanted: count >= wanted,
    "less than": lambda count, wanted: count < wanted,
}


def compare_count(count: int, relation: str, wanted: int) -> bool:
    """Whether a count is in the given relation to the wanted count."""
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r} is not one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, int(wanted))


def count_sentences(text: str) -> int:
    """Number of sentences: pieces that end in . ! or ? (abbreviations excepted), and lines that end without a mark."""
    plain = ABBREVIATION.sub(lambda found: found[0].replace(".", ""), text)
    pieces = (piece for line in plain.split("\n") for piece in SENTENCE_END.split(line))
    return sum(1 for piece in pieces if re.search(r"\w", piece))


def split_at_dividers(text: str, divider: str) -> list[str] | None:
    """The parts of a text between dividers. Empty parts at either end are dropped; an empty part inside gives None."""
    parts = [part.strip() for part in re.split(divider, text)]
    parts = parts[1:] if parts and not parts[0] else parts
    parts = parts[:-1] if parts and not parts[-1] else parts
    return parts if all(parts) else None


# --- the checks ------------------------------------------------------------------------------------------------------


def existence(text: str, keywords: list[str]) -> bool:
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return compare_count(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return compare_count(text.lower().count(letter.lower()), let_relation, let_frequency)


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return compare_count(count_sentences(text), relation, num_sentences)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return compare_count(len(re.findall(r"\w+", text)), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    parts = split_at_dividers(text, r"\s?\*\*\*\s?")
    return parts is not None and len(parts) == num_paragraphs


def nth_paragraph_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\n", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= len(paragraphs):
        return False
    opening = re.search(r"[\w'’-]+", paragraphs[nth_paragraph - 1].split()[0])
    return opening is not None and opening[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]]+\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    letters = [letter for letter in postscript_marker if letter.isalpha()]
    pattern = r"\s?".join(rf"{letter}\." for letter in letters[:-1]) + rf"\s?{letters[-1]}"
    if postscript_marker.endswith("."):
        pattern += r"\."
    return re.search(rf"^[^\w\n]*{pattern}", text, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)(?!-).+$", text, re.MULTILINE)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(option in text for option in CONSTRAINED_OPTIONS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    bold = re.findall(r"\*\*([^\n*]*)\*\*", text)
    italic = re.findall(r"\*([^\n*]*)\*", re.sub(r"\*\*[^\n*]*\*\*", "", text))
    return sum(1 for inside in bold + italic if inside.strip()) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    inside = re.sub(r"^```(?:json|JSON|Json)?|```$", "", text.strip()).strip()
    try:
        json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(inside.strip() for inside in re.findall(r"<<([^\n<>]+)>>", text))


def two_responses(text: str) -> bool:
    parts = split_at_dividers(text, r"\*{6}")
    return parts is not None and len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    inside = text.strip()
    return len(inside) > 1 and inside.startswith('"') and inside.endswith('"')


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    words = re.findall(r"[^\W_][\w'’-]*", text)
    return compare_count(sum(1 for word in words if word.isupper()), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and may_be_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and may_be_language(text, "en")


def response_language(text: str, language: str) -> bool:
    return may_be_language(text, language)


def no_comma(text: str) -> bool:
    return not re.search("[,，、،]", text)


INSTRUCTIONS: dict[str, InstructionCheck] = {
    "keywords:existence": existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


# --- the verifier ----------------------------------------------------------------------------------------------------


def follows_instruction(response: str, instruction: Mapping[str, Any], mode: str) -> bool:
    """Whether a response follows one instruction (its `id` and arguments). An empty response follows none."""
    arguments = {key: value for key, value in instruction.items() if key != "id"}
    check = INSTRUCTIONS.get(instruction["id"])
    if check is None:
        raise ValueError(f"instruction {instruction['id']!r} is not one of {', '.join(INSTRUCTIONS)}")
    texts = loose_variants(response) if mode == "loose" else [response]
    return any(text.strip() and check(text, **arguments) for text in texts)


def loose_variants(response: str) -> list[str]:
    """The eight variants of a response that mode `loose` checks."""
    lines = response.split("\n")
    cuts = ("\n".join(lines[first:last]).strip() for first, last in itertools.product((0, 1), (len(lines), -1)))
    return [form for text in cuts for form in (text, text.replace("*", ""))]


def ifeval(
    completion: str, answer: Any, extra: Mapping[str, Any], *, mode: str = "strict", partial: bool = False
) -> float:
    """1 if all instructions are followed, else 0. `partial` gives the fraction that is followed. The answer is a JSON list of instructions."""
    require_answer(answer)
    instructions = json.loads(answer) if isinstance(answer, str) else answer
    if not instructions:
        raise ValueError("no instructions to follow")
    followed = [follows_instruction(completion, instruction, mode) for instruction in instructions]
    return sum(followed) / len(followed) if partial else float(all(followed))
