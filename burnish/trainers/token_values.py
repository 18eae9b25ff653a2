"""What a step knew of every token of a sample: its advantage, and how far engine and trainer were apart on it.

Only samples that are kept in a table are looked at, so that a step pays for some dozen sequences, whatever its batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory

Values = list[float | None]


class TokenValues(NamedTuple):
    """Of each token the model wrote in the last sequence of a sample; None where there is no such value."""

    advantages: Values | None
    """None where all tokens of a sample share its advantage."""
    gap: Values | None
    """The trainer's log-prob less the engine's; None of a demonstration, which no engine sampled."""


def token_values(
    usable: Sequence[Trajectory], kept: set[str], batch: Batch | None, trainer_logp: Tensor | None
) -> dict[str, TokenValues]:
    """The values of the trajectories whose ids are `kept`, as far as filters left them in the batch.

    `usable` are the trajectories that the batch's `trajectory_ids` point into, `trainer_logp` [N] the trainer's log-probs before its
    first update, nan where not known.
    """
    if batch is None:
        return {}
    per_token = batch.token.get("advantages")
    if per_token is None and trainer_logp is None:
        return {}
    owners = batch.sequence["trajectory_ids"].tolist()
    chosen = [k for k, owner in enumerate(owners) if usable[owner].id in kept]
    part = batch.with_token(**({} if trainer_logp is None else {"trainer_logp": trainer_logp}))
    part = part.select(torch.tensor(chosen, dtype=torch.int64)).to(torch.device("cpu"))
    found = {}
    for k, index in enumerate(chosen):
        span = slice(int(part.offsets[k]), int(part.offsets[k + 1]))
        written = part.action_mask[span]
        sequence = usable[owners[index]].sequences[-1]
        if part.tokens[span].tolist() != sequence.tokens.tolist():
            continue  # an earlier context of an agent, which no table shows

        def of(column: Tensor, span: slice = span, written: Tensor = written) -> Values:
            return [value if math.isfinite(value) else None for value in column[span][written].tolist()]

        advantages = None if per_token is None else of(part.token["advantages"])
        gap = None
        if trainer_logp is not None and not usable[owners[index]].is_demonstration:
            gap = of(part.token["trainer_logp"] - part.token["behaviour_logp"])
        found[usable[owners[index]].id] = TokenValues(advantages, gap)
    return found
