"""Demonstrations inside the groups of a run: found before it starts, and what a step says about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from burnish.config.schema import TrainConfig
from burnish.core.trajectory import Trajectory, judged
from burnish.data.prompts import Draw, PromptStream
from burnish.data.traces import Traces
from burnish.models.policy import AnyPolicy
from burnish.rollout.demonstrations import Demonstrations
from burnish.rollout.driver import nobody
from burnish.rollout.scored import Scored

Shown = Callable[[Draw, int], list[Trajectory]]


def demonstrations_of(
    config: TrainConfig, policy: AnyPolicy, stream: PromptStream, base: Path | None
) -> tuple[Shown, str | None]:
    """What joins the samples of a draw, and a sentence about prompts that nothing joins; nobody where none are asked for."""
    data, each = config.data, config.data.demonstrations_per_group
    if not each:
        return nobody, None
    longest = max(stage.max_tokens for stage in config.rollout.all_stages())
    if policy.max_positions is not None:
        longest = min(longest, policy.max_positions - stream.longest())
    traces = Traces(data, policy.tokenizer, longest, config.seed, base)
    traces.needs_logp = getattr(config.algorithm.loss, "weight", None) == "author"
    traces.scan(stream.rows())
    return Demonstrations(traces, each, policy.tokenizer), traces.report()


def demonstration_values(rollouts: Scored) -> dict[str, float]:
    """Of a step whose groups may have demonstrations: how many, their tokens, their mean reward and accuracy, and the prompts without."""
    found = rollouts.demonstrations
    rewards = [t.reward for t in found if t.reward is not None]
    verdicts = [accuracy for _, accuracy in judged(found)]
    groups = {(t.prompt_id, t.visit) for t in found}
    values = {
        "demonstrations/number": float(len(found)),
        "demonstrations/tokens": float(sum(t.num_actions for t in found)),
        "demonstrations/missing": float(len(rollouts.draws) - len(groups)),
    }
    values |= {"demonstrations/reward": sum(rewards) / len(rewards)} if rewards else {}
    return values | ({"demonstrations/accuracy": sum(verdicts) / len(verdicts)} if verdicts else {})
