"""Advantage `distillation`: each token's own KL to the teacher, and the outcome relative to its group where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from burnish.algorithms.spec import Algorithm
from burnish.config.loading import algorithm_from_preset
from burnish.core.batch import Batch
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from tests.algorithms.functions_with_defaults import distillation


class Says:
    """A learner or a teacher whose log-probs are a column of the batch."""

    is_policy = False

    def __init__(self, column: str) -> None:
        self.column = column

    def logprobs(self, batch: Batch) -> torch.Tensor:
        return batch.token[self.column]

    def outputs(self, batch: Batch, needs: frozenset[str]) -> dict[str, torch.Tensor]:
        return {"logp": batch.token[self.column]}


def prepared(f1: Batch, **slots: Any) -> Batch:
    algorithm = Algorithm.model_validate({**algorithm_from_preset("on_policy_distillation").model_dump(), **slots})
    batch = f1.with_token(policy=f1.token["old_logp"], teacher=f1.token["ref_logp"])
    batch = batch.with_sequence(
        reward=torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64), trajectory_ids=torch.arange(4)
    )
    pipeline = AlgorithmPipeline(algorithm, num_updates=1)
    return pipeline.prepare(batch, StepContext(cast(Any, Says("policy")), cast(Any, Says("teacher"))))


def test_a_tokens_advantage_is_how_much_likelier_the_teacher_finds_it(f1: Batch) -> None:
    """By hand: REF - OLD of fixture F1, row by row; neither the reward nor any later token counts."""
    batch = prepared(f1)
    expected = [-0.1, -0.1, 0.2, -0.1, -0.1, 0.2, 0.3, -0.1, 0.1, 0.2, -0.1, 0.0, 0.1]
    assert batch.token["advantages"][batch.action_mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert not batch.token["advantages"][~batch.action_mask].any()


def test_the_coefficient_scales_it_and_centring_takes_the_mean_off(f1: Batch) -> None:
    plain = prepared(f1).token["advantages"]
    kl: dict[str, Any] = {"reward": {"coef": 0.5}, "reference": "teacher"}
    torch.testing.assert_close(prepared(f1, kl=kl).token["advantages"], 0.5 * plain)
    kl["reward"] = {"coef": 1.0, "center": "token"}
    batch = prepared(f1, kl=kl)
    own = batch.token["advantages"][batch.action_mask]
    torch.testing.assert_close(own, plain[batch.action_mask] - plain[batch.action_mask].mean())


def test_an_outcome_adds_the_reward_relative_to_its_group(f1: Batch) -> None:
    plain, mixed = prepared(f1), prepared(f1, advantage={"name": "distillation", "outcome": 2.0})
    added = (mixed.token["advantages"] - plain.token["advantages"])[f1.action_mask]
    assert added.tolist() == pytest.approx([1.0] * 4 + [-1.0] * 2 + [-1.0] * 3 + [1.0] * 4, abs=1e-9)


def test_a_group_of_one_has_no_outcome_and_without_kl_in_the_reward_there_is_none(f1: Batch) -> None:
    alone = f1.with_sequence(
        group_ids=torch.arange(4), trajectory_ids=torch.arange(4), reward=torch.ones(4, dtype=torch.float64)
    )
    bare = replace(alone, token={name: column for name, column in alone.token.items() if name != "token_rewards"})
    assert not distillation(bare, outcome=1.0).any()
    assert distillation(alone, outcome=1.0).any()  # its tokens have rewards of their own
