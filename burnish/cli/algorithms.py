"""`burnish algorithms`: the table of presets, one algorithm in full, or the differences between two."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterable, Sequence

from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.spec import Kl, KlLoss
from burnish.config.algorithm_guide import (
    BASELINE_PRESET,
    OFF,
    SLOTS,
    changes_from_grpo,
    citation,
    describe_slot,
    record_summary,
    slot_differences,
)
from burnish.config.errors import UserError
from burnish.config.loading import algorithm_from_preset, dump
from burnish.config.records import Record, field_help

WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this algorithm's slots, formulas, papers and YAML")
    parser.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="print only the slots in which two algorithms differ"
    )


def run(args: argparse.Namespace) -> int:
    if args.diff and args.name:
        raise UserError(f"give either one name or --diff with two, not both (got {args.name!r} and --diff)")
    if args.diff:
        print(diff(*(algorithm_from_preset(name) for name in args.diff)))
    elif args.name:
        print(describe(algorithm_from_preset(args.name)))
    else:
        print(table([algorithm_from_preset(name) for name in PRESETS]))
    return 0


def table(algorithms: Sequence[Algorithm]) -> str:
    """One row per algorithm with its changes compared with GRPO."""
    width = max(len(a.preset) for a in algorithms) + 3
    lines = [f"{'':<{width}}changes in {BASELINE_PRESET}"]
    for a in algorithms:
        lines += _hanging(f"{a.preset:<{width}}{changes_from_grpo(a) or OFF}", width)
    lines += ["", "`burnish algorithms NAME` prints one of them in full"]
    return "\n".join(lines)


def diff(first: Algorithm, second: Algorithm) -> str:
    """The slots in which two algorithms differ, one row each."""
    rows = slot_differences(first, second)
    if not rows:
        return f"{first.preset} and {second.preset} are the same"
    return columns([["", first.preset, second.preset], *rows])


def describe(algorithm: Algorithm) -> str:
    """An algorithm in full: its purpose, every slot with formula and paper, and the complete YAML."""
    preset = PRESETS[algorithm.preset]
    lines = [f"{algorithm.preset}: {citation(preset)}"]
    for head, text in (("answers", preset.solves), ("note", preset.note)):
        lines += _hanging(f"{head}: {text}", 4) if text else []
    off = [slot for slot in SLOTS if describe_slot(getattr(algorithm, slot)) == OFF]
    lines.append("")
    for slot in SLOTS:
        if slot not in off:
            value = getattr(algorithm, slot)
            lines += [
                line for choice in (value if isinstance(value, list) else [value]) for line in _slot(slot, choice)
            ]
    lines += _hanging(f"off: {', '.join(off)}", 4) if off else []
    yaml = dump(algorithm).rstrip("\n").replace("\n", "\n  ")
    return "\n".join([*lines, "", "algorithm:", f"  {yaml}"])


def _slot(slot: str, choice: Record) -> list[str]:
    lines = [f"{slot}: {describe_slot(choice)}", *(f"    {line}" for line in record_summary(type(choice)))]
    if isinstance(choice, Kl):
        if choice.loss.coef > 0 or choice.reward.coef > 0:
            lines.append(f"    {field_help(KlLoss, 'estimator')}")
        lines += [f"    reference: {line}" for line in record_summary(type(choice.reference))]
        if choice.context.name != "prompt":
            lines += [f"    context: {line}" for line in record_summary(type(choice.context))]
    return lines


def _hanging(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def columns(rows: Iterable[Sequence[str]]) -> str:
    """Rows of text in aligned columns."""
    rows = list(rows)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
