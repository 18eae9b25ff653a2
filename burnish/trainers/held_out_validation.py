"""Validation during a run: the held-out prompts, and the function that measures every mode on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from burnish.config.errors import UserError, did_you_mean
from burnish.config.schema import TrainConfig
from burnish.data.prompt_pool import Prompt, ReadRows
from burnish.data.prompt_stream import validation_prompts
from burnish.data.row_formats import read_rows
from burnish.models.policy import AnyPolicy, PolicyModel
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import RolloutBatch, refuse_silent_agents
from burnish.rollout.validation import held_out_rollouts, sampling_options, validation_metrics
from burnish.run.run import Run
from burnish.trainers import step_metrics
from burnish.trainers.context import StepResult, Validate
from burnish.trainers.episode_rows import record_new_events


def held_out_prompts(
    config: TrainConfig, base: Path | None, policy: AnyPolicy, read: ReadRows = read_rows
) -> list[Prompt]:
    """The validation prompts; empty without a source."""
    if not config.data.validation:
        return []
    limit, by = config.validation.limit, config.validation.by
    prompts = validation_prompts(config.data.validation, policy.tokenizer, config.data, config.seed, limit, base, read)
    columns = {column for prompt in prompts for column in prompt.row.extra}
    if by is not None and by not in columns:
        known = ", ".join(sorted(columns)) or "none besides prompt and answer"
        raise UserError(
            f"validation.by={by}: no held-out row has that column{did_you_mean(by, columns)} (has: {known})"
        )
    return prompts


def build_validation(
    config: TrainConfig,
    run: Run,
    policy: PolicyModel,
    runner: RolloutRunner,
    rewards: Rewards,
    prompts: list[Prompt],
    kind: str = "validation-",
    extra_metrics: Callable[[RolloutBatch], dict[str, float]] = lambda rollouts: {},
) -> Validate:
    """Return a function that measures every validation mode at a step and writes its samples to tables named `kind` + mode.

    `extra_metrics` returns further metrics of a mode's samples.
    """
    if not prompts:
        return lambda step: {}

    def validate(step: int) -> dict[str, float]:
        values: dict[str, float] = {}
        when = "before step 1" if step == 0 else f"after step {step}"
        for name, mode in config.validation.modes.items():
            progress = partial(run.display.phase, of=f"validation {when}, {name}")
            progress("starting")
            options = sampling_options(mode, policy.tokenizer.eos_ids)
            scores = rewards.apart()  # a step may wait for scores of its own
            rollouts = held_out_rollouts(runner, scores, prompts, mode.n, options, progress, step + 1)
            if rollouts.failed:
                refuse_silent_agents(rollouts.trajectories, f"validation {when}")
                text = f"{len(rollouts.failed)} of {len(rollouts.trajectories)} held-out samples could not be scored"
                if step == 0 and len(rollouts.failed) == len(rollouts.trajectories):
                    raise UserError(f"before the first step {text}; fix the reward. First: {rollouts.failed[0].error}")
                run.display.note(f"step {step}: {text} and do not count; first: {rollouts.failed[0].error}")
            record_new_events(run, step, rollouts.trajectories)
            found = validation_metrics(rollouts, config.validation.by) | extra_metrics(rollouts)
            if step == 0 and not values and (hint := step_metrics.binary_reward_hint(config, rollouts)):
                run.display.note(hint)
            values |= {f"validation/{name}/{k}": v for k, v in found.items()}
            run.samples(step, f"{kind}{name}", step_metrics.sample_rows(rollouts, StepResult(), policy.tokenizer))
        return values

    return validate
