"""`burnish data <command>`: make files to train on, from published data sets, other files, and results of runs and evaluations.

Every command writes a file and `FILE.manifest.json`, which says what it was made from. For each NAME in `COMMANDS` there are
`add_NAME_arguments(parser)` and `run_NAME(args)`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from burnish.cli.data_options import (
    add_ngram,
    add_output,
    add_rows,
    add_samples,
    add_scores,
    add_trees,
    print_progress,
    print_result,
)
from burnish.config.errors import UserError
from burnish.config.extras import install_hint

COMMANDS: dict[str, tuple[str, str]] = {
    "prepare": (
        "burnish.cli.data_commands:prepare",
        "write a published data set as parquet, with prompts and verifier",
    ),
    "decontaminate": ("burnish.cli.data_commands:decontaminate", "remove rows that overlap a test set"),
    "filter": ("burnish.cli.data_commands:filter", "remove rows by pass rate, label noise, repetition and length"),
    "bucket": ("burnish.cli.data_commands:bucket", "add a column with the difficulty of each row"),
    "impact": ("burnish.cli.data_commands:impact", "keep the rows from which a run has learnt (LIMR)"),
    "reject": ("burnish.cli.data_commands:reject", "turn right completions into demonstrations (rejection sampling)"),
    "pairs": (
        "burnish.cli.data_commands:pairs",
        "turn completions into preference pairs: short against long, or right against wrong",
    ),
    "steps": (
        "burnish.cli.search_data_commands:steps",
        "turn the trees of searches into steps with values, for a step reward model",
    ),
    "questions": (
        "burnish.cli.data_commands:questions",
        "turn preference pairs into questions for a judge, in both orders (RM-R1)",
    ),
}
"""As in `cli/main.py`: the functions of each command, and its summary."""
SEARCH = "search"
GENERATED_OPTIONS = {
    "seed": "of the questions and splits (0)",
    "train": "questions to train on (4000)",
    "validation": "questions for validation (300)",
    "test": "questions to test (500)",
    "long": "questions with a long text (400, and a quarter of it to test)",
    "context_chars": "characters of a long text (40000)",
    "tables": "tables with a question (1000, and a quarter of it to test)",
}
"""Options of `burnish data prepare search`."""


# --- prepare ----------------------------------------------------------------------------------------------------------------


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data prepare NAME SOURCE OUT`, and `burnish data prepare search OUT`, which needs no source."""
    from burnish.data.published_datasets import SHAPES

    add = parser.add_argument
    add("name", metavar="NAME", help="the data set whose format the rows have (listed below)")
    add(
        "source",
        metavar="SOURCE",
        nargs="?",
        help="its file (jsonl, json, csv, parquet, arrow), a glob, or a folder of Hugging Face datasets; none for search",
    )
    add("out", type=Path, metavar="OUT", help="the parquet file to write, with OUT.manifest.json; for search a folder")
    add("--split", help="which split, if the source holds several")
    add("--config", help="which configuration (folder), if a snapshot holds several")
    add(
        "--against",
        action="append",
        default=[],
        metavar="[NAME:]PATH",
        help="a test set to compare with; may be repeated; NAME if its format differs (the test split of a folder is "
        "always compared with)",
    )
    add_ngram(parser)
    add(
        "--drop-overlap",
        choices=("exact", "any"),
        help="remove rows that overlap: the same question, or also N common words (default: only count them)",
    )
    add("--force", action="store_true", help="replace a file that this command did not write")
    made = parser.add_argument_group(
        f"only {SEARCH}, a corpus and questions that are generated (docs/agent-recipes.md)"
    )
    for name, what in GENERATED_OPTIONS.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=what)
    width = max(map(len, SHAPES))
    rows = [f"  {name:<{width}}  {shape.title}; verifier {shape.verifier}" for name, shape in SHAPES.items()]
    rows.append(f"  {SEARCH:<{width}}  generated passages with questions of one to three hops; reward search_r1")
    parser.epilog = "data sets:\n" + "\n".join(rows)


