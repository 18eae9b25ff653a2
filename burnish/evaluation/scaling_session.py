"""Runs `burnish eval --scaling`: one pool of samples, its scores by each verifier, and the searches, each resumable for itself.

A folder holds an ordinary evaluation for each part: `pool.jsonl` has max(budgets) samples of every question, with their tokens, which all
strategies on parallel samples share. `scores-VERIFIER.jsonl` has the verifier's score of each sample. Every other strategy has an
evaluation for each budget, such as `beam_search@model-16.jsonl`. What is there is not made again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.config.records import Plugin, Slot
from burnish.data.prompt_stream import PromptSample
from burnish.evaluation.completions import PartialCompletions, encode_row, read_completions, refuse_other_settings
from burnish.evaluation.evaluate import fingerprint
from burnish.evaluation.output_paths import OutputPaths
from burnish.evaluation.pool_estimates import (
    PooledQuestion,
    check_weights,
    estimate_kind,
    independent_trials,
    is_pooled,
    pooled_accuracy,
)
from burnish.evaluation.result import Row, by_question
from burnish.evaluation.scaling import (
    Scaling,
    ScalingPoint,
    Values,
    interpolated,
    paired_bootstrap,
    samples_at_equal_tokens,
)
from burnish.evaluation.search_results import summarise_searches
from burnish.evaluation.session import EvalJob, OpenSession, Say, check_votes
from burnish.evaluation.settings import EvalConfig
from burnish.evaluation.statistics import clustered_interval
from burnish.evaluation.strategies.registry import strategy_record, strategy_verifier
from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_runner import SearchRunner
from burnish.evaluation.strategies.search_tree import NodeEnd, SearchNode
from burnish.evaluation.strategies.spec import LIKELIHOOD, ORACLE, StrategyRecord, VerifierPart
from burnish.evaluation.strategies.verifiers import Verifier, build_verifier, check_steps, step_delimiter
from burnish.models.compatibility import digest_parts
from burnish.rollout.scoring import Progress
from burnish.run.durable_files import atomic_write

MAX_SHOWN_OPTION = 40
"""Characters of a verifier's option in the name of a strategy."""
POOL = "pool"
MAJORITY = "majority"
MAX_FILE_LABEL = 80


@dataclass(frozen=True)
class ScoresFile:
    """The scores of a pool by one verifier."""

    part: VerifierPart
    path: Path
    settings: dict[str, Any]


@dataclass(frozen=True)
class SearchSize:
    """A strategy at one budget."""

    label: str
    strategy: Slot
    budget: int
    job: EvalJob | None
    """Its evaluation; None for a strategy that the pool answers."""
    scores: ScoresFile | None
    """The scores of the pool that it needs; None for likelihood, which the pool holds, and without a verifier."""


@dataclass(frozen=True)
class ScalingPlan:
    """All parts of a measurement."""

    name: str
    folder: Path
    pool: EvalJob
    sizes: list[SearchSize]

    @property
    def searches(self) -> list[EvalJob]:
        return [size.job for size in self.sizes if size.job is not None]

    @property
    def scores(self) -> list[ScoresFile]:
        """Return the files of scores, each once."""
        return list({size.scores.path: size.scores for size in self.sizes if size.scores is not None}.values())


def at_budget(strategy: Slot, budget: int) -> Slot | None:
    """Return a strategy with the work of `budget` parallel answers; None if it has no such size. A plug-in gets it as its option `n`."""
    if isinstance(strategy, Plugin):
        return strategy.model_copy(update={"options": {**strategy.options, "n": budget}})
    assert isinstance(strategy, StrategyRecord)
    return strategy.at_budget(budget)


def strategy_label(strategy: Slot) -> str:
    """Return the name of a strategy with its verifier and the options that are not at their defaults: `beam_search@model beams=2`."""
    part = strategy_verifier(strategy)
    given = strategy.options if isinstance(strategy, Plugin) else strategy.model_dump(exclude_defaults=True)
    more = [f"{key}={value}" for key, value in given.items() if key not in ("name", "n", "verifier", "options")]
    return " ".join([strategy.name + (f"@{verifier_label(part)}" if part is not None else ""), *more])


