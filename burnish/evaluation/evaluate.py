"""One evaluation of a policy: sample completions of prompts, score them, and summarise them with intervals.

Scoring runs in other processes while the engine samples. Nothing waits for a score before the last completion has finished.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import RewardPart, Template
from burnish.config.environment import SINGLE_TURN, Environment
from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin, is_plugin_file, plugin_source
from burnish.config.rollout import Rollout
from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.files import find_files
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.distributed.engine_builder import build_engine
from burnish.distributed.roles import build_environment_driver
from burnish.evaluation.answers import verifier_of
from burnish.evaluation.completions import completion_row, episode_row, token_columns
from burnish.evaluation.result import Result, Row, summarise
from burnish.evaluation.search_results import cache_hit_rate
from burnish.evaluation.strategies.search_runner import SearchRunner
from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.inference.engine_common import EngineStats
from burnish.models.compatibility import digest_parts, model_digest
from burnish.models.policy import PolicyModel, find_directory
from burnish.rewards.reward_parts import MODEL
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import SUBMIT_CHUNK, Progress, apply_score, score_request
from burnish.run.run_directory import flatten_keys

Driver = RolloutRunner | SearchRunner
SEND_EVERY_S = 0.25
"""Completions are sent to the scorers this often, even if few have finished."""
IGNORED_KEYS = ("max_rows", "reward.workers", "model.device", "data.source.path")
"""Settings that do not change the completions."""


@dataclass(frozen=True)
class WorkStats:
    """Tokens and time of an evaluation."""

    num_tokens: int
    """Tokens that were sampled."""
    generate_s: float
    score_s: float
    """Seconds spent waiting for scores after the last completion."""
    context_tokens: int = 0
    """Tokens of the contexts of all requests of a strategy."""
    prefilled_tokens: int | None = None
    """Those of them that the engine computed, because they were not in its cache; None if it does not count them."""

    @property
    def cache_hit_rate(self) -> float | None:
        """Return the share of the strategy's context tokens that came from the engine's cache."""
        return cache_hit_rate(self.context_tokens, self.prefilled_tokens)


def cache_text(work: WorkStats) -> str:
    """Describe how much of the contexts of a strategy came from the engine's cache."""
    rate = "-" if work.cache_hit_rate is None else f"{work.cache_hit_rate:.1%}"
    return f"{rate} of {work.context_tokens:,} context tokens were not prefilled again"


def seconds_text(start_s: float | None, work: WorkStats) -> str:
    """Describe where the time went."""
    start = "" if start_s is None else f"start-up {start_s:.1f} s, "
    rate = work.num_tokens / work.generate_s if work.generate_s else 0.0
    return (
        f"{start}generation {work.generate_s:.1f} s ({work.num_tokens:,} tokens, {rate:,.0f} a second), "
        f"scoring {work.score_s:.1f} s more"
    )


def make_driver(
    policy: PolicyModel,
    engine: Engine,
    seed: int,
    environment: Environment = Environment(),  # noqa: B008 (a frozen record)
    base: Path | None = None,
    template: Template | None = None,
) -> RolloutRunner:
    """Return the rollout runner of an environment; by default, of single-turn questions."""
    return build_environment_driver(environment, policy, engine, seed, base, template)


