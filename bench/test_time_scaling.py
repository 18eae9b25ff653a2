"""Accuracy against tokens for the strategies of test-time scaling, and what a search costs beside plain sampling.

Two measurements of one model, with the commands of `burnish eval`:

    scaling   accuracy at several budgets (`--scaling`), on each data set
    rates     tokens a second of searches, as a share of those of plain samples of the same questions on the same engine: majority with the
              largest budget, and every strategy over steps with 16 branches. Verifiers run, scoring by the key does not

    python bench/test_time_scaling.py DIR --data gsm8k math500 --data-dir FOLDER [--verifier-model RM] [--limit 200]
    python bench/test_time_scaling.py DIR --data gsm8k --parts rates --limit 100        a GPU to itself, because it measures time
    python bench/test_time_scaling.py DIR --data task:sort_digits --budgets 1 2 4 8 16 --limit 500
    python bench/test_time_scaling.py --tiny        everything, with a model from nothing, on a CPU in about a minute; saves nothing

A measurement that was interrupted goes on: its parts are in --work. Results: bench/results/test_time_scaling[-gpu].json, written after each
data set and each rate; rows of other models, verifiers and data that are there stay.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import on_this_gpu, save_beside, table

from burnish.cli.main import main as burnish
from burnish.config.model import Model, NewModel
from burnish.config.records import Slot
from burnish.data.prompt_stream import PromptSample
from burnish.evaluation.evaluate import make_driver
from burnish.evaluation.output_paths import OutputPaths
from burnish.evaluation.session import EvalJob, OpenSession, choose_dtype
from burnish.evaluation.settings import load_settings
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_record
from burnish.evaluation.strategies.search_runner import SearchRunner
from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.evaluation.strategies.spec import STRATEGY_RECORDS
from burnish.models.policy import load_policy
from burnish.rollout.runner import RolloutRunner

BRANCHES = 16
"""Size of the trees whose rate is measured."""
SEARCHES = [
    "early_stopping",
    *(str(one.model_fields["name"].default) for one in STRATEGY_RECORDS if "step" in one.model_fields and one.verified),
]
COLUMNS = [
    "data",
    "strategy",
    "budget",
    "accuracy",
    "low",
    "high",
    "minus_majority",
    "minus_equal_tokens",
    "tokens",
    "times",
    "cache",
    "failed",
]
RATE_COLUMNS = [
    "data",
    "system",
    "tokens_per_second",
    "share",
    "cache_hit_rate",
    "tokens",
    "requests",
    "verifier_calls",
]


def verifier_section(args: argparse.Namespace) -> dict[str, Any]:
    """The verifier of searches: a reward model if one is given, else likelihood."""
    if args.verifier_model is None:
        return {"name": "likelihood"}
    return {"name": "model", "options": {"path": str(args.verifier_model)} | json.loads(args.verifier_options)}


def default_strategies(args: argparse.Namespace) -> list[str]:
    """Votes and best-of-n with the verifiers at hand, the bound of the oracle, early stopping, and every search over steps."""
    given = [] if args.verifier_model is None else [verifier_section(args)]
    verifiers = [{"name": "likelihood"}, *({"name": name} for name in args.verifiers), *given]
    found: list[dict[str, Any]] = [{"name": "majority"}]
    found += [{"name": name, "verifier": one} for name in ("weighted_vote", "best_of_n") for one in verifiers]
    found += [{"name": "best_of_n", "verifier": {"name": "oracle"}}]
    budgets = args.search_budgets or args.budgets
    for record in STRATEGY_RECORDS:
        name = str(record.model_fields["name"].default)
        section = {"name": name, **({"verifier": verifier_section(args)} if record.verified else {})}
        if name in args.searches and any(record.model_validate(section).at_budget(k) is not None for k in budgets):
            found.append(section)
    return [json.dumps(one) for one in found]


def command(args: argparse.Namespace, data: str, out: Path) -> list[str]:
    """The words that all measurements of a data set share."""
    words = [
        "eval",
        str(args.model),
        data,
        "--limit",
        str(args.limit),
        "--temperature",
        str(args.temperature),
        "--out",
        str(out),
    ]
    words += [] if args.data_dir is None else ["--data-dir", str(args.data_dir)]
    words += [] if args.max_tokens is None else ["--max-tokens", str(args.max_tokens)]
    return [*words, *args.set]


def run(words: list[str]) -> None:
    """Run a command of burnish in this process."""
    if burnish(words):
        raise SystemExit(f"failed: burnish {' '.join(words)}")


def scaling(args: argparse.Namespace, data: str, folder: Path) -> list[dict[str, Any]]:
    """One row a point."""
    strategies = args.strategies or default_strategies(args)
    budgets = ["--budgets", *map(str, args.budgets)]
    budgets += ["--search-budgets", *map(str, args.search_budgets)] if args.search_budgets else []
    run([*command(args, data, folder), "--keep-trees", "--scaling", *strategies, *budgets])
    found = json.loads((folder / "scaling.json").read_text())
    best = {(one["strategy"], one["budget"]) for one in found["envelope"]}
    rows = []
    for point in found["points"]:
        none = {"mean": None, "low": None, "high": None}
        versus, equal = (point.pop(name) or none for name in ("versus_majority", "versus_equal_tokens"))
        rows.append(
            {"measurement": "scaling", "data": data, "questions": found["num_questions"], "pool": found["pool_size"]}
            | {
                key: value
                for key, value in point.items()
                if key not in ("accuracy", "times_one_answer", "cache_hit_rate")
            }
            | {
                "accuracy": point["accuracy"]["mean"],
                "low": point["accuracy"]["low"],
                "high": point["accuracy"]["high"],
            }
            | {"minus_majority": versus["mean"], "versus_low": versus["low"], "versus_high": versus["high"]}
            | {
                "minus_equal_tokens": equal["mean"],
                "equal_tokens_low": equal["low"],
                "equal_tokens_high": equal["high"],
            }
            | {"times": point["times_one_answer"], "cache": point["cache_hit_rate"], "failed": point["num_failed"]}
            | {"best_at_its_cost": (point["strategy"], point["budget"]) in best}
        )
    return rows


def rates(args: argparse.Namespace, data: str, folder: Path) -> Iterator[dict[str, Any]]:
    """One row a system, all on one engine and without scoring by the key: plain samples first, then searches.

    A quarter of the plain samples comes before, unmeasured: the first requests compile kernels and capture graphs.
    """
    largest = max(args.budgets)
    systems = rated_systems(args.searches, largest, verifier_section(args))
    plain_rate = None
    with ExitStack() as stack:
        session = rates_session(args, data, list(systems.values()), folder, largest, stack)
        one_rate(session, None, max(1, largest // 4))
        for name, strategy in systems.items():
            found = one_rate(session, strategy, largest)
            plain_rate = plain_rate or found["tokens_per_second"]
            row = {"measurement": "rate", "data": data, "system": name, "questions": args.limit, **found}
            print(f"{name}: {found['tokens_per_second']:,.0f} tokens a second", flush=True)
            yield row | {"share": found["tokens_per_second"] / plain_rate}


def rated_systems(searches: list[str], largest: int, verifier: dict[str, Any]) -> dict[str, Slot | None]:
    """Plain samples, majority of as many, and searches with 16 branches, by the names of their rows."""
    systems: dict[str, Slot | None] = {
        "plain samples": None,
        f"majority of {largest}": strategy_record("majority", n=largest),
    }
    for record in STRATEGY_RECORDS:
        name = str(record.model_fields["name"].default)
        if "step" in record.model_fields and name in searches:
            sized = strategy_record(name, verifier=verifier).at_budget(BRANCHES)
            systems |= {} if sized is None else {f"{name} of {BRANCHES}": sized}
    return systems


def rates_session(
    args: argparse.Namespace, data: str, systems: list[Slot | None], folder: Path, largest: int, stack: ExitStack
) -> OpenSession:
    """Return the model with an engine that has room for each of the systems."""
    flags = {"limit": args.limit, "sampling.temperature": args.temperature, "sampling.max_tokens": args.max_tokens}
    loaded = load_settings(data, flags, args.set, {}, args.data_dir)
    model = loaded.config.model.model_copy(update={"dtype": choose_dtype(loaded.config.model, args.model)})

    def job(strategy: Slot | None) -> EvalJob:
        sampling = loaded.config.sampling.model_copy(update={"n": largest if strategy is None else 1})
        config = loaded.config.model_copy(update={"strategy": strategy, "sampling": sampling, "model": model})
        return EvalJob(OutputPaths("rate", folder / "rate.jsonl"), config, loaded.base, {})

    return OpenSession([job(one) for one in systems], args.model, stack, print, lambda text: None)


def one_rate(session: OpenSession, strategy: Slot | None, n: int) -> dict[str, Any]:
    """Sample all questions once with a strategy, or n plain samples of each."""
    policy, engine, pool = session.policy, session.engine, session.pool
    config, base, draws = pool.job.config, pool.job.base, [PromptSample(prompt, 0) for prompt in pool.prompts]
    runner: RolloutRunner | SearchRunner
    if strategy is None:
        runner = make_driver(policy, engine, config.seed, template=config.data.template)
    else:
        rows = [prompt.row for prompt in pool.prompts]
        runner = build_search_runner(
            strategy, policy, engine, config.reward, rows, config.seed, base, config.data.template
        )
    stats = getattr(engine, "stats", None)
    before = 0 if stats is None else stats.prefilled_tokens
    started, cpu = time.perf_counter(), time.process_time()
    found = list(runner.run(draws, n if strategy is None else 1, pool.sampling, "eval"))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    runner.close()
    costs = [t.metadata[SEARCH] for t in found if SEARCH in t.metadata]
    tokens = sum(cost["tokens"] for cost in costs) if costs else sum(t.num_actions for t in found)
    context = sum(cost["context_tokens"] for cost in costs) or sum(len(d.prompt.start) for d in draws) * n
    return {
        "tokens_per_second": tokens / seconds,
        "wall_s": seconds,
        "cpu_s": cpu,
        "cache_hit_rate": None if stats is None else 1 - (stats.prefilled_tokens - before) / context,
        "tokens": tokens,
        "requests": sum(cost["requests"] for cost in costs) / len(draws) if costs else n,
        "verifier_calls": sum(cost["verifier_calls"] for cost in costs) / len(draws),
    }


def tiny_model(folder: Path) -> Path:
    """A model from nothing for the generated task."""
    new = NewModel(hidden_size=32, num_layers=1, num_heads=2, mlp_size=48, max_positions=48)
    folder.mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>\n", seed=1).save(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", nargs="?", type=Path)
    add("--tiny", action="store_true")
    add("--data", nargs="+", default=["gsm8k", "math500"])
    add("--data-dir", type=Path)
    add("--limit", type=int, default=200)
    add("--budgets", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    add("--search-budgets", nargs="+", type=int, help="the budgets of searches (default: all)")
    add("--strategies", nargs="+", help="words of --scaling (default: all that the model can run)")
    add(
        "--searches",
        nargs="+",
        default=SEARCHES,
        choices=SEARCHES,
        help="searches among them, and those whose rate is measured",
    )
    add("--verifiers", nargs="*", default=["self_certainty"], help="further verifiers of votes and best-of-n")
    add("--verifier-model", type=Path, help="a reward model; searches use it, and so do votes and best-of-n")
    add("--verifier-options", default="{}", help="further options of the reward model, as JSON: delimiter, aggregate")
    add("--temperature", type=float, default=1.0)
    add("--max-tokens", type=int)
    add("--set", nargs="*", default=[], help="further settings, key=value")
    add("--parts", nargs="+", default=["scaling", "rates"], choices=["scaling", "rates"])
    add("--name", help="what the rows call the model (default: its folder)")
    add("--work", type=Path, default=Path("test-time-scaling"))
    args = parser.parse_args()
    temporary = tempfile.TemporaryDirectory() if args.tiny else None
    if temporary is not None:
        args.work = Path(temporary.name)
        args.model, args.data, args.limit, args.budgets = (
            tiny_model(args.work / "tiny"),
            ["task:sort_digits"],
            6,
            [1, 2, 4],
        )
        args.max_tokens, args.set = 12, ["reward.workers=1"]
    if args.model is None:
        parser.error("give a model directory, or --tiny")
    args.work.mkdir(exist_ok=True, parents=True)
    verifier = None if args.verifier_model is None else args.verifier_model.name
    asked = {"model": args.name or args.model.name, "verifier_model": verifier}
    rows: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> None:
        """Save what is measured so far, in the place of earlier rows of the same measurement."""
        rows.extend({**asked, **row} for row in found)
        if temporary is None:
            print(f"saved {save_beside(on_this_gpu('test_time_scaling'), rows, measured)}", flush=True)

    for data in args.data:
        name = data.removeprefix("task:")
        if "scaling" in args.parts:
            keep(scaling(args, data, args.work / f"scaling-{name}"))
        if "rates" in args.parts:
            for row in rates(args, data, args.work / f"rates-{name}"):
                keep([row])
    print("\n" + table([row for row in rows if row["measurement"] == "scaling"], COLUMNS))
    print("\n" + table([row for row in rows if row["measurement"] == "rate"], RATE_COLUMNS))
    if temporary is not None:
        temporary.cleanup()
        print("\ntiny: nothing is saved")


def measured(row: dict[str, Any]) -> tuple[str, ...]:
    """What a row is of: rows of one model with one verifier model, in one measurement of one data set, are of one strategy and budget each."""
    keys = ("model", "verifier_model", "measurement", "data", "strategy", "system", "budget")
    return tuple(str(row.get(key)) for key in keys)


if __name__ == "__main__":
    main()
