"""What a run is told when its settings do less than they seem to."""

from __future__ import annotations

import pytest

from burnish.config.load import load
from burnish.config.remarks import remarks
from burnish.config.schema import TrainConfig

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits", "training.mini_batches=2"]


def said(*overrides: str) -> list[str]:
    return remarks(load(TrainConfig, None, [*MINIMAL, *overrides]).config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=r1_zero"], "renewed after every=400, but training.steps=100"),
        (["algorithm=kimi_k15"], "kimi_length begins after warmup_steps=200, but training.steps=100"),
        (["algorithm.curriculum={name: hard_only, start: 200}"], "hard_only begins at start=199"),
        (["algorithm.curriculum={name: prioritised, warmup_steps: 100}"], "warmup_steps=100, but training.steps=100"),
        (["algorithm.kl.reward.coef=0.1"], "pays twice"),
        (["training.mini_batches=1"], "the clip never acts"),
        (["algorithm=ppo", "algorithm.clip=ppo", "algorithm.ratio=sequence"], "seq_token keeps it with its token"),
    ],
)
def test_it_says_so(overrides: list[str], words: str) -> None:
    (one,) = said(*overrides)
    assert words in one


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "vapo", "t1", "gspo_token", "pacs"])
def test_sensible_settings_stay_quiet(name: str) -> None:
    assert said(f"algorithm={name}") == []
