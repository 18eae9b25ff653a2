"""Validation: it samples and scores completions of held-out prompts, and computes their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from burnish.config.rollout import Sampling
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import with_accuracy
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.rewards.scoring import ScoreQueue
from burnish.rollout.episode_metrics import branch_metrics, episode_metrics, role_rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import Progress, RolloutBatch, rollout_and_score


def sampling_options(config: Sampling, eos_ids: tuple[int, ...]) -> SamplingOptions:
    """Convert a sampling section of the config to the engine's options. The model's end tokens always end a completion."""
    return SamplingOptions(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens,
        stop_tokens=eos_ids,
        stop=tuple(config.stop),
    )


def held_out_rollouts(
    runner: RolloutRunner,
    rewards: ScoreQueue,
    prompts: Sequence[Prompt],
    n: int,
    sampling: SamplingOptions,
    progress: Progress,
    step: int = 0,
) -> RolloutBatch:
    """Return `n` scored completions per prompt. The random numbers are the same at every step of a run.

    `step` is the next training step; rewards with a schedule read it.
    """
    return rollout_and_score(
        runner, rewards, [PromptSample(p, 0, step=step) for p in prompts], n, sampling, "eval", progress
    )


def validation_metrics(rollouts: RolloutBatch, by: str | None = None) -> dict[str, float]:
    """Return accuracy, reward_mean, length_mean, truncated and failed; with several turns also turns_mean.

    Environments add `branches` and `forks` if contexts were rewritten, and `environment/<name>` as in training. Events count in failed
    episodes too. A game of several players adds `reward_mean/role=<name>`.
    The accuracy is the mean over the samples that have one; a graded reward gives none. With `by`, the accuracy is also given per value
    of a column, as `accuracy/<by>=<value>`. A graded reward gives `reward_mean/<by>=<value>` instead.
    """
    trajectories = [t for t in rollouts.trajectories if t.reward is not None]
    values = {"failed": float(len(rollouts.trajectories) - len(trajectories))}
    if not trajectories:
        return values
    verdicts = with_accuracy(trajectories)
    if verdicts:
        values["accuracy"] = _mean([accuracy for _, accuracy in verdicts])
    values["reward_mean"] = _mean([float(t.reward or 0.0) for t in trajectories])
    values["length_mean"] = _mean([t.num_actions for t in trajectories])
    values["truncated"] = _mean([t.truncated and t.finish != "turns" for t in trajectories])
    if any(len(t.turns) > 1 for t in trajectories):
        values["turns_mean"] = _mean([len(t.turns) for t in trajectories])
    values |= branch_metrics(trajectories)
    values |= {f"reward_mean/{name}": value for name, value in role_rewards(trajectories).items()}
    values |= {f"environment/{name}": value for name, value in episode_metrics(rollouts.trajectories).items()}
    if by is not None:
        column = {d.prompt.row.id: d.prompt.row.extra.get(by) for d in rollouts.draws}
        rewards = [(t, float(t.reward or 0.0)) for t in trajectories]
        parts = defaultdict(list)
        for t, figure in verdicts or rewards:
            parts[column[t.prompt_id]].append(figure)
        name = "accuracy" if verdicts else "reward_mean"
        values.update({f"{name}/{by}={value}": _mean(parts[value]) for value in sorted(parts, key=str)})
    return values


def _mean(values: Sequence[float]) -> float:
    return float(sum(values)) / len(values)
