"""F1 with the KL of section 3.2 in its token rewards."""

from __future__ import annotations

import pytest
import torch

from burnish.core.batch import Batch

WITH_KL = [-0.01, -0.01, 0.02, 0.99, -0.01, 0.02, 0.03, -0.01, 0.01, 0.02, -0.01, 0, 1.01]


@pytest.fixture(scope="session")
def f1_kl(f1: Batch) -> Batch:
    rewards = torch.zeros(f1.num_tokens, dtype=torch.float64)
    rewards[f1.action_mask] = torch.tensor(WITH_KL, dtype=torch.float64)
    return f1.with_token(token_rewards=rewards)


@pytest.fixture(scope="session")
def f1_outcome(f1: Batch) -> Batch:
    """F1 with rewards as outcomes only: no column of token rewards."""
    return Batch(
        f1.tokens,
        f1.offsets,
        {name: column for name, column in f1.token.items() if name != "token_rewards"},
        f1.sequence,
    )
