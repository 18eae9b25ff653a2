"""`burnish import verl` and `burnish import trl`: a recipe from a script or config of another system, with a table of every key.

The recipe goes to --out, or to the standard output with the table on the standard error. Scripts are read, never executed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.config.importing.draft import DataFacts, Imported, TableRow

COMMANDS = {
    "verl": ("burnish.cli.import_recipe:verl", "a recipe from a verl config or launch script"),
    "trl": ("burnish.cli.import_recipe:trl", "a recipe from a Python script that uses TRL"),
}
MAX_VALUE = 70
"""Longest value of another system in the table."""
MAX_SOURCES = 1000
"""Rows of a file that are asked for their data_source."""


def add_verl_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish import verl SOURCE`."""
    text = "a YAML of verl's config, or a shell script that runs `python3 -m verl.trainer.main_ppo key=value ...`"
    parser.add_argument("source", type=Path, metavar="CONFIG_OR_SCRIPT", help=text)
    _add_output(parser)
    parser.epilog = "Variables that the script takes from its environment are taken from yours: NAME=value burnish import verl run.sh"


def run_verl(args: argparse.Namespace) -> int:
    """Translate a verl config."""
    from burnish.config.importing.verl_recipe import import_verl

    return _finish(import_verl(args.source, dict(os.environ), data_facts()), args, "verl")


def add_trl_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish import trl SCRIPT`."""
    text = (
        "a Python script that makes GRPOConfig, RLOOConfig, DPOConfig, KTOConfig, ORPOConfig, SFTConfig or RewardConfig; or a shell "
        "script with a command of TRL (trl dpo ...), or its YAML"
    )
    parser.add_argument("source", type=Path, metavar="SCRIPT", help=text)
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes that accelerate starts (default 1)"
    )
    parser.add_argument(
        "--trainer", metavar="NAME", help="which trainer of the script, such as grpo, if it has several"
    )
    _add_output(parser)


def run_trl(args: argparse.Namespace) -> int:
    """Translate a TRL script."""
    from burnish.config.importing.trl_recipe import import_trl

    if args.processes < 1:
        raise UserError(f"--processes {args.processes}: expected 1 or more")
    made = import_trl(args.source, args.out, dict(os.environ), data_facts(), args.processes, args.trainer)
    return _finish(made, args, "trl")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="RECIPE", help="the recipe to write (default: the standard output)")
    parser.add_argument("--force", action="store_true", help="replace RECIPE if it exists")


def _finish(imported: Imported, args: argparse.Namespace, system: str) -> int:
    """Write the recipe and its files, and print the table and whether the recipe loads."""
    from burnish.config.yaml_text import printable

    text = recipe_text(imported, args.source, system)
    if args.out is not None:
        contents = {args.out: text, **{args.out.parent / n: c for n, c in imported.files.items()}}
        if (there := [path for path in contents if path.exists()]) and not args.force:
            raise UserError(f"{there[0]} exists: give another --out, or --force to replace it")
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
    said = sys.stdout if args.out is not None else sys.stderr
    if args.out is None:
        print(text, end="")
    print(printable("\n".join(table_lines(imported, system))), file=said)
    problem = load_problem(imported, args.out or Path("recipe.yaml"))
    if problem is not None:
        print(printable(f"\nthe recipe does not load yet: {problem}"), file=said)
    if imported.files and args.out is None:
        print(f"\n{', '.join(imported.files)} is written with --out only", file=said)
    place = args.out or "RECIPE"
    print(printable(f"\nrun it: burnish {imported.command} {place}   (first in seconds: --shrink)"), file=said)
    return 0


def load_problem(imported: Imported, path: Path) -> str | None:
    """The error that loading the recipe gives, or None."""
    from burnish.config.loading import load_tree
    from burnish.config.stages import CONFIG_TYPES

    try:
        load_tree(CONFIG_TYPES[imported.command], imported.tree, path)
    except UserError as error:
        return str(error)
    return None


def recipe_text(imported: Imported, source: Path, system: str) -> str:
    """The recipe as YAML. Comments at its top say what needs a look."""
    from burnish.config.yaml_text import printable, render_yaml

    lines = [f"Made from {source.name} by `burnish import {system}`."]
    for row in imported.rows:
        if row.verdict == "differs":
            lines.append(f"Something else here: {_theirs(row)}: {row.ours}")
    lines += [f"Note: {note}" for note in imported.notes]
    comments = "".join(f"# {printable(' '.join(line.split()))}\n" for line in lines)
    return f"{comments}\n{render_yaml(imported.tree)}"


def table_lines(imported: Imported, system: str) -> list[str]:
    """The table, by verdict."""
    from burnish.config.importing.draft import VERDICTS

    lines: list[str] = []
    for verdict, title in VERDICTS.items():
        rows = [row for row in imported.rows if row.verdict == verdict]
        if rows:
            width = min(72, max(len(_theirs(row)) for row in rows))
            lines += ["", f"{title} ({len(rows)})"]
            lines += [f"  {_theirs(row):<{width}}  {row.ours}".rstrip() for row in rows]
    if imported.notes:
        lines += ["", "notes", *(f"  {note}" for note in imported.notes)]
    counts = ", ".join(
        f"{sum(row.verdict == verdict for row in imported.rows)} {title}" for verdict, title in VERDICTS.items()
    )
    return [*lines[1:], "", f"{system}: {counts}"]


def _theirs(row: TableRow) -> str:
    from burnish.config.importing.draft import show

    if row.num_keys > 1:
        return f"{row.key} ({row.num_keys} keys)"
    value = show(row.value)
    value = value if len(value) <= MAX_VALUE else value[: MAX_VALUE - 3] + "..."
    return f"{row.key}={value}" + (" (default)" if row.is_default else "")


# --- facts about files ------------------------------------------------------------------------------------------------------


def data_facts() -> DataFacts:
    """What an importer may ask about data files that are on this machine."""
    from burnish.config.importing.draft import DataFacts

    return DataFacts(num_rows, data_sources)


def num_rows(path: str) -> int | None:
    """The number of rows of a file, or None if it is not here."""
    if not Path(path).is_file():
        return None
    if path.endswith(".parquet"):
        import pyarrow.parquet

        try:
            return int(pyarrow.parquet.read_metadata(path).num_rows)
        except pyarrow.ArrowInvalid as error:
            raise UserError(f"{path}: not a parquet file: {error}") from error
    return sum(1 for _ in _records(path))


def data_sources(path: str) -> list[str]:
    """The values of `data_source` in the first rows of a file that is here."""
    if not Path(path).is_file():
        return []
    found: dict[str, None] = {}
    for number, (_, record) in enumerate(_records(path)):
        if isinstance(record.get("data_source"), str):
            found[record["data_source"]] = None
        if number == MAX_SOURCES:
            break
    return list(found)


def _records(path: str) -> Iterable[tuple[str, dict[str, Any]]]:
    from burnish.data.files import read_records

    return read_records(path, None)
