"""Published systems by name: the recipe that stands for each, and what is not the same; `burnish recipes --system NAME`.

`python -m burnish.config.systems` writes docs/systems.md from this table. What a system is made of here is read from its recipe.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from burnish.config.algorithm_guide import slot_differences
from burnish.config.data import RewardPart
from burnish.config.errors import UserError, did_you_mean
from burnish.config.loading import algorithm_from_preset, load
from burnish.config.recipe_names import command_of, recipe_path
from burnish.config.schema import PreferConfig, TrainConfig
from burnish.config.stages import StagesConfig

SYSTEMS_PAGE = Path(__file__).parents[2] / "docs" / "systems.md"


class System(NamedTuple):
    """One published system."""

    name: str
    paper: str
    """The arXiv id, or where it is described if there is no paper."""
    recipes: tuple[str, ...]
    """The recipes that stand for it, the first one first. Empty: it cannot run here."""
    differs: str
    """What is not the same here; for a system without a recipe, what is missing."""
    aliases: tuple[str, ...] = ()


SYSTEMS: tuple[System, ...] = (
    System("DeepSeek-R1", "2501.12948", ("r1", "r1_small", "r1_toy"), "Qwen2.5-32B in place of DeepSeek-V3 (whose weights are published in 8 bits), no code and logic rewards", ("R1",)),
    System("DeepSeek-R1-Zero", "2501.12948", ("r1_zero",), "Qwen2.5-32B, which the paper also trains, no code and logic rewards", ("R1-Zero",)),
    System("TinyZero", "github.com/Jiayi-Pan/TinyZero", ("tinyzero",), "0.1 asks for the right numbers, not only for the form"),
    System("SimpleRL", "2503.18892", ("simplerl",), "no data by ability; v0 is the reward rule simple_rl with PPO", ("SimpleRL-Zoo", "simpleRL-reason")),
    System("open-r1", "github.com/huggingface/open-r1", ("open_r1", "codeforces"), "no reward for single tags; its distillation is `burnish sft`"),
    System("X-R1", "github.com/dhcode-cpp/X-R1", ("x_r1",), "problems of MATH; sizes are unchecked"),
    System("Logic-RL", "2502.14768", ("logic_rl",), "our own generator of puzzles, no curriculum by people"),
    System("Minimal-RL", "2504.11343", ("minimal_rl", "raft_plus_plus", "reinforce_rej"), "the number of steps; 3072 tokens for its 7B model, which its positions allow"),
    System("understand-r1-zero", "2503.20783", ("understand_r1_zero", "dr_grpo"), "two templates of its study; the reward also reads answers outside their tags", ("Dr.GRPO", "Oat-Zero")),
    System("Open-Reasoner-Zero", "2503.24290", ("orz",), "the last phase on hard prompts is unchecked", ("ORZ",)),
    System("DAPO", "2503.14476", ("dapo",), "the number of steps"),
    System("VAPO", "2504.05118", ("vapo",), "the algorithm is the same; length and steps are ours"),
    System("VC-PPO", "2503.01491", ("vc_ppo",), "not its supervised start"),
    System("GPG", "2504.02546", ("gpg",), "sizes and steps are ours"),
    System("CPPO", "2503.22342", ("cppo",), "not the reward for the form"),
    System("Skywork-OR1", "2505.22312", ("skywork_or1",), "no programs, no upper limit of the entropy coefficient"),
    System("DeepScaleR", "the report of Luo et al. 2025", ("deepscaler", "deepscaler_toy"), "stages at given steps, not at plateaus"),
    System("POLARIS", "hkunlp.github.io/blog/2025/Polaris", ("polaris",), "one temperature for all stages, data filtered before and not between stages"),
    System("DeepMath", "2504.11456", ("deepmath",), "settings of dapo; theirs are unchecked", ("DeepMath-Zero", "DeepMath-103K")),
    System("STILL-3", "2503.04548", ("still3",), "settings from summaries; not its tools"),
    System("SkyThought", "github.com/NovaSky-AI/SkyThought", ("skythought",), "supervised only; Flash is simpo on pairs of `burnish data pairs`, its RL of 7B prime and rloo", ("Sky-T1",)),
    System("QwQ", "qwenlm.github.io/blog/qwq-32b", ("qwq",), "all settings are ours: none are published; its second stage is the last of r1", ("QwQ-32B",)),
    System("theLMbook", "github.com/aburkov/theLMbook", ("the_lm_book",), "form all or nothing, no reward for almost right answers"),
    System("T1", "2501.11651", ("t1",), "not the data of its cold start"),
    System("Kimi k1.5", "2501.12599", ("kimi_k15", "long2short", "long2short_toy"), "not Kimi's model and data; partial rollouts are rollout.source", ("k1.5",)),
    System("PF-PPO", "2409.06957", ("pf_ppo",), "a verifier in place of its reward model"),
    System("L1", "2503.04697", ("l1", "lcpo", "lcpo_max"), "the algorithm is the same; some sizes are ours", ("LCPO",)),
    System("Demystify", "2502.03373", ("demystify",), "not its supervised start and web data", ("demystify-long-cot",)),
    System("LIMR", "2502.11886", ("limr",), "the selection is `burnish data impact`, made before"),
    System("Tina", "2504.15777", ("tina",), "no dropout of adapters, plain accuracy for its cosine of the length"),
    System("PRIME", "2502.01456", ("prime",), "mathematics alone, not its supervised stage"),
    System("SPO", "2505.23564", ("spo", "spo_chain", "spo_tree"), "the lengths and numbers of steps; spo_tree has data and base of ours and not their small KL"),
    System("Clip-Cov/KL-Cov", "2505.22617", ("clip_cov", "kl_cov"), "the algorithm is the same; some sizes are ours", ("Clip-Cov", "KL-Cov", "entropy mechanism")),
    System("LUFFY", "2504.14945", ("luffy", "rl_sft"), "not its own prompt"),
    System("PACS", "2509.02522", ("pacs",), "the algorithm is the same; some sizes are ours"),
    System("RL-PLUS", "2508.00222", ("rl_plus",), "group statistics hold the demonstrations too"),
    System("Code-R1", "github.com/ganler/code-r1", ("code_r1", "mbpp"), "sizes are ours; Python's standard library alone in the sandbox"),
    System("CodeForces", "github.com/huggingface/open-r1", ("codeforces",), "Python in place of C++", ("CodeForces-style stdin/stdout", "stdin/stdout", "stdio")),
    System("CoT-RM", "2501.12599", ("cot_rm",), "an instruct model as the judge, not one trained on 800 thousand labels"),
    System("Bae et al.", "2504.03380", ("bae",), "nothing of the filter", ("online difficulty filtering",)),
    System("Search-R1", "2503.09516", ("search_r1",), "BM25 over generated passages, or your retriever by search_http, in place of E5 over Wikipedia"),
    System("ReSearch", "2503.19470", ("research",), "generated questions in place of MuSiQue; a 1.5B model"),
    System("ReTool", "2504.11536", ("retool",), "start from your own cold start"),
    System("ToRL", "2503.23383", ("torl",), "not the penalty for failing code, which they report to hurt"),
    System("DeepRetrieval", "2503.00223", ("deep_retrieval",), "BM25 over generated passages in place of PubMed"),
    System("DeepResearcher", "2504.03160", ("deep_researcher",), "a search tool in place of the live web, no browsing agent, no -1 for a broken form"),
    System("RL-Factory", "2509.06980", ("rl_factory",), "the built-in search; an MCP server is tools=[{name: mcp, ...}]"),
    System("verl-tool", "2509.01055", ("verl_tool",), "tools in the sandbox of this machine, no tool server"),
    System("rStar2-Agent", "2508.20722", ("rstar2_agent",), "no resampling on correct (GRPO-RoC), not its supervised start and later stages", ("rStar2",)),
    System("MemAgent", "2507.02259", ("mem_agent",), "shorter sections and texts"),
    System("Table-R1", "2505.23621", ("table_r1",), "generated tables, short answers alone"),
    System("RAGEN", "2504.20073", ("ragen", "ragen_sokoban", "ragen_frozen_lake", "ragen_countdown"), "our own makers of boards"),
    System("verl-agent", "2505.10978", ("verl_agent", "gigpo", "science_world"), "our own boards and drawings of Sokoban; guess_number and ScienceWorld in place of ALFWorld and WebShop", ("GiGPO", "verl-agent/GiGPO")),
    System("OpenManus-RL", "github.com/OpenManus/OpenManus-RL", ("openmanus_rl",), "ScienceWorld in place of ALFWorld, WebShop and GAIA"),
    System("Agent Lightning", "2508.03680", ("agent_lightning", "gsm8k_agent"), "GSM8K in place of Calc-X; trainer and endpoint are one run"),
    System("Kimina-Prover", "2504.11354", ("kimina_prover", "proofs"), "bring Lean, a built Mathlib, formal statements and your own cold start of the 72B model; no run with Lean was made here. proofs needs none of them: propositional logic in a language of our own, GRPO on a small decoder made from nothing"),
    System("RM-R1", "2505.02387", ("rm_r1",), "our own question, asked in both orders of every pair; your pairs; not the distillation of reasoning chains before RL; sizes and rates are ours"),
    System("Absolute Zero", "2505.03335", ("absolute_zero",), "a 1.5B model, 16 tasks of each type and shorter answers; the 8 attempts that measure a task are trained on; the buffer begins with one task", ("AZR", "Absolute Zero Reasoner")),
    System("SPIRAL", "2506.24119", ("spiral", "spiral_tic_tac_toe"), "one game a run, not three at once; three of four games against earlier weights; 1024 tokens a turn"),
    System("Vision-SR1", "2508.19652", ("vision_sr1",), "not its prompts and cold start; the answer from the description alone is trained too"),
    System("VAGEN", "2510.16907", ("vagen", "frozen_lake_pictures", "sokoban_pictures"), "our own boards and drawings; no reward for describing states, no robot and navigation tasks"),
    System("Easy-R1", "github.com/hiyouga/EasyR1", ("easy_r1", "count_shapes"), "the number of steps; count_shapes is a run of minutes on a CPU"),
    System("GUI-R1", "2504.10458", ("gui_r1", "click_target"), "sizes are ours; click_target is a run of minutes on a CPU with drawn screens"),
    System("VTool-R1", "2505.19255", ("vtool_r1",), "built-in tools that crop, zoom, highlight and mask in place of code that the model writes; exact answers in place of a judge"),
    System("RACRO", "2506.04559", ("racro",), "the reasoner also compares with the reference, which it therefore sees; sizes are ours"),
    System("SimpleVLA-RL", "2509.09674", ("simple_vla",), "a small decoder made from nothing in place of OpenVLA-OFT; a gripper on a table, whose positions the model reads as codes, in place of LIBERO and its pictures; a poor operator as the cold start", ("SimpleVLA",)),
    System("LLaSA-TTS", "2502.04128", ("llasa_tts",), "a small decoder made from nothing, a codec of two tones and its recogniser in place of Llasa, X-codec2 and Whisper; the error rate alone, not the likelihood of the text", ("Llasa",)),
)  # fmt: skip


# --- what a system is made of ---------------------------------------------------------------------------------------------------


def made_of(recipe: str) -> str:
    """The algorithm, environment and reward of a recipe in a line; the commands of a recipe of stages."""
    path = recipe_path(recipe)
    command = command_of(path)
    if command == "stages":
        stages = load(StagesConfig, path).config.stages.values()
        return "stages: " + ", ".join(
            stage.command if stage.recipe is None else f"{stage.command} {stage.recipe.removesuffix('.yaml')}"
            for stage in stages
        )
    if command == "prefer":
        return f"prefer with {load(PreferConfig, path).config.preference.loss.name}"
    if command != "train":
        return command
    config = load(TrainConfig, path).config
    algorithm = config.algorithm
    name = algorithm.preset or "grpo"
    changes = [
        f"{slot}: {'none' if new == '-' else new}"
        for slot, _, new in slot_differences(algorithm_from_preset(name), algorithm)
    ]
    parts = [f"{name} ({'; '.join(changes)})" if changes else name]
    parts += ["LoRA"] if config.model.lora is not None else []
    tools = ", ".join(tool.name for tool in config.environment.tools)
    environment = config.environment.name
    if environment != "single_turn":
        parts.append(f"environment {environment}{f' with {tools}' if tools else ''}")
    names = [part.name for part in config.reward.parts]
    is_own = environment != "single_turn" and names == ["task"]  # the default, in place of which the environment pays
    parts.append(
        "reward of the environment" if is_own else f"reward {' + '.join(map(_reward_text, config.reward.parts))}"
    )
    return "; ".join(parts)


def _reward_text(part: RewardPart) -> str:
    rule = part.options.get("rule")
    return f"{'' if part.weight == 1 else f'{part.weight:g} '}{part.name}{f' ({rule})' if rule else ''}"


# --- by name ---------------------------------------------------------------------------------------------------------------------


def normal_name(name: str) -> str:
    """A name without case and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find_system(name: str) -> System:
    """The system of this name, alias or recipe, whatever its case and punctuation."""
    wanted = normal_name(name)
    named = {normal_name(text): system for system in SYSTEMS for text in system.recipes[::-1]}
    named |= {normal_name(text): system for system in SYSTEMS for text in (*system.aliases, system.name)}
    if wanted in named:
        return named[wanted]
    names = {normal_name(text): text for system in SYSTEMS for text in (*system.aliases, system.name)}
    near = did_you_mean(wanted, names)
    for short, text in names.items():
        near = near.replace(f"'{short}'", f"'{text}'")
    raise UserError(
        f"there is no system {name!r} here{near} (docs/systems.md lists them; `burnish recipes` lists recipes)"
    )


