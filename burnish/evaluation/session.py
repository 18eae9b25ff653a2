"""One command's evaluations: every data set on one model that is loaded once, each going on where it was interrupted."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.rollout import SINGLE_TURN, Rollout
from burnish.core.engine import Engine, SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import validation_prompts
from burnish.data.row_formats import NO_TOOL_ENVIRONMENT, refuse_tools
from burnish.distributed.roles import build_engine, build_scorers, find_paged_engine
from burnish.environments.registry import check_template_for_turns
from burnish.evaluation.completions import PartialCompletions, write_completions
from burnish.evaluation.evaluate import WorkStats, in_data_order, make_driver, sample_and_score
from burnish.evaluation.model_source import fit_max_tokens, stored_dtype
from burnish.evaluation.output_paths import COMBINED_NAME, CPU_ROWS, OutputPaths, plan_batch_size
from burnish.evaluation.result import Result, summarise
from burnish.evaluation.result_table import result_json
from burnish.evaluation.settings import EvalConfig
from burnish.memory_plan.kv_cache import GIB, kv_token_bytes
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel, check_finite, load_policy, resolve_device
from burnish.rewards.reward_parts import check_parts
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import Progress
from burnish.rollout.validation import sampling_options
from burnish.run.durable_files import atomic_write

Say = Callable[[str], None]
MAX_WORKERS = 16


@dataclass(frozen=True)
class EvalJob:
    """One data set: its settings, what they come to, and where its files go."""

    place: OutputPaths
    config: EvalConfig
    base: Path
    settings: dict[str, Any]
    """What decides the completions (`burnish.evaluation.evaluate`)."""


@dataclass(frozen=True)
class PreparedEval:
    """A test whose prompts are there."""

    test: EvalJob
    prompts: list[Prompt]
    sampling: SamplingOptions

    @property
    def num_requests(self) -> int:
        """Completions wanted."""
        return len(self.prompts) * self.test.config.sampling.n

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(p.tokens) for p in self.prompts)

    @property
    def most_written(self) -> int:
        """Tokens that the model may put behind a prompt, in all its turns."""
        return self.sampling.max_tokens * self.test.config.environment.max_turns


@dataclass(frozen=True)
class MeasuredEval:
    """A test that is done."""

    test: EvalJob
    result: Result
    work: WorkStats
    start_s: float
    """Seconds from the start of the process until the model was ready; the same for all tests of a command."""
    num_found: int
    """Completions that were there already."""


def choose_dtype(model: Model, path: Path) -> str:
    """The type to compute in where nobody gave one: on a GPU the half precision the weights are stored in, else as set."""
    stored = stored_dtype(path)
    return stored if resolve_device(model.device).type == "cuda" and stored in ("bfloat16", "float16") else model.dtype


def default_workers() -> int:
    """Scoring processes where nobody said how many: half of the cores, at least two. Their number changes no value."""
    return max(Reward().workers, min(MAX_WORKERS, len(os.sched_getaffinity(0)) // 2))


def run_evaluations(
    tests: Sequence[EvalJob],
    model: Path,
    best_by: str | None,
    say: Say,
    progress: Progress,
    show: Callable[[MeasuredEval], None],
) -> list[MeasuredEval]:
    """Measure each test and hand it to `show` as soon as it is done; what is wrong with any is found before the first token."""
    with ExitStack() as stack:
        for test in tests:
            check_best_by(best_by, [part.label for part in check_parts(test.config.reward.parts, test.base)])
        journals = [stack.enter_context(_journal(test, stack)) for test in tests]
        first = stack.enter_context(
            Rewards(tests[0].config.reward, tests[0].base)
        )  # its processes start while the model loads
        policy = load_policy(tests[0].config.model, model, None, tests[0].config.seed)
        check_finite(policy)
        ready = [_prepare(test, policy, say) for test in tests]
        first.attach_scorers(build_scorers(tests[0].config.reward, policy.tokenizer, tests[0].base))
        _check_rows(first, ready[0])
        engine = _engine(policy, ready, say)
        start_s = seconds_since_start()
        say(f"{model}: {policy.note}, {tests[0].config.model.dtype}; ready after {start_s:.1f} s{_warmup_note(engine)}")
        found = []
        for i, (one, journal) in enumerate(zip(ready, journals, strict=True)):
            with ExitStack() as inner:
                rewards = first if i == 0 else inner.enter_context(Rewards(one.test.config.reward, one.test.base))
                if i > 0:
                    rewards.attach_scorers(build_scorers(one.test.config.reward, policy.tokenizer, one.test.base))
                _check_rows(rewards, one)
                num_found = len(journal.rows)
                config, base = one.test.config, one.test.base
                driver = make_driver(policy, engine, config.seed, config.environment, base)
                work = _measure(one, journal, driver, rewards, say, progress)
            found.append(_finish(one, journal, best_by, work, start_s, num_found))
            journal.close(remove=True)
            show(found[-1])
        return found


def _check_rows(rewards: Rewards, one: PreparedEval) -> None:
    if one.test.config.environment.name == SINGLE_TURN:  # any other may give the reward itself
        for prompt in one.prompts:
            refuse_tools(prompt.row.extra, prompt.row.place, NO_TOOL_ENVIRONMENT)
        rewards.check((p.row for p in one.prompts), "--answer-key ")


def _journal(test: EvalJob, stack: ExitStack) -> PartialCompletions:
    folder = test.place.completions.parent
    if not folder.exists():
        try:
            folder.mkdir()
        except OSError as error:
            raise UserError(f"--out {folder}: cannot be made: {error.strerror or error}") from error
        stack.callback(lambda: None if any(folder.iterdir()) else folder.rmdir())
    return PartialCompletions(test.place.journal, test.settings)


def _prepare(test: EvalJob, policy: PolicyModel, say: Say) -> PreparedEval:
    """The prompts of a test, and how their completions are drawn."""
    config, positions = test.config, policy.max_positions
    check_template_for_turns(config.environment, policy.tokenizer, config.data.template, test.base)
    data = config.prompts(positions)
    prompts = validation_prompts(data.validation, policy.tokenizer, data, config.seed, config.limit, test.base)
    longest = max(len(p.tokens) for p in prompts)
    max_tokens, note = fit_max_tokens(config.sampling.max_tokens, longest, positions, config.environment)
    if note is not None:
        say(f"{test.place.name}: {note}")
    sampling = config.sampling.model_copy(update={"max_tokens": max_tokens})
    return PreparedEval(test, prompts, sampling_options(sampling, policy.tokenizer.eos_ids))


# --- the engine ------------------------------------------------------------------------------------------------------


def _engine(policy: PolicyModel, ready: Sequence[PreparedEval], say: Say) -> Engine:
    """One engine for all tests, with room for the largest; on a GPU everything that takes seconds is made now."""
    asked, module = ready[0].test.config.max_rows, policy.module
    if not isinstance(module, Decoder) or not module.embedding.weight.is_cuda:
        return build_engine(policy, Rollout(max_rows=asked or CPU_ROWS))
    arch, weight = module.arch, module.embedding.weight
    each = kv_token_bytes(arch.num_layers, arch.num_kv_heads, arch.head_dim, weight.element_size())
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(weight.device)
    wanted = [min(one.num_requests, asked or one.num_requests) for one in ready]
    rooms = [
        plan_batch_size(requests, one.longest_prompt, one.most_written, each, free)
        for requests, one in zip(wanted, ready, strict=True)
    ]
    rows = asked or max(room.rows for room in rooms)
    engine = build_engine(policy, Rollout(max_rows=rows, cache_gib=max(room.cache_bytes for room in rooms) / GIB))
    paged = find_paged_engine(engine)
    assert paged is not None, "a decoder on a GPU has a paged cache"
    longest = max(one.longest_prompt + one.most_written for one in ready)
    paged.prepare(longest, min(max(wanted), rows), ready[0].sampling)
    assert paged.stats.plan is not None, "made just now"
    say(paged.stats.plan.text)
    return engine


def _warmup_note(engine: Engine) -> str:
    paged = find_paged_engine(engine)
    if paged is None or not paged.stats.graphs:
        return ""
    return f" (kernels {paged.stats.compile_s:.1f} s, {paged.stats.graphs} graphs {paged.stats.capture_s:.1f} s)"


def seconds_since_start() -> float:
    """Seconds since this process began, where the system tells (Linux); else since this module was loaded."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.monotonic() - _LOADED


