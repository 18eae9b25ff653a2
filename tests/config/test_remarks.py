"""What a run is told when its settings do less than they seem to."""

from __future__ import annotations

import pytest

from burnish.config.explain import remarks
from burnish.config.loading import load
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
        (
            ["training.mini_batches=1", "algorithm.clip.high=0.28"],
            "algorithm.clip has no effect with one update a batch",
        ),
        (["rollout.source=ahead"], "weights one step old, and algorithm.correction=none does nothing about it"),
        (["rollout.source={name: async, max_staleness: 3}"], "weights up to 3 steps old"),
        (["algorithm=ppo", "algorithm.clip=ppo", "algorithm.ratio=sequence"], "seq_token keeps it with its token"),
    ],
)
def test_it_says_so(overrides: list[str], words: str) -> None:
    (one,) = said(*overrides)
    assert words in one


@pytest.mark.parametrize("name", ["grpo", "dapo", "ppo", "vapo", "t1", "gspo_token", "pacs"])
def test_sensible_settings_stay_quiet(name: str) -> None:
    assert said(f"algorithm={name}") == []
    assert said(f"algorithm={name}", "training.mini_batches=1") == [], "a preset's own clip was not set by the user"


@pytest.mark.parametrize("correction", ["decoupled_token_is", "bypass_ppo_clip", "budget"])
def test_older_weights_that_are_corrected_for_need_no_word(correction: str) -> None:
    chosen = "{budget: {ess: 0.5}}" if correction == "budget" else correction
    assert said("rollout.source=ahead", f"algorithm.correction={chosen}") == []
    assert said("rollout.source={name: async, max_staleness: 0}") == []
    assert said("rollout.source=ahead", "algorithm.correction=bypass_ppo_clip", "training.mini_batches=1") == []


@pytest.mark.parametrize(
    "overrides",
    [["algorithm.replay={}", "training.mini_batches=1"], ["algorithm=online_dpo", "rollout.source=ahead"]],
    ids=["a ratio to those who wrote what comes back", "pairs whoever wrote them"],
)
def test_what_does_act_is_not_said_to_do_nothing(overrides: list[str]) -> None:
    assert said(*overrides) == []


SGLANG = ["rollout.engine=sglang", "rollout.sglang.urls=[http://a:1]"]
SERVER = ["rollout.engine=vllm", "rollout.vllm.url=http://a:1"]


@pytest.mark.parametrize(
    ("engine", "lora", "dtype", "is_told"),
    [
        (SGLANG, "{}", "bfloat16", True),
        (SGLANG, "{base: nf4}", "bfloat16", True),
        (SGLANG, "{base: nf4}", "float32", False),
        (SGLANG, "null", "bfloat16", False),
        (SERVER, "{base: nf4}", "bfloat16", True),
        (SERVER, "{}", "bfloat16", False),
        (["rollout.engine=vllm"], "{base: nf4}", "bfloat16", False),
        ([], "{base: nf4}", "bfloat16", False),
    ],
)
def test_adapters_that_are_added_into_half_weights_are_told(
    engine: list[str], lora: str, dtype: str, is_told: bool
) -> None:
    model = ["data.train.task=sort_digits", "model.path=x", f"model.lora={lora}", f"model.dtype={dtype}"]
    found = remarks(load(TrainConfig, None, [*model, "training.mini_batches=2", *engine]).config)
    assert [("vanishes in their rounding" in one) for one in found] == [True] * is_told
