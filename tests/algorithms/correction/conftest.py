"""F1 with the engine's log-probs, a ragged random batch, and how a padded matrix is read off a packed column."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths

ROLLOUT = [[-1.05, -0.45, -2.1, -0.1], [-0.7, -1.3], [-1.75, -0.9, -2.6], [-2.2, -0.4, -0.5, -1.2]]


@pytest.fixture(scope="session")
def sampled(f1: Batch) -> Batch:
    """F1 with `behaviour_logp`, nan at prompts."""
    nan = float("nan")
    column = torch.tensor([x for row in ROLLOUT for x in [nan, *row]], dtype=torch.float64)
    return f1.with_token(behaviour_logp=column)


@pytest.fixture(scope="session")
def rows() -> Callable[[Batch, Tensor], list[list[float]]]:
    """A token column as lists, one a sequence, at the tokens the model wrote."""

    def read(batch: Batch, column: Tensor) -> list[list[float]]:
        parts = torch.tensor_split(torch.arange(batch.num_tokens), batch.offsets[1:-1])
        return [column[p][batch.action_mask[p]].tolist() for p in parts]

    return read


def make(old: list[list[float]], behaviour: list[list[float]], masks: list[list[bool]] | None = None) -> Batch:
    """A batch of rows of log-probs; where `masks` is False the model did not write, and both columns are nan."""
    masks = masks or [[True] * len(row) for row in old]
    mask = torch.tensor([m for row in masks for m in row], dtype=torch.bool)

    def column(values: list[list[float]]) -> Tensor:
        flat = torch.tensor([x for row in values for x in row], dtype=torch.float64)
        return torch.where(mask, flat, torch.nan)

    return Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(torch.tensor([len(row) for row in old])),
        token={
            "action_mask": mask,
            "loss_mask": mask.clone(),
            "old_logp": column(old),
            "behaviour_logp": column(behaviour),
        },
    )


@pytest.fixture(scope="session")
def build() -> Callable[..., Batch]:
    return make


@pytest.fixture(scope="session")
def ragged() -> Callable[..., Batch]:
    """Rows of one token, with an interior tool mask, wholly masked, and with gaps far beyond the clamp."""

    def draw(seed: int, far: bool = True, scale: float = 0.5) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        lengths = [1, 5, 3, 8, 1, 6, 4]
        total = sum(lengths)
        behaviour = -3 * torch.rand(total, generator=generator, dtype=torch.float64) - 0.01
        old = behaviour + scale * torch.randn(total, generator=generator, dtype=torch.float64)
        if far:
            old[10], behaviour[12] = behaviour[10] - 100, old[12] - 100
        mask = torch.ones(total, dtype=torch.bool)
        mask[3], mask[6:9] = False, False
        splits = torch.tensor(lengths).cumsum(0)[:-1]
        pieces = [[p.tolist() for p in torch.tensor_split(x, splits)] for x in (old, behaviour, mask)]
        return make(*pieces)

    return draw