_LOADED = time.monotonic()


# --- one test --------------------------------------------------------------------------------------------------------


def _measure(
    one: PreparedEval,
    journal: PartialCompletions,
    driver: RolloutRunner,
    rewards: Rewards,
    say: Say,
    progress: Progress,
) -> WorkStats:
    config, name = one.test.config, one.test.place.name
    done = {(row["id"], row["sample"]) for row in journal.rows}
    n, plural = config.sampling.n, "s" if config.sampling.n > 1 else ""
    goes_on = f"; {len(done):,} are there already" if done else ""
    played = "" if config.environment.name == SINGLE_TURN else f" in environment {config.environment.name}"
    say(f"{name}: {len(one.prompts):,} prompts, {n} sample{plural} of each{played}{goes_on}")
    try:
        return sample_and_score(
            driver, rewards, one.prompts, n, one.sampling, progress, journal.add, config.reward.parts, done
        )
    except KeyboardInterrupt:
        if journal.rows:
            say(f"{len(journal.rows):,} completions are kept in {journal.path}; the same command goes on from there")
        raise


def _finish(
    one: PreparedEval, journal: PartialCompletions, best_by: str | None, work: WorkStats, start_s: float, num_found: int
) -> MeasuredEval:
    """Write the ordered completions, then the result: a kill between the two leaves the journal, from which both come again."""
    rows = in_data_order(journal.rows, one.prompts)
    result = summarise(rows, best_by)
    write_completions(one.test.place.completions, rows)
    measured = MeasuredEval(one.test, result, work, start_s, num_found)
    atomic_write(one.test.place.result, json.dumps(result_record(measured), indent=1) + "\n")
    return measured


