"""`burnish eval DIR DATA... [key=value ...]`: accuracy with its interval, pass@k, maj@k and length. Every completion is saved.

`burnish eval --compare A B` compares two results question by question. `--scaling` is in `eval_scaling.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.cli import eval_scaling
from burnish.cli.main import print_note
from burnish.config.errors import UserError
from burnish.config.yaml_text import printable

if TYPE_CHECKING:
    from burnish.evaluation.contamination import TrainingQuestions
    from burnish.evaluation.model_source import ModelSource
    from burnish.evaluation.session import EvalJob, MeasuredEval

LINE_EVERY_S = 10.0
REDRAW_EVERY_S = 0.1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options. Every setting also has a dotted key, which `--help` lists."""
    from burnish.config.explain import help_text
    from burnish.data.published_datasets import BENCHMARKS
    from burnish.evaluation.settings import EvalConfig

    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="DIR DATA ... key=value",
        help=f"a model directory, a run (its best checkpoint) or an id of the hub; \
what to measure it on: {', '.join(BENCHMARKS)}, a jsonl, parquet or csv file, a glob, SHAPE:FILE, task:NAME; further settings",
    )
    add(
        "--compare",
        nargs=2,
        type=Path,
        metavar=("A", "B"),
        help="compare two results (folders or files of completions)",
    )
    add("--data-dir", type=Path, metavar="FOLDER", help="folder of the benchmarks' files (default: BURNISH_DATA)")
    add("--n", type=int, help="samples of each prompt (default 1)")
    add("--temperature", type=float, help="0 is greedy (default); must be above 0 for several samples")
    add("--top-p", type=float, help="keep the smallest set of tokens with this probability")
    add("--top-k", type=int, help="keep the k most likely tokens")
    add(
        "--max-tokens",
        type=int,
        help="most new tokens of one completion (default: the benchmark's or run's own, or 256)",
    )
    add("--limit", type=int, help="most prompts (default: all rows of a file, 1000 problems of a task)")
    add(
        "--environment",
        metavar="NAME",
        help="play episodes in this environment, or '{agent: FILE.py:FUNCTION}' (default: that of the run or of the game's task; `burnish "
        "environments` lists them); "
        "environment.max_turns=N and environment.options.NAME=VALUE set more",
    )
    add(
        "--reward",
        action="append",
        metavar="NAME",
        help="the reward; may be repeated, the first one decides what is correct",
    )
    add(
        "--correct-at",
        type=float,
        metavar="VALUE",
        help="values of the first --reward of VALUE or more count as correct (default: 1 for verifiers; a function that returns numbers is graded)",
    )
    add(
        "--contamination",
        nargs="*",
        metavar="PATH",
        help="compare the questions with training data: of the run, or these files (also SHAPE:FILE, or a run's folder), and print the "
        "accuracy with and without those that overlap",
    )
    add("--best-by", metavar="PART", help="best@k selects the sample with the highest score of this reward part")
    add(
        "--strategy",
        metavar="NAME",
        help=f"how several samples or a search become one answer: {', '.join(strategy_names())}, or path/to/file.py:function; strategy.n=N, "
        "strategy.verifier.name=NAME and so on set more (docs/test-time-scaling.md)",
    )
    add("--budget", type=int, metavar="TOKENS", help="most tokens that the strategy samples for a question")
    add("--keep-trees", action="store_true", help="store all nodes of every search with its row")
    add("--strategies", action="store_true", help="print the table of strategies")
    eval_scaling.add_arguments(parser)
    add("--template", choices=("auto", "chat", "plain"), help="how a prompt becomes text")
    add("--system", help="a system message (chat templates)")
    add("--prompt-key", metavar="COLUMN", help="column of the prompt in plain rows (default question)")
    add("--answer-key", metavar="COLUMN", help="column of the expected answer (default answer)")
    add("--out", type=Path, metavar="PATH", help="a folder (default eval-<model>), or one .jsonl or .parquet file")
    add("--force", action="store_true", help="start again if there are completions already")
    add("--seed", type=int, help="which problems a task generates, and all sampling noise (default 0)")
    add("--device", help="auto, cpu, cuda, cuda:1")
    add(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        help="type of the arithmetic (on a GPU: as stored)",
    )
    add("--max-rows", type=int, help="most sequences decoded at once (default: what fits a GPU, 256 on a CPU)")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = help_text(EvalConfig)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print; status 1 if no completion of some data set could be scored."""
    if args.strategies:
        print(strategy_table())
        return 0
    if args.compare is not None:
        return run_compare(args)
    if args.scaling is not None:
        return eval_scaling.run(args, split_words, make_tests, Progress)
    if args.budgets is not None or args.search_budgets is not None:
        raise UserError(
            "--budgets and --search-budgets are the sizes of --scaling; --budget TOKENS limits one strategy"
        )
    from burnish.evaluation.model_source import find_model
    from burnish.evaluation.session import run_evaluations, write_combined

    model, data, overrides = split_words(args.words)
    if args.environment is not None and args.environment.startswith("{"):  # a whole section
        overrides, args.environment = [f"environment={args.environment}", *overrides], None
    subject = find_model(model, print_note)
    training = read_training_questions(args, model)  # before --force removes old results
    tests = make_tests(args, model, subject, data, overrides)
    printer = ResultPrinter(args, len(tests) > 1, training)
    for test in tests:
        printer.reuse(test)
    left = [test for test in tests if test.paths.name not in printer.results]
    if left:
        if subject.note is not None:
            print_note(f"{subject.note}; its template is used unless the command sets another{run_settings_note(data)}")
        with Progress() as progress:
            run_evaluations(
                left, subject.path, args.best_by, print_note, progress, lambda m: printer.measured(m, progress)
            )
    if len(tests) > 1:
        print(printable(printer.summary([test.paths.name for test in tests])))
        folder = tests[0].paths.completions.parent
        print(f"results      {write_combined(folder, [printer.files[t.paths.name] for t in tests], model)}")
    return int(any(result.num_failed == result.num_samples for result in printer.results.values()))


def strategy_names() -> list[str]:
    """The names of the strategies."""
    from burnish.evaluation.strategies.spec import STRATEGY_RECORDS

    return [str(record.model_fields["name"].default) for record in STRATEGY_RECORDS]


def strategy_table() -> str:
    """Every strategy with its formula, its paper and whether it compares answers by a verifier."""
    from burnish.evaluation.strategies.spec import STRATEGY_RECORDS

    width = max(map(len, strategy_names())) + 2
    lines = [f"{'strategy':<{width}}{'verifier':<10}formula, paper"]
    for name, record in zip(strategy_names(), STRATEGY_RECORDS, strict=True):
        lines.append(f"{name:<{width}}{'yes' if record.verified else '-':<10}{record.formula}")
        lines += [f"{'':<{width + 10}}{record.paper}"] if record.paper else []
    return "\n".join(
        [*lines, "", "`burnish eval --help` has their options; docs/test-time-scaling.md says what they do"]
    )


def run_compare(args: argparse.Namespace) -> int:
    """Compare two results question by question, and write the questions that changed to a file."""
    import json

    from burnish.evaluation.comparison import (
        compare,
        comparison_json,
        comparison_table,
        differing_settings,
        find_pairs,
        read_pair,
    )
    from burnish.evaluation.completions import encode_row
    from burnish.evaluation.output_paths import COMBINED_NAME, find_output_paths
    from burnish.run.durable_files import atomic_write

    unused = [*args.words, *(key for key, value in option_values(args).items() if value is not None)]
    others = ("best_by", "data_dir", "contamination", "scaling", "budgets", "search_budgets")
    unused += [name for name in others if getattr(args, name) is not None]
    if unused:
        raise UserError(f"--compare A B reads two results and evaluates nothing, so {unused[0]} has no effect")
    if args.out is not None and args.out.suffix == ".parquet":
        raise UserError(f"--out {args.out}: the questions that changed are written as .jsonl")
    pairs = find_pairs(*args.compare)
    folder = args.out or Path("-".join(["compare", *result_labels(*args.compare)]))
    targets = find_output_paths(folder, Path(), [pair.name for pair in pairs])
    together = targets[0].result if len(pairs) == 1 and folder.suffix else folder / f"{COMBINED_NAME}.json"
    there = [path for path in (*(target.completions for target in targets), together) if path.exists()]
    if there and not args.force:
        raise UserError(f"{there[0]} exists; give --force to replace it, or --out for another path")
    found = [compare(*read_pair(pair)) for pair in pairs]
    together.parent.mkdir(exist_ok=True)
    for pair, one, target in zip(pairs, found, targets, strict=True):
        for line in differing_settings(pair):
            print_note(f"{pair.name}: the two were measured differently: {line}")
        atomic_write(target.completions, b"".join(map(encode_row, one.changed)))
        print(printable(comparison_table(one, pair)))
        print(f"changed      {target.completions} ({len(one.changed):,} questions)")
    results = {pair.name: comparison_json(one, pair) for pair, one in zip(pairs, found, strict=True)}
    atomic_write(together, json.dumps({"comparison": results}, indent=1) + "\n")
    print(f"results      {together}")
    return 0


def result_labels(a: Path, b: Path) -> tuple[str, str]:
    """Names of two results: their folders or files, with the parent folder if the names are equal."""
    names = [(path.stem if path.is_file() else path.name, path.resolve().parent.name) for path in (a, b)]
    (one, above), (other, beside) = names
    return (one, other) if one != other else (f"{above}-{one}", f"{beside}-{other}")


def split_words(words: list[str]) -> tuple[Path, list[str], list[str]]:
    """The model, the data sets and the settings. `key=value` words are settings, except the word after the model."""
    if len(words) < 2:
        raise UserError("burnish eval needs a model directory and what to measure it on: burnish eval DIR gsm8k")
    model, first, *rest = words
    overrides = [word for word in rest if word.partition("=")[0].replace(".", "_").isidentifier() and "=" in word]
    return Path(model), [first, *(word for word in rest if word not in overrides)], overrides


def make_tests(
    args: argparse.Namespace, model: Path, subject: ModelSource, data: list[str], overrides: list[str]
) -> list[EvalJob]:
    """The checked settings of every data set, resolved for this machine. `--force` removes old results."""
    from burnish.config.environment import GAME_TURNS, SINGLE_TURN
    from burnish.evaluation.evaluate import fingerprint
    from burnish.evaluation.output_paths import find_output_paths
    from burnish.evaluation.session import EvalJob, choose_dtype, default_workers
    from burnish.evaluation.settings import is_given, load_settings, usual_game

    tests, given = [], option_values(args)
    for place, one in zip(find_output_paths(args.out, model, data), data, strict=True):
        config, resolved, base = load_settings(one, given, overrides, subject.config, args.data_dir)
        if usual := usual_game(one, given, overrides, subject.config):
            taken = ", ".join(f"{key}={value}" for key, value in usual.items())
            print_note(f"{place.name}: a game, played with {taken} (give others to change this)")
        played = config.environment
        if played.name != SINGLE_TURN and played.max_turns == 1 and GAME_TURNS.get(played.name) != 1:
            print_note(
                f"{place.name}: environment.max_turns=1 ends each episode in {played.name} after the first answer; set it to play more turns"
            )
        if args.best_by is not None and config.strategy is not None:
            raise UserError(
                f"--best-by selects among samples, and strategy {config.strategy.name} has chosen already; leave one of them out "
                "(--strategy best_of_n selects by a verifier)"
            )
        if args.best_by is not None and config.sampling.n == 1:
            raise UserError("--best-by selects among several samples: give --n above 1 and --temperature above 0")
        if not is_given("model.dtype", given, overrides, subject.config):
            resolved["model"]["dtype"] = choose_dtype(config.model, subject.path)
        if not is_given("reward.workers", given, overrides, {}):
            resolved["reward"]["workers"] = default_workers()
        config = type(config).model_validate(resolved)
        if place.completions.exists() and one == str(place.completions):
            raise UserError(f"--out {place.completions} is the data itself; give another path")
        if args.force:
            place.clear()
        tests.append(EvalJob(place, config, base, fingerprint(resolved, base, subject.path)))
    return tests


def option_values(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the options by their dotted keys."""
    return {
        "seed": args.seed,
        "limit": args.limit,
        "max_rows": args.max_rows,
        "model.device": args.device,
        "model.dtype": args.dtype,
        "data.template.kind": args.template,
        "data.template.system": args.system,
        "data.source.prompt_key": args.prompt_key,
        "data.source.answer_key": args.answer_key,
        "sampling.n": args.n,
        "sampling.temperature": args.temperature,
        "sampling.top_p": args.top_p,
        "sampling.top_k": args.top_k,
        "sampling.max_tokens": args.max_tokens,
        "environment.name": args.environment,
        "strategy.name": args.strategy,
        "budget": args.budget,
        "keep_trees": args.keep_trees or None,
        "reward.parts": reward_parts(args),
    }