def run_prepare(args: argparse.Namespace) -> int:
    """Write the file and print its rows, overlaps and checksum."""
    if args.name == SEARCH:
        return _run_prepare_search(args)
    from burnish.data.curation.prepare import PrepareOptions, prepare

    if args.source is None:
        raise UserError(
            f"burnish data prepare {args.name} needs a SOURCE and an OUT; only {SEARCH} is made from nothing"
        )
    for name in GENERATED_OPTIONS:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} has no effect on {args.name}: it belongs to {SEARCH}")
    if args.ngram < 2:
        raise UserError(f"--ngram {args.ngram}: expected 2 words or more")
    options = PrepareOptions(
        args.name, args.source, args.split, args.config, tuple(args.against), args.ngram, args.drop_overlap
    )
    manifest, is_new = prepare(options, args.out, args.force)
    print_result(_prepare_report(manifest, args.out, is_new))
    return 0


def _run_prepare_search(args: argparse.Namespace) -> int:
    """Write the corpus and its questions, and print their numbers."""
    from burnish.data.search_corpus.prepare import SearchDataOptions, prepare_search

    others = {"SOURCE": args.source, "--split": args.split, "--config": args.config, "--against": args.against}
    for name, value in {**others, "--drop-overlap": args.drop_overlap}.items():
        if value:
            raise UserError(f"{name} {value} has no effect on {SEARCH}, which is generated")
    given = {name: getattr(args, name) for name in GENERATED_OPTIONS if getattr(args, name) is not None}
    print_result(_search_report(prepare_search(SearchDataOptions(**given), args.out, args.force), args.out))
    return 0


def _search_report(manifest: dict[str, Any], out: Path) -> list[str]:
    files, recall = manifest["files"], manifest["recall"]
    kinds = ", ".join(f"{count:,} of {kind}" for kind, count in manifest["passages"].items())
    lines = [f"{out}", f"  corpus.jsonl           {files['corpus.jsonl']['rows']:,} passages ({kinds})"]
    for split, hops in manifest["hops"].items():
        shown = ", ".join(f"{count:,} with {hop} hop{'s' if hop > 1 else ''}" for hop, count in hops.items())
        lines.append(f"  {split + '.jsonl':<22} {files[split + '.jsonl']['rows']:,} questions: {shown}")
    for name, what in (("long", "long texts"), ("tables", "tables")):
        numbers = [f"{files[f'{name}_{split}.jsonl']['rows']:,}" for split in ("train", "test")]
        lines.append(f"  {name + '_*.jsonl':<22} {numbers[0]} {what} to train on, {numbers[1]} to test")
    if recall is None:
        return [*lines, f"  recall                 not measured: {install_hint('search')}"]
    for key, what in (("question", "the question as the query"), ("query_per_hop", "a good query for each hop")):
        shown = ", ".join(f"{hops} hop{'s' if hops != '1' else ''} {value:.3f}" for hops, value in recall[key].items())
        lines.append(f"  BM25 recall@3          {what}: {shown} (test)")
    return lines


def _prepare_report(manifest: dict[str, Any], out: Path, is_new: bool) -> list[str]:
    output = manifest["output"]
    lines = [
        f"{out}: {output['rows']:,} rows" if is_new else f"{out} is up to date: {output['rows']:,} rows, nothing to do",
        f"  read         {manifest['rows_read']:,} rows of {', '.join(s['file'] for s in manifest['asked']['source'])}",
    ]
    lines += [f"  left out     {count:,}: {reason}" for reason, count in manifest["left_out"].items()]
    if manifest["repeated_questions"]:
        lines.append(f"  repeated     {manifest['repeated_questions']:,} questions occur more than once (kept)")
    for overlap in manifest["overlap"]:
        near = next(key for key in overlap if key.endswith("_words"))
        lines.append(
            f"  overlap      {overlap['exact']:,} questions are in {overlap['with']} ({overlap['test_rows']:,} rows), "
            f"{overlap[near]:,} more share {near.removesuffix('_words')} words with it; "
            + (f"{overlap['left_out']:,} left out" if overlap["left_out"] else "all kept")
        )
        lines += [f"               {o['row']} ~ {o['test_row']}: {o['shared']}" for o in overlap["first"][:3]]
    if not manifest["overlap"]:
        lines.append("  overlap      not checked: name a test set with --against")
    lines.append(f"  sha256       {output['sha256']}")
    lines.append("  recipe       " + manifest["recipe"].rstrip().replace("\n", "\n               "))
    return lines


