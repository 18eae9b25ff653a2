"""Help, the plan, the page of documentation."""

import pytest

from burnish.algorithms.spec import TABLE
from burnish.config.explain import PAGE, count_keys, help_text, page, plan_text
from burnish.config.loading import load
from burnish.config.preference import PreferConfig
from burnish.config.records import Slot
from burnish.config.schema import SftConfig, TrainConfig
from burnish.config.schema_walk import label, walk


def test_the_page_is_the_one_the_schema_gives() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "docs/config.md is stale: run `python -m burnish.config.explain`"


def test_there_are_fewer_than_150_keys_outside_the_slots() -> None:
    assert 40 < count_keys(SftConfig) < count_keys(TrainConfig) < 150


@pytest.mark.parametrize("kind", [TrainConfig, SftConfig, PreferConfig])
def test_every_key_is_documented_and_in_the_help(kind: type) -> None:
    text = help_text(kind)
    for key in walk(kind):
        assert key.doc or key.path == "algorithm.aggregation.name", key.path
        assert key.choice or f"\n{key.path}" in f"\n{text}", key.path


def test_help_shows_type_default_and_docstring() -> None:
    text = help_text(TrainConfig)
    assert "rollout.n (an integer of 1 or more; default 8)\n    Samples of each prompt." in text
    assert "warm_start.optimizer.lr (a number above 0; default 1e-05)" in text
    assert "training.optimizer.lr (a number above 0; default 1e-06)" in text
    assert "algorithm.advantage (name: grpo): Reward relative to its group" in text
    assert "    std (one of group, none, batch; default group)" in text


@pytest.mark.parametrize(("slot", "record"), [(slot, r) for slot, records in TABLE.items() for r in records])
def test_every_choice_of_a_slot_says_what_it_does(slot: str, record: type[Slot]) -> None:
    assert vars(record).get("__doc__"), f"{slot} {record} has no docstring of its own"
    # "none" computes nothing, so it has no formula; its docstring is the reason.
    assert record.formula or label(record) == "none"


def test_names_within_a_slot_are_unique() -> None:
    for records in TABLE.values():
        assert len({label(r) for r in records}) == len(records)


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
        "warm start        5 updates of 7 sequences (at most 77 tokens), 35 sequences in all",
        "sequences a step  24 (6 prompts x 4 samples)",
        "tokens a step     at most 480 sampled, 720 trained on with their prompts",
        "updates a step    6 (mini_batches 3 x epochs 2)",
        "steps             10, so 240 sequences and 60 updates",
        "validation        at most 50 prompts x 4 samples (greedy, sampled) = 200 sequences, 4 times",
    ]


def test_the_plan_of_supervised_training() -> None:
    config = load(
        SftConfig, None, ["model.path=m", "sft.data.path=d", "sft.updates=2", "sft.batch_size=3", "sft.max_tokens=4"]
    ).config
    assert plan_text(config) == "training  2 updates of 3 sequences (at most 12 tokens), 6 sequences in all\n"
