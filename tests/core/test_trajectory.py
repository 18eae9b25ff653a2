"""Trajectories become one batch: the columns, the groups, and what cannot be packed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from burnish.core.random_keys import fold, to_int64
from burnish.core.trajectory import TokenSequence, Trajectory, pack


def sequence(tokens: list[int], prompt: int, version: int = 3) -> TokenSequence:
    written = np.arange(len(tokens)) >= prompt
    return TokenSequence(
        tokens=np.array(tokens, dtype=np.int64),
        action_mask=written,
        behaviour_logp=np.where(written, -0.25 * np.array(tokens), 0).astype(np.float32),
        version=np.where(written, version, -1).astype(np.int32),
    )


def trajectory(prompt_id: str, visit: int, sample: int, *sequences: TokenSequence, **fields: Any) -> Trajectory:
    defaults: dict[str, Any] = {"finish": "stop", "completion": "", "reward": 1.0}
    return Trajectory(prompt_id, visit, sample, list(sequences), **(defaults | fields))


def test_packing_lays_sequences_end_to_end_with_their_columns() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([5, 6, 7], 1), reward=0.5, accuracy=1.0),
            trajectory("p", 0, 1, sequence([5, 8], 1), reward=-1.0, finish="length"),
            trajectory("q", 0, 0, sequence([9, 2, 4], 2), accuracy=0.0, finish="turns"),
        ]
    )
    assert batch.tokens.tolist() == [5, 6, 7, 5, 8, 9, 2, 4]
    assert batch.offsets.tolist() == [0, 3, 5, 8]
    assert batch.action_mask.tolist() == [False, True, True, False, True, False, False, True]
    assert torch.equal(batch.loss_mask, batch.action_mask)
    assert batch.loss_mask is not batch.action_mask
    assert batch.token["behaviour_logp"].tolist() == [0, -1.5, -1.75, 0, -2, 0, 0, -1]
    assert batch.token["version"].tolist() == [-1, 3, 3, -1, 3, -1, -1, 3]
    assert batch.sequence["reward"].tolist() == [0.5, -1.0, 1.0]
    assert batch.sequence["reward"].dtype == torch.float64
    assert batch.sequence["truncated"].tolist() == [False, True, True]
    accuracy = batch.sequence["accuracy"].tolist()
    assert accuracy[0] == 1
    assert math.isnan(accuracy[1])
    assert accuracy[2] == 0


def test_a_group_is_one_visit_of_one_prompt() -> None:
    def one(prompt_id: str, visit: int, sample: int) -> Trajectory:
        return trajectory(prompt_id, visit, sample, sequence([1, 2], 1))

    batch = pack([one("p", 0, 0), one("q", 0, 0), one("p", 1, 0), one("q", 0, 1), one("p", 0, 1)])
    assert batch.sequence["group_ids"].tolist() == [0, 1, 2, 1, 0]
    assert batch.sequence["trajectory_ids"].tolist() == [0, 1, 2, 3, 4]


def test_a_rewritten_context_gives_several_sequences_of_one_trajectory() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4, 5], 2), reward=0.25),
            trajectory("p", 0, 1, sequence([6, 7], 1), reward=0.75),
        ]
    )
    assert batch.offsets.tolist() == [0, 2, 5, 7]
    assert batch.sequence["trajectory_ids"].tolist() == [0, 0, 1]
    assert batch.sequence["group_ids"].tolist() == [0, 0, 0]
    assert batch.sequence["reward"].tolist() == [0.25, 0.25, 0.75]


def test_every_sequence_has_a_key_of_its_own_whatever_it_is_packed_with() -> None:
    a = trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4, 5], 2))
    b = trajectory("p", 0, 1, sequence([6, 7], 1))
    c = trajectory("p", 1, 0, sequence([6, 7], 1))
    keys = pack([a, b, c]).sequence["key"]
    assert keys.dtype == torch.int64
    assert keys.tolist() == [to_int64(fold(0, "p", *rest)) for rest in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0))]
    assert len(set(keys.tolist())) == 4
    assert pack([c, a]).sequence["key"].tolist() == [keys[3], keys[0], keys[1]]


def test_reward_parts_become_columns_with_nan_where_a_trajectory_has_none() -> None:
    batch = pack(
        [
            trajectory("p", 0, 0, sequence([1, 2], 1), sequence([3, 4], 1), parts={"math": 1.0, "format": 0.25}),
            trajectory("q", 0, 0, sequence([1, 2], 1), parts={"math": 0.0}),
        ]
    )
    assert batch.sequence["part/math"].tolist() == [1.0, 1.0, 0.0]
    formats = batch.sequence["part/format"]
    assert formats.dtype == torch.float64
    assert formats.tolist()[:2] == [0.25, 0.25]
    assert math.isnan(formats[2])


@pytest.mark.parametrize("name", ["greedy_reward", "budget"])
def test_numbers_of_the_metadata_become_columns_where_any_trajectory_has_them(name: str) -> None:
    plain = trajectory("p", 0, 0, sequence([1, 2], 1))
    given = trajectory("q", 0, 0, sequence([1, 2], 1), metadata={name: 7})
    column = pack([given, plain]).sequence[name]
    assert column.dtype == torch.float64
    assert column[0] == 7
    assert math.isnan(column[1])
    assert set(pack([plain]).sequence) == {"group_ids", "trajectory_ids", "key", "reward", "accuracy", "truncated"}


def test_a_trajectory_without_a_reward_cannot_be_packed_and_is_named() -> None:
    good = trajectory("p", 0, 0, sequence([1, 2], 1))
    failed = trajectory("p", 2, 1, sequence([1, 2], 1), reward=None)
    with pytest.raises(ValueError, match=r"1 trajectories have no reward.*p#2\.1"):
        pack([good, failed])


def test_counts_and_names() -> None:
    one = trajectory("p", 4, 2, sequence([1, 2, 3], 1), sequence([1, 2], 1), finish="aborted")
    assert (one.id, one.num_actions, one.truncated) == ("p#4.2", 3, True)
    assert not trajectory("p", 0, 0, finish="stop").truncated
