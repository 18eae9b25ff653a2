"""All evaluations of one `burnish eval` command: the model is loaded once, and each data set resumes where it was interrupted."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from burnish.config.data import Reward, Source
from burnish.config.environment import SINGLE_TURN, Environment
from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.records import Slot
from burnish.config.rollout import Rollout
from burnish.core.engine import Engine, SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import validation_prompts
from burnish.data.row import Row as DataRow
from burnish.data.row_formats import NO_TOOL_ENVIRONMENT, read_rows, reasons_text, refuse_tools
from burnish.distributed.engine_builder import build_engine, find_paged_engine
from burnish.distributed.roles import build_scorers
from burnish.environments.registry import check_template_for_turns
from burnish.evaluation.answers import has_comparable_answers, verifier_of
from burnish.evaluation.completions import PartialCompletions, write_completions
from burnish.evaluation.evaluate import Driver, WorkStats, in_data_order, make_driver, sample_and_score
from burnish.evaluation.model_source import fit_max_tokens, stored_dtype
from burnish.evaluation.output_paths import COMBINED_NAME, OutputPaths
from burnish.evaluation.result import Result, result_json, summarise
from burnish.evaluation.settings import EvalConfig
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import load_strategy, strategy_verifier, strategy_width
from burnish.evaluation.strategies.spec import StrategyRecord
from burnish.evaluation.strategies.verifiers import check_steps, check_verifier, step_delimiter
from burnish.memory_plan.kv_cache import BLOCK_SIZE, GIB, MAX_FREE_SHARE, cache_token_bytes
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel, check_finite, load_policy, resolve_device
from burnish.rewards.reward_parts import check_parts
from burnish.rewards.scoring import Rewards
from burnish.rollout.scoring import Progress
from burnish.rollout.validation import sampling_options
from burnish.run.durable_files import atomic_write
from burnish.run.supervisor.liveness import process_seconds

Say = Callable[[str], None]
MAX_WORKERS = 16
MAX_ROWS = 2048
"""More rows per step decode no faster per row, and their logits take gigabytes."""
CPU_ROWS = 256
"""Rows on a CPU, where the free memory is unknown."""
ROW_MULTIPLE = 64
"""Rows are a multiple of this: kernels are compiled for it, and matmuls then have whole tiles."""
WORK_BYTES = 6 * GIB
"""Memory left for activations and logits, if the device is large enough."""
CACHE_SHARE = 0.85
"""Largest share of the free memory that the KV cache takes."""


@dataclass(frozen=True)
class EvalJob:
    """The evaluation of one data set: its settings and the paths of its files."""

    paths: OutputPaths
    config: EvalConfig
    base: Path
    settings: dict[str, Any]
    """Everything that determines the completions (`burnish.evaluation.evaluate.fingerprint`)."""
    keep_tokens: bool = False
    """Store the tokens of each completion and their mean log-prob, for verifiers that score it later."""


@dataclass(frozen=True)
class PreparedEval:
    """A job with its prompts."""

    job: EvalJob
    prompts: list[Prompt]
    sampling: SamplingOptions
    positions: int | None = None
    """The model's limit on the tokens of a context."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of rows that cannot be used, by reason."""

    @property
    def num_requests(self) -> int:
        """Number of completions to sample; with a strategy, how many of them can be open at once."""
        strategy = self.job.config.strategy
        width = 1 if strategy is None else strategy_width(strategy)
        return len(self.prompts) * self.job.config.sampling.n * width

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.tokens) for p in self.prompts)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that may follow a row's prompt in a context: answers, and in an environment what it writes."""
        return most_new_tokens(
            self.longest_prompt, self.sampling.max_tokens, self.job.config.environment, self.positions
        )


