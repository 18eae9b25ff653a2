"""`burnish eval DIR DATA --scaling [STRATEGY ...] [--budgets K ...]`: accuracy against tokens for several strategies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli.main import print_note
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import is_plugin
from burnish.config.yaml_text import parse_yaml, printable

if TYPE_CHECKING:
    from burnish.config.records import Slot

BUDGETS = (1, 2, 4, 8, 16, 32, 64)
DEFAULT = ("majority", "weighted_vote", "best_of_n", "best_of_n@self_certainty")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of scaling."""
    add = parser.add_argument
    add(
        "--scaling",
        nargs="*",
        metavar="STRATEGY",
        help="measure these strategies at several budgets: NAME, NAME@VERIFIER, or '{name: NAME, verifier: {name: model, options: {path: DIR}}}' "
        f"(default {' '.join(DEFAULT)})",
    )
    add(
        "--budgets",
        nargs="+",
        type=int,
        metavar="K",
        help=f"work of a question in parallel answers (default {' '.join(map(str, BUDGETS))})",
    )
    add(
        "--search-budgets",
        nargs="+",
        type=int,
        metavar="K",
        help="those of --budgets at which strategies run that the pool of samples does not answer, such as searches over steps (default all)",
    )


def run(args: argparse.Namespace, split_words: Any, make_tests: Any, progress: Any) -> int:
    """Measure, print the table, and write scaling.json, scaling.svg and scaling.html."""
    from burnish.evaluation.model_source import find_model
    from burnish.evaluation.output_paths import find_output_paths, model_name
    from burnish.evaluation.scaling import scaling_table
    from burnish.evaluation.scaling_session import plan_scaling, run_scaling
    from burnish.report.scaling_page import write_scaling

    args.words += [word for word in args.scaling if is_setting(word)]
    named = [word for word in args.scaling if not is_setting(word)]
    model, data, overrides = split_words(args.words)
    refuse_options(args, data)
    budgets = sorted(set(args.budgets or BUDGETS))
    if budgets[0] < 1:
        raise UserError(f"--budgets {budgets[0]}: expected numbers of answers of 1 or more")
    searched = sorted(set(args.search_budgets or budgets))
    if not set(searched) <= set(budgets):
        other = ", ".join(map(str, sorted(set(searched) - set(budgets))))
        raise UserError(
            f"--search-budgets {other}: they are compared with majority of the same budget; name them in --budgets too"
        )
    strategies = [read_strategy(text) for text in named or DEFAULT]
    subject = find_model(model, print_note)
    name = find_output_paths(None, model, data)[0].name
    folder = args.out or Path(f"scaling-{model_name(model)}-{name}")
    if folder.suffix in (".jsonl", ".parquet", ".json"):
        raise UserError(f"--out {folder}: a scaling measurement is a folder of several files; give its name")
    force, args.force, args.out = args.force, False, folder
    args.strategy = "majority"  # the settings that all parts share, with what several samples need
    base = make_tests(args, model, subject, data, overrides)[0]
    plan = plan_scaling(name, base, folder, subject.path, strategies, budgets, searched)
    if subject.note is not None:
        print_note(subject.note)
    with progress() as shown:
        scaling = run_scaling(plan, subject.path, print_note, shown, force, lambda part: write_scaling(folder, part))
    print(printable(scaling_table(scaling)))
    for path in write_scaling(folder, scaling):
        print(f"{path.suffix[1:]:<11}  {path}")
    return 0


def is_setting(word: str) -> bool:
    """Whether a word is `key=value`."""
    return "=" in word and word.partition("=")[0].replace(".", "_").isidentifier()


def refuse_options(args: argparse.Namespace, data: list[str]) -> None:
    """Raise for options that have no effect with --scaling."""
    unused = {
        "--n": args.n,
        "--strategy": args.strategy,
        "--budget": args.budget,
        "--best-by": args.best_by,
        "--contamination": args.contamination,
    }
    given = [name for name, value in unused.items() if value is not None]
    if given:
        why = {
            "--n": "the pool has as many samples as the largest of --budgets",
            "--budget": "--budgets sets the sizes",
            "--contamination": "evaluate once without --scaling",
        }
        raise UserError(
            f"{given[0]} has no effect with --scaling: {why.get(given[0], 'name the strategies behind --scaling')}"
        )
    if len(data) > 1:
        raise UserError(f"--scaling measures one data set at a time, and {len(data)} are named: {', '.join(data)}")


def read_strategy(text: str) -> Slot:
    """The strategy of a word: `NAME`, `NAME@VERIFIER`, or a section in braces."""
    from pydantic import TypeAdapter, ValidationError

    from burnish.evaluation.strategies.spec import STRATEGY_RECORDS, Strategy

    if text.startswith("{"):
        section = parse_yaml(text, f"--scaling {text}")
    else:
        name, _, verifier = text.partition("@")
        section = {"name": name, **({"verifier": verifier} if verifier else {})}
    name = section.get("name", "") if isinstance(section, dict) else text
    records = {str(record.model_fields["name"].default): record for record in STRATEGY_RECORDS}
    if not isinstance(name, str) or (name not in records and not is_plugin(name)):
        raise unknown_name_error("strategy", str(name), records)
    if is_plugin(name) and "verifier" in section and "options" not in section:
        section = {"name": name, "options": {"verifier": section["verifier"]}}
    if name in records and "verifier" in section and "verifier" not in records[name].model_fields:
        verified = ", ".join(one for one, record in records.items() if "verifier" in record.model_fields)
        raise UserError(f"--scaling {text}: {name} compares no scores, so it has no verifier (these have: {verified})")
    try:
        found: Slot = TypeAdapter(Strategy).validate_python(section)
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(f"--scaling {text}: {'.'.join(map(str, first['loc'][1:]))}: {first['msg']}") from error
    return found
