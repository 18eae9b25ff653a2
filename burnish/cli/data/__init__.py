"""`burnish data <command>`: files to train on, made of published data sets, of other files, and of what a run has learnt."""

import sys

from burnish.config.yaml_text import printable

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": ("burnish.cli.data.prepare", "write a published data set as parquet, with prompts and verifier"),
    "decontaminate": ("burnish.cli.data.decontaminate", "leave out rows that overlap a test set"),
    "filter": ("burnish.cli.data.filter", "leave out rows by pass rate, label noise, repetition and length"),
    "bucket": ("burnish.cli.data.bucket", "add a column that says how hard each row is"),
    "impact": ("burnish.cli.data.impact", "keep the rows that taught a run something (LIMR)"),
    "reject": ("burnish.cli.data.reject", "turn right completions into demonstrations (rejection sampling)"),
    "pairs": ("burnish.cli.data.pairs", "turn completions into preferences, the shortest right one first"),
}
"""As in `cli/main.py`: a module for each, and what it is for."""


def say(text: str) -> None:
    """How far a command is, beside what it prints."""
    print(f"  {printable(text)}", file=sys.stderr, flush=True)


def show(text: str) -> None:
    """A result; names and examples in it come from files."""
    print(printable(text))