def verifier_label(part: VerifierPart) -> str:
    """Return the name of a verifier with its options: `model(scorer/step-000200, aggregate=min)`."""
    shown = [
        _path_label(Path(value)) if key == "path" and isinstance(value, str) else f"{key}={_short(value)}"
        for key, value in part.options.items()
    ]
    return f"{part.name}({', '.join(shown)})" if shown else part.name


def _path_label(path: Path) -> str:
    """Return the last folder of a path, and for a checkpoint the name of its run too."""
    return f"{path.parent.parent.name}/{path.name}" if path.parent.name == "checkpoints" else path.name


def _short(value: Any) -> str:
    """Return a value as text on one line; a long one, such as a judge's template, ends with its digest."""
    text = value if isinstance(value, str) and value.isprintable() else json.dumps(value)
    return text if len(text) <= MAX_SHOWN_OPTION else f"{text[:MAX_SHOWN_OPTION]}...{digest_parts([text.encode()])}"


def file_label(label: str) -> str:
    """Return a label as part of a file name. A long one, such as of a strategy with levels, ends with its digest."""
    name = re.sub(r"[^\w.+=@]+", "-", label).strip("-")
    return name if len(name) <= MAX_FILE_LABEL else f"{name[:MAX_FILE_LABEL]}-{digest_parts([label.encode()])}"


def plan_scaling(
    name: str,
    base: EvalJob,
    folder: Path,
    model: Path,
    strategies: Sequence[Slot],
    budgets: Sequence[int],
    search_budgets: Sequence[int] | None = None,
) -> ScalingPlan:
    """Return all parts for one data set. `base` has the settings that all share; its strategy is not used.

    Strategies that the pool does not answer run at `search_budgets`, which are some of the budgets (None: all of them).
    """
    plain = base.config.model_dump(mode="json")

    def job(file: str, strategy: Slot | None, n: int) -> EvalJob:
        sampling = plain["sampling"] | {"n": n}
        kept = plain["keep_trees"] and strategy is not None
        chosen = None if strategy is None else strategy.model_dump(mode="json")
        resolved = plain | {"sampling": sampling, "strategy": chosen, "keep_trees": kept}
        settings = fingerprint(resolved, base.base, model)
        # The record itself: read from its dump, options that were left out would count as given.
        config = EvalConfig.model_validate(resolved | {"strategy": strategy})
        return EvalJob(OutputPaths(file, folder / f"{file}.jsonl"), config, base.base, settings, strategy is None)

    pool = job(POOL, None, max(budgets))
    found: list[SearchSize] = []
    labels: set[str] = set()
    for strategy in strategies:
        label = strategy_label(strategy)
        if label in labels:
            raise UserError(f"--scaling names {label} twice")
        labels.add(label)
        asked = sorted(set(budgets if is_pooled(strategy) or search_budgets is None else search_budgets))
        sized = [(k, one) for k in asked if (one := at_budget(strategy, k)) is not None]
        if not sized:
            raise UserError(f"{label} has none of the sizes {', '.join(map(str, asked))}: give other --budgets")
        scores = _scores_file(strategy, pool, job, folder) if is_pooled(strategy) else None
        for k, one in sized:
            own = None if is_pooled(strategy) else job(f"{file_label(label)}-{k}", one, 1)
            found.append(SearchSize(label, one, k, own, scores))
    return ScalingPlan(name, folder, pool, found)


def _scores_file(strategy: Slot, pool: EvalJob, job: Any, folder: Path) -> ScoresFile | None:
    part = strategy_verifier(strategy)
    if part is None or part.name == LIKELIHOOD:
        return None
    # The settings of an evaluation with this verifier name its contents: of a model, of a user's file.
    own = job(POOL, strategy_record("best_of_n", verifier=part), 1).settings
    verifier = {key: value for key, value in own.items() if key.startswith(("strategy.verifier", "verifier."))}
    return ScoresFile(part, folder / f"scores-{file_label(verifier_label(part))}.jsonl", pool.settings | verifier)


