"""Whether the rest of a run provides what its algorithm needs; what is missing is refused with what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig

TEXT_ONLY = ("format", "think_format", "language")
"""Rewards that look at how an answer is written: they say nothing about right or wrong."""
NO_VERDICT = (*TEXT_ONLY, "model")
"""All rewards that say nothing about right or wrong: the score of a model has no zero."""


def check_algorithm_fits(config: TrainConfig) -> None:
    """Whether the rest of the run provides what the algorithm needs."""
    algorithm, late = config.algorithm, [stage.start for stage in config.rollout.stages]
    if algorithm.waits:
        raise ValueError(f"algorithm {algorithm.preset} cannot run yet; it waits for {'; '.join(algorithm.waits)}")
    if getattr(algorithm.loss, "command", "train") == "prefer":
        raise ValueError(
            f"loss {algorithm.loss.name} learns from preferences, not from rollouts: use `burnish prefer` with "
            f"preference.loss={algorithm.loss.name} (recipes/{algorithm.loss.name}.yaml)"
        )
    if algorithm.loss.name == "nll" and all(f.name != "positives_only" for f in algorithm.filters):
        raise ValueError(
            "loss nll imitates every sample, right or wrong: add positives_only to algorithm.filters, or use `burnish sft` on data"
        )
    needs_groups = algorithm.needs("groups")
    if needs_groups and min(stage.n for stage in config.rollout.all_stages()) < 2:
        raise ValueError(f"{', '.join(needs_groups)} compares samples of one prompt and needs rollout.n of 2 or more")
    if algorithm.needs("budget") and config.data.budget is None:
        raise ValueError(
            f"{', '.join(algorithm.needs('budget'))} rewards the length a prompt asks for, but no prompt asks: set data.budget={{}}"
        )
    if config.data.budget is not None and not algorithm.needs("budget"):
        raise ValueError(
            "data.budget asks for a length that nothing rewards: add lcpo_exact or lcpo_max to algorithm.shaping"
        )
    judged = [
        *algorithm.needs("accuracy"),
        *(["auxiliary.positive_nll"] if algorithm.auxiliary.positive_nll else []),
    ]
    if judged and all(part.name in NO_VERDICT for part in config.reward.parts):
        raise ValueError(
            f"{', '.join(judged)} must know right from wrong, and {', '.join(p.name for p in config.reward.parts)} says neither: "
            "add a reward part that judges the answer"
        )
    if not config.data.demonstrations and config.data.demonstrations_per_update != 32:
        raise ValueError("data.demonstrations_per_update has no effect without data.demonstrations")
    if algorithm.auxiliary.sft > 0 and not config.data.demonstrations:
        raise ValueError("algorithm.auxiliary.sft imitates data.demonstrations, and there are none")
    if config.data.demonstrations and algorithm.auxiliary.sft == 0:
        raise ValueError("data.demonstrations are not used: set algorithm.auxiliary.sft to their coefficient")
    if late and late[-1] > config.training.steps:
        raise ValueError(f"rollout.stages: one starts at step {late[-1]}, but training.steps={config.training.steps}")
    if algorithm.critic is not None and algorithm.critic.warmup_steps >= config.training.steps:
        raise ValueError(
            f"algorithm.critic.warmup_steps={algorithm.critic.warmup_steps} leaves the policy none of training.steps={config.training.steps}"
        )