# --- choosing rows ----------------------------------------------------------------------------------------------------------


def add_decontaminate_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data decontaminate SRC OUT --against BENCHMARK_OR_FILE`."""
    from burnish.data.published_datasets import BENCHMARKS

    add = parser.add_argument
    add(
        "source",
        type=Path,
        metavar="SRC",
        help="rows of any kind (prompts, demonstrations or preferences): jsonl, json, csv, parquet or arrow",
    )
    add_output(parser)
    add(
        "--against",
        action="append",
        default=[],
        metavar="BENCHMARK|[SHAPE:]FILE",
        help=f"a test set: {', '.join(BENCHMARKS)}, or a file; may be repeated",
    )
    add_ngram(parser)
    add("--data-dir", type=Path, metavar="FOLDER", help="folder of the benchmarks' files (default: BURNISH_DATA)")


def run_decontaminate(args: argparse.Namespace) -> int:
    """Write the rows that do not overlap a test set."""
    from burnish.data.curation.decontamination import decontaminate
    from burnish.data.curation.output_files import aligned_table, summary

    manifest, is_new = decontaminate(
        args.source, args.out, tuple(args.against), args.ngram, args.data_dir, args.force, print_progress
    )
    print_result(summary(manifest, args.out, is_new))
    rows = [[o["with"], o["test_rows"], o["exact"], o["words"]] for o in manifest["overlap"]]
    print_result(aligned_table(["test set", "its rows", "same question", f"{args.ngram} words"], rows))
    for overlap in manifest["overlap"]:
        for example in overlap["first"][:3]:
            print_result([f"  {example['row']} ~ {example['test_row']}: {example['shared']}"])
    return 0


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data filter SRC OUT`."""
    add = parser.add_argument
    add_rows(parser)
    add_output(parser)
    add_scores(parser, required=False)
    add(
        "--pass-rate",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        help="keep rows whose share of right answers is in LOW..HIGH, such as 0.1 0.9",
    )
    add(
        "--agree",
        type=int,
        metavar="N",
        help="keep rows whose answer at least N samples give (1: removes wrong labels)",
    )
    add(
        "--guesses",
        type=Path,
        metavar="COMPLETIONS",
        help="remove rows that one of these completions, asked for without reasoning, answers right",
    )
    add("--contradictions", action="store_true", help="remove rows whose question also occurs with another answer")
    add("--duplicates", action="store_true", help="keep only the first of rows with the same question")
    add("--words", type=int, nargs=2, metavar=("MIN", "MAX"), help="keep questions with MIN to MAX words")
    add("--answer-chars", type=int, metavar="MAX", help="keep answers of at most MAX characters")
    add("--keep-unseen", action="store_true", help="keep rows that were never sampled")


def run_filter(args: argparse.Namespace) -> int:
    """Write the rows that pass all criteria."""
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.data.curation.row_selection import Criteria, filter_rows

    criteria = Criteria(
        pass_rate=None if args.pass_rate is None else tuple(args.pass_rate),
        agree=args.agree,
        contradictions=args.contradictions,
        duplicates=args.duplicates,
        words=None if args.words is None else tuple(args.words),
        answer_chars=args.answer_chars,
        keep_unseen=args.keep_unseen,
    )
    manifest, is_new = filter_rows(
        args.source, args.out, criteria, args.scores, args.guesses, args.force, print_progress
    )
    lines, counts = summary(manifest, args.out, is_new), manifest.get("pass_rates")
    if counts is not None:
        names = ["0", *(f"{k / 10:.1f} to {(k + 1) / 10:.1f}" for k in range(10)), "1"]
        rows = [[name, f"{n:,}"] for name, n in zip(names, counts, strict=True) if n]
        lines = [*lines, *aligned_table(["pass rate", "rows"], rows)]
    print_result(lines)
    return 0


def add_bucket_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data bucket SRC OUT --scores RUN|COMPLETIONS`."""
    add = parser.add_argument
    add_rows(parser)
    add_output(parser)
    add_scores(parser, required=True)
    add("--buckets", type=int, default=4, metavar="N", help="number of buckets of equal size (default 4)")
    add("--column", default="difficulty", help="the column of 1 - pass rate (default difficulty)")