def check_best_by(part: str | None, known: Sequence[str]) -> None:
    """Refuse to choose by a part that the reward does not have; `part/number` is a number that a part gives besides its value."""
    if part is not None and part.partition("/")[0] not in known:
        raise UserError(f"--best-by {part}: the reward has no such part (it has: {', '.join(known)})")


def result_record(measured: MeasuredEval) -> dict[str, Any]:
    """What `<name>.json` holds."""
    work = measured.work
    return {
        "name": measured.test.place.name,
        **result_json(measured.result),
        "seconds": {"start_up": measured.start_s, "generation": work.generate_s, "scoring": work.score_s},
        "resumed": measured.num_found,
        "tokens": work.num_tokens,
        "tokens_per_second": work.num_tokens / work.generate_s if work.generate_s else None,
        "device": _device(measured.test.config.model),
        "completions": measured.test.place.completions.name,
        "settings": measured.test.settings,
    }


def _device(model: Model) -> str:
    device = resolve_device(model.device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} CPU cores"


def write_combined(folder: Path, results: Sequence[dict[str, Any]], model: Path) -> Path:
    """`results.json`: the results of one command by name, without their settings."""
    path = folder / f"{COMBINED_NAME}.json"
    by_name = {r["name"]: {k: v for k, v in r.items() if k != "settings"} for r in results}
    atomic_write(path, json.dumps({"model": str(model), "results": by_name}, indent=1) + "\n")
    return path
