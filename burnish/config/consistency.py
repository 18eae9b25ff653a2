"""Checks that a run provides what its algorithm needs. Each error says what to set."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.algorithms.advantages.spec import ADVANTAGE_RECORDS, DistillationAdvantage
from burnish.algorithms.terms.spec import DemonstrationContext, TeacherReference, TeachersReference
from burnish.config.data import RewardPart
from burnish.config.plugins import is_plugin

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


def check_demonstrations_fit(config: TrainConfig) -> None:
    """Refuse demonstrations that are not used, and settings that need demonstrations and have none."""
    data, algorithm = config.data, config.algorithm
    imitates = algorithm.auxiliary.imitates
    if imitates and not data.demonstrations:
        key = "sft" if algorithm.auxiliary.sft > 0 else "chord"
        raise ValueError(f"algorithm.auxiliary.{key} imitates data.demonstrations, but there are none")
    if not imitates and data.demonstrations_per_update != 32:
        raise ValueError("data.demonstrations_per_update has no effect without data.demonstrations and auxiliary.sft")
    from_file = bool(data.demonstrations_per_group) and data.demonstration_column is None
    if data.demonstrations and not imitates and not from_file:
        raise ValueError(
            "data.demonstrations are not used: set algorithm.auxiliary.sft to their coefficient, or algorithm=luffy and "
            "data.demonstrations_per_group=1 to put them into the groups"
        )
    if data.demonstrations_per_group:
        _check_group_demonstrations(config)
    elif algorithm.needs("demonstrations"):
        raise ValueError(
            f"loss {algorithm.loss.name} needs groups with demonstrations: set data.demonstrations_per_group=1, and "
            "data.demonstrations or data.demonstration_column"
        )
    elif data.demonstration_column is not None:
        raise ValueError("data.demonstration_column has no effect without data.demonstrations_per_group")


def _check_group_demonstrations(config: TrainConfig) -> None:
    """Refuse demonstrations in groups if the rest of the run cannot use them there."""
    data, algorithm, what = config.data, config.algorithm, "data.demonstrations_per_group"
    if not data.demonstrations and data.demonstration_column is None:
        raise ValueError(f"{what} adds demonstrations to groups: give data.demonstrations or data.demonstration_column")
    if not algorithm.needs("demonstrations"):
        raise ValueError(
            f"{what}: loss {algorithm.loss.name} would treat demonstrations as samples of the policy: set "
            "algorithm.loss=mixed_offpolicy with algorithm.ratio=none and algorithm.clip=none (or algorithm=luffy)"
        )
    if config.environment.name != "single_turn":
        raise ValueError(
            f"{what}: a demonstration is one answer, but environment {config.environment.name} may ask for several: use single_turn"
        )
    if data.budget is not None:
        raise ValueError(f"{what}: data.budget asks for lengths that demonstrations do not have: remove one")
    samplers = {
        "kl.reference=rollout": algorithm.kl.reference.name == "rollout",
        "kl.reward.policy=rollout": algorithm.kl.reward.coef > 0 and algorithm.kl.reward.policy == "rollout",
    }
    for key in [key for key, is_set in samplers.items() if is_set]:
        other = "kl.reference=frozen" if "reference" in key else "kl.reward.policy=old"
        raise ValueError(f"{what}: {key} reads log-probs of the sampler, and demonstrations have none: use {other}")


def check_distillation_fits(config: TrainConfig) -> None:
    """Refuse distillation without a teacher, and reward shaping that it does not read."""
    algorithm, advantage = config.algorithm, config.algorithm.advantage
    teacher, context = algorithm.kl.reference, algorithm.kl.context
    _check_teacher_context(config)
    if teacher.servers:
        if algorithm.compares_vocabulary:
            raise ValueError(
                "loss gold needs the teacher's hidden states in the learner's process: load it from a path instead of a url"
                if algorithm.loss.name == "gold"
                else "a server returns the log-probs of sampled tokens, not distributions: use loss.support=sampled, kl.loss.estimator=k2 or a path"
            )
        if config.rollout.temperature != 1:
            raise ValueError(
                f"a server's log-probs are those at temperature 1, and rollout.temperature is {config.rollout.temperature:g}: set it to 1, or "
                "load the teacher from a path"
            )
    if isinstance(teacher, TeachersReference) and not teacher.paths:
        raise ValueError(
            "kl.reference=teachers names no teacher: set algorithm.kl.reference.paths={math: DIRECTORY, code: DIRECTORY}, with the values "
            f"of the column {teacher.column!r} of your rows as names"
        )
    paths = (
        list(teacher.paths.values())
        if isinstance(teacher, TeachersReference)
        else [getattr(teacher, "path", None), getattr(teacher, "url", None)]
    )
    is_teacher = isinstance(teacher, TeacherReference | TeachersReference)
    is_own = context.name == "prompt" and (is_teacher or teacher.name == "frozen") and not any(paths)
    if (
        algorithm.loss.name in ("divergence", "teacher_surrogate", "gold")
        and is_own
        and getattr(algorithm.loss, "weight", 1) == 1
    ):
        raise ValueError(
            f"loss {algorithm.loss.name} would hold the policy at the weights it started from: set algorithm.kl.reference={{name: teacher, "
            "path: <a model directory>}, or algorithm.kl.context"
        )
    if not isinstance(advantage, DistillationAdvantage):
        return
    if context.name == "prompt" and not isinstance(teacher, TeacherReference | TeachersReference):
        raise ValueError(
            f"advantage distillation learns from a teacher, but algorithm.kl.reference is {teacher.name}: set "
            "algorithm.kl.reference={name: teacher, path: <a model directory>}"
        )
    if advantage.outcome == 0:
        if is_own:
            raise ValueError(
                "the policy would be its own teacher and learn nothing: set algorithm.kl.reference.path to a model directory"
            )
        if algorithm.shaping:
            raise ValueError(
                f"algorithm.shaping: {algorithm.shaping[0].name} changes the reward, which advantage distillation with outcome=0 does "
                "not read: remove it, or set algorithm.advantage.outcome"
            )
    elif min(stage.n for stage in config.rollout.all_stages()) < 2:
        raise ValueError(
            "advantage distillation with an outcome compares samples of one prompt: set rollout.n to 2 or more"
        )


def _check_teacher_context(config: TrainConfig) -> None:
    """Refuse a teacher's context that cannot be made from the rows of this run."""
    context = config.algorithm.kl.context
    what = f"kl.context={context.name}"
    if config.algorithm.loss.name == "gold":
        what = "loss gold"
    elif context.name == "prompt":
        return
    if isinstance(context, DemonstrationContext) and context.column is None:
        raise ValueError(
            "kl.context=demonstration shows the teacher a demonstration: set algorithm.kl.context.column to the column of the training rows "
            "that has it"
        )
    if config.data.template.prerendered:
        raise ValueError(
            f"{what} renders prompts anew for the teacher, which a prerendered prompt does not allow: leave out template.kind=prerendered"
        )
    if config.data.budget is not None:
        raise ValueError(f"{what} renders prompts anew, without the length that data.budget asks for: remove one")


