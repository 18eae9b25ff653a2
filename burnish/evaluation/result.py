"""The result of an evaluation: every estimate with its interval, computed from the completions alone, as text and as JSON.

Rows are plain dictionaries (`burnish.evaluation.completions`), so a result can be computed again from the file. Samples
whose scoring failed count in `num_failed` and in no score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from burnish.evaluation.episode_results import (
    EpisodeResult,
    episode_lines,
    episodes_json,
    player_table,
    summarise_episodes,
)
from burnish.evaluation.instruction_results import (
    InstructionResult,
    instruction_estimates,
    instructions_json,
    summarise_instructions,
)
from burnish.evaluation.search_results import SearchResult, search_lines, searches_json, summarise_searches
from burnish.evaluation.statistics import (
    Estimate,
    best_at_k,
    clustered_interval,
    maj_at_k,
    mean_at_k,
    mean_pass_at_k,
    powers_up_to,
)

Row = dict[str, Any]
MAX_TABLE_ROWS = 64
"""A column with more values than this gets no table."""
MIN_WIDTH = 11
CORRECT_VOTE = ("right",)
"""The common vote of all right answers, whatever their spelling. No answer text equals it."""
NO_ACCURACY = "- (the rewards are graded: --correct-at VALUE says from which on an answer counts as right)"
NO_SUCCESS = "- (the environment does not say which episodes succeeded)"


@dataclass(frozen=True)
class Lengths:
    """Lengths of the completions in tokens."""

    mean: float
    median: float
    p95: float
    longest: int
    right: float | None
    """Mean length of the right completions."""
    wrong: float | None


@dataclass(frozen=True)
class TableEntry:
    """One line of a table by subject."""

    num_questions: int
    accuracy: Estimate


@dataclass(frozen=True)
class Result:
    """The summary of an evaluation."""

    num_prompts: int
    num_samples: int
    n: int
    """Samples a question."""
    accuracy: Estimate | None
    """mean@n; None if no sample has an accuracy, because all scoring failed or the reward is graded."""
    reward: Estimate | None
    pass_at: dict[int, Estimate]
    maj_at: dict[int, Estimate]
    """Empty if no answer can be extracted from the completions."""
    best_at: dict[int, Estimate]
    """Accuracy of the sample with the highest `best_by` part; if `best_by` is the reward itself, its reward."""
    best_by: str
    parts: dict[str, float]
    """Mean of each part of the reward, if there are several."""
    lengths: Lengths
    truncated: Estimate
    """Share of the samples that hit max_tokens."""
    formatted: Estimate | None
    """Share of the samples whose answer is in the required format."""
    num_failed: int
    num_timed_out: int
    tables: dict[str, dict[str, TableEntry]] = field(default_factory=dict)
    """Accuracy by subject, level and so on, if the questions have several."""
    episodes: EpisodeResult | None = None
    """Only if an environment answered the completions."""
    searches: SearchResult | None = None
    """Only if a strategy chose the completions."""
    instructions: InstructionResult | None = None
    """Only if the expected answers are IFEval's instructions."""
    rows: list[Row] = field(default_factory=list)
    """One row per sample, in the order of the questions. In a game of several players, one per player of a sample."""

    @property
    def first_error(self) -> str | None:
        """The error of the first sample whose scoring failed."""
        return next((row["error"] for row in self.rows if row["error"]), None)

    @property
    def label(self) -> str:
        """Return what stands behind the name of a result: that an oracle chose."""
        return " (oracle)" if self.searches is not None and self.searches.is_oracle else ""


def summarise(rows: Sequence[Row], best_by: str | None = None) -> Result:
    """Summarise all samples of all questions. `best_by` is the reward part by which best@k chooses."""
    if not rows:
        raise ValueError("no completions")
    groups = by_question(rows)
    scored = by_question(judged_rows(rows))
    n = max(map(len, groups.values()))
    accuracies = [[row["accuracy"] for row in group] for group in scored.values()]
    graded = by_question([row for row in rows if row["reward"] is not None])
    rewards = [[row["reward"] for row in group] for group in graded.values()]
    passes = {k: mean_pass_at_k(accuracies, k) for k in powers_up_to(n)}
    has_votes = any(row["answered"] is not None for row in rows)
    return Result(
        num_prompts=len({row["id"] for row in rows}),
        num_samples=len(rows),
        n=n,
        accuracy=mean_at_k(accuracies) if accuracies else None,
        reward=mean_at_k(rewards) if rewards else None,
        pass_at={k: value for k, value in passes.items() if value is not None},
        maj_at=_at_each_k(list(scored.values()), n, _majority) if has_votes else {},
        best_at=_best(list(graded.values()), n, best_by),
        best_by=best_by or "reward",
        parts=_parts(rows),
        lengths=_lengths(rows),
        truncated=_share(groups, "truncated"),
        formatted=_formatted(rows),
        num_failed=sum(row["reward"] is None for row in rows),
        num_timed_out=sum(bool(row["timed_out"]) for row in rows),
        tables=_tables(scored),
        episodes=summarise_episodes(rows),
        searches=summarise_searches(rows),
        instructions=summarise_instructions(rows),
        rows=list(rows),
    )


