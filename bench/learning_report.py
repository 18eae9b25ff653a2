"""Table, picture and page of `bench/learning.py`: docs/learning.md and docs/learning.svg."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from learning_presets import (
    CHOICE_PRESETS,
    CHOICE_SEEDS,
    LEARNING_RATE,
    MINI_BATCHES,
    PROMPTS,
    ROWS,
    SAMPLES,
    STEPS,
    TOYS,
    UNTRAINED_REASONS,
)

from burnish.algorithms.presets import PRESETS

LEVEL = 0.9
LEAST_GAIN = 0.1
"""A preset has learnt if its mean accuracy rose by this much."""
NUM_SEEDS = 3
WIDTH, LEFT, RIGHT, ROW, TOP = 640, 190, 70, 14, 46
STYLE = (
    "text{font:11px sans-serif;fill:#444}.grid{stroke:#ddd}.range{stroke:#1f6feb;stroke-width:2}.dot{fill:#1f6feb}"
    ".bad .range{stroke:#d1495b}.bad .dot{fill:#d1495b}.before{fill:none;stroke:#888}.level{stroke:#888;stroke-dasharray:4 3}"
)


# --- numbers ------------------------------------------------------------------------------------------------------------


def summaries(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line for each preset, in the order of the table of algorithms; a preset without a finished run has a line too."""
    return [summary(name, [row for row in rows if row["preset"] == name]) for name in PRESETS]


