"""Selects rows by how they were answered: `burnish data filter`, `impact` and `bucket`.

filter   drops rows that are too easy, too hard, mislabelled, contradictory, repeated or of the wrong length. The criteria are applied in one
         fixed order, and a row counts under the first that drops it.
impact   keeps the rows of a run's training data whose rewards followed the run's own learning curve. Every epoch gives a prompt one number,
         the mean of its samples; a prompt whose numbers move like the average of all prompts taught the policy something. Scores and
         threshold are those of LIMR (Li et al. 2025, 2502.11886).
bucket   adds a column with the difficulty of each row, which `curriculum: easy_to_hard` reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.decontamination import comparable_words
from burnish.data.curation.output_files import KeptRows, ProgressReport, no_progress, with_progress, write_output
from burnish.data.curation.pass_rates import (
    NEVER_SAMPLED,
    LocatedRow,
    PassCount,
    completion_pass_counts,
    match_pass_counts,
    pass_count_files,
    read_located_rows,
    rows_with_pass_counts,
    run_sources,
)
from burnish.data.files import find_files
from burnish.data.math_datasets import strip_format_request
from burnish.data.row import Row
from burnish.run.durable_files import checksums
from burnish.run.run import PromptVisit, read_visits

IMPACT_COLUMN = "impact"
IMPACT_THRESHOLD = 0.6
IMPACT_BINS = (-math.inf, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
DIFFICULTY_COLUMN = "difficulty"
BUCKET_COLUMN = "bucket"


# --- filter ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Criteria:
    """The criteria of `burnish data filter`; None applies no criterion."""

    pass_rate: tuple[float, float] | None = None
    """Lowest and highest pass rate, both included (DAPO and Kimi k1.5 drop rows that are never or always right)."""
    agree: int | None = None
    """Fewest samples that must give the row's answer. If none does, the label is probably wrong (2502.03373)."""
    contradictions: bool = False
    """Drop every row whose question is in the file with another answer, too."""
    duplicates: bool = False
    """Keep only the first of rows with the same question."""
    words: tuple[int, int] | None = None
    """Fewest and most words of the question."""
    answer_chars: int | None = None
    """Most characters of the answer; short answers can be checked."""
    keep_unseen: bool = False
    """Keep rows that were never sampled, which pass_rate and agree drop otherwise."""

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
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write the rows that meet the criteria. `guesses` are completions without reasoning; a row with a right guess is dropped."""
    _check_criteria(criteria, scores, guesses)
    given = {"scores": scores, "guesses": guesses}
    used = {name: checksums(pass_count_files(path)) for name, path in given.items() if path is not None}
    asked = {"command": "filter", **asdict(criteria), "source": checksums(find_files(str(file))), **used}
    return write_output(out, asked, lambda say: _filtered(file, criteria, scores, guesses, say), force, report)


def _check_criteria(criteria: Criteria, scores: Path | None, guesses: Path | None) -> None:
    """Raise a UserError for options that would have no effect or make no sense."""
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
            raise UserError(f"{name} {span[0]} {span[1]}: the first number should not be above the second")


def _filtered(
    file: Path, criteria: Criteria, scores: Path | None, guesses: Path | None, report: ProgressReport
) -> KeptRows:
    counts: list[PassCount | None]
    if scores is not None:
        items, counts = rows_with_pass_counts(file, scores)
    else:
        items = read_located_rows(Source(path=str(file)))
        counts = [None] * len(items)
    guessed = (
        [None] * len(items) if guesses is None else match_pass_counts(items, completion_pass_counts(guesses), guesses)
    )
    asked = [comparable_question(item.row) for item in items]
    contradicted = _contradicted_questions(items, asked) if criteria.contradictions else set()
    seen: set[str] = set()
    kept = KeptRows([], facts={"rows_read": len(items)})
    rows = list(zip(items, counts, guessed, asked, strict=True))
    for item, count, guess, question in with_progress(rows, "rows", report):
        reason = next(_drop_reasons(item, count, guess, question, criteria, contradicted, seen), None)
        if reason is not None:
            kept.drop(reason, item.where)
            continue
        seen.add(question)
        kept.records.append(item.record)
    if scores is not None:
        kept.facts["pass_rates"] = pass_rate_histogram([count.rate for count in counts if count is not None])
    return kept


def _drop_reasons(
    item: LocatedRow,
    count: PassCount | None,
    guess: PassCount | None,
    question: str,
    criteria: Criteria,
    contradicted: set[str],
    seen: set[str],
) -> Iterator[str]:
    """The reasons to drop a row, in order."""
    if question in contradicted:
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
    if criteria.needs_scores and count is None and not criteria.keep_unseen:
        yield NEVER_SAMPLED
    if count is not None and criteria.agree is not None and count.right < criteria.agree:
        yield f"fewer than {criteria.agree} samples agree with its answer"
    if count is not None and criteria.pass_rate is not None:
        low_rate, high_rate = criteria.pass_rate
        if count.rate < low_rate:
            yield f"pass rate below {low_rate:g}"
        if count.rate > high_rate:
            yield f"pass rate above {high_rate:g}"


def comparable_question(row: Row) -> str:
    """The question of a row for comparison: its words, without the sentence that asks for a format."""
    question = row.extra.get("question")
    if not isinstance(question, str):
        prompt = row.prompt
        if not isinstance(prompt, str):
            prompt = "\n".join(str(message["content"]) for message in prompt if message["role"] == "user")
        question = strip_format_request(prompt)
    return " ".join(comparable_words(question)) or question.strip()


def _contradicted_questions(items: list[LocatedRow], questions: list[str]) -> set[str]:
    answers: dict[str, set[str]] = {}
    for item, question in zip(items, questions, strict=True):
        answers.setdefault(question, set()).add(str(item.row.answer).strip())
    return {question for question, given in answers.items() if len(given) > 1}


def pass_rate_histogram(rates: list[float]) -> list[int]:
    """Twelve counts of rates: those that are 0, in each tenth between, and 1."""
    counts = [0] * 12
    for rate in rates:
        counts[0 if rate <= 0 else 11 if rate >= 1 else 1 + min(9, int(rate * 10))] += 1
    return counts


# --- impact ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImpactOptions:
    """Options of `burnish data impact`."""

    threshold: float = IMPACT_THRESHOLD
    by: str | None = None
    """`accuracy` or `reward`; None means accuracy if every visit was judged, else reward."""
    epochs: int | None = None
    """Number of epochs to use; None means all finished ones."""


def select_by_impact(
    run: Path,
    out: Path,
    options: ImpactOptions,
    data: Path | None = None,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write the rows above the threshold, with their score in the column `impact`; return the manifest and whether it is new."""
    sources, seed = run_sources(run, data, "--data")
    files = [file for source in sources if source.path is not None for file in find_files(source.path)]
    asked = {
        "command": "impact",
        **asdict(options),
        "source": checksums(files),
        "scores": checksums(pass_count_files(run)),
    }
    return write_output(out, asked, lambda say: _rows_by_impact(run, sources, seed, options, say), force, report)