def run_scaling(
    plan: ScalingPlan,
    model: Path,
    say: Say,
    progress: Progress,
    force: bool = False,
    on_part: Callable[[Scaling], object] = lambda part: None,
) -> Scaling:
    """Sample, score and search what is not there yet, and summarise.

    `on_part` gets the points that are complete, once the pool is scored and after every search, so that a run that is killed leaves them.
    """
    jobs = [plan.pool, *plan.searches]
    if force:
        for job in jobs:
            job.paths.clear()
        for scores in plan.scores:
            scores.path.unlink(missing_ok=True)
            _journal_of(scores).unlink(missing_ok=True)
    plan.folder.mkdir(exist_ok=True)
    left = [job for job in jobs if job.paths.finished(job.settings) is None]
    to_score = [scores for scores in plan.scores if not _has_scores(scores)]
    if left or to_score:
        with ExitStack() as stack:
            session = OpenSession(jobs, model, stack, say, progress)
            for size in plan.sizes:
                check_votes(size.strategy, session.pool)
            _check_verifiers([job for job in left if job is not plan.pool], session)
            scorers = [(scores, _scorer(scores.part, session)) for scores in to_score]
            if plan.pool in left:
                session.run(plan.pool)
            for scores, verifier in scorers:
                _score_pool(scores, verifier, plan.pool, session, say, progress)
            searches = [job for job in left if job is not plan.pool]
            for number, job in enumerate(searches):
                if done := [size for size in plan.sizes if size.job is None or size.job not in searches[number:]]:
                    on_part(summarise_scaling(replace(plan, sizes=done), str(model)))
                session.run(job)
    return summarise_scaling(plan, str(model))


def _check_verifiers(jobs: Sequence[EvalJob], session: OpenSession) -> None:
    """Build each verifier of some searches once and close it, so that one that cannot be built stops the command before it samples."""
    parts: dict[str, VerifierPart] = {}
    for job in jobs:
        strategy = job.config.strategy
        part = None if strategy is None else strategy_verifier(strategy)
        if strategy is not None and part is not None:
            check_steps(strategy, step_delimiter(part, job.base))
            parts[part.model_dump_json()] = part
    for part in parts.values():
        verifier = _scorer(part, session)
        if verifier is not None:
            verifier.close()


def _scorer(part: VerifierPart, session: OpenSession) -> Verifier | None:
    pool = session.pool
    rows = {prompt.row.id: prompt.row for prompt in pool.prompts}
    return build_verifier(part, session.policy, pool.job.config.reward, pool.job.base, rows)


# --- Scores of the pool ----------------------------------------------------------------------------------------------------


def _journal_of(scores: ScoresFile) -> Path:
    return scores.path.with_suffix(".partial.jsonl")


def _has_scores(scores: ScoresFile) -> bool:
    if not scores.path.exists():
        return False
    with scores.path.open(encoding="utf-8") as file:
        refuse_other_settings(json.loads(file.readline())["settings"], scores.settings, scores.path)
    return True


def _score_pool(
    scores: ScoresFile, verifier: Verifier | None, pool: EvalJob, session: OpenSession, say: Say, progress: Progress
) -> None:
    """Score every sample of the pool as a strategy would. After an interruption, the questions that are scored stay so."""
    rows = by_question(read_completions(pool.paths.completions))
    with PartialCompletions(_journal_of(scores), scores.settings) as journal:
        counts = by_question(journal.rows)
        done = {(question, 0) for question, found in counts.items() if len(found) == len(rows[question])}
        say(f"{scores.path.name}: {sum(map(len, rows.values())):,} samples by {scores.part.name}")
        for question, nodes in scored_questions(verifier, rows, done, session):
            found = [
                {"id": question, "sample": k, "score": node.score, "tokens": node.verifier_tokens}
                for k, node in enumerate(nodes)
            ]
            journal.add(found)
            progress(f"{scores.path.name}: {len(by_question(journal.rows))}/{len(rows)} questions")
        lines = [encode_row({"settings": scores.settings}), *map(encode_row, journal.rows)]
        atomic_write(scores.path, b"".join(lines))
        journal.close(remove=True)


