"""`burnish algorithms`: the preset table, one algorithm in full, or what two of them differ in."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from burnish.config.algorithm import PAPERS, PRESETS, Algorithm
from burnish.config.errors import UserError
from burnish.config.load import dump, from_preset
from burnish.config.slots import Entropy, Kl, KlTerm, Record, Slot

COLUMNS = tuple(name for name in Algorithm.model_fields if name != "preset")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="print this algorithm's slots, formulas, papers and YAML")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="print only the slots two algorithms differ in")


def run(args: argparse.Namespace) -> int:
    if args.diff and args.name:
        raise UserError(f"give either one name or --diff with two, not both (got {args.name!r} and --diff)")
    if args.diff:
        print(diff(*(from_preset(name) for name in args.diff)))
    elif args.name:
        print(describe(from_preset(args.name)))
    else:
        print(table([from_preset(name) for name in PRESETS]))
    return 0


def table(algorithms: Sequence[Algorithm]) -> str:
    """One row an algorithm, one column a slot."""
    return columns([["", *COLUMNS], *([a.preset, *(brief(getattr(a, slot)) for slot in COLUMNS)] for a in algorithms)])


def diff(first: Algorithm, second: Algorithm) -> str:
    """The slots two algorithms differ in, one row each."""
    rows = [
        [slot, brief(getattr(first, slot)), brief(getattr(second, slot))]
        for slot in COLUMNS
        if getattr(first, slot) != getattr(second, slot)
    ]
    if not rows:
        return f"{first.preset} and {second.preset} are the same"
    return columns([["", first.preset, second.preset], *rows])


def describe(algorithm: Algorithm) -> str:
    """An algorithm in full: every slot with its formula and paper, then the YAML that spells it out."""
    lines = [f"{algorithm.preset}: {PAPERS[algorithm.preset]}", ""]
    for slot in COLUMNS:
        value = getattr(algorithm, slot)
        for choice in value if isinstance(value, list) else [value]:
            lines.append(f"{slot}: {brief(choice)}")
            lines += [f"    {line}" for line in _about(choice)]
    yaml = dump(algorithm).rstrip("\n").replace("\n", "\n  ")
    return "\n".join([*lines, "", "algorithm:", f"  {yaml}"])


def brief(value: Any) -> str:
    """A slot in a word or two: its name and what it sets; `-` for what is off."""
    if isinstance(value, list):
        return ", ".join(brief(v) for v in value) or "-"
    if isinstance(value, Kl):
        uses = [_use(where, term) for where, term in (("loss", value.loss), ("reward", value.reward)) if term.coef > 0]
        return f"{', '.join(uses)} to {value.reference}" if uses else "-"
    if isinstance(value, Entropy):
        return f"{value.coef:g}" if value.coef > 0 else "-"
    options = {k: v for k, v in value if k != "name" and v != type(value).model_fields[k].default}
    return value.name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else "")


def _use(where: str, term: KlTerm) -> str:
    return f"{term.coef:g} {term.estimator} in {where}"


def _about(choice: Record) -> list[str]:
    lines = [(choice.__doc__ or "").strip().splitlines()[0]]
    if isinstance(choice, Slot):
        lines += [text for text in (choice.formula, choice.paper) if text]
    if isinstance(choice, Kl):
        lines.append(str(KlTerm.model_fields["estimator"].description))
    return lines


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)