def _rows_by_impact(
    run: Path, sources: Sequence[Source], seed: int, options: ImpactOptions, report: ProgressReport
) -> KeptRows:
    curves, by = reward_curves(read_visits(run), options)
    scores, average = impact_scores(curves)
    items = [item for source in sources for item in read_located_rows(source, seed)]
    kept = KeptRows([])
    for item in with_progress(items, "rows", report):
        _keep_or_drop(kept, item, scores.get(item.row.id), options.threshold)
    known = sorted(score for score in scores.values() if math.isfinite(score))
    kept.facts = {
        "rows_read": len(items),
        "measured_by": by,
        "epochs": len(average),
        "prompts_scored": len(known),
        "average_curve": average,
        "histogram": _impact_histogram(known),
    }
    return kept


def _keep_or_drop(kept: KeptRows, item: LocatedRow, score: float | None, threshold: float) -> None:
    if score is None:
        kept.drop(NEVER_SAMPLED, item.where)
    elif not math.isfinite(score):
        kept.drop("no reward in the last epoch to fill a gap with, or nothing was left to learn", item.where)
    elif score < threshold:
        kept.drop(f"impact below {threshold:g}", item.where)
    else:
        kept.records.append({**item.record, IMPACT_COLUMN: score})


def _impact_histogram(scores: Sequence[float]) -> list[list[Any]]:
    """[lower bound, number of scores] of each bin, the lowest first."""
    return [
        [
            low if math.isfinite(low) else None,
            sum(low <= score and (score < high or high == IMPACT_BINS[-1]) for score in scores),
        ]
        for low, high in zip(IMPACT_BINS, IMPACT_BINS[1:], strict=False)
    ]


