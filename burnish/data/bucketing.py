"""`burnish data bucket`: how hard each row is, as a column of numbers that `curriculum: easy_to_hard` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.files import find_files
from burnish.data.outputs import Kept, Report, counted, quiet, write_output
from burnish.data.tallies import UNSEEN, scored_items, tally_files
from burnish.run.checksums import sums

COLUMN = "difficulty"
BUCKET = "bucket"


def bucket_rows(
    file: Path,
    out: Path,
    scores: Path,
    buckets: int = 4,
    column: str = COLUMN,
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

    from burnish.algorithms.curriculum import difficulty_buckets

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
