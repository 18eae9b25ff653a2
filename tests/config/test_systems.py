"""docs/systems.md, the table of published systems and the recipes name each other; `burnish recipes --system` finds them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.recipe_names import recipe_names
from burnish.config.systems import SYSTEMS, SYSTEMS_PAGE, find_system, made_of, normal_name, systems_page

TASKS = {
    "sort_digits",
    "beyond_demonstrations",
    "gsm8k",
    "math",
    "smollm2_sums",
    "reward_model",
    "guess_number",
    "multi_turn_correction",
}
TASKS |= {
    "sort_digits_experts",
    "step_reward_model",
    "tic_tac_toe_self_play",
    "kuhn_poker",
    "alphabet_sort",
    "reverse_text",
    "calculator_toy",
}
TASKS |= {"math_fast", *(f"gsm8k_{name}" for name in ("fast", "dapo", "dr_grpo", "gspo", "rloo", "ppo"))}
"""Recipes of a task or a method that are no published system."""
ISSUE = """DeepSeek-R1, DeepSeek-R1-Zero, TinyZero, SimpleRL, open-r1, X-R1, Logic-RL, Minimal-RL, understand-r1-zero, ORZ, DAPO, VAPO, VC-PPO, GPG, CPPO,
Skywork-OR1, DeepScaleR, POLARIS, DeepMath, STILL-3, SkyThought, QwQ, theLMbook, T1, Kimi k1.5, PF-PPO, L1, Demystify, LIMR, Tina, PRIME, SPO,
Clip-Cov, KL-Cov, LUFFY, PACS, RL-PLUS, Code-R1, CodeForces-style stdin/stdout, CoT-RM, Bae et al., Vision-SR1, Search-R1, ReSearch, ReTool, ToRL,
DeepRetrieval, DeepResearcher, RL-Factory, verl-tool, rStar2-Agent, MemAgent, Table-R1, RAGEN, verl-agent, GiGPO, OpenManus-RL, Agent Lightning, VAGEN,
Easy-R1, GUI-R1, VTool-R1, RACRO, SimpleVLA-RL, LLaSA-TTS, verl-agent/GiGPO, Kimina-Prover, RM-R1, Absolute Zero, SPIRAL"""


def test_the_page_is_the_one_that_the_table_and_the_recipes_give() -> None:
    assert SYSTEMS_PAGE.read_text(encoding="utf-8") == systems_page(), (
        "docs/systems.md is stale: run `python -m burnish.config.systems`"
    )


def test_every_recipe_of_the_table_exists_and_every_recipe_is_of_a_system_a_preset_or_a_task() -> None:
    named = {recipe for system in SYSTEMS for recipe in system.recipes}
    assert named <= set(recipe_names())
    assert set(recipe_names()) - named - set(PRESETS) == TASKS
    links = set(re.findall(r"\(\.\./recipes/(\w+)\.yaml\)", SYSTEMS_PAGE.read_text(encoding="utf-8")))
    assert links == {recipe for system in SYSTEMS for recipe in system.recipes}


def test_every_system_is_found_by_its_names_without_case_and_punctuation() -> None:
    assert [find_system(name.strip()).name for name in ISSUE.replace("\n", " ").split(",")]
    assert find_system("search r1") == find_system("SEARCH_R1") == find_system("Search-R1")
    assert find_system("r1").recipes[0] == "r1"
    names = [normal_name(text) for system in SYSTEMS for text in (system.name, *system.aliases)]
    assert len(set(names)) == len(names)
    with pytest.raises(UserError, match="no system 'tiny zeros' here; did you mean 'TinyZero'"):
        find_system("tiny zeros")


def test_every_system_that_runs_has_a_recipe_of_one_of_its_names_first() -> None:
    others = {"Clip-Cov/KL-Cov", "Bae et al."}
    """Recipes clip_cov and kl_cov, and bae."""
    for system in SYSTEMS:
        names = {normal_name(text) for text in (system.name, *system.aliases)}
        assert not system.recipes or system.name in others or normal_name(system.recipes[0]) in names, system.name


def test_the_command_prints_the_recipe_or_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "--system", "logicrl"]) == 0
    out = capsys.readouterr().out
    assert "Logic-RL (https://arxiv.org/abs/2502.14768)\n  burnish train logic_rl\n" in out
    assert "reward rule_scores (logic_rl)" in out
    assert "not the same: our own generator" in out
    assert main(["recipes", "--system", "gui-r1"]) == 0
    assert "burnish train gui_r1" in capsys.readouterr().out
    assert main(["recipes", "grpo", "--system", "gui-r1"]) == 2


def test_what_a_system_is_made_of_is_read_from_its_recipe() -> None:
    assert made_of("dapo") == "dapo (shaping: signed, soft_overlong(cache=4096)); reward math"
    assert made_of("tina").startswith("grpo (kl: 0.04 k3 in loss to frozen); LoRA; reward 2 math + think_format")
    assert "environment torl with python_session" in made_of("verl_tool")
    assert made_of("skythought") == "sft"
    assert made_of("r1").startswith("stages: sft, train r1_zero, eval, data reject, sft, reward-model, train")
    assert Path(SYSTEMS_PAGE).name == "systems.md"