def scored_questions(
    verifier: Verifier | None, rows: Mapping[str, Sequence[Row]], done: set[tuple[str, int]], session: OpenSession
) -> Iterator[tuple[str, list[SearchNode]]]:
    """Yield each question with its samples as scored nodes, except those in `done`. Close the verifier.

    A search that samples nothing puts the stored tokens into its tree, so a verifier reads what it would read of a strategy.
    """
    pool, found = session.pool, dict[str, list[SearchNode]]()

    async def score_stored(search: Search) -> Choice:
        nodes = [_stored_node(search, row) for row in rows[search.question.id]]
        await search.score(nodes)
        found[search.question.id] = nodes
        return Choice(nodes[0])

    seed, tokenizer = pool.job.config.seed, session.policy.tokenizer
    runner = SearchRunner(session.engine, tokenizer, score_stored, verifier, lambda draw: "", seed)
    try:
        draws = [PromptSample(prompt, 0) for prompt in pool.prompts]
        for trajectory in runner.run(draws, 1, pool.sampling, "eval", done):
            yield trajectory.prompt_id, found.pop(trajectory.prompt_id)
    finally:
        runner.close()


def _stored_node(search: Search, row: Row) -> SearchNode:
    """Put a sample of the pool into the tree of a search."""
    end: NodeEnd = "stop" if row["finish"] == "stop" else "length"
    logp = np.full(len(row["tokens"]), row["mean_logp"], dtype=np.float32)
    node = SearchNode(search.root, 0, len(search.nodes), tuple(row["tokens"]), logp, end=end)
    search.nodes.append(node)
    return node


def read_scores(scores: ScoresFile) -> dict[str, list[Row]]:
    """Return the rows of each question, in the order of the samples."""
    rows = [json.loads(line) for line in scores.path.read_text(encoding="utf-8").splitlines()[1:]]
    return {question: sorted(found, key=lambda row: row["sample"]) for question, found in by_question(rows).items()}


def mean_verifier_tokens(rows: Sequence[Row]) -> float | None:
    """Return the mean tokens of the scores of a question; None if the verifier did not say so of all, as in files of older versions."""
    counts = [row["tokens"] for row in rows if row.get("tokens") is not None]
    return sum(counts) / len(counts) if len(counts) == len(rows) else None


# --- The summary -----------------------------------------------------------------------------------------------------------


def read_pool(plan: ScalingPlan) -> dict[str, PooledQuestion]:
    """Return the questions of the pool whose samples were all judged, with the scores of all verifiers."""
    files = {scores.path.name: read_scores(scores) for scores in plan.scores}
    found = {}
    for question, rows in by_question(read_completions(plan.pool.paths.completions)).items():
        if any(row["accuracy"] is None for row in rows):
            continue
        scores = {name: [row["score"] for row in scored[question]] for name, scored in files.items()}
        scores[LIKELIHOOD] = [row["mean_logp"] for row in rows]
        tokens = {name: mean_verifier_tokens(scored[question]) for name, scored in files.items()}
        found[question] = PooledQuestion(
            [row["answered"] for row in rows],
            [row["accuracy"] for row in rows],
            [row["length"] for row in rows],
            scores,
            tokens | {LIKELIHOOD: 0.0},
        )
    if not found:
        raise UserError(
            f"{plan.pool.paths.completions}: no question has an accuracy for all of its samples: the rewards are graded (--correct-at VALUE "
            "says from which on an answer counts as right), or scoring failed"
        )
    return found


def summarise_scaling(plan: ScalingPlan, model: str) -> Scaling:
    """Return the points of all strategies, from the files."""
    pool = read_pool(plan)
    num_all = len(by_question(read_completions(plan.pool.paths.completions)))
    size = plan.pool.config.sampling.n
    answer_tokens = float(np.mean([np.mean(question.lengths) for question in pool.values()]))
    seed = plan.pool.config.seed

    @cache
    def majority(k: int) -> dict[str, float]:
        return _pooled_values(strategy_record(MAJORITY, n=k), pool, k, LIKELIHOOD)

    points = []
    for one in plan.sizes:
        if one.job is None:
            point, values = _pooled_point(one, pool, answer_tokens, num_all)
        else:
            point, values = _searched_point(one, one.job, answer_tokens, num_all)
        if one.label != MAJORITY:
            point = _compared(point, values, majority, size, seed)
        points.append(point)
    return Scaling(plan.name, model, num_all, size, answer_tokens, points)