def run_bucket(args: argparse.Namespace) -> int:
    """Write the rows with a column of their difficulty."""
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.data.curation.row_selection import bucket_rows

    manifest, is_new = bucket_rows(
        args.source, args.out, args.scores, args.buckets, args.column, args.force, print_progress
    )
    print_result(summary(manifest, args.out, is_new))
    rows = [
        [b["bucket"], b["rows"], f"{b['highest_pass_rate']:.3f}", f"{b['lowest_pass_rate']:.3f}"]
        for b in manifest["buckets"]
    ]
    print_result(aligned_table(["bucket", "rows", "pass rate from", "down to"], rows))
    options = f"name: easy_to_hard, column: {args.column}, buckets: {args.buckets}"
    print_result([f"  recipe       algorithm: {{curriculum: {{{options}}}}}"])
    return 0


def add_impact_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data impact RUN OUT`."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="a run of two epochs or more over its training data")
    add_output(parser)
    add("--threshold", type=float, default=0.6, help="lowest learning impact to keep (default 0.6, as in the paper)")
    add(
        "--by",
        choices=("accuracy", "reward"),
        help="the learning curves to use (default: accuracy if all samples have one)",
    )
    add("--epochs", type=int, metavar="K", help="use the first K epochs (default: all finished ones)")
    add("--data", type=Path, metavar="FILE", help="the run's training file, if it is not where its config says")


def run_impact(args: argparse.Namespace) -> int:
    """Write the rows with a learning impact above the threshold."""
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.data.curation.row_selection import ImpactOptions, select_by_impact

    options = ImpactOptions(args.threshold, args.by, args.epochs)
    manifest, is_new = select_by_impact(args.run, args.out, options, args.data, args.force, print_progress)
    print_result(summary(manifest, args.out, is_new))
    curve = " ".join(f"{value:.3f}" for value in manifest["average_curve"])
    measured = f"mean {manifest['measured_by']} of {manifest['prompts_scored']:,} prompts by epoch"
    print_result([f"  curve        {measured}: {curve}"])
    bins = manifest["histogram"]
    starts = [low for low, _ in bins]
    names = ["below 0", *(f"{a:g} to {b:g}" for a, b in zip(starts[1:], [*starts[2:], 1], strict=True))]
    rows = [[name, f"{n:,}"] for name, (_, n) in zip(names, bins, strict=True)]
    print_result(aligned_table(["impact", "rows"], rows))
    return 0


# --- completions as training data ---------------------------------------------------------------------------------------------


def add_reject_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data reject COMPLETIONS|RUN OUT`, and `burnish data reject DATA OUT --strategy NAME --model DIR key=value ...`."""
    from burnish.cli.search_data_commands import add_search_arguments
    from burnish.rewards.language_id import SCRIPTS

    add = parser.add_argument
    add_samples(parser)
    add_trees(parser)
    add_output(parser)
    add("--most", type=int, default=1, metavar="M", help="most completions of one prompt (default 1)")
    add(
        "--pick",
        choices=("shortest", "random"),
        default="shortest",
        help="which of the right completions of a prompt (default shortest)",
    )
    add("--seed", type=int, default=0, help="seed of --pick random (default 0)")
    add("--language", choices=sorted(" ".join(SCRIPTS.values()).split()), help="keep completions in this language")
    add(
        "--purity",
        type=float,
        default=0.98,
        metavar="SHARE",
        help="lowest share of words in one script (default 0.98)",
    )
    add(
        "--max-repeat",
        type=float,
        default=0.2,
        metavar="SHARE",
        help="highest share of repeated runs of 8 words (default 0.2)",
    )
    add("--max-paragraph", type=int, metavar="WORDS", help="longest paragraph")
    add("--no-code", action="store_true", help="remove completions with code blocks")
    add_search_arguments(parser)


def run_reject(args: argparse.Namespace) -> int:
    """Write right completions as demonstrations for `burnish sft`."""
    from burnish.cli.search_data_commands import search_first
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.evaluation.rejection_sampling import RejectionOptions, write_demonstrations

    options = RejectionOptions(
        most=args.most,
        pick=args.pick,
        seed=args.seed,
        language=args.language,
        purity=args.purity,
        max_repeat=args.max_repeat,
        max_paragraph=args.max_paragraph,
        no_code=args.no_code,
        trees=args.trees,
    )
    search_first(args)
    manifest, is_new = write_demonstrations(args.source, args.out, options, args.prompts, args.force, print_progress)
    print_result(summary(manifest, args.out, is_new))
    counts = [(key, manifest[key]) for key in ("read", "right", "written")]
    rows = [[key, f"{c['completions']:,}", f"{c['prompts']:,}", f"{c['mean_tokens']:.1f}"] for key, c in counts]
    print_result(aligned_table(["", "completions", "prompts", "mean tokens"], rows))
    return 0


def add_pairs_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data pairs COMPLETIONS|RUN OUT`."""
    add = parser.add_argument
    add_samples(parser)
    add_trees(parser)
    add_output(parser)
    add(
        "--reject",
        choices=("longer", "wrong"),
        default="longer",
        help="longer (default): the shortest right completion against longer ones. wrong: right ones against wrong ones",
    )
    add(
        "--ratio",
        type=float,
        help="of longer: a right completion this many times longer than the chosen one is rejected (default 1.5)",
    )
    add(
        "--most",
        type=int,
        metavar="M",
        help="most pairs of one prompt; of longer, longest rejected first (default: all)",
    )
    add("--seed", type=int, help="of wrong: of the order in which right and wrong completions meet (default 0)")


