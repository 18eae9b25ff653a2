"""`burnish data impact`: the rows of a run's training data whose rewards followed the run's own learning curve.

Every epoch gives a prompt one number, the mean of its samples; a prompt whose numbers move as the average of all
prompts does taught the policy something. Scores and threshold are those of LIMR (Li et al. 2025, 2502.11886).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.output_files import Kept, Report, counted, quiet, write_output
from burnish.data.curation.pass_rates import UNSEEN, Item, read_items, run_sources, scored_items, tally_files
from burnish.data.files import find_files
from burnish.run.durable_files import sums
from burnish.run.run import Visit, read_visits

IMPACT_COLUMN = "impact"
THRESHOLD = 0.6
BINS = (-math.inf, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True)
class Impact:
    """What to select by."""

    threshold: float = THRESHOLD
    by: str | None = None
    """`accuracy` or `reward`; None means accuracy where every visit was judged."""
    epochs: int | None = None
    """How many epochs count; None means all that were finished."""


def select_by_impact(
    run: Path, out: Path, options: Impact, data: Path | None = None, force: bool = False, report: Report = quiet
) -> tuple[dict[str, Any], bool]:
    """Write the rows worth training on, with their score in the column `impact`; the manifest and whether it is new."""
    sources, seed = run_sources(run, data, "--data")
    files = [file for source in sources if source.path is not None for file in find_files(source.path)]
    asked = {"command": "impact", **asdict(options), "source": sums(files), "scores": sums(tally_files(run))}
    return write_output(out, asked, lambda say: _selected(run, sources, seed, options, say), force, report)


def _selected(run: Path, sources: Sequence[Source], seed: int, options: Impact, report: Report) -> Kept:
    curves, by = reward_curves(read_visits(run), options)
    scores, average = impact_scores(curves)
    items = [item for source in sources for item in read_items(source, seed)]
    kept = Kept([])
    for item in counted(items, "rows", report):
        _place(kept, item, scores.get(item.row.id), options.threshold)
    known = sorted(score for score in scores.values() if math.isfinite(score))
    kept.facts = {
        "rows_read": len(items),
        "measured_by": by,
        "epochs": len(average),
        "prompts_scored": len(known),
        "average_curve": average,
        "histogram": _histogram(known),
    }
    return kept


def _place(kept: Kept, item: Item, score: float | None, threshold: float) -> None:
    if score is None:
        kept.drop(UNSEEN, item.where)
    elif not math.isfinite(score):
        kept.drop("no reward in the last epoch to fill a gap with, or nothing was left to learn", item.where)
    elif score < threshold:
        kept.drop(f"impact below {threshold:g}", item.where)
    else:
        kept.records.append({**item.record, IMPACT_COLUMN: score})


def _histogram(scores: Sequence[float]) -> list[list[Any]]:
    """[where a bin begins, how many scores it holds], the lowest first."""
    return [
        [
            low if math.isfinite(low) else None,
            sum(low <= score and (score < high or high == BINS[-1]) for score in scores),
        ]
        for low, high in zip(BINS, BINS[1:], strict=False)
    ]


# --- curves --------------------------------------------------------------------------------------------------------------


def reward_curves(visits: Sequence[Visit], options: Impact) -> tuple[dict[str, list[float]], str]:
    """Of each prompt the mean of its samples in each epoch, nan where it has none; and what it is the mean of.

    The epochs are the visits that every prompt drawn so far has had: an epoch that the run did not finish says nothing
    of the prompts it did not reach.
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
            f"a prompt has a mean reward of {best:g}, and learning impact takes 1 for the best there is: use --by accuracy"
        )
    return curves, by


def _num_epochs(visits: Sequence[Visit], wanted: int | None) -> int:
    seen: dict[str, int] = {}
    for visit in visits:
        seen[visit.prompt_id] = max(seen.get(visit.prompt_id, 0), visit.visit + 1)
    finished = min(seen.values())
    if finished < 2:
        raise UserError("the run has not seen all its prompts twice; a learning curve takes two epochs at least")
    if wanted is not None and not 2 <= wanted <= finished:
        raise UserError(f"--epochs {wanted}: the run has finished {finished}, and a curve takes two at least")
    return wanted or finished


def impact_scores(curves: dict[str, list[float]]) -> tuple[dict[str, float], list[float]]:
    """LIMR's score of each prompt, -inf for one that cannot be scored; and the average curve they are held to."""
    import torch

    from burnish.algorithms.curriculum.prompt_selection import filled_from_next, limr_scores

    rewards = torch.tensor(list(curves.values()), dtype=torch.float64)
    filled = filled_from_next(rewards)
    average = filled[~filled.isnan().any(1)].mean(0)
    return dict(zip(curves, limr_scores(rewards).tolist(), strict=True)), average.tolist()


# --- `burnish data bucket`: how hard each row is, as a column of numbers that `curriculum: easy_to_hard` reads.

DIFFICULTY_COLUMN = "difficulty"
BUCKET = "bucket"


def bucket_rows(
    file: Path,
    out: Path,
    scores: Path,
    buckets: int = 4,
    column: str = DIFFICULTY_COLUMN,
    force: bool = False,
    report: Report = quiet,
) -> tuple[dict[str, Any], bool]:
    """Write the rows that were sampled, each with 1 - its pass rate in `column` and its place among the buckets in `bucket`.

    Buckets are equally large, 0 the easiest (Kimi k1.5, 2501.12599, curriculum sampling).
    """
    if buckets < 2:
        raise UserError(f"--buckets {buckets}: expected 2 or more")
    asked = {"command": "bucket", "buckets": buckets, "column": column, "source": sums(find_files(str(file)))}
    asked["scores"] = sums(tally_files(scores))
    return write_output(out, asked, lambda say: _bucketed(file, scores, buckets, column, say), force, report)


def _bucketed(file: Path, scores: Path, buckets: int, column: str, report: Report) -> Kept:
    import torch

    from burnish.algorithms.curriculum.prompt_selection import difficulty_buckets

    items, tallies = scored_items(file, scores)
    kept = Kept([], facts={"rows_read": len(items)})
    taken = [name for name in (column, BUCKET) if any(name in item.record for item in items)]
    if taken:
        raise UserError(f"{items[0].where}: there is a column {taken[0]!r} already; name another with --column")
    for item, tally in counted(list(zip(items, tallies, strict=True)), "rows", report):
        if tally is None:
            kept.drop(UNSEEN, item.where)
        else:
            kept.records.append({**item.record, column: 1 - tally.rate})
    if len(kept.records) < buckets:
        raise UserError(f"{scores}: {len(kept.records)} rows of {file} were sampled, too few for {buckets} buckets")
    hardness = [record[column] for record in kept.records]
    places = difficulty_buckets(torch.tensor(hardness, dtype=torch.float64), buckets).tolist()
    kept.records = [{**record, BUCKET: place} for record, place in zip(kept.records, places, strict=True)]
    kept.facts["buckets"] = [_described(kept.records, place, column) for place in range(buckets)]
    return kept


def _described(records: list[dict[str, Any]], place: int, column: str) -> dict[str, Any]:
    rates = [1 - record[column] for record in records if record[BUCKET] == place]
    return {"bucket": place, "rows": len(rates), "highest_pass_rate": max(rates), "lowest_pass_rate": min(rates)}