STYLE_REWARDS = ("format", "think_format", "language")
"""Rewards for the style of an answer. They do not tell whether it is correct."""
REWARDS_WITHOUT_VERDICT = (*STYLE_REWARDS, "model")
"""All rewards that do not tell whether an answer is correct. The score of a model has no threshold."""


def gives_verdict(part: RewardPart) -> bool:
    """Whether a part always tells whether an answer is correct: a built-in verifier, or a part with `correct_at`."""
    is_graded = part.name in (*REWARDS_WITHOUT_VERDICT, "judge") or is_plugin(part.name)
    return part.correct_at is not None or not is_graded


def may_give_verdict(part: RewardPart) -> bool:
    """Whether a part may tell whether an answer is correct. A function or a judge decides it with each value."""
    return gives_verdict(part) or part.name not in REWARDS_WITHOUT_VERDICT


def always_gives_verdicts(config: TrainConfig) -> bool:
    """Whether every scored sample of a run certainly has a verdict. If False, a function or an environment may still give verdicts."""
    if config.environment.name != "single_turn":  # other environments may give the reward themselves
        return False
    return any(gives_verdict(p) and p.sources is None and not is_plugin(p.name) for p in config.reward.parts)


def check_algorithm_fits(config: TrainConfig) -> None:
    """Refuse a run that does not provide what its algorithm needs."""
    algorithm, stage_starts = config.algorithm, [stage.start for stage in config.rollout.stages]
    makes_pairs = any(f.name == "pairs" for f in algorithm.filters)
    if getattr(algorithm.loss, "command", "train") == "prefer" and not makes_pairs:
        online = (
            ""
            if algorithm.loss.name == "kto"
            else "; or add pairs to algorithm.filters, which makes pairs from samples"
        )
        raise ValueError(
            f"loss {algorithm.loss.name} learns from preferences, not from rollouts: use `burnish prefer` with "
            f"preference.loss={algorithm.loss.name} (recipes/{algorithm.loss.name}.yaml){online}"
        )
    if algorithm.loss.name == "nll" and all(f.name not in ("positives_only", "non_stub") for f in algorithm.filters):
        raise ValueError(
            "loss nll imitates every sample, right or wrong: add positives_only or non_stub to algorithm.filters, or use `burnish sft` on data"
        )
    source = config.rollout.source
    oldest = getattr(source, "max_staleness", 1 if source.name == "ahead" else 0)
    if algorithm.replay is not None and algorithm.replay.max_age <= oldest:
        raise ValueError(
            f"rollout.source={source.name} gives samples that are up to {oldest} steps old, so algorithm.replay.max_age={algorithm.replay.max_age} "
            f"allows no replay: set it above {oldest}"
        )
    needs_groups = algorithm.needs("groups")
    if needs_groups and min(stage.n for stage in config.rollout.all_stages()) < 2:
        raise ValueError(f"{', '.join(needs_groups)} compares samples of one prompt and needs rollout.n of 2 or more")
    for name in [*algorithm.needs("borders"), *algorithm.needs("tree")]:
        check_branching_fits(config, name)
    if algorithm.needs("budget") and config.data.budget is None:
        raise ValueError(
            f"{', '.join(algorithm.needs('budget'))} rewards the length that a prompt asks for, but no prompt asks for one: set data.budget={{}}"
        )
    if config.data.budget is not None and not algorithm.needs("budget"):
        raise ValueError(
            "data.budget asks for a length that nothing rewards: add lcpo_exact or lcpo_max to algorithm.shaping"
        )
    needs_verdict = [
        *algorithm.needs("accuracy"),
        *(["auxiliary.positive_nll"] if algorithm.auxiliary.positive_nll else []),
    ]
    if needs_verdict and not any(may_give_verdict(part) for part in config.reward.parts):
        raise ValueError(
            f"{', '.join(needs_verdict)} must know whether an answer is correct, but {', '.join(p.name for p in config.reward.parts)} does not tell: "
            "add a reward part that verifies the answer, or set correct_at of a part to the lowest value of a correct answer"
        )
    num_updates = config.training.mini_batches * config.training.epochs
    if algorithm.router.learner_experts == "replay" and num_updates == 1:
        raise ValueError(
            "algorithm.router.learner_experts=replay has no effect with one update per batch: it has the weights of the pass of old "
            "log-probs, and chooses the same experts. Set training.mini_batches or training.epochs above 1, or remove it"
        )
    check_demonstrations_fit(config)
    check_distillation_fits(config)
    check_observations_fit(config)
    check_step_rewards_fit(config)
    if stage_starts and stage_starts[-1] > config.training.steps:
        raise ValueError(
            f"rollout.stages: one starts at step {stage_starts[-1]}, but training.steps={config.training.steps}"
        )
    if algorithm.critic is not None and algorithm.critic.warmup_steps >= config.training.steps:
        raise ValueError(
            f"algorithm.critic.warmup_steps={algorithm.critic.warmup_steps} leaves no steps for the policy: training.steps={config.training.steps}"
        )