def run_pairs(args: argparse.Namespace) -> int:
    """Write preference pairs: the shortest right completion against longer ones, or right completions against wrong ones."""
    from burnish.data.curation.output_files import aligned_table, summary
    from burnish.evaluation.rejection_sampling import PairingOptions, write_pairs

    unused = {"longer": ("--seed", args.seed), "wrong": ("--ratio", args.ratio)}[args.reject]
    if unused[1] is not None:
        raise UserError(f"{unused[0]} has no effect with --reject {args.reject}")
    ratio, seed = 1.5 if args.ratio is None else args.ratio, args.seed or 0
    options = PairingOptions(ratio, args.most, args.reject, seed, args.trees)
    manifest, is_new = write_pairs(args.source, args.out, options, args.prompts, args.force, print_progress)
    print_result(summary(manifest, args.out, is_new))
    print_result([f"  prompts      {manifest['prompts_paired']:,} of {manifest['prompts']:,} have a pair"])
    rows = [[what, f"{n:,}"] for what, n in manifest["rejected"].items()]
    print_result(aligned_table(["rejected", "pairs"], rows))
    return 0


def add_questions_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish data questions PAIRS OUT`."""
    text = "preference pairs: rows of prompt, chosen and rejected (docs/preference.md)"
    parser.add_argument("source", type=Path, metavar="PAIRS", help=text)
    add_output(parser)
    text = "a file with the question's text; {question}, {first} and {second} are replaced (default: a built-in text)"
    parser.add_argument("--template", type=Path, metavar="FILE", help=text)


def run_questions(args: argparse.Namespace) -> int:
    """Write two questions for each pair, for `burnish train` with the reward rm_r1."""
    from burnish.data.curation.judge_questions import write_questions
    from burnish.data.curation.output_files import summary
    from burnish.data.pair_questions import PAIR_TEMPLATE

    if args.template is not None and not args.template.is_file():
        raise UserError(f"--template {args.template}: no such file")
    template = PAIR_TEMPLATE if args.template is None else args.template.read_text(encoding="utf-8").rstrip("\n")
    manifest, is_new = write_questions(args.source, args.out, template, args.force, print_progress)
    print_result([*summary(manifest, args.out, is_new), f"  pairs        {manifest['pairs']:,}, each in both orders"])
    return 0