def reward_parts(args: argparse.Namespace) -> list[Any] | None:
    """The reward parts of the options; the first one has the threshold."""
    if args.correct_at is None:
        return list(args.reward) if args.reward else None
    if not args.reward:
        raise UserError("--correct-at is the lowest value of --reward of a correct answer: give --reward too")
    first, *others = args.reward
    return [{"name": first, "correct_at": args.correct_at}, *others]


def run_settings_note(data: list[str]) -> str:
    """Which settings of a run apply to data that is not a benchmark."""
    from burnish.data.published_datasets import BENCHMARKS

    return (
        ""
        if all(one in BENCHMARKS for one in data)
        else ", and so do its reward, environment, seed and max_tokens on data that is not a benchmark"
    )


def read_training_questions(args: argparse.Namespace, model: Path) -> TrainingQuestions | None:
    """The training questions that `--contamination` asks to compare with; None without the option."""
    if args.contamination is None:
        return None
    from burnish.evaluation.contamination import training_questions

    return training_questions(model, args.contamination, args.data_dir)


class ResultPrinter:
    """Prints the results to stdout: each data set when it is done, and one table at the end."""

    def __init__(self, args: argparse.Namespace, is_many: bool, training: TrainingQuestions | None) -> None:
        self.best_by, self.is_many, self.training = args.best_by, is_many, training
        self.results: dict[str, Any] = {}
        self.files: dict[str, dict[str, Any]] = {}

    def reuse(self, test: EvalJob) -> None:
        """Print the result of a data set that was evaluated before, from its files."""
        from burnish.evaluation.completions import read_completions
        from burnish.evaluation.result import result_json, summarise

        found = test.paths.finished(test.settings)
        if found is None:
            return
        print_note(f"{test.paths.completions} is complete; nothing is sampled again (use --force to start again)")
        result = summarise(read_completions(test.paths.completions), self.best_by)
        self.files[test.paths.name] = {**found, **result_json(result)}
        self._show(test, result)

    def measured(self, measured: MeasuredEval, progress: Progress) -> None:
        """Print the result of a data set that was evaluated now."""
        from burnish.evaluation.evaluate import cache_text, seconds_text
        from burnish.evaluation.session import result_record

        progress.clear()
        self.files[measured.job.paths.name] = result_record(measured)
        cache = cache_text(measured.work) if measured.result.searches is not None else None
        self._show(measured.job, measured.result, seconds_text(measured.start_s, measured.work), cache)

    def summary(self, names: list[str]) -> str:
        """All data sets, one line each."""
        from burnish.evaluation.result import summary_table

        return summary_table({name: self.results[name] for name in names})

    def _show(self, test: EvalJob, result: Any, seconds: str | None = None, cache: str | None = None) -> None:
        from burnish.evaluation.result import result_text

        self.results[test.paths.name] = result
        print(printable("\n".join([f"{test.paths.name}\n"] if self.is_many else []) + result_text(result)))
        if self.training is not None:
            self._show_contamination(test, result, self.training)
        if cache is not None:
            print(f"cache        {cache}")
        if seconds is not None:
            print(f"seconds      {seconds}")
        print(f"completions  {test.paths.completions}" + ("\n" if self.is_many else ""))
        if result.num_failed:
            print_note(
                f"{result.num_failed} of {result.num_samples} samples could not be scored; first: {result.first_error}"
            )
        if self.best_by is not None and not result.best_at:
            print_note(f"--best-by {self.best_by}: no completion of {test.paths.name} has that part of the reward")

    def _show_contamination(self, test: EvalJob, result: Any, training: TrainingQuestions) -> None:
        """Print the overlap with the training data, and add it to the result's file."""
        import json

        from burnish.evaluation.contamination import contamination_json, contamination_text, find_contamination
        from burnish.run.durable_files import atomic_write

        found = find_contamination(result.rows, test.config.data.source, training, test.base)
        print(printable(contamination_text(found)))
        record = self.files[test.paths.name]
        record["contamination"] = contamination_json(found)
        atomic_write(test.paths.result, json.dumps(record, indent=1) + "\n")


class Progress:
    """Progress on stderr: one line that is redrawn in a terminal, or a line every few seconds."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (REDRAW_EVERY_S if self._is_terminal else LINE_EVERY_S):
            return
        self._last = now
        if self._is_terminal:
            print(f"\r\x1b[K{printable(text)}", end="", file=sys.stderr, flush=True)
        else:
            print_note(text)

    def clear(self) -> None:
        """Erase the line before other output."""
        if self._is_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()
