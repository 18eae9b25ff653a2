r"""Normal spelling of answers, so that equal answers have equal votes.

`normal_spelling` changes typography and numbers alone; it is for answers of any kind. `math_spelling` is for rows that math-verify judges. It
takes expressions to a normal form (`expressions.py`) and follows the verifier where the spelling has no meaning: names of values
(`x=5`), sets and lists in another order, units, letters of a choice in brackets. Answers that it makes equal are equal for math-verify.

Votes are not grouped by math-verify itself. Its equality is not transitive (10% equals both 10 and 0.1; `(1,2)` and `(2,1)` equal `1,2` and
not each other), so that groups would depend on the order of samples. A hostile answer may also keep it busy for ever, and a deadline would
let the clock decide which answer is chosen.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from burnish.evaluation.expressions import normal_expression
from burnish.rewards.math_answers import both_signs

MAX_CHARS = 1_000
"""Longer answers are compared by their plain spelling."""
MAX_DEPTH = 6
"""Brackets within brackets of a list that are read."""
_TEXT = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)"
_TYPOGRAPHY = (
    (re.compile(r"(?<!\\)\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![A-Za-z])|\\?\$|(?<!\\)\\[()!]"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z]))|~"), " "),
    (re.compile(r"\\?%"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\^\{?\\circ\}?|\\degree(?![A-Za-z])|°"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile("[−–]"), "-"),
)
_WORDS = re.compile(_TEXT + r"\{([^{}]*)\}")
_SPACE = re.compile(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])|\s+")
_ONE_IN_BRACES = re.compile(r"([_^])\{(\w)\}")
_BEHIND_TEXT = re.compile(rf"(.+?)\s*{_TEXT}\{{([^{{}}]*)\}}(?:\^\{{?[23]\}}?)?", re.DOTALL)
_BEHIND_NUMBER = re.compile(r"(.*\d)\s+([A-Za-z]{2}[A-Za-z./^23 ]*)", re.DOTALL)
_WORD_ANSWER = re.compile(r"[A-Za-z]{2,}(?:\s+[A-Za-z]+)*")
_UNIT_WORDS = """
    m cm mm km meter meters metre metres centimeter centimeters millimeter millimeters kilometer kilometers in inch inches ft foot feet yd yard
    yards mi mile miles mph g kg mg gram grams kilogram kilograms lb lbs pound pounds oz ounce ounces ton tons l ml liter liters litre litres
    milliliters gallon gallons cup cups quart quarts s sec second seconds min minute minutes h hr hrs hour hours day days week weeks month months
    year years degree degrees deg c f radian radians dollar dollars cent cents euro euros unit units way ways sq square cu cubic per
"""
"""Units that an answer may have or not. The verifier ignores any text behind a number; millions and times of the day are left alone here."""
_UNITS = frozenset(_UNIT_WORDS.split())
_OR = re.compile(rf"{_TEXT}\{{\s*(?:,?\s*(?:and|or)|,)\s*\}}|(?<=[\s$}}])(?:and|or)(?=[\s$\\])")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+|\d+/0*[1-9]\d*)")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_NAME = re.compile(r"(?:[A-Za-z](?:\([A-Za-z]\))?|\\[a-z]+)(?:_\{?\w\}?)?(?:=|\\in(?![a-z]))")
_RELATIONS = {sign: sign for sign in ("=", "<", ">", "<=", ">=")} | {
    r"\lt": "<",
    r"\gt": ">",
    r"\ne": "!=",
    r"\neq": "!=",
}
_RELATIONS |= {r"\le": "<=", r"\leq": "<=", r"\leqslant": "<=", r"\ge": ">=", r"\geq": ">=", r"\geqslant": ">="}
_MIRRORED = {">": "<", ">=": "<="}
_RELATION = re.compile(r"(\\(?:leqslant|geqslant|leq|geq|neq|le|ge|ne|lt|gt)(?![A-Za-z])|<=|>=|[<>=])")
_MATRIX = re.compile(r"\\begin\{([pbv]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


def normal_spelling(text: str) -> str:
    """Normalise the typography of an answer. Equal numbers in different notations become equal texts."""
    text = _WORDS.sub(r"\1", _typography(text))
    text = re.sub(r"\s+", "", text).rstrip(".")
    fraction = re.fullmatch(r"(-?)\\frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))", text)
    if fraction:
        candidate = f"{fraction[1]}{fraction[2] or fraction[3]}/{fraction[4] or fraction[5]}"
    else:
        candidate = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    # Fraction alone would read 52_8 (base 8) as 528, and spend for ever on 1e999999999.
    if len(candidate) < 100 and _NUMBER.fullmatch(candidate):
        return str(Fraction(candidate))
    return text


@functools.lru_cache(maxsize=8192)
def math_spelling(text: str) -> str:
    """Normalise a mathematical answer. Empty if there is nothing in it."""
    if len(text) > MAX_CHARS:
        return normal_spelling(text)
    text = " ".join(_typography(text).split()).rstrip(". ")
    if whole := _WORDS.fullmatch(text):
        text = whole[1].strip()
    if re.fullmatch(r"\([A-Za-z]\)|[A-Za-z]", text):
        return text.strip("()")
    if _WORD_ANSWER.fullmatch(text) or (whole and not re.search(r"[\\\d]", text)):
        return text.replace(" ", "").lower()
    text = _SPACE.sub(lambda m: f"{m[1]} " if m[1] else "", _OR.sub(",", _without_unit(text)))
    return _list_spelling(text, MAX_DEPTH)


def _without_unit(text: str) -> str:
    found = _BEHIND_TEXT.fullmatch(text) or _BEHIND_NUMBER.fullmatch(text)
    words = re.findall(r"[A-Za-z]+|[^\s/.^23]", found[2].lower()) if found else []
    return found[1] if found and words and _UNITS.issuperset(words) else text


def _typography(text: str) -> str:
    for pattern, replacement in _TYPOGRAPHY:
        text = pattern.sub(replacement, text)
    return text


def _list_spelling(text: str, depth: int) -> str:
    """Return the spelling of one value, or of several in any order, which a set in braces is too."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    if text.startswith(r"\{") and text.endswith(r"\}") and _closes_at_the_end(text[1:]):
        text = text[2:-2]
    signed = [one for part in _split(text, ",") for one in both_signs(part)]
    return ",".join(sorted({_value_spelling(part, depth) for part in signed}))


