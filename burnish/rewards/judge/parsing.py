r"""What a judge said, as a number: nothing is guessed, an answer that does not say is None.

verdict    the last line is a JSON object with a boolean `correct` (the strict form: Kimi k1.5, 2501.12599): 1 or 0
boxed      the number in the last \boxed{...}
score      the number behind the last `Score:`
a regular expression with a group named `score`: its last match
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from statistics import median

PATTERNS = {
    "boxed": r"\\boxed\s*\{\s*(?P<score>[^{}]*?)\s*\}",
    "score": r"(?i:score)\s*[:=]\s*\**\s*(?P<score>[-+]?\d+(?:\.\d+)?)",
}


def check_parser(parser: str) -> None:
    """ValueError for a parser that is neither a known name nor a regular expression with the group."""
    if parser == "verdict" or parser in PATTERNS:
        return
    known = f"verdict, {', '.join(PATTERNS)}, or a regular expression with a group (?P<score>...)"
    try:
        groups = re.compile(parser).groupindex
    except re.error as error:
        raise ValueError(f"parser {parser!r} is no regular expression ({error}); it should be {known}") from error
    if "score" not in groups:
        raise ValueError(f"parser {parser!r} should be {known}")


def parse(text: str, parser: str, low: float = 0.0, high: float = 1.0) -> float | None:
    """A score from 0 (`low`) to 1 (`high`); None where the text gives none, or one outside."""
    if parser == "verdict":
        return _verdict(text)
    matches = list(re.finditer(PATTERNS.get(parser, parser), text))
    said = matches[-1]["score"] if matches else None
    try:
        number = math.nan if said is None else float(said)
    except ValueError:
        return None
    return (number - low) / (high - low) if low <= number <= high else None


def _verdict(text: str) -> float | None:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    try:
        said = json.loads(last)
    except (ValueError, RecursionError):
        return None
    correct = said.get("correct") if isinstance(said, dict) else None
    return float(correct) if isinstance(correct, bool) else None


def settle(votes: Sequence[float]) -> tuple[float, float]:
    """The median of votes (of an odd number of verdicts: what most say), and the share that differs from the commonest vote."""
    commonest = Counter(votes).most_common(1)[0][1]
    return float(median(votes)), 1 - commonest / len(votes)
