"""TRR++: one mean and deviation for each role, over the whole batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import ROLE, TokenNode, Trajectory, pack
from tests.algorithms.functions_with_defaults import trr_plus_plus

REWARDS, ROLES = [1, 0, 1, 0.5, 0.75, 0], [4, 4, 4, 9, 9, 9]
ORACLE = [0.57735, -1.154701, 0.57735, 0.218218, 0.872872, -1.091089]


def batch_of(rewards: list[float], roles: list[int] | None, owners: list[int] | None = None) -> Batch:
    num = len(rewards)
    batch = Batch(
        tokens=torch.zeros(2 * num, dtype=torch.int64),
        offsets=offsets_from_lengths(torch.full((num,), 2)),
        token={"action_mask": torch.tensor([False, True] * num), "loss_mask": torch.tensor([False, True] * num)},
        sequence={
            "reward": torch.tensor(rewards, dtype=torch.float64),
            "group_ids": torch.arange(num),
            "trajectory_ids": torch.tensor(owners or list(range(num))),
        },
    )
    return batch if roles is None else batch.with_sequence(role_ids=torch.tensor(roles))


def close(found: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=0)


def test_every_role_has_its_own_mean_and_deviation() -> None:
    close(trr_plus_plus(batch_of(REWARDS, ROLES)), ORACLE)
    order = [5, 0, 3, 2, 4, 1]
    mixed = batch_of([REWARDS[k] for k in order], [ROLES[k] for k in order])
    close(trr_plus_plus(mixed), [ORACLE[k] for k in order])
    scaled = [10 * r + 3 if role == 9 else r for r, role in zip(REWARDS, ROLES, strict=True)]
    close(trr_plus_plus(batch_of(scaled, ROLES)), ORACLE)
    assert not torch.allclose(trr_plus_plus(batch_of(REWARDS, [4] * 6)), torch.tensor(ORACLE, dtype=torch.float64))


def test_one_sample_or_equal_rewards_give_exactly_zero() -> None:
    found = trr_plus_plus(batch_of([0.1, 0.1, 0.1, 5.0, 1.0, 0.0], [1, 1, 1, 2, 3, 3]))
    assert found[:4].tolist() == [0.0] * 4
    close(found[4:], [0.5**0.5, -(0.5**0.5)])


def test_branches_of_a_trajectory_count_once() -> None:
    branched = batch_of([1, 1, 1, 0, 1], [4] * 5, owners=[0, 0, 0, 1, 2])
    close(trr_plus_plus(branched), [0.57735] * 3 + [-1.154701, 0.57735])


def test_a_batch_without_roles_is_refused() -> None:
    with pytest.raises(UserError, match="no roles"):
        trr_plus_plus(batch_of(REWARDS, None))


def test_copies_of_a_role_share_its_number_in_a_packed_batch() -> None:
    def sample(role: str | None) -> Trajectory:
        nodes = [
            TokenNode(-1, np.array([1])),
            TokenNode(0, np.array([2]), np.zeros(1, np.float32), np.zeros(1, np.int32)),
        ]
        return Trajectory("p", 0, 0, nodes, "stop", "", reward=0.0, metadata={ROLE: role} if role else {})

    ids = pack([sample(role) for role in ("solve#0", "solve#1", "propose", "solve#0")]).sequence["role_ids"].tolist()
    assert ids[0] == ids[1] == ids[3] != ids[2]
    assert "role_ids" not in pack([sample(None)]).sequence
