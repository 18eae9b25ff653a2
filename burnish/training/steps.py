"""Where the steps of an answer end: what a process reward model is read at."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from burnish.models.tokenizer import Tokenizer


def step_ends(
    tokens: Sequence[int], written: Sequence[bool], tokenizer: Tokenizer, delimiter: str, last: int
) -> list[int]:
    """Positions at which the steps of what was `written` end, in order: one at least, and the last is `last`.

    A step ends with the token that completes the delimiter, which may be the name of a special token. Steps without text
    are none: delimiters in a row end one step, and what follows the last one belongs to the step before if it is blank.
    """
    where = [position for position, is_written in enumerate(written) if is_written]
    named = tokenizer.pieces([tokens[position] for position in where], skip_special=False)
    is_text = [not tokenizer.is_special(tokens[position]) for position in where]
    # A special token's name is not text, and a delimiter that is a part of it is not there.
    pieces = [piece if real or piece == delimiter else "" for piece, real in zip(named, is_text, strict=True)]
    stops, text = list(accumulate(map(len, pieces))), "".join(pieces)
    ends: list[int] = []
    start = 0
    while (at := text.find(delimiter, start)) >= 0:
        end = where[bisect_left(stops, at + len(delimiter))]
        if text[start:at].strip() and end not in ends:
            ends.append(end)
        start = at + len(delimiter)
    if not text[start:].strip():
        ends = ends[:-1]
    return [end for end in ends if end < last] + [last]
