"""Steps of an answer: where a model that scores steps is read, and the delimiter that its directory names.

Training and scoring both take their positions from `scored_positions`, so that a model is read exactly where it was trained.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from burnish.config.errors import UserError
from burnish.config.yaml_text import read_json_object
from burnish.models.tokenizer import Tokenizer
from burnish.run.checkpoint.snapshot import BytesFile

STEP_FILE = "steps.json"
"""Next to the weights of a model that was trained to score steps: the delimiter of its steps."""


def scored_positions(tokens: Sequence[int], written: Sequence[bool], tokenizer: Tokenizer, delimiter: str) -> list[int]:
    """Positions at which the steps of an answer are scored, ascending; at least one.

    `written` marks the tokens of the answer. A step is scored at the token that completes its delimiter. The last step is scored at the
    answer's last token that is not padding.
    """
    pad, end = tokenizer.pad_id, len(tokens) - 1
    answer = (i for i in range(end, -1, -1) if written[i] and tokens[i] != pad)
    last = next(answer, None)
    if last is None:  # the answer is nothing but an end token that also pads
        last = next((i for i in range(end, -1, -1) if tokens[i] != pad), 0)
    return step_ends(tokens, written, tokenizer, delimiter, last)


def step_ends(
    tokens: Sequence[int], written: Sequence[bool], tokenizer: Tokenizer, delimiter: str, last: int
) -> list[int]:
    """Positions where the steps of the `written` tokens end, ascending; at least one, and the last is `last`.

    A step ends with the token that completes the delimiter, which may be the name of a special token. A step needs text: several
    delimiters in a row end one step, and blank text after the last delimiter belongs to the step before it.
    """
    where = [position for position, is_written in enumerate(written) if is_written]
    named = tokenizer.pieces([tokens[position] for position in where], skip_special=False)
    is_text = [not tokenizer.is_special(tokens[position]) for position in where]
    # A special token's name is not text: a delimiter inside it does not count.
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


def delimiter_file(delimiter: str) -> BytesFile:
    """The file that names the delimiter in the directory of a model."""
    return BytesFile(STEP_FILE, json.dumps({"delimiter": delimiter}, ensure_ascii=False) + "\n")


def stored_delimiter(directory: Path) -> str | None:
    """The delimiter that a model was trained with; None for a model that was not trained to score steps."""
    path = directory / STEP_FILE
    if not path.is_file():
        return None
    delimiter = read_json_object(path).get("delimiter")
    if not isinstance(delimiter, str) or not delimiter:
        raise UserError(f"{path}: delimiter should be a text, got {delimiter!r}")
    return delimiter


def delimiter_of(directory: Path, given: str | None) -> str | None:
    """The delimiter to read a model with: the one that it was trained with, or the given one. Two that differ are an error."""
    stored = stored_delimiter(directory)
    if stored is not None and given is not None and given != stored:
        raise UserError(
            f"{directory} was trained to score steps that end with {stored!r}, and delimiter is {given!r}: its scores would be read where it "
            "has learnt nothing. Remove the option delimiter, or give the same one"
        )
    return given if stored is None else stored
