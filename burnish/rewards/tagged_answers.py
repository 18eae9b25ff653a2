r"""Rewards of agents that think, search and answer in tags: Search-R1, ReSearch and Table-R1.

A completion is everything behind the prompt, with what the tools said. The prompt's own example of an answer is not in it, so one pair of
`<answer>` tags is enough. (Search-R1's scorer, which reads the prompt too, wants two.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from burnish.rewards.answer_texts import answer_block, has_words, last_boxed, normalized_words, token_f1
from burnish.rewards.score_types import PartResult, require_answer

SEARCH_R1_SCORES = ("em", "format")
RIGHT, RIGHT_ILL_FORMED, WELL_FORMED, RETRIEVED, ANSWERED = 1.0, 0.8, 0.2, 0.1, 0.1
"""The scores of Search-R1's format variant. RETRIEVED is added to WELL_FORMED."""
RESEARCH_FORMAT = 0.1
_TAG = re.compile(r"<(/?)(think|search|information|result|answer)>")


def accepted_answers(answer: Any) -> list[list[str]]:
    """The words of each accepted answer."""
    require_answer(answer)
    return [normalized_words(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])]


def sections(text: str) -> list[tuple[str, str]] | None:
    """The tags of a text with their contents, in order. None if tags are nested or open, or if words stand between them."""
    found: list[tuple[str, str]] = []
    end, opened = 0, None
    for tag in _TAG.finditer(text):
        between, end = text[end : tag.start()], tag.end()
        if opened is None:
            if tag[1] or between.strip():
                return None
            opened = tag[2]
        else:
            if not tag[1] or tag[2] != opened:
                return None
            found.append((opened, between))
            opened = None
    return None if opened is not None or text[end:].strip() else found


def is_search_dialogue(text: str, observation: str) -> bool:
    """Whether a text is (think, search, observation)*, think, answer, with nothing between the tags."""
    found = sections(text)
    if found is None:
        return False
    names = [name for name, _ in found]
    rounds, rest = divmod(len(names), 3)
    return rest == 2 and names == ["think", "search", observation] * rounds + ["think", "answer"]


def search_r1(completion: str, answer: Any, extra: Mapping[str, Any], *, scores: str = "em") -> PartResult:
    """Search-R1's reward (2503.09516): exact match of the last `<answer>` after SQuAD's normalisation.

    em: 1 or 0. format: 1 right and well formed, 0.8 right and ill formed, 0.2 well formed (0.3 if an accepted answer was in the
    information), 0.1 an answer alone, else 0. Well formed: thoughts, searches and information in turn, then thoughts and the answer.
    """
    accepted = accepted_answers(answer)
    block = answer_block(completion)
    is_right = block is not None and normalized_words(block) in accepted
    if scores == "em":
        return PartResult(float(is_right), float(is_right))
    is_well_formed = is_search_dialogue(completion, "information")
    if is_right:
        return PartResult(RIGHT if is_well_formed else RIGHT_ILL_FORMED, 1.0)
    if is_well_formed:
        read = [normalized_words(text) for name, text in sections(completion) or [] if name == "information"]
        was_retrieved = any(has_words(words, expected) for words in read for expected in accepted)
        return PartResult(WELL_FORMED + RETRIEVED * was_retrieved, 0.0)
    return PartResult(ANSWERED if block is not None else 0.0, 0.0)


def research(completion: str, answer: Any, extra: Mapping[str, Any]) -> PartResult:
    r"""ReSearch's reward (2503.19470): word F1 of the `\boxed{}` in the answer; 0.1 if it is 0 and the form is right; 0 in another form.

    The form: thoughts, searches and results in turn, then thoughts and an answer with `\boxed{}`. Accuracy is the exact match.
    """
    accepted = accepted_answers(answer)
    boxed = last_boxed(answer_block(completion) or "")
    if boxed is None or not is_search_dialogue(completion, "result"):
        return PartResult(0.0, 0.0)
    words = normalized_words(boxed)
    f1 = max(token_f1(words, expected) for expected in accepted)
    return PartResult(f1 or RESEARCH_FORMAT, float(words in accepted))


def table_r1(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """Table-R1's accuracy (2505.23621): 1 if `<answer>{"answer": [...]}</answer>` lists exactly the expected answers, in any order.

    Its reward of the format is the part `think_format`.
    """
    expected = accepted_answers(answer)
    try:
        written = json.loads(answer_block(completion) or "")
    except (ValueError, RecursionError):
        return 0.0
    listed = written.get("answer") if isinstance(written, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, str | int | float) for one in listed):
        return 0.0
    return float(sorted(normalized_words(str(one)) for one in listed) == sorted(expected))
