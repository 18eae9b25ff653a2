"""Who computes side by side: the learner of a run whose engine waits meanwhile."""

from __future__ import annotations

import pytest
import torch

from burnish.config.load import load
from burnish.config.schema import TrainConfig
from burnish.controller.roles import build_critic, build_learner, build_policy


def config_of(*overrides: str) -> TrainConfig:
    return load(TrainConfig, None, ["model.new.num_layers=1", "data.train.task=sort_digits", *overrides]).config


@pytest.mark.parametrize(
    ("option", "hands"),
    [("rollout.source=sync", 4), ("rollout.source=ahead", 1), ("rollout.source=async", 1), ("rollout.exact=true", 1)],
)
def test_threads_are_the_learners_while_no_engine_computes(
    monkeypatch: pytest.MonkeyPatch, option: str, hands: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    config = config_of(option)
    policy = build_policy(config.model, config.data.train, 0, None)
    assert build_learner(config, policy).hands.number == hands


def test_a_critic_has_hands_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    config = config_of("algorithm=ppo")
    critic = build_critic(config, build_policy(config.model, config.data.train, 0, None))
    assert critic is not None
    assert critic.learner.hands.number == 2