def describe_system(system: System) -> list[str]:
    """The lines that `burnish recipes --system` prints."""
    lines = [f"{system.name} ({_paper_text(system.paper)})"]
    if not system.recipes:
        return [*lines, f"  cannot run here; missing: {system.differs}"]
    for recipe in system.recipes:
        lines += [f"  burnish {command_of(recipe_path(recipe))} {recipe}", f"      made of: {made_of(recipe)}"]
    return [*lines, f"  not the same: {system.differs}"]


def _paper_text(paper: str) -> str:
    return f"https://arxiv.org/abs/{paper}" if re.fullmatch(r"\d{4}\.\d{5}", paper) else paper


# --- the page --------------------------------------------------------------------------------------------------------------------


def systems_page() -> str:
    """The text of docs/systems.md."""
    lines = [
        "# Published systems",
        "",
        "`python -m burnish.config.systems` writes this page. What a system is made of is read from its first recipe; a recipe's header says which settings come",
        "from the paper and which are chosen here.",
        "",
        "    burnish recipes --system search-r1        # case and punctuation do not matter",
        "    burnish train search_r1 --shrink          # its algorithm in seconds on a CPU",
        "",
        "| system | paper | recipes | made of here | differences from the paper |",
        "|---|---|---|---|---|",
    ]
    runs = [system for system in SYSTEMS if system.recipes]
    lines += [_page_row(system) for system in runs]
    missing = [f"| {one.name} | {_paper_link(one.paper)} | {one.differs} |" for one in SYSTEMS if not one.recipes]
    if missing:
        lines += ["", "## Systems that cannot run here", "", "| system | paper | missing |", "|---|---|---|", *missing]
    return "\n".join(lines) + "\n"


def _page_row(system: System) -> str:
    recipes = ", ".join(f"[`{recipe}`](../recipes/{recipe}.yaml)" for recipe in system.recipes)
    made = made_of(system.recipes[0]).replace("|", "\\|")
    return f"| {system.name} | {_paper_link(system.paper)} | {recipes} | {made} | {system.differs} |"


def _paper_link(paper: str) -> str:
    if re.fullmatch(r"\d{4}\.\d{5}", paper):
        return f"[{paper}](https://arxiv.org/abs/{paper})"
    return f"[{paper}](https://{paper})" if re.match(r"[\w.]+\.(com|io)/", paper) else paper


if __name__ == "__main__":
    SYSTEMS_PAGE.write_text(systems_page(), encoding="utf-8")
    print(f"wrote {SYSTEMS_PAGE.relative_to(Path.cwd()) if SYSTEMS_PAGE.is_relative_to(Path.cwd()) else SYSTEMS_PAGE}")
