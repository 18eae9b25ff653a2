"""Shapers by outcome (ALGORITHMS.md 10.8; DAPO's rewards of 1 and -1), and the table of all shapers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from burnish.algorithms.shaping import spec as records
from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import SHAPERS, signed_reward, stop_properly, t1_penalty

LOOP = [1, 2, 1, 2, 1, 2, 3]  # three of its six pairs are repeats
PLAIN = [1, 2, 3, 4, 5, 6, 7]


def ended(rows: list[list[int]], reward: list[float], **columns: list[Any]) -> Batch:
    num = len(rows)
    tokens = torch.tensor([token for row in rows for token in row])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    made = {name: torch.tensor(values) for name, values in columns.items()}
    made = {k: v.double() if v.is_floating_point() else v for k, v in made.items()}
    sequence = {
        "reward": torch.tensor(reward, dtype=torch.float64),
        "accuracy": torch.tensor([float(r > 0) for r in reward], dtype=torch.float64),
        "group_ids": torch.zeros(num, dtype=torch.int64),
        "truncated": torch.zeros(num, dtype=torch.bool),
        **made,
    }
    offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
    return Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, sequence)


def test_a_truncated_sample_keeps_a_share_of_its_reward_or_gets_a_fixed_one() -> None:
    batch = ended([PLAIN] * 3, [1.0, 1.0, -2.0], truncated=[False, True, True])
    assert stop_properly(batch, 1, coef=0.5).tolist() == stop_properly(batch, 1).tolist() == [1, 0.5, -1]
    assert stop_properly(batch, 1, coef=0.0).tolist() == [1, 0, 0]
    assert stop_properly(batch, 1, coef=-0.5).tolist() == [1, -0.5, -0.5]


def test_a_trajectory_is_truncated_if_any_of_its_sequences_is() -> None:
    batch = ended([PLAIN] * 3, [1.0, 1.0, 1.0], truncated=[False, True, False], trajectory_ids=[5, 5, 2])
    assert stop_properly(batch, 1, coef=0.5).tolist() == [0.5, 0.5, 1]


def test_right_but_repetitive_or_truncated_gets_minus_one() -> None:
    batch = ended([PLAIN, LOOP, PLAIN, PLAIN], [1.0, 1.0, 1.0, 0.0], truncated=[False, False, True, False])
    assert t1_penalty(batch, 1, ngram=2).tolist() == [1, -1, -1, 0]
    assert t1_penalty(batch, 1, ngram=20).tolist() == [1, 1, -1, 0]
    assert t1_penalty(batch, 1, ngram=2, share=0.5).tolist() == [1, 1, -1, 0]  # exactly the share is allowed


def test_mixed_scripts_are_read_from_a_reward_part() -> None:
    batch = ended([PLAIN] * 3, [1.0] * 3, **{"part/language": [0.9, 0.8, 0.7]})
    assert t1_penalty(batch, 1).tolist() == [1, 1, 1]
    assert t1_penalty(batch, 1, script_part="language").tolist() == [1, 1, -1]
    assert t1_penalty(batch, 1, script_part="language", script_low=0.85).tolist() == [1, -1, -1]
    with pytest.raises(UserError, match="script_part is 'script', but the reward parts are: language"):
        t1_penalty(batch, 1, script_part="script")
    with pytest.raises(ValidationError, match="no effect without script_part"):
        records.T1PenaltyShaper(script_low=0.5)


def test_signed_rewards_come_from_the_accuracy_alone() -> None:
    batch = ended([PLAIN] * 3, [0.3, 5.0, -1.0], accuracy=[1.0, 0.0, 0.5])
    assert signed_reward(batch, 1).tolist() == [1, -1, -1]
    assert signed_reward(batch, 1, right=0.1, wrong=-0.3).tolist() == [0.1, -0.3, -0.3]
    with pytest.raises(UserError, match="shaper signed needs"):
        signed_reward(ended([PLAIN], [1.0], accuracy=[float("nan")]), 1)


def test_every_shaper_says_whether_it_is_dense_and_changes_nothing_it_was_given() -> None:
    batch = ended([LOOP, PLAIN], [1.0, 0.0], budget=[3.0, 3.0])
    probability = Ragged(torch.tensor([0.2, 0.3], dtype=torch.float64), torch.tensor([0, 1, 2]))
    batch = replace(batch, ragged={**batch.ragged, "answer_probability": probability})
    before = {name: column.clone() for name, column in {**batch.token, **batch.sequence}.items()}
    required: dict[str, dict[str, Any]] = {
        "soft_overlong": {"max_tokens": 8, "cache": 4},
        "cosine": {"max_tokens": 9},
    }
    assert [r.model_fields["name"].default for r in records.SHAPER_RECORDS] == list(SHAPERS)
    for record in records.SHAPER_RECORDS:
        name = record.model_fields["name"].default
        result = SHAPERS[name](batch, 1, **required.get(name, {}))
        assert result.dtype == torch.float64
        assert result.shape == ((batch.num_tokens if record.dense else batch.num_sequences),)
    assert all(torch.equal(before[k], c) for k, c in {**batch.token, **batch.sequence}.items())