def sample_and_score(
    driver: Driver,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingOptions,
    progress: Progress,
    keep: Callable[[list[Row]], None],
    parts: Sequence[RewardPart] = (),
    done: Container[tuple[str, int]] = frozenset(),
    keep_tokens: bool = False,
) -> WorkStats:
    """Sample and score `n` completions of each prompt, except those in `done`. `keep` gets each completion once it is scored.

    The noise depends on the `eval` stream, the prompt's id and the sample index alone. So an interrupted evaluation ends
    with the same completions. `parts` are the reward parts; they determine how answers are extracted.
    With `keep_tokens`, rows have the tokens of their completion and the mean log-prob.
    """
    draws = [PromptSample(p, 0) for p in prompts]
    kinds = {p.row.id: verifier_of(parts, p.row.data_source, p.row.extra) for p in prompts}
    queue = _ScoringQueue(driver, rewards, draws, kinds, keep, keep_tokens)
    total = sum(not driver.is_sampled(draw, sample, done) for draw in draws for sample in range(n))
    what = "episodes" if has_environment(driver) else "completions"
    ended = set[tuple[str, int]]()  # the players of a game end together
    num_tokens, num_context, started = 0, 0, time.perf_counter()
    before = _prefilled_tokens(driver.engine)
    for trajectory in driver.run(draws, n, sampling, "eval", done):
        search = trajectory.metadata.get(SEARCH)
        num_tokens += trajectory.num_actions if search is None else search["tokens"]
        num_context += 0 if search is None else search["context_tokens"]
        ended.add((trajectory.prompt_id, driver.episode_index(trajectory.sample)))
        queue.add(trajectory)
        progress(f"{len(ended)}/{total} {what}, {num_tokens / (time.perf_counter() - started):,.0f} tokens/s")
    queue.send()
    generated = time.perf_counter()
    while rewards.pending:
        queue.take(None)
        progress(f"scoring, {rewards.pending} left")
    after = _prefilled_tokens(driver.engine)
    prefilled = None if before is None or after is None else after - before
    scored_s = time.perf_counter() - generated
    return WorkStats(num_tokens, generated - started, scored_s, num_context, prefilled)


def _prefilled_tokens(engine: Engine) -> int | None:
    """Return how many tokens a native engine has prefilled so far; None for others."""
    stats = getattr(engine, "stats", None)
    return stats.prefilled_tokens if isinstance(stats, EngineStats) else None


def has_environment(driver: Driver) -> bool:
    """Whether completions are answered, so that a sample is an episode."""
    return driver.host is not None or driver.max_turns > 1


class _ScoringQueue:
    """Sends completions to the scorers in batches, and keeps them as their scores return."""

    def __init__(
        self,
        driver: Driver,
        rewards: Rewards,
        draws: Sequence[PromptSample],
        kinds: Mapping[str, str],
        keep: Callable[[list[Row]], None],
        keep_tokens: bool,
    ) -> None:
        self.driver, self.rewards, self.kinds, self.keep, self.keep_tokens = driver, rewards, kinds, keep, keep_tokens
        self.draws = {draw.prompt.row.id: draw for draw in draws}
        self.fresh: list[Trajectory] = []
        self.waiting: dict[str, Trajectory] = {}
        self.sent = time.perf_counter()

    def add(self, trajectory: Trajectory) -> None:
        """Add a completion. If there are enough, or enough time has passed, send the batch and keep what has been scored."""
        self.fresh.append(trajectory)
        if len(self.fresh) >= SUBMIT_CHUNK or time.perf_counter() - self.sent > SEND_EVERY_S:
            self.send()
            self.take(0.0)

    def send(self) -> None:
        """Send finished completions to the scorers, except those that their environment scored or that failed."""
        self._keep([t for t in self.fresh if t.reward is not None or t.error is not None])
        unscored = [t for t in self.fresh if t.reward is None and t.error is None]
        self.waiting.update((t.id, t) for t in unscored)
        self.rewards.submit([score_request(t, self.draws[t.prompt_id]) for t in unscored])
        self.fresh.clear()
        self.sent = time.perf_counter()

    def take(self, timeout_s: float | None) -> None:
        """Keep what has been scored; wait at most `timeout_s` for the first score."""
        scored = []
        for score in self.rewards.poll(timeout_s):
            scored.append(self.waiting.pop(score.id))
            apply_score(scored[-1], score)
        self._keep(scored)

    def _keep(self, trajectories: Sequence[Trajectory]) -> None:
        if trajectories:
            self.keep([self._row(t) for t in trajectories])

    def _row(self, t: Trajectory) -> Row:
        driver, prompt, kind = self.driver, self.draws[t.prompt_id].prompt, self.kinds[t.prompt_id]
        if not has_environment(driver):
            return completion_row(prompt, kind, t) | (token_columns(t) if self.keep_tokens else {})
        return episode_row(prompt, kind, t, driver.episode_index(t.sample), driver.tokenizer)