def check_branching_fits(config: TrainConfig, name: str) -> None:
    """Refuse a run in which answers cannot be continued from the middle, as `name` needs."""
    if config.environment.name != "single_turn":
        raise ValueError(
            f"{name} continues answers from the middle, but environment {config.environment.name} cannot be restored to such a state: "
            "use environment=single_turn"
        )
    if config.data.demonstrations_per_group:
        raise ValueError(
            f"{name} compares answers that share a prefix, but a demonstration shares none: set data.demonstrations_per_group=0"
        )
    if config.rollout.stop:
        raise ValueError(
            f"{name} continues answers from the middle, but an engine does not see a rollout.stop string that begins before it: "
            "remove rollout.stop (the model's end tokens end an answer anyway)"
        )
    if config.rollout.source.name == "async":
        raise ValueError(
            f"{name} compares answers continued from the same tokens, but rollout.source=async loads new weights in the middle of them: "
            "use sync or ahead"
        )


def check_observations_fit(config: TrainConfig) -> None:
    """Refuse the NLL of observations in a run whose model never reads one."""
    if config.algorithm.auxiliary.observations is None:
        return
    what = "algorithm.auxiliary.observations learns what an environment says after an answer"
    if config.environment.name == "single_turn":
        raise ValueError(
            f"{what}, and single_turn says nothing: set environment to tools, a game or an environment of your own, or "
            "algorithm.auxiliary.observations=null"
        )
    if config.environment.max_turns == 1:
        raise ValueError(f"{what}, and environment.max_turns=1 ends an episode with the first: set it to 2 or more")


def check_step_rewards_fit(config: TrainConfig) -> None:
    """Refuse rewards of single steps if the advantage ignores their positions."""
    rewards_steps = any(
        part.name == "model" and part.options.get("aggregate") == "each" for part in config.reward.parts
    )
    if rewards_steps and not getattr(config.algorithm.advantage, "by_token", True):
        able = [record.model_fields["name"].default for record in ADVANTAGE_RECORDS if record.by_token]
        raise ValueError(
            f"reward part model with aggregate=each rewards single steps, but advantage {config.algorithm.advantage.name} uses only their "
            f"sum: use one with a return for every token ({', '.join(able)}), or aggregate last, min, prod or mean"
        )