def _value_spelling(text: str, depth: int) -> str:
    name = _NAME.match(text)
    if name and not _RELATION.search(text[name.end() :]):
        return _list_spelling(text[name.end() :], depth - 1) if depth else text
    if depth and text[:1] in ("(", "[") and text[-1:] in (")", "]") and _closes_at_the_end(text):
        parts = _split(text[1:-1], ",")
        if len(parts) > 1:
            return text[0] + ",".join(_list_spelling(part, depth - 1) for part in parts) + text[-1]
    if depth and len(parts := _split(text, r"\cup")) > 1:
        return r"\cup".join(sorted(_value_spelling(part, depth - 1) for part in parts))
    if depth and (matrix := _MATRIX.fullmatch(text)):
        rows = [row for row in matrix[2].split(r"\\") if row]
        cells = ("&".join(_value_spelling(cell, depth - 1) for cell in row.split("&")) for row in rows)
        return rf"\matrix{{{';'.join(cells)}}}"
    if len(sides := _RELATION.split(text)) > 1:
        return _relation_spelling(sides)
    return _expression_spelling(text)


def _relation_spelling(sides: list[str]) -> str:
    """Return relations with one spelling of each sign. A single one begins with its smaller side, an equation with a fixed one.

    Chains keep their direction, because math-verify tells 1<x<2 from 2>x>1.
    """
    values = [_expression_spelling(one) for one in sides[::2]]
    signs = [_RELATIONS[one] for one in sides[1::2]]
    if len(signs) == 1 and signs[0] in _MIRRORED:
        values, signs = values[::-1], [_MIRRORED[signs[0]]]
    if signs in (["="], ["!="]):
        values.sort()
    return values[0] + "".join(sign + value for sign, value in zip(signs, values[1:], strict=True))


def _expression_spelling(text: str) -> str:
    # Three letters in a row are a word, or points of a figure, rather than a product.
    is_word = re.fullmatch("[A-Za-z]{2,}", text) or re.search(r"(?<![\\A-Za-z])[A-Za-z]{3,}", text)
    found = None if is_word else normal_expression(text)
    if found is not None:
        return found
    return _ONE_IN_BRACES.sub(r"\1\2", normal_spelling(text))


def _split(text: str, separator: str) -> list[str]:
    """Return the parts of a text between separators that are in no brackets."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        depth += (text[place] in "([{") - (text[place] in ")]}")
        if depth == 0 and text.startswith(separator, place):
            parts.append(text[start:place])
            start = place = place + len(separator)
            continue
        place += 1
    return [part for part in (*parts, text[start:]) if part] or [text]


def _closes_at_the_end(text: str) -> bool:
    """Whether the first bracket of a text is closed by its last character. Half-open intervals have two kinds of brackets."""
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False
