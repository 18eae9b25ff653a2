"""`burnish data questions`: preference pairs become questions for a judge, two for each pair (burnish.data.pair_questions)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.output_files import KeptRows, ProgressReport, no_progress, write_output
from burnish.data.pair_questions import PAIR_TEMPLATE, check_template, question_rows
from burnish.data.preference_pairs import pair_texts
from burnish.run.durable_files import sha256


def write_questions(
    source: Path, out: Path, template: str = PAIR_TEMPLATE, force: bool = False, report: ProgressReport = no_progress
) -> tuple[dict[str, Any], bool]:
    """Write the questions of a file of pairs. Returns the manifest, and whether anything was written."""
    try:
        check_template(template)
    except ValueError as error:
        raise UserError(f"--template: {error}") from error
    if not source.is_file():
        raise UserError(f"{source}: no such file of preference pairs (rows of prompt, chosen and rejected)")
    digest = hashlib.sha256(template.encode()).hexdigest()
    asked = {"command": "questions", "template": digest, "source": source.name, "source_sha256": sha256(source)}
    return write_output(out, asked, lambda say: _questions(source, template, say), force, report)


def _questions(source: Path, template: str, report: ProgressReport) -> KeptRows:
    kept = KeptRows([])
    for where, pair, question, chosen, rejected in _pairs(source):
        if chosen.strip() == rejected.strip():
            kept.drop("the same answer twice", where)
        else:
            kept.records += question_rows(pair, question, chosen, rejected, template)
    kept.facts = {"pairs": len(kept.records) // 2}
    report(f"{kept.facts['pairs']:,} pairs in both orders")
    return kept


def _pairs(source: Path) -> Iterator[tuple[str, str, str, str, str]]:
    return pair_texts([Source(path=str(source))], None)
