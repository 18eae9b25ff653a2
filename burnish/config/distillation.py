"""Whether a run that learns from a teacher has one, and something to learn from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from burnish.config.slots.advantages import DistillationAdvantage
from burnish.config.slots.terms import TeacherReference

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


def check_distillation_fits(config: TrainConfig) -> None:
    """Refuse a distillation without a teacher, and rewards that it does not read."""
    algorithm, advantage = config.algorithm, config.algorithm.advantage
    teacher = algorithm.kl.reference
    if not isinstance(advantage, DistillationAdvantage):
        return
    if not isinstance(teacher, TeacherReference):
        raise ValueError(
            f"advantage distillation learns from a teacher, and algorithm.kl.reference is {teacher.name}: set "
            "algorithm.kl.reference={name: teacher, path: <a model directory>}"
        )
    if advantage.outcome == 0:
        if teacher.path is None:
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
