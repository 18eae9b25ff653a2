"""docs/algorithms.md: the page, and that what it says can be done."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.algorithms.spec import TABLE
from burnish.config.algorithm_guide import PAGE, PROBLEMS, Remedy, brief, differences, from_base, page
from burnish.config.loading import from_preset, load
from burnish.config.schema import TrainConfig
from burnish.config.schema_walk import label

RECIPE = Path(__file__).parents[2] / "recipes" / "grpo.yaml"


def test_the_page_is_the_one_the_presets_and_slots_give() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "docs/algorithms.md is stale: run `python -m burnish.config.algorithm_guide`"
    )


@pytest.mark.parametrize("remedy", PROBLEMS, ids=lambda r: r.method)
def test_every_setting_of_the_table_of_problems_loads_and_changes_the_recipe(remedy: Remedy) -> None:
    changed = load(TrainConfig, RECIPE, remedy.overrides)
    assert changed.resolved != load(TrainConfig, RECIPE).resolved
    assert set(remedy.presets) <= set(PRESETS)


def test_every_preset_answers_a_problem_or_is_a_plain_method() -> None:
    named = {name for remedy in PROBLEMS for name in remedy.presets}
    plain = {"reinforce", "grpo", "gpg", "ppo", "sft", "dro", "pacs", "sppo", "limr", "grpo_passk"}
    plain |= {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    # Of preferences, which are another problem than those of RL.
    plain |= {"dpo", "online_dpo", "ipo", "kto", "simpo", "orpo"}
    assert set(PRESETS) - named == plain


def test_the_page_names_every_preset_and_every_choice() -> None:
    text = page()
    for name in PRESETS:
        assert f"| `{name}` |" in text
    for records in TABLE.values():
        for record in records:
            assert f"- `{label(record)}`: " in text
            assert record.formula in text


def test_a_preset_in_a_line_names_what_it_changes_and_nothing_else() -> None:
    assert from_base(from_preset("grpo")) == ""
    assert from_base(from_preset("dr_grpo")) == (
        "advantage: grpo(std=none); aggregation: seq-mean-token-sum-norm; kl: none"
    )
    assert from_base(from_preset("vapo")).endswith("critic: warmup_steps=50, optimizer.lr=2e-06")


def test_off_is_a_dash_and_options_at_their_defaults_are_not_shown() -> None:
    dapo, t1, ppo = from_preset("dapo"), from_preset("t1"), from_preset("ppo")
    assert brief(dapo.clip) == "ppo(high=0.28, dual=10)"
    assert brief(dapo.critic) == brief(dapo.entropy) == brief(dapo.auxiliary) == brief(dapo.curriculum) == "-"
    assert brief(ppo.critic) == "on"
    assert brief(t1.kl) == "0.0002 k1 in reward centred by token to ema"
    assert brief(from_preset("kimi_k15").kl) == "to iterate"
    assert [slot for slot, _, _ in differences(from_preset("grpo"), from_preset("cppo"))] == ["filters"]
