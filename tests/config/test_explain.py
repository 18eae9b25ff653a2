"""Help texts, plans, notes and docs/config.md."""

from __future__ import annotations

import pytest

from burnish.algorithms.spec import SLOT_RECORDS
from burnish.config.explain import CONFIG_PAGE, config_notes, config_page, count_keys, help_text, plan_text
from burnish.config.loading import load
from burnish.config.records import Slot, choice_name, walk_keys
from burnish.config.schema import PreferConfig, SftConfig, TrainConfig


def test_the_page_is_the_one_the_schema_gives() -> None:
    assert CONFIG_PAGE.read_text(encoding="utf-8") == config_page(), (
        "docs/config.md is stale: run `python -m burnish.config.explain`"
    )


def test_there_are_fewer_than_150_keys_outside_the_slots() -> None:
    assert 40 < count_keys(SftConfig) < count_keys(TrainConfig) < 150


@pytest.mark.parametrize("kind", [TrainConfig, SftConfig, PreferConfig])
def test_every_key_is_documented_and_in_the_help(kind: type) -> None:
    text = help_text(kind)
    for key in walk_keys(kind):
        assert key.doc or key.path == "algorithm.aggregation.name", key.path
        assert key.choice or f"\n{key.path}" in f"\n{text}", key.path


def test_help_shows_type_default_and_docstring() -> None:
    text = help_text(TrainConfig)
    assert "rollout.n (an integer of 1 or more; default 8)\n    Samples of each prompt." in text
    assert "warm_start.optimizer.lr (a number above 0; default 1e-05)" in text
    assert "training.optimizer.lr (a number above 0; default 1e-06)" in text
    assert "algorithm.advantage (name: grpo): Reward relative to its group" in text
    assert "    std (one of group, none, batch; default group)" in text


@pytest.mark.parametrize(("slot", "record"), [(slot, r) for slot, records in SLOT_RECORDS.items() for r in records])
def test_every_choice_of_a_slot_says_what_it_does(slot: str, record: type[Slot]) -> None:
    assert vars(record).get("__doc__"), f"{slot} {record} has no docstring of its own"
    # "none" computes nothing, so it has no formula; its docstring is the reason.
    assert record.formula or choice_name(record) == "none"


def test_names_within_a_slot_are_unique() -> None:
    for records in SLOT_RECORDS.values():
        assert len({choice_name(r) for r in records}) == len(records)


def test_the_plan_counts_sequences_tokens_updates_and_validation() -> None:
    overrides = ["model.new.num_layers=1", "data.train.task=t", "data.validation.task=t", "data.max_prompt_tokens=10"]
    overrides += [
        "rollout.prompts=6",
        "rollout.n=4",
        "rollout.max_tokens=20",
        "training.mini_batches=3",
        "training.epochs=2",
    ]
    overrides += ["training.steps=10", "validation.every=4", "validation.limit=50", "validation.modes.sampled.n=3"]
    overrides += ["warm_start.updates=5", "warm_start.batch_size=7", "warm_start.max_tokens=11"]
    assert plan_text(load(TrainConfig, None, overrides).config).splitlines() == [
        "warm start          5 updates of 7 sequences (at most 77 tokens), 35 sequences in all",
        "sequences per step  24 (6 prompts x 4 samples)",
        "tokens per step     at most 480 sampled, 720 trained on including prompts",
        "updates per step    6 (mini_batches 3 x epochs 2)",
        "steps               10, so 240 sequences and 60 updates",
        "validation          at most 50 prompts x 4 samples (greedy, sampled) = 200 sequences, 4 times",
    ]


def test_the_plan_of_supervised_training() -> None:
    config = load(
        SftConfig, None, ["model.path=m", "sft.data.path=d", "sft.updates=2", "sft.batch_size=3", "sft.max_tokens=4"]
    ).config
    assert plan_text(config) == "training  2 updates of 3 sequences (at most 12 tokens), 6 sequences in all\n"


# --- notes on settings that have less effect than expected ------------------------------------------------------------

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits", "training.mini_batches=2"]


def said(*overrides: str) -> list[str]:
    return config_notes(load(TrainConfig, None, [*MINIMAL, *overrides]).config)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=r1_zero"], "renewed after every=400, but training.steps=100"),
        (["algorithm=kimi_k15"], "kimi_length begins after warmup_steps=200, but training.steps=100"),
        (["algorithm.curriculum={name: hard_only, start: 200}"], "hard_only begins at start=199"),
        (["algorithm.curriculum={name: prioritised, warmup_steps: 100}"], "warmup_steps=100, but training.steps=100"),
        (["algorithm.kl.reward.coef=0.1"], "penalised twice"),
        (
            ["training.mini_batches=1", "algorithm.clip.high=0.28"],
            "algorithm.clip has no effect with one update per batch",
        ),
        (["rollout.source=ahead"], "weights one step old, and algorithm.correction=none does not correct for it"),
        (["rollout.source={name: async, max_staleness: 3}"], "weights up to 3 steps old"),
        (["algorithm=ppo", "algorithm.clip=ppo", "algorithm.ratio=sequence"], "use ratio seq_token"),
        (["algorithm=kdrl"], "names no model, so the policy's own starting weights are the teacher"),
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
    ids=["a ratio to those who wrote what comes back", "pairs of any policy"],
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
    found = config_notes(load(TrainConfig, None, [*model, "training.mini_batches=2", *engine]).config)
    assert [("are lost to rounding" in one) for one in found] == [True] * is_told