def in_data_order(rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Row]:
    """Sort rows by question, in the order of the data, then by sample, and in a game of several players by role."""
    order = {p.row.id: i for i, p in enumerate(prompts)}
    return sorted(rows, key=lambda row: (order[row["id"]], row["sample"], row.get("role", "")))


def evaluate(
    policy: PolicyModel,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingOptions,
    progress: Progress,
    seed: int = 0,
    max_rows: int = 256,
    parts: Sequence[RewardPart] = (),
) -> Result:
    """Sample, score and summarise `n` completions of each prompt. The same arguments give the same result."""
    driver = make_driver(policy, build_engine(policy, Rollout(max_rows=max_rows)), seed)
    rows: list[Row] = []
    sample_and_score(driver, rewards, prompts, n, sampling, progress, rows.extend, parts)
    return summarise(in_data_order(rows, prompts))


def fingerprint(resolved: dict[str, Any], base: Path, model: Path) -> dict[str, Any]:
    """Return the settings that determine the completions, by dotted key. Equal fingerprints mean equal completions.

    `resolved` is the checked configuration as plain values. Files count by content, not by path, so that a data set or model
    may be moved before an interrupted evaluation resumes.
    """
    flat = {key: value for key, value in flatten_keys(resolved).items() if key not in IGNORED_KEYS}
    environment = resolved["environment"]["name"]
    if environment == SINGLE_TURN:  # its settings have no effect
        flat = {key: value for key, value in flat.items() if not key.startswith("environment")}
    flat["model.content"] = model_digest(model)
    path = resolved["data"]["source"]["path"]
    if path is not None:
        files = find_files(path, base)
        flat["data.source.files"] = [file.name for file in files]
        flat["data.source.content"] = digest_parts([file.read_bytes() for file in files])
    plugins = [("reward", part["name"]) for part in resolved["reward"]["parts"]] + [("environment", environment)]
    plugins += _strategy_settings(flat, resolved.get("strategy"), base)
    plugins += [("tool", tool["name"]) for tool in resolved["environment"]["tools"]]
    target = resolved["environment"]["options"].get("target")  # the class that an adapter plays
    plugins += [("environment", target)] if isinstance(target, str) else []
    for what, name in plugins:
        if is_plugin(name):
            file = plugin_source(name, base)
            if file is None:
                kind = "file" if is_plugin_file(name) else "module"
                raise UserError(f"{what} {name}: there is no {kind} {name.rpartition(':')[0]} in {base} or here")
            flat[f"{what}.content of {name}"] = digest_parts([file.read_bytes()])
    plain: dict[str, Any] = json.loads(json.dumps(flat))
    return plain


def _strategy_settings(flat: dict[str, Any], strategy: dict[str, Any] | None, base: Path) -> list[tuple[str, str]]:
    """Return the names of a strategy and its verifier, and put the content of a verifier's model in the place of its path."""
    if strategy is None:  # its settings have no effect
        for key in ("strategy", "budget", "keep_trees"):
            flat.pop(key, None)
        return []
    verifier = strategy.get("verifier") or strategy.get("options", {}).get("verifier")
    verifier = {"name": verifier} if isinstance(verifier, str) else verifier or {}
    path = verifier.get("options", {}).get("path")
    if verifier.get("name") == MODEL and isinstance(path, str):
        for key in ("strategy.verifier.options.path", "strategy.options.verifier.options.path"):
            flat.pop(key, None)
        flat["strategy.verifier.content"] = model_digest(find_directory(path, base))
    return [("strategy", strategy["name"]), *([("verifier", verifier["name"])] if verifier else [])]
