"""Whether demonstrations are there exactly where the algorithm uses them: imitated beside the policy loss, or inside the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


def check_demonstrations_fit(config: TrainConfig) -> None:
    """Refuse demonstrations that nothing uses, and uses of them that have none."""
    data, algorithm = config.data, config.algorithm
    if algorithm.auxiliary.sft > 0 and not data.demonstrations:
        raise ValueError("algorithm.auxiliary.sft imitates data.demonstrations, and there are none")
    if algorithm.auxiliary.sft == 0 and data.demonstrations_per_update != 32:
        raise ValueError("data.demonstrations_per_update has no effect without data.demonstrations and auxiliary.sft")
    from_file = bool(data.demonstrations_per_group) and data.demonstration_column is None
    if data.demonstrations and algorithm.auxiliary.sft == 0 and not from_file:
        raise ValueError(
            "data.demonstrations are not used: set algorithm.auxiliary.sft to their coefficient, or algorithm=luffy and "
            "data.demonstrations_per_group=1 to put them into the groups"
        )
    if data.demonstrations_per_group:
        _check_groups(config)
    elif algorithm.needs("demonstrations"):
        raise ValueError(
            f"loss {algorithm.loss.name} is for groups with demonstrations in them: set data.demonstrations_per_group=1, and "
            "data.demonstrations or data.demonstration_column"
        )
    elif data.demonstration_column is not None:
        raise ValueError("data.demonstration_column has no effect without data.demonstrations_per_group")


def _check_groups(config: TrainConfig) -> None:
    """Whether demonstrations can stand beside the policy's samples."""
    data, algorithm, what = config.data, config.algorithm, "data.demonstrations_per_group"
    if not data.demonstrations and data.demonstration_column is None:
        raise ValueError(
            f"{what} puts demonstrations into groups: give data.demonstrations or data.demonstration_column"
        )
    if not algorithm.needs("demonstrations"):
        raise ValueError(
            f"{what}: loss {algorithm.loss.name} would take demonstrations for samples of the policy: set "
            "algorithm.loss=mixed_offpolicy with algorithm.ratio=none and algorithm.clip=none (or algorithm=luffy)"
        )
    if config.environment.name != "single_turn":
        raise ValueError(
            f"{what}: a demonstration is one answer, and environment {config.environment.name} may ask for several: use single_turn"
        )
    if data.budget is not None:
        raise ValueError(f"{what}: data.budget asks for lengths that demonstrations were not written to: remove one")
