"""One measurement of a policy: prompts in, a result with its intervals and every completion out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.config.schema import Environment, Rollout
from burnish.controller.roles import build_engine
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Prompt
from burnish.environments.base import environment_factory
from burnish.evaluation.statistics import Estimate, mean_at_k, mean_pass_at_k, powers_up_to
from burnish.models.policy import PolicyModel
from burnish.rewards.rewards import Rewards
from burnish.rollout.driver import Driver
from burnish.rollout.measure import measure
from burnish.rollout.scored import Progress, Scored


@dataclass(frozen=True)
class Result:
    """What was measured. Samples whose scorer failed are counted in `num_failed` and in nothing else."""

    num_prompts: int
    num_samples: int
    accuracy: Estimate | None
    """None where no sample has an accuracy: every scorer failed, or the only reward is `format`."""
    reward_mean: float | None
    pass_at: dict[int, float]
    """pass@k for k = 1, 2, 4, ... up to the samples a prompt."""
    length_mean: float
    truncated: float
    """Share of the samples that hit max_tokens."""
    num_failed: int
    num_timed_out: int
    by_source: dict[str, Estimate] = field(default_factory=dict)
    """Accuracy of each data source, where there are several."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """One a sample, in the order of the prompts."""

    @property
    def first_error(self) -> str | None:
        """What the first failed scorer said."""
        return next((row["error"] for row in self.rows if row["error"]), None)


def evaluate(
    policy: PolicyModel,
    rewards: Rewards,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingOptions,
    progress: Progress,
    seed: int = 0,
    max_rows: int = 256,
) -> Result:
    """`n` scored completions of each prompt, summed up. The same arguments give the same result."""
    engine = build_engine(policy, Rollout(max_rows=max_rows))
    driver = Driver(engine, environment_factory(Environment(), policy.tokenizer), policy.tokenizer, seed)
    return summarise(measure(driver, rewards, prompts, n, sampling, progress), n)


def summarise(scored: Scored, n: int) -> Result:
    """The result of scored completions, `n` of each prompt."""
    usable = [t for t in scored.trajectories if t.reward is not None]
    groups = accuracies(usable)
    source = {d.prompt.row.id: d.prompt.row.data_source for d in scored.draws}
    names = sorted({source[prompt] for prompt in groups})
    parts = {name: [g for prompt, g in groups.items() if source[prompt] == name] for name in names}
    passes = {k: mean_pass_at_k(list(groups.values()), k) for k in powers_up_to(n)}
    return Result(
        num_prompts=len(scored.draws),
        num_samples=len(scored.trajectories),
        accuracy=mean_at_k(list(groups.values())) if groups else None,
        reward_mean=_mean([t.reward for t in usable if t.reward is not None]) if usable else None,
        pass_at={k: value for k, value in passes.items() if value is not None},
        length_mean=_mean([t.num_actions for t in scored.trajectories]),
        truncated=_mean([t.truncated for t in scored.trajectories]),
        num_failed=len(scored.failed),
        num_timed_out=sum(bool(t.metadata.get("timed_out")) for t in scored.trajectories),
        by_source={name: mean_at_k(part) for name, part in parts.items()} if len(names) > 1 else {},
        rows=completion_rows(scored),
    )


def accuracies(trajectories: Sequence[Trajectory]) -> dict[str, list[float]]:
    """The accuracies of each prompt's samples, by prompt; a prompt whose samples have none is left out."""
    groups: dict[str, list[float]] = {}
    for t in trajectories:
        if t.accuracy is not None:
            groups.setdefault(t.prompt_id, []).append(t.accuracy)
    return groups


def completion_rows(scored: Scored) -> list[dict[str, Any]]:
    """Every completion with its prompt and its score, as plain values."""
    prompts = {d.prompt.row.id: d.prompt for d in scored.draws}
    return [
        {
            "id": t.prompt_id,
            "sample": t.sample,
            "data_source": prompts[t.prompt_id].row.data_source,
            "prompt": prompts[t.prompt_id].text,
            "completion": t.completion,
            "answer": None if prompts[t.prompt_id].row.answer is None else str(prompts[t.prompt_id].row.answer),
            "accuracy": t.accuracy,
            "reward": t.reward,
            "parts": t.parts,
            "length": t.num_actions,
            "truncated": t.truncated,
            "error": t.error,
        }
        for t in scored.trajectories
    ]


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values)