def _compared(
    point: ScalingPoint, values: Values, majority: Callable[[int], Values], pool_size: int, seed: int
) -> ScalingPoint:
    """Return a point with its differences from majority at the same budget, and at the tokens that it spent."""
    same = majority(point.budget)
    if not any(question in same for question in values):
        return point
    versus, num = paired_bootstrap(same, values, seed, point.strategy, point.budget)
    samples = samples_at_equal_tokens(point.times_one_answer, pool_size)
    equal = None
    if samples is not None:
        # The same resamples: at the budget itself both differences are the same numbers.
        equal, _ = paired_bootstrap(interpolated(majority, samples), values, seed, point.strategy, point.budget)
    return replace(point, versus_majority=versus, num_compared=num, versus_equal_tokens=equal, equal_samples=samples)


def _pooled_values(strategy: Slot, pool: Mapping[str, PooledQuestion], k: int, scores: str) -> dict[str, float]:
    is_logp = scores == LIKELIHOOD
    found = {q: pooled_accuracy(strategy, question, k, scores, is_logp) for q, question in pool.items()}
    return {q: value for q, value in found.items() if value is not None}


def _pooled_point(
    one: SearchSize, pool: Mapping[str, PooledQuestion], answer_tokens: float, num_all: int
) -> tuple[ScalingPoint, dict[str, float]]:
    scores = LIKELIHOOD if one.scores is None else one.scores.path.name
    questions = list(pool.values())
    if (reason := check_weights(one.strategy, questions, scores, scores == LIKELIHOOD)) is not None:
        raise UserError(f"{one.label}: {reason}")
    values = _pooled_values(one.strategy, pool, one.budget, scores)
    if not values:
        raise UserError(f"{one.label}: the verifier failed for every sample of every question")
    kind, part = estimate_kind(one.strategy), strategy_verifier(one.strategy)
    trials = independent_trials(kind, [pool[question] for question in values], one.budget)
    failures = 0 if part is None else sum(score is None for question in questions for score in question.scores[scores])
    point = ScalingPoint(
        strategy=one.label,
        budget=one.budget,
        estimate=kind,
        accuracy=clustered_interval(list(values.values()), trials),
        tokens=answer_tokens * one.budget,
        times_one_answer=float(one.budget),
        requests=float(one.budget),
        verifier_calls=0.0 if part is None else float(one.budget),
        verifier_failures=failures,
        wall_s=None,
        cache_hit_rate=None,
        num_questions=len(values),
        num_failed=num_all - len(values),
        is_oracle=part is not None and part.name == ORACLE,
        verifier_tokens=_pooled_verifier_tokens(questions, scores, one.budget),
    )
    return point, values


def _pooled_verifier_tokens(questions: Sequence[PooledQuestion], scores: str, k: int) -> float | None:
    """Return the mean tokens of the scores of k samples."""
    means = [mean for question in questions if (mean := question.verifier_tokens[scores]) is not None]
    return k * float(np.mean(means)) if len(means) == len(questions) else None


def _searched_point(
    one: SearchSize, job: EvalJob, answer_tokens: float, num_all: int
) -> tuple[ScalingPoint, dict[str, float]]:
    rows = read_completions(job.paths.completions)
    cost = summarise_searches(rows)
    assert cost is not None, "rows of a strategy have its cost"
    values = {row["id"]: float(row["accuracy"]) for row in rows if row["accuracy"] is not None}
    if not values:
        raise UserError(f"{job.paths.completions}: no search has an accuracy; first error: {rows[0]['error']}")
    result = json.loads(job.paths.result.read_text(encoding="utf-8"))
    point = ScalingPoint(
        strategy=one.label,
        budget=one.budget,
        estimate="search",
        accuracy=clustered_interval(list(values.values()), len(values)),
        tokens=cost.tokens,
        times_one_answer=cost.tokens / answer_tokens if answer_tokens else 0.0,
        requests=cost.requests,
        verifier_calls=cost.verifier_calls,
        verifier_failures=cost.verifier_failures,
        wall_s=cost.wall_s,
        cache_hit_rate=result.get("cache_hit_rate"),
        num_questions=len(values),
        num_failed=num_all - len(values),
        is_oracle=cost.is_oracle,
        verifier_tokens=cost.verifier_tokens,
    )
    return point, values
