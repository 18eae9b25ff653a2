"""The worked fixtures F1 and F2 as ragged batches.

Each sequence has a prompt token in front, so that offsets and masks matter, and log-prob columns hold NaN there:
whatever reads a token the model did not write shows it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths

OLD = [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2], [-1.8, -0.9, -1.5], [-2.2, -0.4, -0.6, -1.1]]
NEW = [[-0.8, -0.9, -1.5, -0.1], [-0.9, -0.6], [-0.5, -2.4, -1.2], [-1.0, -0.4, -0.5, -1.4]]
REF = [[-1.1, -0.6, -1.8, -0.2], [-0.8, -1.0], [-1.5, -1.0, -1.4], [-2.0, -0.5, -0.6, -1.0]]


def behind_prompts(rows: list[list[float]], prompt: float) -> Tensor:
    return torch.tensor([x for row in rows for x in [prompt, *row]], dtype=torch.float64)


def skeleton(lengths: list[int]) -> Batch:
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    return Batch(
        tokens=torch.arange(mask.numel()),
        offsets=offsets_from_lengths(torch.tensor(lengths) + 1),
        token={"action_mask": mask, "loss_mask": mask.clone()},
    )


@pytest.fixture(scope="session")
def f1() -> Batch:
    """Columns `new`, `old_logp`, `ref_logp`, `token_rewards` (the scores); `advantages` a; groups a, a, b, b."""
    nan = float("nan")
    scores = [[0.0] * (len(row) - 1) + [score] for row, score in zip(OLD, [1.0, 0, 0, 1.0], strict=True)]
    return (
        skeleton([4, 2, 3, 4])
        .with_token(
            new=behind_prompts(NEW, nan),
            old_logp=behind_prompts(OLD, nan),
            ref_logp=behind_prompts(REF, nan),
            token_rewards=behind_prompts(scores, 0.0),
        )
        .with_sequence(
            advantages=torch.tensor([1.0, -1.0, -0.8, 0.6], dtype=torch.float64),
            reward=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64),
            group_ids=torch.tensor([0, 0, 1, 1]),
            truncated=torch.tensor([False, False, False, True]),
            void_turns=torch.tensor([0.0, 2.0, 0.0, 0.0], dtype=torch.float64),
            num_chars=torch.tensor([0, 9, 9, 10]),
            num_lines=torch.tensor([1, 1, 2, 1]),
        )
    )


@pytest.fixture(scope="session")
def f2() -> Batch:
    """Rewards 1, 0, 0, 1 | 0.2, 0.8 | 0.5 of three groups whose ids are neither sorted nor dense."""
    return skeleton([4, 2, 3, 3, 2, 4, 3]).with_sequence(
        reward=torch.tensor([1, 0, 0, 1, 0.2, 0.8, 0.5], dtype=torch.float64),
        group_ids=torch.tensor([7, 7, 7, 7, -2, -2, 40]),
    )