def reward_curves(visits: Sequence[PromptVisit], options: ImpactOptions) -> tuple[dict[str, list[float]], str]:
    """The mean of each prompt's samples in each epoch, nan if it has none; and what it is the mean of (accuracy or reward).

    Only epochs that every drawn prompt has completed are used: an unfinished epoch says nothing about the prompts it did not reach.
    """
    by = options.by or ("accuracy" if all(v.judged == v.scored for v in visits) else "reward")
    num = _num_epochs(visits, options.epochs)
    curves = {visit.prompt_id: [math.nan] * num for visit in visits}
    for visit in visits:
        count, total = (visit.judged, visit.right) if by == "accuracy" else (visit.scored, visit.reward)
        if visit.visit < num and count:
            curves[visit.prompt_id][visit.visit] = total / count
    best = max((value for curve in curves.values() for value in curve if not math.isnan(value)), default=math.nan)
    if math.isnan(best):
        raise UserError(f"no sample has {'an' if by == 'accuracy' else 'a'} {by}, so no prompt has a curve")
    if best > 1:
        raise UserError(
            f"a prompt has a mean reward of {best:g}, but learning impact assumes that 1 is the best reward: use --by accuracy"
        )
    return curves, by


def _num_epochs(visits: Sequence[PromptVisit], wanted: int | None) -> int:
    seen: dict[str, int] = {}
    for visit in visits:
        seen[visit.prompt_id] = max(seen.get(visit.prompt_id, 0), visit.visit + 1)
    finished = min(seen.values())
    if finished < 2:
        raise UserError("the run has not seen all its prompts twice; a learning curve needs at least two epochs")
    if wanted is not None and not 2 <= wanted <= finished:
        raise UserError(f"--epochs {wanted}: the run has finished {finished}, and a curve needs at least two")
    return wanted or finished


def impact_scores(curves: dict[str, list[float]]) -> tuple[dict[str, float], list[float]]:
    """LIMR's score of each prompt, -inf if it cannot be scored; and the average curve that they are compared with."""
    import torch

    from burnish.algorithms.curriculum.prompt_selection import backfill_nan, limr_scores

    rewards = torch.tensor(list(curves.values()), dtype=torch.float64)
    filled = backfill_nan(rewards)
    average = filled[~filled.isnan().any(1)].mean(0)
    return dict(zip(curves, limr_scores(rewards).tolist(), strict=True)), average.tolist()


# --- bucket ----------------------------------------------------------------------------------------------------------


def bucket_rows(
    file: Path,
    out: Path,
    scores: Path,
    buckets: int = 4,
    column: str = DIFFICULTY_COLUMN,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write the rows that were sampled, each with 1 - pass rate in `column` and the number of its bucket in `bucket`.

    Buckets are equally large; 0 is the easiest (Kimi k1.5, 2501.12599, curriculum sampling).
    """
    if buckets < 2:
        raise UserError(f"--buckets {buckets}: expected 2 or more")
    asked = {"command": "bucket", "buckets": buckets, "column": column, "source": checksums(find_files(str(file)))}
    asked["scores"] = checksums(pass_count_files(scores))
    return write_output(out, asked, lambda say: _rows_with_buckets(file, scores, buckets, column, say), force, report)


def _rows_with_buckets(file: Path, scores: Path, buckets: int, column: str, report: ProgressReport) -> KeptRows:
    import torch

    from burnish.algorithms.curriculum.prompt_selection import difficulty_buckets

    items, counts = rows_with_pass_counts(file, scores)
    kept = KeptRows([], facts={"rows_read": len(items)})
    taken = [name for name in (column, BUCKET_COLUMN) if any(name in item.record for item in items)]
    if taken:
        raise UserError(f"{items[0].where}: the column {taken[0]!r} exists already; name another with --column")
    for item, count in with_progress(list(zip(items, counts, strict=True)), "rows", report):
        if count is None:
            kept.drop(NEVER_SAMPLED, item.where)
        else:
            kept.records.append({**item.record, column: 1 - count.rate})
    if len(kept.records) < buckets:
        raise UserError(f"{scores}: {len(kept.records)} rows of {file} were sampled, too few for {buckets} buckets")
    hardness = [record[column] for record in kept.records]
    places = difficulty_buckets(torch.tensor(hardness, dtype=torch.float64), buckets).tolist()
    kept.records = [{**record, BUCKET_COLUMN: place} for record, place in zip(kept.records, places, strict=True)]
    kept.facts["buckets"] = [_bucket_summary(kept.records, place, column) for place in range(buckets)]
    return kept


def _bucket_summary(records: list[dict[str, Any]], place: int, column: str) -> dict[str, Any]:
    rates = [1 - record[column] for record in records if record[BUCKET_COLUMN] == place]
    return {"bucket": place, "rows": len(rates), "highest_pass_rate": max(rates), "lowest_pass_rate": min(rates)}