def summary(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and range over the seeds of one preset."""
    done = [row for row in rows if "after" in row]
    line: dict[str, Any] = {"preset": name, "toy": ROWS[name].toy, "seeds": len(done)}
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        line["error"] = errors[0]
    if not done:
        return line
    after = [row["after"] for row in done]
    return line | {
        "before": statistics.mean(row["before"] for row in done),
        "after": statistics.mean(after),
        "low": min(after),
        "high": max(after),
        "steps_to_0.9": steps_to_level(name, done),
        "cpu_s": statistics.mean(row["cpu_s"] for row in done),
        "cpu": done[0]["cpu"],
    }


def steps_to_level(name: str, rows: list[dict[str, Any]]) -> str:
    """The mean of the first measured steps at the level, and how many seeds reached it. Presets without rollouts are measured at the end alone."""
    if ROWS[name].command != "train":
        return ""
    found = [next((step for step, accuracy in row["curve"] if accuracy >= LEVEL), None) for row in rows]
    reached = [step for step in found if step is not None]
    if not reached:
        return "not reached"
    return f"{statistics.mean(reached):.0f}" + (
        "" if len(reached) == len(rows) else f" ({len(reached)} of {len(rows)})"
    )


def has_learnt(line: dict[str, Any]) -> bool:
    return line["after"] - line["before"] >= LEAST_GAIN


# --- the picture --------------------------------------------------------------------------------------------------------


def write_picture(path: Path, lines: list[dict[str, Any]]) -> None:
    """A dot for the mean and a line for the range of every measured preset, sorted by mean; a circle where it began."""
    shown = sorted((line for line in lines if "after" in line), key=lambda line: (-line["after"], line["preset"]))
    height = TOP + ROW * len(shown) + 24

    def x_of(value: float) -> float:
        return round(LEFT + value * (WIDTH - LEFT - RIGHT), 1)

    title = "Held-out accuracy after training: mean and range over the seeds"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{title}">'
        f'<style>{STYLE}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="{LEFT}" y="14">{title}. Circle: untrained.</text>',
    ]
    for tick in range(0, 11, 2):
        x = x_of(tick / 10)
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height - 20}"/>')
        for y in (TOP - 12, height - 6):
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{tick / 10:g}</text>')
    starts = [line["before"] for line in shown if line["toy"] == "sort"]
    if starts:
        x = x_of(statistics.mean(starts))
        parts.append(f'<line class="level" x1="{x}" x2="{x}" y1="{TOP - 8}" y2="{height - 20}"/>')
    for number, line in enumerate(shown):
        y = TOP + ROW * number + ROW / 2
        toy = "" if line["toy"] == "sort" else f" ({line['toy']})"
        parts.append(f'<g class="{"good" if has_learnt(line) else "bad"}">')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{line["preset"]}{toy}</text>')
        parts.append(f'<line class="range" x1="{x_of(line["low"])}" x2="{x_of(line["high"])}" y1="{y}" y2="{y}"/>')
        parts.append(f'<circle class="before" cx="{x_of(line["before"])}" cy="{y}" r="3"/>')
        parts.append(f'<circle class="dot" cx="{x_of(line["after"])}" cy="{y}" r="3.5"/>')
        count = "" if line["seeds"] >= NUM_SEEDS else f" ({line['seeds']})"
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{y + 4}">{line["after"]:.3f}{count}</text></g>')
    path.write_text("".join(parts) + "</svg>\n", encoding="utf-8")


# --- the page -----------------------------------------------------------------------------------------------------------


def write_page(path: Path, lines: list[dict[str, Any]], choice: str, own_choice: str) -> None:
    """docs/learning.md."""
    measured = [line for line in lines if "after" in line]
    parts = [
        intro(measured),
        settings_text(choice, own_choice),
        result_table(measured),
        failures_text(lines),
        missing_text(lines),
    ]
    path.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def intro(measured: list[dict[str, Any]]) -> str:
    learnt = sum(has_learnt(line) for line in measured)
    runs, seconds = sum(line["seeds"] for line in measured), sum(line["cpu_s"] * line["seeds"] for line in measured)
    toys = "\n".join(f"- `{name}`: {toy.title}" for name, toy in TOYS.items())
    most = statistics.mode(line["cpu"] for line in measured)
    others = [f"`{line['preset']}`" for line in measured if line["cpu"] != most]
    elsewhere = (
        f" Another machine, on which they end with slightly different weights, made the rows of {', '.join(others)}."
        if others
        else ""
    )
    return f"""\
# What each algorithm learns

`python bench/learning.py` trains the presets of [algorithms](algorithms.md) on toys that one CPU core learns in seconds, and writes this page. {learnt}
of the {len(measured)} presets measured so far learn: their mean held-out accuracy rises by at least {LEAST_GAIN:g}. {runs} runs took {seconds / 60:.0f} minutes of CPU time, without the warm starts.

A toy shows that a preset works from end to end. It does not rank methods: a preset made for long answers, stale samples or large models has
nothing to gain here, and differences smaller than the ranges are noise.

![held-out accuracy after training, by preset](learning.svg)

A dot is the mean over the seeds, the line behind it their range, and the circle the accuracy before training. The dashed line is the untrained
level of `sort`. Red presets have not learnt.

The toys are made of the built-in tasks sort_digits and calculator. A policy is a decoder of 0.4 million parameters after a supervised warm start on flawed
demonstrations; all presets of a toy and a seed begin with the same weights.{elsewhere}

{toys}
"""


def settings_text(choice: str, own_choice: str) -> str:
    common = f"{STEPS} steps of {PROMPTS} prompts x {SAMPLES} samples in {MINI_BATCHES} updates, learning rate {LEARNING_RATE:g} falling to a tenth"
    presets, seeds = ", ".join(f"`{name}`" for name in CHOICE_PRESETS), ", ".join(map(str, CHOICE_SEEDS))
    text = f"""\
## Settings

All presets run with {common}. Accuracy is that of greedy answers to 500 held-out problems.
Where a preset needs other numbers, the table says which and why. Most of them were found in earlier benchmarks on seeds 0 to 2, so those rows are not as
blind as the others. The learning rate is one of three, compared by the mean of {presets}
on seed {seeds} (`bench/learning.py --choose`), which is in no other number here and has held-out problems of its own:

"""
    own = "\nTwo rows have a setting of their own that was compared on that seed:\n\n"
    return f"{text}{indented(choice)}{own}{indented(own_choice)}"


def indented(text: str) -> str:
    return "".join(f"    {line.rstrip()}\n" for line in text.splitlines())


def result_table(measured: list[dict[str, Any]]) -> str:
    lines = [
        "## Results",
        "",
        f"`steps to {LEVEL:g}` is the first measured step (of every fifth) with that accuracy. CPU seconds are those of one run, without its warm start.",
        "",
        f"| preset | toy | seeds | before | after: mean (range) | steps to {LEVEL:g} | CPU s | settings of its own, and what is left out |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for line in measured:
        after = f"{line['after']:.3f} ({line['low']:.3f} to {line['high']:.3f})"
        cells = [f"`{line['preset']}`", line["toy"], str(line["seeds"]), f"{line['before']:.3f}", after]
        cells += [line["steps_to_0.9"], f"{line['cpu_s']:.0f}", ROWS[line["preset"]].why]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def failures_text(lines: list[dict[str, Any]]) -> str:
    """Presets that were measured and did not learn, and those whose runs failed."""
    found = [line for line in lines if "after" in line and not has_learnt(line)]
    failed = [line for line in lines if "error" in line]
    if not found and not failed:
        return ""
    parts = ["## Not learnt", ""]
    for line in found:
        reason = UNTRAINED_REASONS.get(line["preset"], "the reason is not known")
        parts.append(f"- `{line['preset']}`: from {line['before']:.3f} to {line['after']:.3f}; {reason}.")
    parts += [f"- `{line['preset']}`: a run failed: {line['error']}" for line in failed]
    return "\n".join(parts) + "\n"


def missing_text(lines: list[dict[str, Any]]) -> str:
    """Presets without all seeds."""
    by_seeds: dict[int, list[str]] = {}
    for line in lines:
        if line["seeds"] < NUM_SEEDS:
            by_seeds.setdefault(line["seeds"], []).append(f"`{line['preset']}`")
    parts = [
        f"- {count} of {NUM_SEEDS} seeds measured: {', '.join(names)}." for count, names in sorted(by_seeds.items())
    ]
    return "\n".join(["## Missing", "", *parts]) + "\n" if parts else ""
