"""Reverse a text, character by character. The reward is graded: the similarity with the right answer, as in verifiers' reverse-text.

With `words` a chat model is asked in a sentence to reverse a few words, and answers inside `<reversed_text>`. Without words `abcd>` is
answered by `dcba`, for small models from nothing. A hash of the text decides the split.
"""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, first_on_split

REVERSE_TEXT = "reverse_text"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = (
    "amber apple arch autumn basket bell bird blanket boat bread bridge bright brown candle carpet castle cedar chair clock cloud coast coffee copper "
    "corner cotton cradle dance dawn door dream dust eagle early earth echo edge ember evening falls feather field fire flower forest frost garden "
    "gentle glass gold grain green harbour hill honey hollow house island ivory journey kettle kitchen ladder lake lamp leaf letter lights linen little "
    "long market meadow melody mirror moon morning mountain narrow night north ocean old olive open orchard paper path pebble pine quiet rain "
    "river road roof rose sail sand shadow shore silver sky slow small snow song spring star stone storm story stream summer sun table thread "
    "tower train travel tree valley village violet voice walk warm water wave west whisper wide wild wind window winter wood yellow"
)
WORDS = VOCABULARY.split()
PROMPT = (
    "Reverse the text below character by character: the last character comes first. Put the reversed text, and nothing else, between "
    "<reversed_text> and </reversed_text>.\n\n{text}"
)
MAX_LENGTH_RATIO = 4
"""An answer this many times as long as the right one scores 0, without a comparison that could take seconds."""


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """The similarity with the reversed text (`difflib.SequenceMatcher`), from 0 to 1. Without the tags an answer in words scores 0."""
    written = completion.strip()
    if extra["words"]:
        tagged = re.findall(r"<reversed_text>(.*?)</reversed_text>", completion, re.DOTALL)
        if not tagged:
            return 0.0
        written = str(tagged[-1]).strip()
    if len(written) > MAX_LENGTH_RATIO * len(answer):
        return 0.0
    return SequenceMatcher(None, written, answer).ratio()


class ReverseText:
    """Texts of `min_length` to `max_length` words, or of that many letters without `words`. Every length is equally frequent."""

    name = REVERSE_TEXT
    score = staticmethod(score)

    def __init__(
        self, seed: int, words: bool = True, min_length: int | None = None, max_length: int | None = None
    ) -> None:
        if not isinstance(words, bool):
            raise UserError(f"{REVERSE_TEXT}: words should be true or false, got {words!r}")
        self.min_length = min_length if min_length is not None else (3 if words else 4)
        self.max_length = max_length if max_length is not None else (12 if words else 7)
        check_span(REVERSE_TEXT, "length", self.min_length, self.max_length, least=1, most=64)
        self.seed, self.words = seed, words

    @property
    def alphabet(self) -> str | None:
        return None if self.words else LETTERS + ">"

    def row(self, split: str, index: int) -> Row:
        """The index-th text of a split; extra["length"] is its number of words or letters."""
        return self._row(split, f"{REVERSE_TEXT}/{split}/{index}", self.seed, REVERSE_TEXT, split, index)

    def demonstrations(self, num: int = 2000, seed: int = 0, flawed: float = 0.0) -> list[dict[str, Any]]:
        """Answers to rows of the train split. A share `flawed` of them repeats the text as it is, without reversing it."""
        if not 0 <= flawed <= 1:
            raise UserError(f"{REVERSE_TEXT}: flawed should be a share from 0 to 1, got {flawed!r}")
        rows = []
        for index in range(num):
            row = self._row("train", "", seed, REVERSE_TEXT, "demonstrations", index)
            is_flawed = Dice(seed, REVERSE_TEXT, "flaws", index).unit() < flawed
            answer = row.answer[::-1] if is_flawed else row.answer
            rows.append({"prompt": row.prompt, "completion": self._written(answer)})
        return rows

    def _written(self, answer: str) -> str:
        return f"<reversed_text>{answer}</reversed_text>" if self.words else answer

    def _row(self, split: str, name: str, *key: int | str) -> Row:
        def propose(attempt: int) -> tuple[str, tuple[str, int]]:
            dice = Dice(*key, attempt)
            length = dice.between(self.min_length, self.max_length)
            pool = WORDS if self.words else LETTERS
            text = (" " if self.words else "").join(pool[dice.between(0, len(pool) - 1)] for _ in range(length))
            return f"{REVERSE_TEXT} {text}", (text, length)

        text, length = first_on_split(split, propose, REVERSE_TEXT)
        prompt = PROMPT.replace("{text}", text) if self.words else f"{text}>"
        extra = {"task": REVERSE_TEXT, "length": length, "words": self.words}
        return Row(name, prompt, REVERSE_TEXT, text[::-1], extra)