@dataclass(frozen=True)
class MeasuredEval:
    """A finished job."""

    job: EvalJob
    result: Result
    work: WorkStats
    start_s: float
    """Seconds from the start of the process until the model was ready. It is the same for all jobs of a command."""
    num_found: int
    """Completions that an interrupted evaluation had already sampled."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """The number of rows that were not asked because their answer cannot be used, by reason."""


def choose_dtype(model: Model, path: Path) -> str:
    """Return the default dtype: on a GPU the half precision that the weights are stored in, else that of the config."""
    stored = stored_dtype(path)
    return stored if resolve_device(model.device).type == "cuda" and stored in ("bfloat16", "float16") else model.dtype


def default_workers() -> int:
    """Return the default number of scoring processes: half of the cores, at least two. It changes no result."""
    return max(Reward().workers, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


def run_evaluations(
    jobs: Sequence[EvalJob],
    model: Path,
    best_by: str | None,
    say: Say,
    progress: Progress,
    show: Callable[[MeasuredEval], None],
) -> list[MeasuredEval]:
    """Run each job and pass it to `show` when it is done. All settings are checked before the first token is sampled."""
    with ExitStack() as stack:
        for job in jobs:
            check_best_by(best_by, [part.label for part in check_parts(job.config.reward.parts, job.base)])
        journals = [stack.enter_context(_journal(job, stack)) for job in jobs]
        first = stack.enter_context(
            Rewards(jobs[0].config.reward, jobs[0].base)
        )  # its processes start while the model loads
        policy = _load_policy(jobs[0], model)
        ready = [_prepare(job, policy, say) for job in jobs]
        first.attach_scorers(build_scorers(jobs[0].config.reward, policy.tokenizer, jobs[0].base))
        _check_rows(first, ready[0])
        for one in ready:
            _check_search(one, policy)
        engine = _engine(policy, ready, say)
        start_s = _say_ready(model, jobs[0], policy, engine, say)
        found = []
        for i, (one, journal) in enumerate(zip(ready, journals, strict=True)):
            with ExitStack() as inner:
                rewards = first if i == 0 else inner.enter_context(Rewards(one.job.config.reward, one.job.base))
                if i > 0:
                    rewards.attach_scorers(build_scorers(one.job.config.reward, policy.tokenizer, one.job.base))
                _check_rows(rewards, one)
                found.append(_run_job(one, journal, policy, engine, rewards, best_by, start_s, say, progress))
            show(found[-1])
        return found


def _load_policy(job: EvalJob, model: Path) -> PolicyModel:
    policy = load_policy(job.config.model, model, None, job.config.seed)
    check_finite(policy)
    return policy


def _say_ready(model: Path, job: EvalJob, policy: PolicyModel, engine: Engine, say: Say) -> float:
    start_s = process_seconds()
    say(f"{model}: {policy.note}, {job.config.model.dtype}; ready after {start_s:.1f} s{_warmup_note(engine)}")
    return start_s


def _run_job(
    one: PreparedEval,
    journal: PartialCompletions,
    policy: PolicyModel,
    engine: Engine,
    rewards: Rewards,
    best_by: str | None,
    start_s: float,
    say: Say,
    progress: Progress,
) -> MeasuredEval:
    """Sample and score what the journal lacks, and write the result."""
    num_found = len(journal.rows)
    with ExitStack() as stack:
        driver = _driver(one, policy, engine)
        stack.callback(driver.close)
        work = _measure(one, journal, driver, rewards, say, progress)
    measured = _finish(one, journal, best_by, work, start_s, num_found)
    journal.close(remove=True)
    return measured


class OpenSession:
    """A loaded model with its engine and the rewards of one data set, for several evaluations of its prompts one after the other."""

    def __init__(self, jobs: Sequence[EvalJob], model: Path, stack: ExitStack, say: Say, progress: Progress) -> None:
        """`jobs` differ in their strategies and numbers of samples alone. The first has the prompts that all share."""
        job = jobs[0]
        self.say, self.progress, self._stack = say, progress, stack
        self._rewards = stack.enter_context(Rewards(job.config.reward, job.base))
        self.policy = _load_policy(job, model)
        self.pool = _prepare(job, self.policy, say)
        self._rewards.attach_scorers(build_scorers(job.config.reward, self.policy.tokenizer, job.base))
        _check_rows(self._rewards, self.pool)
        self.engine = _engine(self.policy, [self._prepared(one) for one in jobs], say)
        self._start_s = _say_ready(model, job, self.policy, self.engine, say)

    def run(self, job: EvalJob) -> MeasuredEval:
        """Run one of the jobs, or go on with it."""
        journal = self._stack.enter_context(_journal(job, self._stack))
        return _run_job(
            self._prepared(job),
            journal,
            self.policy,
            self.engine,
            self._rewards,
            None,
            self._start_s,
            self.say,
            self.progress,
        )

    def _prepared(self, job: EvalJob) -> PreparedEval:
        return replace(self.pool, job=job)


def _driver(one: PreparedEval, policy: PolicyModel, engine: Engine) -> Driver:
    config, base = one.job.config, one.job.base
    if config.strategy is None:
        return make_driver(policy, engine, config.seed, config.environment, base, config.data.template)
    return build_search_runner(
        config.strategy,
        policy,
        engine,
        config.reward,
        [prompt.row for prompt in one.prompts],
        config.seed,
        base,
        config.data.template,
        config.budget,
        config.keep_trees,
    )


def _check_search(one: PreparedEval, policy: PolicyModel) -> None:
    """Check the strategy of a job and its verifier, before the first token of any job is sampled."""
    config, base = one.job.config, one.job.base
    if config.strategy is None:
        return
    load_strategy(config.strategy, base)
    check_votes(config.strategy, one)
    part = strategy_verifier(config.strategy)
    if part is not None:
        check_verifier(part, policy, config.reward, base, {prompt.row.id: prompt.row for prompt in one.prompts})
        check_steps(config.strategy, step_delimiter(part, base))


def check_votes(strategy: Slot, one: PreparedEval) -> None:
    """Refuse a strategy that votes on data without a row whose answers can be compared: it would take its first sample."""
    parts = one.job.config.reward.parts
    if not isinstance(strategy, StrategyRecord) or not strategy.votes:
        return
    kinds = {verifier_of(parts, prompt.row.data_source, prompt.row.extra) for prompt in one.prompts}
    if not any(map(has_comparable_answers, kinds)):
        names = ", ".join(sorted(kind for kind in kinds if kind)) or "a graded reward"
        raise UserError(
            f"{one.job.paths.name}: strategy {strategy.name} votes on equal answers, and no answer to these questions has a text to compare "
            f"({names}), so that many samples would say no more than the first: use the strategy best_of_n with a verifier, or choose=best "
            "where the strategy has it"
        )


def _check_rows(rewards: Rewards, one: PreparedEval) -> None:
    if one.job.config.environment.name == SINGLE_TURN:  # other environments may give the reward themselves
        for prompt in one.prompts:
            refuse_tools(prompt.row.extra, prompt.row.place, NO_TOOL_ENVIRONMENT)
        rewards.check((p.row for p in one.prompts), "--answer-key ")


def _journal(job: EvalJob, stack: ExitStack) -> PartialCompletions:
    folder = job.paths.completions.parent
    if not folder.exists():
        try:
            folder.mkdir()
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be made: {error.strerror or error}") from error
        stack.callback(lambda: None if any(folder.iterdir()) else folder.rmdir())
    return PartialCompletions(job.paths.journal, job.settings)


def _prepare(job: EvalJob, policy: PolicyModel, say: Say) -> PreparedEval:
    """Read the prompts of a job and resolve its sampling options."""
    config, positions = job.config, policy.max_positions
    for text in check_template_for_turns(config.environment, policy.tokenizer, config.data.template, job.base):
        say(f"{job.paths.name}: {text}")
    data = config.prompts(positions)
    left_out: Counter[str] = Counter()

    def read(source: Source, base: Path | None) -> list[DataRow]:
        return read_rows(source, base, left_out)

    prompts = validation_prompts(data.validation, policy.tokenizer, data, config.seed, config.limit, job.base, read)
    if left_out:
        say(f"{job.paths.name}: {left_out.total():,} rows are not asked: {reasons_text(left_out)}")
    longest = max(len(p.tokens) for p in prompts)
    max_tokens, note = fit_max_tokens(config.sampling.max_tokens, longest, positions, config.environment)
    if note is not None:
        say(f"{job.paths.name}: {note}")
    sampling = config.sampling.model_copy(update={"max_tokens": max_tokens})
    return PreparedEval(job, prompts, sampling_options(sampling, policy.tokenizer.eos_ids), positions, dict(left_out))


def most_new_tokens(longest_prompt: int, max_tokens: int, environment: Environment, positions: int | None) -> int:
    """Return how many tokens may follow a row's prompt in one context.

    In an environment, `environment.max_tokens` is the limit of a context, whatever the row's prompt: a game writes its own prompt, and tools
    their results. Without that limit, what the environment writes counts as much as the answers.
    """
    if environment.name == SINGLE_TURN:
        return max_tokens
    expected = longest_prompt + 2 * max_tokens * environment.max_turns
    longest = min(environment.max_tokens or expected, positions or expected)
    return max(max_tokens, longest - longest_prompt)


class BatchPlan(NamedTuple):
    """Number of rows that are decoded at once, and the bytes of their KV cache."""

    rows: int
    cache_bytes: int


def plan_batch_size(
    requests: int, longest_prompt: int, max_tokens: int, token_bytes: int, free_bytes: int
) -> BatchPlan:
    """Plan rows and KV cache for a number of requests on a device with `free_bytes` of free memory.

    An evaluation has the device to itself. Decoding all completions at once is best if they fit: long ones start early.
    The cache takes what all rows need at their longest, at most `CACHE_SHARE` of the free memory, and leaves `WORK_BYTES`.
    On a small device it takes the share that a rollout takes. A row counts with half of its new tokens, because few
    reach the limit. If rows outgrow the cache, the engine preempts the youngest.
    """
    longest = -(-(longest_prompt + max_tokens) // BLOCK_SIZE) * BLOCK_SIZE
    typical = longest_prompt + max_tokens // 2
    available = max(free_bytes * MAX_FREE_SHARE, min(free_bytes * CACHE_SHARE, free_bytes - WORK_BYTES))
    rows_that_fit = int(available // (typical * token_bytes))
    wanted_rows = -(-requests // ROW_MULTIPLE) * ROW_MULTIPLE if requests > ROW_MULTIPLE else requests
    rows = max(1, min(wanted_rows, MAX_ROWS, rows_that_fit))
    wanted = (rows * longest + BLOCK_SIZE) * token_bytes  # one block is never assigned to a row
    return BatchPlan(rows, int(min(wanted, available)))


def _engine(policy: PolicyModel, ready: Sequence[PreparedEval], say: Say) -> Engine:
    """Build one engine for all jobs, sized for the largest. On a GPU, kernels and graphs are compiled now."""
    asked, module = ready[0].job.config.max_rows, policy.module
    if not isinstance(module, Decoder) or not module.embedding.weight.is_cuda:
        return build_engine(policy, Rollout(max_rows=asked or CPU_ROWS))
    weight = module.embedding.weight
    each = cache_token_bytes(module.arch, weight.element_size())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(weight.device)
    wanted = [min(one.num_requests, asked or one.num_requests) for one in ready]
    plans = [
        plan_batch_size(requests, one.longest_prompt, one.max_new_tokens, each, free)
        for requests, one in zip(wanted, ready, strict=True)
    ]
    rows = asked or max(plan.rows for plan in plans)
    engine = build_engine(policy, Rollout(max_rows=rows, cache_gib=max(plan.cache_bytes for plan in plans) / GIB))
    paged = find_paged_engine(engine)
    assert paged is not None, "a decoder on a GPU has a paged cache"
    longest = max(one.longest_prompt + one.max_new_tokens for one in ready)
    paged.prepare(longest, min(max(wanted), rows), ready[0].sampling)
    assert paged.stats.plan is not None, "made just now"
    say(paged.stats.plan.text)
    return engine


def _warmup_note(engine: Engine) -> str:
    paged = find_paged_engine(engine)
    if paged is None or not paged.stats.graphs:
        return ""
    return f" (kernels {paged.stats.compile_s:.1f} s, {paged.stats.graphs} graphs {paged.stats.capture_s:.1f} s)"


def _measure(
    one: PreparedEval,
    journal: PartialCompletions,
    driver: Driver,
    rewards: Rewards,
    say: Say,
    progress: Progress,
) -> WorkStats:
    config, name = one.job.config, one.job.paths.name
    done = {(row["id"], row["sample"]) for row in journal.rows}
    n, plural = config.sampling.n, "s" if config.sampling.n > 1 else ""
    num_done = len({(row["id"], row.get("episode", row["sample"])) for row in journal.rows})
    goes_on = f"; {num_done:,} are there already" if done else ""
    played = "" if config.environment.name == SINGLE_TURN else f" in environment {config.environment.name}"
    played += "" if config.strategy is None else f" by strategy {config.strategy.name}"
    say(f"{name}: {len(one.prompts):,} prompts, {n} sample{plural} of each{played}{goes_on}")
    try:
        return sample_and_score(
            driver,
            rewards,
            one.prompts,
            n,
            one.sampling,
            progress,
            journal.add,
            config.reward.parts,
            done,
            one.job.keep_tokens,
        )
    except KeyboardInterrupt:
        if journal.rows:
            say(f"{len(journal.rows):,} completions are kept in {journal.path}; the same command goes on from there")
        raise


def _finish(
    one: PreparedEval, journal: PartialCompletions, best_by: str | None, work: WorkStats, start_s: float, num_found: int
) -> MeasuredEval:
    """Write the ordered completions, then the result. After a kill in between, both are written again from the partial file."""
    rows = in_data_order(journal.rows, one.prompts)
    result = summarise(rows, best_by)
    write_completions(one.job.paths.completions, rows)
    measured = MeasuredEval(one.job, result, work, start_s, num_found, one.left_out)
    atomic_write(one.job.paths.result, json.dumps(result_record(measured), indent=1) + "\n")
    return measured


def check_best_by(part: str | None, known: Sequence[str]) -> None:
    """Raise a `UserError` for a part that the reward lacks. `part/number` is an additional number that a part reports."""
    if part is not None and part.partition("/")[0] not in known:
        raise UserError(f"--best-by {part}: the reward has no such part (it has: {', '.join(known)})")


def result_record(measured: MeasuredEval) -> dict[str, Any]:
    """Return the content of `<name>.json`."""
    work = measured.work
    return {
        "name": measured.job.paths.name,
        **result_json(measured.result),
        "seconds": {"start_up": measured.start_s, "generation": work.generate_s, "scoring": work.score_s},
        "resumed": measured.num_found,
        "left_out": dict(measured.left_out),
        "tokens": work.num_tokens,
        "tokens_per_second": work.num_tokens / work.generate_s if work.generate_s else None,
        **({} if measured.result.searches is None else {"cache_hit_rate": work.cache_hit_rate}),
        "device": _device(measured.job.config.model),
        "completions": measured.job.paths.completions.name,
        "settings": measured.job.settings,
    }


def _device(model: Model) -> str:
    device = resolve_device(model.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def write_combined(folder: Path, results: Sequence[dict[str, Any]], model: Path) -> Path:
    """Write `results.json`: the results of one command by name, without their settings."""
    path = folder / f"{COMBINED_NAME}.json"
    by_name = {r["name"]: {k: v for k, v in r.items() if k != "settings"} for r in results}
    atomic_write(path, json.dumps({"model": str(model), "results": by_name}, indent=1) + "\n")
    return path