def by_question(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by question, in order of appearance. The players of a game are groups of their own."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(f"{row['id']}/{row['role']}" if "role" in row else row["id"], []).append(row)
    return groups


def judged_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with an accuracy. A reward call that timed out counts as wrong; if only such rows have one, return none."""
    found = [row for row in rows if row["accuracy"] is not None]
    return found if any(not row["timed_out"] for row in found) else []


def _at_each_k(
    groups: Sequence[list[Row]], n: int, value: Callable[[list[Row], int], float | None]
) -> dict[int, Estimate]:
    """Average a value over the questions with at least k samples, for k = 2, 4, ..., n."""
    found = {}
    for k in powers_up_to(n):
        usable = [group for group in groups if len(group) >= k > 1]
        values = [v for group in usable if (v := value(group, k)) is not None]
        if values:
            found[k] = clustered_interval(values, sum(len(group) / k for group in usable))
    return found


def _majority(group: list[Row], k: int) -> float:
    return maj_at_k([CORRECT_VOTE if row["accuracy"] >= 1 else row["answered"] for row in group], CORRECT_VOTE, k)


def _best(groups: Sequence[list[Row]], n: int, part: str | None) -> dict[int, Estimate]:
    """Return best@k: the expected highest reward if rewards are graded; by a part, the accuracy of its choice."""
    if part is not None:
        return _at_each_k(groups, n, lambda group, k: _chosen(group, part, k))
    if all(row["reward"] in (0, 1) for group in groups for row in group):
        return {}  # with rewards 0 and 1, pass@k says the same, unbiased
    return _at_each_k(groups, n, _highest)


def _highest(group: list[Row], k: int) -> float:
    rewards = [row["reward"] for row in group]
    return best_at_k(rewards, rewards, k)


def _chosen(group: list[Row], part: str, k: int) -> float | None:
    usable = [row for row in group if part in row["parts"] and row["accuracy"] is not None]
    if len(usable) < k:
        return None
    return best_at_k([row["parts"][part] for row in usable], [row["accuracy"] for row in usable], k)


def _share(groups: dict[str, list[Row]], column: str) -> Estimate:
    return mean_at_k([[float(row[column]) for row in group] for group in groups.values()])


def _formatted(rows: Sequence[Row]) -> Estimate | None:
    asked = by_question([row for row in rows if row["formatted"] is not None])
    return _share(asked, "formatted") if asked else None


def _parts(rows: Sequence[Row]) -> dict[str, float]:
    names = dict.fromkeys(name for row in rows for name in row["parts"])
    if len(names) < 2:
        return {}
    return {name: _mean([row["parts"][name] for row in rows if name in row["parts"]]) for name in names}


def _lengths(rows: Sequence[Row]) -> Lengths:
    lengths = sorted(row["length"] for row in rows)
    right = [row["length"] for row in rows if row["accuracy"] is not None and row["accuracy"] >= 1]
    wrong = [row["length"] for row in rows if row["accuracy"] is not None and row["accuracy"] < 1]
    return Lengths(
        mean=_mean(lengths),
        median=(lengths[(len(lengths) - 1) // 2] + lengths[len(lengths) // 2]) / 2,
        p95=float(lengths[math.ceil(0.95 * len(lengths)) - 1]),
        longest=lengths[-1],
        right=_mean(right) if right else None,
        wrong=_mean(wrong) if wrong else None,
    )


def _tables(scored: dict[str, list[Row]]) -> dict[str, dict[str, TableEntry]]:
    """Return accuracy by each tag column, and by data source, that has several values."""
    columns = dict.fromkeys(name for group in scored.values() for name in group[0]["tags"])
    tables: dict[str, dict[str, TableEntry]] = {}
    for column in ["data_source", *columns]:
        kinds: dict[Any, list[list[float]]] = {}
        for group in scored.values():
            value = group[0]["data_source"] if column == "data_source" else group[0]["tags"].get(column)
            kinds.setdefault(value, []).append([row["accuracy"] for row in group])
        if 1 < len(kinds) <= MAX_TABLE_ROWS:
            order = sorted(kinds, key=lambda v: (isinstance(v, str), v is None, v if v is not None else 0))
            tables[column] = {_label(value): TableEntry(len(kinds[value]), mean_at_k(kinds[value])) for value in order}
    return tables


def _label(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def result_text(result: Result) -> str:
    """Return the main numbers as text, one per line."""
    n = result.n
    unit = "samples" if result.searches is None else "searches"
    rows = [("prompts", f"{result.num_prompts:,}" + (f" x {n} {unit}" if n > 1 else ""))]
    episodes = result.episodes
    players = episodes.players if episodes is not None else {}
    if result.accuracy is not None or not players:  # the players of a game win or lose: their table says how often
        missing = NO_ACCURACY if episodes is None else NO_SUCCESS
        rows.append((accuracy_name(n), interval_text(result.accuracy) + result.label if result.accuracy else missing))
    if result.instructions is not None:
        rows += [(name, interval_text(e)) for name, e in instruction_estimates(result.instructions).items()]
    rows += [(f"pass@{k}", interval_text(e)) for k, e in result.pass_at.items() if n > 1]
    rows += [(f"maj@{k}", interval_text(e)) for k, e in result.maj_at.items()]
    if not players:
        rows += [(f"best@{k}", f"{interval_text(e)}  by {result.best_by}") for k, e in result.best_at.items()]
    is_accuracy = (
        result.accuracy is not None and result.reward is not None and result.reward.mean == result.accuracy.mean
    )
    if result.reward is not None and not is_accuracy and not players:
        rows.append(("mean reward", interval_text(result.reward)))
    rows += [(f"  {name}", f"{mean:.3f}") for name, mean in result.parts.items()]
    rows += episode_lines(episodes) if episodes is not None else []
    rows.append(("truncated", f"{result.truncated.mean:.1%}"))
    rows += [("in format", f"{result.formatted.mean:.1%}")] if result.formatted else []
    rows.append(("mean length", length_text(result)))
    rows += [("timed out", f"{result.num_timed_out} answers, counted as wrong")] if result.num_timed_out else []
    rows += [("failed", f"{result.num_failed} {unit}, not counted")] if result.num_failed else []
    rows += search_lines(result.searches) if result.searches is not None else []
    tables = [_table_text(column, shares) for column, shares in result.tables.items()]
    tables += [player_table(players)] if players else []
    return "\n".join([aligned_lines(rows), *tables])


def _table_text(column: str, shares: Mapping[str, TableEntry]) -> str:
    rows = [(f"  {name}", f"{interval_text(s.accuracy)}  {s.num_questions:,} questions") for name, s in shares.items()]
    return f"by {column}\n{aligned_lines(rows)}"


def aligned_lines(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and values in two aligned columns."""
    width = max(MIN_WIDTH, *(len(name) for name, _ in rows))
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def interval_text(estimate: Estimate) -> str:
    """Format an estimate as `0.402  (95% interval 0.372 to 0.433)`."""
    return f"{estimate.mean:.3f}  (95% interval {estimate.low:.3f} to {estimate.high:.3f})"


def accuracy_name(n: int) -> str:
    """Return the name of the mean over n samples."""
    return f"mean@{n}" if n > 1 else "accuracy"


def length_text(result: Result) -> str:
    """Describe the lengths."""
    sizes = result.lengths
    parts = [
        f"{sizes.mean:.1f} tokens (median {sizes.median:.0f}, 95% up to {sizes.p95:.0f}, longest {sizes.longest:,}"
    ]
    if sizes.right is not None and sizes.wrong is not None:
        parts.append(f"; right {sizes.right:.0f}, wrong {sizes.wrong:.0f}")
    return "".join(parts) + ")"


def summary_table(results: Mapping[str, Result]) -> str:
    """Return one table of several data sets. A missing value is `-`."""
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
        name + result.label,
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
    """Return the numbers as plain values. An estimate is `{"value", "low", "high"}`."""

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
        **({} if result.episodes is None else {"episodes": episodes_json(result.episodes)}),
        **({} if result.instructions is None else {"instructions": instructions_json(result.instructions)}),
        **({} if result.searches is None else {"search": searches_json(result.searches)}),
        "by": {
            column: {
                name: {"num_questions": s.num_questions, **estimate_json(s.accuracy)} for name, s in shares.items()
            }
            for column, shares in result.tables.items()
        },
    }


def estimate_json(estimate: Estimate) -> dict[str, float]:
    """Return an estimate as plain values."""
    return {"value": estimate.mean, "low": estimate.low, "high": estimate.high}
