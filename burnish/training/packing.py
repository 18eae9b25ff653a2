"""Micro-batches: which sequences go through the model together, under a token budget and about equally costly.

Which sequences share a micro-batch changes memory and speed, never the gradient: a loss is a weighted sum whose weights
are fixed before the split. What is packed are units: a sequence, or the samples of one prompt, whose shared tokens go
through the model once. A unit costs its tokens and, with their squares, its attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from burnish.training.balance import karmarkar_karp

ATTENTION_COST = 1 / 30_000
"""b / a of the cost a L + b L^2 where a model does not say: attention over 30,000 tokens costs what its matmuls do."""


@dataclass(frozen=True)
class Unit:
    """Sequences that stay together, the tokens they need of the budget, and what they cost."""

    members: list[int]
    num_tokens: int
    cost: float


def single_units(lengths: Sequence[int], attention_cost: float = ATTENTION_COST) -> list[Unit]:
    """Every sequence by itself."""
    return [Unit([i], length, length + attention_cost * length**2) for i, length in enumerate(lengths)]


def group_units(
    lengths: Sequence[int],
    groups: Sequence[int],
    shared: Sequence[int],
    budget: int,
    attention_cost: float = ATTENTION_COST,
) -> list[Unit]:
    """The sequences of a group together, their first `shared` tokens counted once; a group above the budget in several units.

    All members of a group have the same number of shared tokens, each fewer than it has tokens.
    """
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        trunk = shared[members[0]]
        parts: list[list[int]] = []
        size = 0
        for i in sorted(members, key=lambda i: lengths[i]):
            own = lengths[i] - trunk
            if parts and trunk and size + own <= budget:
                parts[-1].append(i)
                size += own
            else:  # without anything shared a sequence is a unit by itself: smaller ones fill a budget better
                parts.append([i])
                size = trunk + own
        for part in parts:
            squares = sum(lengths[i] ** 2 - trunk**2 for i in part) + trunk**2
            tokens = sum(lengths[i] - trunk for i in part) + trunk
            units.append(Unit(part, tokens, tokens + attention_cost * squares))
    return units


def whole_units(
    lengths: Sequence[int], groups: Sequence[int], shared: Sequence[int], attention_cost: float = ATTENTION_COST
) -> list[Unit]:
    """The sequences of every group together, whatever the budget, their first `shared` tokens counted once."""
    by_group: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        by_group.setdefault(group, []).append(i)
    units = []
    for members in by_group.values():
        trunk = shared[members[0]]
        tokens = trunk + sum(lengths[i] - trunk for i in members)
        squares = trunk**2 + sum(lengths[i] ** 2 - trunk**2 for i in members)
        units.append(Unit(members, tokens, tokens + attention_cost * squares))
    return units


def micro_batches(units: Sequence[Unit], budget: int, at_least: int = 0) -> list[list[Unit]]:
    """The units of each micro-batch: few micro-batches, none above the budget, of about the same cost.

    A unit above the budget has a micro-batch of its own. Asked for at least so many, those that find no unit are empty:
    ranks that work together need the same number.
    """
    fewest = max(at_least, math.ceil(sum(min(unit.num_tokens, budget) for unit in units) / budget))
    filled = _first_fit(units, budget)
    for count in range(fewest, max(len(filled), at_least) + 1):
        parts = karmarkar_karp([unit.cost for unit in units], count)
        if all(len(part) < 2 or sum(units[k].num_tokens for k in part) <= budget for part in parts):
            break
    else:
        parts = filled + [[] for _ in range(at_least - len(filled))]
    return [[units[k] for k in part] for part in parts]


def _first_fit(units: Sequence[Unit], budget: int) -> list[list[int]]:
    """Units of each micro-batch, the largest first, each into the first one with room; never far from the fewest."""
    parts: list[list[int]] = []
    room: list[int] = []
    for k in sorted(range(len(units)), key=lambda k: (-units[k].num_tokens, k)):
        size = units[k].num_tokens
        place = next((p for p, left in enumerate(room) if left >= size), None)
        if place is None:
            parts.append([k])
            room.append(budget - size)
        else:
            parts[place].append(k)
            room[place] -= size
    return parts
