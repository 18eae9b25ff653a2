"""A result for people (a line a number, and one table of several data sets) and for machines (plain values for JSON)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from burnish.evaluation.evaluate import WorkStats
from burnish.evaluation.result import Result, TableEntry
from burnish.evaluation.statistics import Estimate

MIN_WIDTH = 11


def result_text(result: Result) -> str:
    """The numbers a person wants, a line each."""
    n = result.n
    rows = [("prompts", f"{result.num_prompts:,}" + (f" x {n} samples" if n > 1 else ""))]
    rows.append((accuracy_name(n), interval_text(result.accuracy) if result.accuracy else NO_ACCURACY))
    rows += [(f"pass@{k}", interval_text(e)) for k, e in result.pass_at.items() if n > 1]
    rows += [(f"maj@{k}", interval_text(e)) for k, e in result.maj_at.items()]
    rows += [(f"best@{k}", f"{interval_text(e)}  by {result.best_by}") for k, e in result.best_at.items()]
    if result.reward is not None and (result.accuracy is None or result.reward.mean != result.accuracy.mean):
        rows.append(("mean reward", interval_text(result.reward)))
    rows += [(f"  {name}", f"{mean:.3f}") for name, mean in result.parts.items()]
    rows.append(("truncated", f"{result.truncated.mean:.1%}"))
    rows += [("in format", f"{result.formatted.mean:.1%}")] if result.formatted else []
    rows.append(("mean length", length_text(result)))
    rows += [("timed out", f"{result.num_timed_out} answers, counted as wrong")] if result.num_timed_out else []
    rows += [("failed", f"{result.num_failed} samples, not counted")] if result.num_failed else []
    return "\n".join([aligned_lines(rows), *(_table_text(column, shares) for column, shares in result.tables.items())])


def _table_text(column: str, shares: Mapping[str, TableEntry]) -> str:
    rows = [(f"  {name}", f"{interval_text(s.accuracy)}  {s.num_questions:,} questions") for name, s in shares.items()]
    return f"by {column}\n{aligned_lines(rows)}"


NO_ACCURACY = "- (the rewards are graded: --correct-at VALUE says from which on an answer counts as right)"


def aligned_lines(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values, aligned."""
    width = max(MIN_WIDTH, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def interval_text(estimate: Estimate) -> str:
    """`0.402  (95% interval 0.372 to 0.433)`."""
    return f"{estimate.mean:.3f}  (95% interval {estimate.low:.3f} to {estimate.high:.3f})"


def accuracy_name(n: int) -> str:
    """What the mean over n samples is called."""
    return f"mean@{n}" if n > 1 else "accuracy"


def length_text(result: Result) -> str:
    """Mean and spread of the lengths."""
    sizes = result.lengths
    parts = [
        f"{sizes.mean:.1f} tokens (median {sizes.median:.0f}, 95% up to {sizes.p95:.0f}, longest {sizes.longest:,}"
    ]
    if sizes.right is not None and sizes.wrong is not None:
        parts.append(f"; right {sizes.right:.0f}, wrong {sizes.wrong:.0f}")
    return "".join(parts) + ")"


def seconds_text(start_s: float | None, work: WorkStats) -> str:
    """Where the time went."""
    start = "" if start_s is None else f"start-up {start_s:.1f} s, "
    rate = work.num_tokens / work.generate_s if work.generate_s else 0.0
    return (
        f"{start}generation {work.generate_s:.1f} s ({work.num_tokens:,} tokens, {rate:,.0f} a second), "
        f"scoring {work.score_s:.1f} s more"
    )


def summary_table(results: Mapping[str, Result]) -> str:
    """Several data sets in one table; what not all of them have is `-`."""
    head = ["", "prompts", "n", "mean@n", "95% interval", "pass@n", "maj@n", "truncated", "in format", "length"]
    body = [head, *(_summary_row(name, result) for name, result in results.items())]
    widths = [max(len(row[i]) for row in body) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in body
    )


def _summary_row(name: str, result: Result) -> list[str]:
    n, accuracy = result.n, result.accuracy
    passed, voted = result.pass_at.get(n) if n > 1 else None, result.maj_at.get(n)
    return [
        name,
        f"{result.num_prompts:,}",
        str(n),
        f"{accuracy.mean:.3f}" if accuracy else "-",
        f"{accuracy.low:.3f} to {accuracy.high:.3f}" if accuracy else "-",
        f"{passed.mean:.3f}" if passed else "-",
        f"{voted.mean:.3f}" if voted else "-",
        f"{result.truncated.mean:.1%}",
        f"{result.formatted.mean:.1%}" if result.formatted else "-",
        f"{result.lengths.mean:.0f}",
    ]


def result_json(result: Result) -> dict[str, Any]:
    """The numbers as plain values; an estimate is `{"value", "low", "high"}`."""

    def each(estimates: Mapping[int, Estimate], name: str) -> dict[str, Any]:
        return {f"{name}@{k}": estimate_json(e) for k, e in estimates.items()}

    accuracy = result.accuracy
    return {
        "accuracy": None if accuracy is None else accuracy.mean,
        "ci": None if accuracy is None else [accuracy.low, accuracy.high],
        "num_prompts": result.num_prompts,
        "num_samples": result.num_samples,
        "n": result.n,
        "metrics": {
            **({f"mean@{result.n}": estimate_json(accuracy)} if accuracy else {}),
            **each(result.pass_at, "pass"),
            **each(result.maj_at, "maj"),
            **each(result.best_at, "best"),
        },
        "best_by": result.best_by if result.best_at else None,
        "reward": None if result.reward is None else estimate_json(result.reward),
        "parts": result.parts,
        "truncated": estimate_json(result.truncated),
        "formatted": None if result.formatted is None else estimate_json(result.formatted),
        "length": asdict(result.lengths),
        "failed": result.num_failed,
        "timed_out": result.num_timed_out,
        "by": {
            column: {
                name: {"num_questions": s.num_questions, **estimate_json(s.accuracy)} for name, s in shares.items()
            }
            for column, shares in result.tables.items()
        },
    }


def estimate_json(estimate: Estimate) -> dict[str, float]:
    """An estimate for JSON."""
    return {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
