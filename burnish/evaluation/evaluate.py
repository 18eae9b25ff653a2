"""One measurement of a policy: prompts in, every completion scored and kept as it comes, a result with its intervals out.

Scoring runs in other processes while the engine goes on drawing; nothing here waits for a score before the last completion
is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import RewardPart
from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin, is_plugin_file, plugin_source
from burnish.config.rollout import SINGLE_TURN, Environment, Rollout
from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.files import find_files
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.distributed.roles import build_engine, build_environment_driver
from burnish.evaluation.answers import verifier_of
from burnish.evaluation.completions import completion_row
from burnish.evaluation.result import Result, Row, summarise
from burnish.models.compatibility import digest_parts, model_digest
from burnish.models.policy import PolicyModel
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import SUBMIT_CHUNK, Progress, RoundBuilder, apply_score
from burnish.run.run_directory import flatten_keys

SEND_EVERY_S = 0.25  # completions go to the scorers this often even where few have ended


@dataclass(frozen=True)
class WorkStats:
    """What a measurement took."""

    num_tokens: int
    """Tokens that were drawn."""
    generate_s: float
    score_s: float
    """Seconds spent waiting for scores after the last completion."""


def seconds_text(start_s: float | None, work: WorkStats) -> str:
    """Where the time went."""
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
) -> RolloutRunner:
    """The driver of an environment; of single-turn questions unless one is given."""
    return build_environment_driver(environment, policy, engine, seed, base)


def sample_and_score(
    driver: RolloutRunner,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingOptions,
    progress: Progress,
    keep: Callable[[list[Row]], None],
    parts: Sequence[RewardPart] = (),
    done: Container[tuple[str, int]] = frozenset(),
) -> WorkStats:
    """`n` completions of each prompt, each handed to `keep` once when it is scored; those `done` are not drawn again.

    The noise is that of the `eval` stream and of the prompt's id and sample alone, so a measurement that was interrupted
    ends with the completions it would have had. `parts` tell how answers are to be read.
    """
    scoring = RoundBuilder(driver, rewards, [PromptSample(p, 0) for p in prompts], progress)
    kinds = {p.row.id: (p, verifier_of(parts, p.row.data_source, p.row.extra)) for p in prompts}
    desk = _ScoringQueue(scoring, kinds, keep)
    total = sum((p.row.id, sample) not in done for p in prompts for sample in range(n))
    num_tokens, started = 0, time.perf_counter()
    for i, trajectory in enumerate(driver.run(scoring.draws, n, sampling, "eval", done), start=1):
        num_tokens += trajectory.num_actions
        desk.add(trajectory)
        progress(f"{i}/{total} completions, {num_tokens / (time.perf_counter() - started):,.0f} tokens/s")
    desk.send()
    generated = time.perf_counter()
    while rewards.pending:
        desk.take(None)
        progress(f"scoring, {rewards.pending} left")
    return WorkStats(num_tokens, generated - started, time.perf_counter() - generated)


class _ScoringQueue:
    """Completions on their way through scoring: many at once to the scorers, and kept as their scores come back."""

    def __init__(
        self, scoring: RoundBuilder, kinds: dict[str, tuple[Prompt, str]], keep: Callable[[list[Row]], None]
    ) -> None:
        self.scoring, self.kinds, self.keep = scoring, kinds, keep
        self.fresh: list[Trajectory] = []
        self.waiting: dict[str, Trajectory] = {}
        self.sent = time.perf_counter()

    def add(self, trajectory: Trajectory) -> None:
        """One more; when there are enough, or it has been a while, they go out, and what is scored meanwhile is kept."""
        self.fresh.append(trajectory)
        if len(self.fresh) >= SUBMIT_CHUNK or time.perf_counter() - self.sent > SEND_EVERY_S:
            self.send()
            self.take(0.0)

    def send(self) -> None:
        """Everything that has ended to the scorers; what its environment has judged, or lost, needs none."""
        self._keep([t for t in self.fresh if t.reward is not None or t.error is not None])
        self.waiting.update((t.id, t) for t in self.fresh if t.reward is None and t.error is None)
        self.scoring.submit(self.fresh)
        self.fresh.clear()
        self.sent = time.perf_counter()

    def take(self, timeout_s: float | None) -> None:
        """Keep what has been scored, waiting so long for the first."""
        scored = []
        for score in self.scoring.rewards.poll(timeout_s):
            scored.append(self.waiting.pop(score.id))
            apply_score(scored[-1], score)
        self._keep(scored)

    def _keep(self, trajectories: Sequence[Trajectory]) -> None:
        if trajectories:
            self.keep([completion_row(*self.kinds[t.prompt_id], t) for t in trajectories])


def in_data_order(rows: Sequence[Row], prompts: Sequence[Prompt]) -> list[Row]:
    """Rows by question as in the data, then by sample."""
    order = {p.row.id: i for i, p in enumerate(prompts)}
    return sorted(rows, key=lambda row: (order[row["id"]], row["sample"]))


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
    """`n` scored completions of each prompt, summed up. The same arguments give the same result."""
    driver = make_driver(policy, build_engine(policy, Rollout(max_rows=max_rows)), seed)
    rows: list[Row] = []
    sample_and_score(driver, rewards, prompts, n, sampling, progress, rows.extend, parts)
    return summarise(in_data_order(rows, prompts))


# --- What an evaluation was made with, as a flat dictionary: two with the same one have the same completions.
#
# Files count by their content and not by their place, so a data set or a model may be moved or copied between a kill and
# the command that goes on. What leaves completions as they are (rows at once, worker processes, the device) does not count.

IGNORED_KEYS = ("max_rows", "reward.workers", "model.device", "data.source.path")


def fingerprint(resolved: dict[str, Any], base: Path, model: Path) -> dict[str, Any]:
    """The settings that decide the completions, by dotted key; `resolved` is the checked configuration as plain values."""
    flat = {key: value for key, value in flatten_keys(resolved).items() if key not in IGNORED_KEYS}
    environment = resolved["environment"]["name"]
    if environment == SINGLE_TURN:  # has no settings that decide anything
        flat = {key: value for key, value in flat.items() if not key.startswith("environment")}
    flat["model.content"] = model_digest(model)
    path = resolved["data"]["source"]["path"]
    if path is not None:
        files = find_files(path, base)
        flat["data.source.files"] = [file.name for file in files]
        flat["data.source.content"] = digest_parts([file.read_bytes() for file in files])
    plugins = [("reward", part["name"]) for part in resolved["reward"]["parts"]] + [("environment", environment)]
    for what, name in plugins:
        if is_plugin(name):
            file = plugin_source(name, base)
            if file is None:
                kind = "file" if is_plugin_file(name) else "module"
                raise UserError(f"{what} {name}: there is no {kind} {name.rpartition(':')[0]} in {base} or here")
            flat[f"{what}.content of {name}"] = digest_parts([file.read_bytes()])
    plain: dict[str, Any] = json.loads(json.dumps(flat))
    return plain
