"""`burnish data filter`: rows that are too easy, too hard, mislabelled, contradictory, repeated or of the wrong length go.

Every criterion that is asked for is applied in one fixed order, and a row is counted under the first that drops it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.decontamination import words_of
from burnish.data.curation.output_files import Kept, Report, counted, quiet, write_output
from burnish.data.curation.pass_rates import (
    UNSEEN,
    Item,
    Tally,
    completion_tallies,
    matched,
    read_items,
    scored_items,
    tally_files,
)
from burnish.data.files import find_files
from burnish.data.published_sets import bare
from burnish.data.row import Row
from burnish.run.durable_files import sums


@dataclass(frozen=True)
class Criteria:
    """What a row must be like; None asks for nothing."""

    pass_rate: tuple[float, float] | None = None
    """Lowest and highest share of right answers, both included (DAPO and Kimi k1.5 leave out what is never or always right)."""
    agree: int | None = None
    """So many samples at least must give the row's answer: none says that the label is probably wrong (2502.03373)."""
    contradictions: bool = False
    """Drop every row whose question stands in the file with another answer."""
    duplicates: bool = False
    """Of rows that ask the same keep the first."""
    words: tuple[int, int] | None = None
    """Fewest and most words of the question."""
    answer_chars: int | None = None
    """Most characters of the answer: short ones can be checked."""
    keep_unseen: bool = False
    """Keep rows that were never sampled, which are dropped otherwise where pass_rate or agree asks."""

    @property
    def needs_scores(self) -> bool:
        return self.pass_rate is not None or self.agree is not None


def filter_rows(
    file: Path,
    out: Path,
    criteria: Criteria,
    scores: Path | None = None,
    guesses: Path | None = None,
    force: bool = False,
    report: Report = quiet,
) -> tuple[dict[str, Any], bool]:
    """Write the rows that meet the criteria; `guesses` are completions without reasoning, none of which may be right."""
    _check(criteria, scores, guesses)
    given = {"scores": scores, "guesses": guesses}
    used = {name: sums(tally_files(path)) for name, path in given.items() if path is not None}
    asked = {"command": "filter", **asdict(criteria), "source": sums(find_files(str(file))), **used}
    return write_output(out, asked, lambda say: _filtered(file, criteria, scores, guesses, say), force, report)


def _check(criteria: Criteria, scores: Path | None, guesses: Path | None) -> None:
    """Refuse what would have no effect."""
    if criteria.needs_scores and scores is None:
        raise UserError("--pass-rate and --agree need --scores: a run, or completions of `burnish eval --n K`")
    if scores is not None and not criteria.needs_scores:
        raise UserError("--scores has no effect without --pass-rate or --agree")
    if criteria.keep_unseen and not criteria.needs_scores:
        raise UserError("--keep-unseen has no effect without --pass-rate or --agree")
    asked = [value for name, value in asdict(criteria).items() if name != "keep_unseen"]
    if guesses is None and all(value is None or value is False for value in asked):
        raise UserError("nothing to filter by; see `burnish data filter --help`")
    if criteria.agree is not None and criteria.agree < 1:
        raise UserError(f"--agree {criteria.agree}: expected 1 or more")
    if criteria.pass_rate is not None and not all(0 <= rate <= 1 for rate in criteria.pass_rate):
        raise UserError(f"--pass-rate {criteria.pass_rate[0]:g} {criteria.pass_rate[1]:g}: expected shares in 0..1")
    for name, span in (("--pass-rate", criteria.pass_rate), ("--words", criteria.words)):
        if span is not None and span[0] > span[1]:
            raise UserError(f"{name} {span[0]} {span[1]}: the first is the lowest, the second the highest")


def _filtered(file: Path, criteria: Criteria, scores: Path | None, guesses: Path | None, report: Report) -> Kept:
    tallies: list[Tally | None]
    if scores is not None:
        items, tallies = scored_items(file, scores)
    else:
        items = read_items(Source(path=str(file)))
        tallies = [None] * len(items)
    guessed = [None] * len(items) if guesses is None else matched(items, completion_tallies(guesses), guesses)
    asked = [question_of(item.row) for item in items]
    disputed = _disputed(items, asked) if criteria.contradictions else set()
    seen: set[str] = set()
    kept = Kept([], facts={"rows_read": len(items)})
    rows = list(zip(items, tallies, guessed, asked, strict=True))
    for item, tally, guess, question in counted(rows, "rows", report):
        reason = next(_reasons(item, tally, guess, question, criteria, disputed, seen), None)
        if reason is not None:
            kept.drop(reason, item.where)
            continue
        seen.add(question)
        kept.records.append(item.record)
    if scores is not None:
        kept.facts["pass_rates"] = histogram([tally.rate for tally in tallies if tally is not None])
    return kept


def _reasons(
    item: Item,
    tally: Tally | None,
    guess: Tally | None,
    question: str,
    criteria: Criteria,
    disputed: set[str],
    seen: set[str],
) -> Iterator[str]:
    """Why a row goes, the first reason first."""
    if question in disputed:
        yield "its question has several answers"
    if criteria.duplicates and question in seen:
        yield "repeated question"
    if criteria.words is not None:
        low, high = criteria.words
        if not low <= len(question.split()) <= high:
            yield f"question not of {low} to {high} words"
    if criteria.answer_chars is not None and len(str(item.row.answer)) > criteria.answer_chars:
        yield f"answer longer than {criteria.answer_chars} characters"
    if guess is not None and guess.right > 0:
        yield "guessed without reasoning"
    if criteria.needs_scores and tally is None and not criteria.keep_unseen:
        yield UNSEEN
    if tally is not None and criteria.agree is not None and tally.right < criteria.agree:
        yield f"fewer than {criteria.agree} samples agree with its answer"
    if tally is not None and criteria.pass_rate is not None:
        low_rate, high_rate = criteria.pass_rate
        if tally.rate < low_rate:
            yield f"pass rate below {low_rate:g}"
        if tally.rate > high_rate:
            yield f"pass rate above {high_rate:g}"


def question_of(row: Row) -> str:
    """The question of a row as it is compared: its words, without what asks for a format."""
    stated = row.extra.get("question")
    if not isinstance(stated, str):
        said = row.prompt
        if not isinstance(said, str):
            said = "\n".join(str(message["content"]) for message in said if message["role"] == "user")
        stated = bare(said)
    return " ".join(words_of(stated)) or stated.strip()


def _disputed(items: list[Item], questions: list[str]) -> set[str]:
    answers: dict[str, set[str]] = {}
    for item, question in zip(items, questions, strict=True):
        answers.setdefault(question, set()).add(str(item.row.answer).strip())
    return {question for question, given in answers.items() if len(given) > 1}


def histogram(rates: list[float]) -> list[int]:
    """How many rates are 0, in each tenth between, and 1: twelve counts."""
    counts = [0] * 12
    for rate in rates:
        counts[0 if rate <= 0 else 11 if rate >= 1 else 1 + min(9, int(rate * 10))] += 1
    return counts
