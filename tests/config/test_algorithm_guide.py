"""docs/algorithms.md matches the presets, and its settings load."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import SLOT_RECORDS
from burnish.config.algorithm_guide import (
    ALGORITHMS_PAGE,
    PROBLEMS,
    Remedy,
    algorithms_page,
    changes_from_grpo,
    describe_slot,
    slot_differences,
)
from burnish.config.loading import algorithm_from_preset, load
from burnish.config.records import choice_name
from burnish.config.schema import TrainConfig

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.yaml"


def test_the_page_is_the_one_the_presets_and_slots_give() -> None:
    assert ALGORITHMS_PAGE.read_text(encoding="utf-8") == algorithms_page(), (
        "docs/algorithms.md is stale: run `python -m burnish.config.algorithm_guide`"
    )


@pytest.mark.parametrize("remedy", PROBLEMS, ids=lambda r: r.method)
def test_every_setting_of_the_table_of_problems_loads_and_changes_the_recipe(remedy: Remedy) -> None:
    changed = load(TrainConfig, RECIPE, remedy.overrides)
    assert changed.resolved != load(TrainConfig, RECIPE).resolved
    assert set(remedy.presets) <= set(PRESETS)


def test_the_methods_against_a_problem_stand_together_and_once() -> None:
    problems = [remedy.problem for remedy in PROBLEMS]
    assert len(list(groupby(problems))) == len(set(problems))
    assert len({(remedy.problem, remedy.method) for remedy in PROBLEMS}) == len(PROBLEMS)


def test_every_preset_answers_a_problem_or_is_a_plain_method() -> None:
    named = {name for remedy in PROBLEMS for name in remedy.presets}
    plain = {"reinforce", "grpo", "gpg", "ppo", "sft", "dro", "pacs", "sppo", "limr", "grpo_passk"}
    plain |= {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    # Of preferences, which are another problem than those of RL.
    plain |= {"dpo", "online_dpo", "ipo", "kto", "simpo", "orpo"}
    assert set(PRESETS) - named == plain


def test_the_page_names_every_preset_and_every_choice() -> None:
    text = algorithms_page()
    for name in PRESETS:
        assert f"| `{name}` |" in text
    for records in SLOT_RECORDS.values():
        for record in records:
            assert f"- `{choice_name(record)}`: " in text
            assert record.formula in text


def test_a_preset_in_a_line_names_what_it_changes_and_nothing_else() -> None:
    assert changes_from_grpo(algorithm_from_preset("grpo")) == ""
    assert changes_from_grpo(algorithm_from_preset("dr_grpo")) == (
        "advantage: grpo(std=none); aggregation: seq-mean-token-sum-norm; kl: none"
    )
    assert changes_from_grpo(algorithm_from_preset("vapo")).endswith("critic: warmup_steps=50, optimizer.lr=2e-06")


def test_off_is_a_dash_and_options_at_their_defaults_are_not_shown() -> None:
    dapo, t1, ppo = algorithm_from_preset("dapo"), algorithm_from_preset("t1"), algorithm_from_preset("ppo")
    assert describe_slot(dapo.clip) == "ppo(high=0.28, dual=10)"
    assert (
        describe_slot(dapo.critic)
        == describe_slot(dapo.entropy)
        == describe_slot(dapo.auxiliary)
        == describe_slot(dapo.curriculum)
        == "-"
    )
    assert describe_slot(ppo.critic) == "on"
    assert describe_slot(t1.kl) == "0.0002 k1 in reward centred by token to ema"
    assert describe_slot(algorithm_from_preset("kimi_k15").kl) == "to iterate"
    assert [slot for slot, _, _ in slot_differences(algorithm_from_preset("grpo"), algorithm_from_preset("cppo"))] == [
        "filters"
    ]
