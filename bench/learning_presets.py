"""What each preset of `bench/learning.py` learns from, and the settings in which it differs from the others, each with its reason.

Every preset runs with its own slots. What all share is in `learning.yaml`. A `Row` says which toy a preset needs and adds overrides where the published
numbers cannot work on answers of eight tokens in forty steps; `why` is printed in the table of docs/learning.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from burnish.algorithms.presets import PRESETS

TOYS_FILE = Path(__file__).with_name("learning_toys.py")
SHARED: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("learning.yaml").read_text(encoding="utf-8"))
STEPS, MINI_BATCHES = SHARED["training"]["steps"], SHARED["training"]["mini_batches"]
PROMPTS, SAMPLES = SHARED["rollout"]["prompts"], SHARED["rollout"]["n"]
LEARNING_RATE: float = SHARED["training"]["optimizer"]["lr"]
"""Of all presets that do not say otherwise: chosen by `--choose` on seeds that are not reported."""
CHOICE_RATES = (1e-4, 2e-4, 4e-4)
CHOICE_SEEDS = (100,)
CHOICE_PRESETS = ("grpo", "rloo", "ppo")
"""One of each kind: a clipped ratio, no ratio, a critic."""
OWN_CHOICES: dict[str, tuple[tuple[str, ...], ...]] = {
    "opsd": tuple((f"training.optimizer.lr={rate}",) for rate in ("2.0e-4", "1.0e-4", "5.0e-5")),
    "simpo": (
        ("loss={name: simpo, beta: 2.0}",),
        ("loss={name: simpo, beta: 2.0}", "updates=240"),
        ("loss={name: simpo, beta: 10}",),
        ("loss={name: simpo, beta: 25}",),
    ),
}
"""Settings of single rows that are compared by `--choose` too, because these presets barely learn with those of all."""


@dataclass(frozen=True)
class Start:
    """A warm start: rows to imitate, made once for each seed."""

    data: str
    updates: int = 250
    overrides: tuple[str, ...] = ()
    merges: tuple[str, ...] = ()
    """Pairs of characters that are one token: the model has another tokenizer than the others."""


def plugin(function: str, options: str) -> str:
    return f"{{plugin: '{TOYS_FILE}:{function}', options: {{{options}, seed: {{seed}}}}}}"


CALCULATOR = ("data.train={task: calculator}", "data.validation={task: calculator}", "rollout.max_tokens=12")
STARTS: dict[str, Start] = {
    "flawed": Start("{task: sort_digits, options: {num: 2000}}"),
    "right": Start("{task: sort_digits, options: {num: 4000, clean: true}}", updates=400),
    "turns": Start(plugin("turns", "num: 1000"), updates=100),
    "budgets": Start(plugin("with_budgets", "num: 2000, low: 5, high: 8")),
    "copies": Start(plugin("with_copies", "num: 2000"), updates=500),
    "proposals": Start(plugin("with_swaps", "num: 2000, at_digits: 6"), updates=500),
    "conversations": Start(plugin("single_turns", "num: 1000"), updates=100),
    "orders": Start(plugin("with_both_orders", "num: 2000"), updates=400),
    "falling": Start(plugin("falling", "num: 4000"), updates=400),
    "pairs": Start("{task: sort_digits, options: {num: 2000}}", updates=400, merges=("01", "23", "45", "67", "89")),
    "calls": Start("{task: calculator, options: {num: 4000}}", updates=300, overrides=CALCULATOR),
}
"""`right` and `falling` are teachers of the distillation rows; the others are policies."""


@dataclass(frozen=True)
class Toy:
    """What is learnt: the warm start of the policy, and the overrides that make the task."""

    start: str
    overrides: tuple[str, ...] = ()
    title: str = ""


def task(digits: int) -> tuple[str, ...]:
    rows = f"{{task: sort_digits, options: {{min_digits: {digits}, max_digits: {digits}}}}}"
    return f"data.train={rows}", f"data.validation={rows}", "data.template={kind: plain}"


SHORT = ("training.steps=20", "validation.limit=200")
"""Games take several answers, so a step costs several times as much; they are learnt sooner."""


def environment(name: str, turns: int) -> str:
    return f"environment={{name: '{TOYS_FILE}:{name}', max_turns: {turns}}}"


def order_rows(num: int, split: str) -> str:
    return f"[{{plugin: '{TOYS_FILE}:both_orders', options: {{num: {num}, split: {split}}}}}]"


ORDERS = (f"data.train={order_rows(4000, 'train')}", f"data.validation={order_rows(500, 'test')}", "reward.parts=exact")
TAGS = (
    "environment={name: tags, max_turns: 2, tools: [calculator], options: {actions: [{open: '[', close: ']', tool: calculator, "
    "argument: expression}], observation: '>{result};', answer: ['(', ')']}}"
)
TOYS: dict[str, Toy] = {
    "sort": Toy("flawed", (), "sort 4 to 7 digits"),
    "turns": Toy(
        "turns",
        (*task(4), environment("SortInTurns", 3), *SHORT),
        "name the smallest digit left, in three turns (20 steps, 200 held-out problems)",
    ),
    "race": Toy(
        "flawed",
        (*task(6), environment("SortRace", 2), *SHORT),
        "two roles sort 6 and 4 digits; a right answer beats a wrong one (20 steps, 200 held-out problems)",
    ),
    "proposals": Toy(
        "proposals",
        (*task(6), environment("ProposeOrder", 5), *SHORT),
        "a proposer orders 6 digits, four solvers sort them; the solvers are measured (20 steps, 200 held-out problems)",
    ),
    "budget": Toy(
        "budgets", ("data.budget={low: 5, high: 8, text: '{n}>'}",), "sort 4 to 7 digits, asked for a length"
    ),
    "context": Toy("copies", ("data.max_prompt_tokens=32",), "sort 4 to 7 digits, with a teacher that reads an answer"),
    "conversations": Toy(
        "conversations",
        (*task(4), environment("SortInConversations", 3), *SHORT),
        "name the smallest digit left, in three conversations, up to the first mistake (20 steps, 200 held-out problems)",
    ),
    "orders": Toy("orders", ORDERS, "sort 4 to 7 digits in rising or in falling order, as the prompt asks"),
    "pairs": Toy("pairs", (), "sort 4 to 7 digits, with the policy's tokens for 01, 23, 45, 67 and 89"),
    "calls": Toy(
        "calls",
        (*CALCULATOR, TAGS, "validation.limit=200"),
        "work out two numbers of two or three digits with a calculator (200 held-out problems)",
    ),
}


@dataclass(frozen=True)
class Row:
    """How one preset takes part."""

    toy: str = "sort"
    overrides: tuple[str, ...] = ()
    why: str = ""
    command: str = "train"
    """`train`; `prefer` and `sft` learn from a fixed data set."""


ALONE = (f"rollout.prompts={PROMPTS * SAMPLES}", "rollout.n=1")
ONE_SAMPLE = "one sample of each of 256 prompts: needs no group"
ONE_UPDATE = ("training.mini_batches=1",)
MEANT_FOR_ONE = "one update a step, as the method is meant"
CRITIC = ("algorithm.critic.optimizer.lr=1.0e-3",)
CRITIC_WHY = "critic at 1e-3, to learn within 40 steps"
REFILL = ("algorithm.refill={rounds: 2}",)
REFILL_WHY = "two rounds of refill, instead of a hunt for the last unsolved prompts"
TEACHER = "algorithm.kl.reference.path={right}"
TEACHER_WHY = "teacher: the same model, started from right demonstrations"
DEMONSTRATED = ("data.demonstration_column=answer", "data.demonstrations_per_group=1", f"rollout.n={SAMPLES - 1}")
DEMONSTRATED_WHY = "the right answer is one of the eight of a group"
IMITATED = (
    "data.demonstrations={task: sort_digits, options: {num: 2000, clean: true}}",
    "data.demonstrations_per_update=32",
)
IMITATED_WHY = "32 right demonstrations an update"
CONTEXT = "algorithm.kl.context.text='>{context}>'"
SHOWN = (CONTEXT, "algorithm.kl.context.column=answer", "algorithm.kl.context.place=user")
SHOWN_WHY = "start from a model that can copy from its context"
OPSD_WHY = "a quarter of the common learning rate, because a live teacher drifts at it"
OFFLINE_UPDATES, OFFLINE_RATE = 60, 1e-4
"""Of `prefer` and `sft`; 160 updates or 2e-4 make DPO lower right answers too (docs/preference.md)."""
PAIRS_WHY = f"pairs of the start's own samples; {OFFLINE_UPDATES} updates of 64 at {OFFLINE_RATE:g}, no rollouts"
TURNS = Row("turns")
ROWS: dict[str, Row] = {name: Row() for name in PRESETS} | {
    "reinforce": Row(overrides=ONE_UPDATE, why=MEANT_FOR_ONE),
    "opo": Row(overrides=ONE_UPDATE, why=MEANT_FOR_ONE),
    "dapo": Row(overrides=REFILL, why=REFILL_WHY),
    "clip_cov": Row(overrides=REFILL, why=REFILL_WHY),
    "kl_cov": Row(overrides=REFILL, why=REFILL_WHY),
    "bae": Row(overrides=REFILL, why=REFILL_WHY),
    "remax": Row(overrides=ALONE, why=ONE_SAMPLE),
    "r1_zero": Row(why="reward of the task alone, without a format reward"),
    "r1": Row(why="the slots of r1_zero; its stages are recipes/r1.yaml"),
    "deepscaler": Row(why="without its stages: all answers fit the first context"),
    "t1": Row(why="8 samples at temperature 1 instead of 64 at 1.2"),
    "gdpo": Row(why="one reward, so nothing is decoupled"),
    "long2short": Row(why="without the phase before it"),
    "lcpo": Row("budget"),
    "lcpo_max": Row("budget"),
    "astar_po": Row(
        overrides=(*ALONE, "data.train={task: sort_digits, limit: 1024}"),
        why="one sample a prompt, of 1,024 prompts whose values are estimated first",
    ),
    "ppo": Row(overrides=CRITIC, why=CRITIC_WHY),
    "vc_ppo": Row(
        overrides=(*CRITIC, "algorithm.critic.warmup_steps=5"), why=f"{CRITIC_WHY}; 5 steps of critic warm-up"
    ),
    "vapo": Row(
        overrides=(*CRITIC, "algorithm.critic.warmup_steps=5", "algorithm.advantage.length_adaptive=1.0"),
        why=f"{CRITIC_WHY}; 5 steps of critic warm-up; alpha 1, because 0.05 makes lambda 0 below 20 tokens",
    ),
    "orz": Row(
        overrides=(*CRITIC, "algorithm.critic.updates=4", "algorithm.critic.optimizer.warmup=0"),
        why=f"{CRITIC_WHY}; 4 critic updates a step, without warm-up",
    ),
    "pf_ppo": Row(
        overrides=(*CRITIC, "algorithm.shaping=[signed]"),
        why=f"{CRITIC_WHY}; rewards -1 and 1, because its power filter needs extremes",
    ),
    "demystify": Row(overrides=CRITIC, why=CRITIC_WHY),
    "limr": Row(overrides=CRITIC, why=f"{CRITIC_WHY}; without its choice of data, it is PPO with no KL"),
    "kimi_k15": Row(
        overrides=("algorithm.shaping=[{name: kimi_length, warmup_steps: 10}]",), why="length reward from step 10, not 200"
    ),
    "sppo": Row(overrides=("algorithm.loss.eta=10",), why="eta 10: its 1000 is for log-ratios of long answers"),
    "prime": Row(
        overrides=(
            "algorithm.process={beta: 1.0, mini_batches: 4, optimizer: {lr: 2.0e-4, betas: [0.9, 0.95], clip_norm: 10}}",
            "rollout.prompts=8",
        ),
        why="process model: beta 1 and lr 2e-4 for short answers; 8 of 32 prompts a step are used",
    ),
    "spo_chain": Row(
        overrides=("algorithm.advantage={every: 2, rollouts: 4}", "rollout.prompts=16"),
        why="a cut at every second unsure token, 4 continuations; 16 prompts, because these are samples too",
    ),
    "spo_tree": Row(
        overrides=(
            "algorithm.advantage={branches: [2, 2], segment: 2}",
            "rollout.prompts=16",
            "rollout.n=4",
            "algorithm.replay={share: 1, uses: 2, max_age: 7, pick: oldest}",
        ),
        why="trees 4-2-2 of 2 tokens an edge; as many replayed groups as new ones instead of 7 times",
    ),
    "luffy": Row(overrides=DEMONSTRATED, why=DEMONSTRATED_WHY),
    "rl_plus": Row(overrides=DEMONSTRATED, why=DEMONSTRATED_WHY),
    "rl_sft": Row(overrides=IMITATED, why=IMITATED_WHY),
    "chord": Row(overrides=IMITATED, why=IMITATED_WHY),
    "on_policy_distillation": Row(overrides=(*ALONE, TEACHER), why=f"{TEACHER_WHY}; {ONE_SAMPLE}"),
    "iw_opd": Row(overrides=(*ALONE, TEACHER), why=f"{TEACHER_WHY}; {ONE_SAMPLE}"),
    "mopd": Row(
        "orders",
        overrides=(
            *ALONE,
            "algorithm.kl.reference={name: teachers, column: kind, paths: {rising: '{right}', falling: '{falling}'}}",
        ),
        why=f"teachers: two models of the same shape, started from right demonstrations of one order each; {ONE_SAMPLE}",
    ),
    "gold": Row("pairs", (*ALONE, TEACHER), f"{TEACHER_WHY}, one token a digit; {ONE_SAMPLE}"),
    "kdrl": Row(overrides=(TEACHER,), why=TEACHER_WHY),
    "sdpo": Row("context", (CONTEXT,), SHOWN_WHY),
    "sdft": Row("context", (*ALONE, *SHOWN, "algorithm.loss.top=8"), f"{SHOWN_WHY}; 8 likeliest tokens of 13"),
    "opsd": Row("context", (*ALONE, *SHOWN, "training.optimizer.lr=5.0e-5"), f"{SHOWN_WHY}; {OPSD_WHY}"),
    "ssd": Row(
        overrides=(*ALONE, *ONE_UPDATE, "rollout.temperature=0.7", "algorithm.filters=[{name: non_stub, min_chars: 1}]"),
        why="no reward; samples at temperature 0.7; answers have 4 to 7 characters",
    ),
    "dpo": Row(overrides=("loss={name: dpo, beta: 1.0}",), why=f"{PAIRS_WHY}; beta 1, for short answers", command="prefer"),
    "ipo": Row(overrides=("loss={name: ipo, beta: 1.0}",), why=f"{PAIRS_WHY}; beta 1, for short answers", command="prefer"),
    "kto": Row(overrides=("loss={name: kto, beta: 1.0}",), why=f"{PAIRS_WHY}; beta 1, for short answers", command="prefer"),
    "simpo": Row(overrides=("loss={name: simpo, beta: 25}",), why=f"{PAIRS_WHY}; beta 25, for short answers", command="prefer"),
    "orpo": Row(overrides=("loss=orpo",), why=PAIRS_WHY, command="prefer"),
    "sft": Row(why=f"2,000 right demonstrations; {OFFLINE_UPDATES} updates of 64 at {OFFLINE_RATE:g}, no rollouts", command="sft"),
    "gigpo": TURNS,
    "mt_grpo": Row("turns", (environment("SortInTurns", 3)[:-1] + ", options: {turn_reward: 0.2}}",), "0.2 for a right turn"),
    "bilevel_gae": Row("turns", CRITIC, CRITIC_WHY),
    "rebn": Row("turns", ONE_UPDATE, MEANT_FOR_ONE),
    "hgpo": TURNS,
    "multi_conversation": Row("conversations"),
    "echo": Row("calls"),
    "step_broadcast": TURNS,
    "rae": Row("race", (f"rollout.prompts={PROMPTS * SAMPLES // 2}", "rollout.n=1"), "128 games of two answers"),
    "trr_plus_plus": Row(
        "race", (f"rollout.prompts={PROMPTS * SAMPLES // 2}", "rollout.n=1"), "128 games of two answers"
    ),
    "hierarchical_grpo": Row("proposals", ("rollout.prompts=16", "rollout.n=4"), "64 games of five answers; at least 196 of 200 held-out proposals are valid"),
}  # fmt: skip

UNTRAINED_REASONS: dict[str, str] = {
    "ssd": "it has no reward, and sharpens what the start does most, which is to copy its input",
}
"""Why a preset does not learn here: the likely reason, where there is one."""
