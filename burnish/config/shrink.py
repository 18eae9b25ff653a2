"""`--shrink`: any recipe as a job of seconds that uses every slot of its algorithm.

The model becomes a tiny new decoder. The data becomes the built-in task sort_digits with its own checker. Board games stay what they are,
with bare boards (or pictures of them) and one-word answers. Tasks with drawn pictures keep them. An environment with tools keeps its episodes of calls and results, but calls a calculator. Self-made
tasks are written in a one-line language. Any other environment of several turns becomes the built-in game guess_number. Processes on Ray become one process. Numbers of steps, samples and
tokens become small enough for two steps. The algorithm keeps all of its choices; only numbers that would have no effect in two steps of
ten tokens change. A short warm start is kept or added: groups of a model that is never right carry no signal, and filters would leave
nothing for the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from burnish.config.consistency import STYLE_REWARDS
from burnish.config.environment import (
    ABSOLUTE_ZERO,
    GAME_TURNS,
    GUESS_NUMBER,
    SELF_CORRECTION,
    SINGLE_TURN,
    TAG_ENVIRONMENTS,
    TOOLS,
)
from burnish.config.placement import LocalPlacement, Parallel
from burnish.config.plugins import is_reference

Tree = Any
Edit = tuple[str, Any]
"""A dotted key and its new value."""

LOCAL = LocalPlacement().name
NUM_STEPS, MAX_PROMPTS, MAX_SAMPLES, MAX_NEW_TOKENS = 2, 4, 4, 10
SHRUNK_SUFFIX = "-shrunk"
TINY_MODEL: dict[str, Any] = {
    "new": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "mlp_size": 64, "max_positions": 64},
    "device": "cpu",
}
SORT_DIGITS_OPTIONS = {"min_digits": 2, "max_digits": 3}
TRAIN_SOURCE = {"task": "sort_digits", "options": SORT_DIGITS_OPTIONS, "limit": 32}
HELD_OUT_SOURCE = {"task": "sort_digits", "options": SORT_DIGITS_OPTIONS, "limit": 8}
DEMONSTRATION_SOURCE = {"task": "sort_digits", "options": {**SORT_DIGITS_OPTIONS, "num": 96, "clean": True}}
PREFERENCE_SOURCE = {"task": "sort_digits", "options": {**SORT_DIGITS_OPTIONS, "num": 24}}
"""Pairs, or answers with values of steps: the task has both."""
WARM_START: dict[str, Any] = {
    "data": DEMONSTRATION_SOURCE,
    "updates": 20,
    "batch_size": 32,
    "max_tokens": 32,
    "optimizer": {"lr": 1e-2},
}
NUMERIC_COLUMN = "length"
"""The only numeric column of sort_digits rows; rows of guess_number and calculator have it too."""
BARE_GAMES = tuple(name for name in GAME_TURNS if name not in (GUESS_NUMBER, "alphabet_sort", "tabletop"))
"""Games that a tiny model can play: a board as the prompt, and a word as the answer."""
GAME_DEMONSTRATIONS = "burnish.environments.games.demonstrations:demonstrations"
GAME_POSITIONS = 512
LONG_WARM_STARTS = {"propose_sum": 120}
"""Updates of the warm start of games whose first answer must be right for the game to go on."""
DRAWN_TASKS = ("count_shapes", "read_chart", "click_target")
"""Tasks whose prompts are drawn pictures."""
MAX_SIDE, MAX_DRAWN_TOKENS, DRAWN_POSITIONS = 64, 48, 128
"""Pixels of a drawn picture, tokens of an answer about it, and of both together."""
CALCULATOR = "calculator"
CALCULATOR_ENVIRONMENT = {
    "name": "tags",
    "tools": [{"name": CALCULATOR, "options": {}}],
    "options": {
        "actions": [{"open": "[", "close": "]", "tool": CALCULATOR, "argument": "expression"}],
        "observation": ">{result};",
        "answer": ["(", ")"],
    },
    "max_turns": 2,
    "max_tokens": None,
}
"""The episodes of the task `calculator`, as in recipes/calculator_toy.yaml."""
LENGTH_BUDGET = {"low": 1, "high": 9, "text": "{n}>"}
PLAIN_TEMPLATE: dict[str, Any] = {
    "kind": "auto",
    "text": "{prompt}",
    "system": None,
    "kwargs": {},
}

UPPER_LIMITS = {
    "run.save_every": NUM_STEPS,
    "reward.workers": 1,
    "rollout.n": MAX_SAMPLES,
    "rollout.max_rows": 64,
    "rollout.cache_gib": 0.01,
    "rollout.source.max_staleness": 1,
    "rollout.opponents.every": 1,
    "rollout.opponents.keep": 2,
    "rollout.opponents.at_once": 1,
    "training.mini_batches": 2,
    "training.epochs": 2,
    "training.collapse_every": 1,
    "training.optimizer.warmup": 1,
    "validation.limit": 8,
    "validation.every": NUM_STEPS,
    "algorithm.aggregation.horizon": MAX_NEW_TOKENS,
    "algorithm.kl.reference.every": 1,
    "algorithm.refill.rounds": 3,
    "algorithm.critic.warmup_steps": 1,
    "algorithm.critic.updates": 2,
    "algorithm.critic.optimizer.warmup": 1,
    "algorithm.process.mini_batches": 2,
    "algorithm.process.optimizer.warmup": 1,
    "algorithm.advantage.every": 1,
    "algorithm.advantage.rollouts": 3,
    "algorithm.advantage.segment": 2,
    "algorithm.curriculum.start": 2,
    "algorithm.curriculum.steps": 2,
    "algorithm.curriculum.buckets": 2,
    "algorithm.curriculum.warmup_steps": 1,
    "sft.updates": NUM_STEPS,
    "sft.batch_size": 4,
    "sft.max_tokens": 32,
    "sft.optimizer.warmup": 1,
    "reward_model.updates": NUM_STEPS,
    "reward_model.batch_size": 4,
    "reward_model.max_tokens": 32,
    "reward_model.held_out_every": 1,
    "reward_model.optimizer.warmup": 1,
    "preference.updates": NUM_STEPS,
    "preference.batch_size": 4,
    "preference.max_tokens": 32,
    "preference.held_out_every": NUM_STEPS,
    "preference.optimizer.warmup": 1,
}
SHAPER_LIMITS = {"max_tokens": MAX_NEW_TOKENS, "cache": 4, "margin": 2, "ngram": 2, "warmup_steps": 1}


def shrink(tree: Tree) -> tuple[Tree, list[str]]:
    """A small version of a resolved configuration, and the changes as `key: old -> new`."""
    notes = []
    for key, new in _edits(tree):
        old = _get_key(tree, key.split("."))
        if old != new:
            tree = _set_key(tree, key.split("."), new)
            notes.append(f"{key}: {_describe_change(old, new)}")
    return tree, notes


def _edits(tree: Tree) -> Iterator[Edit]:
    yield "model", TINY_MODEL
    yield from _optimizer_edits(tree)
    yield from _run_edits(tree)
    yield from next((make(tree) for name, make in SECTION_EDITS.items() if name in tree), _rl_edits(tree))
    for key, most in UPPER_LIMITS.items():
        yield from _at_most(tree, key, most)


def _optimizer_edits(tree: Tree) -> Iterator[Edit]:
    """Reset options without effect on a tiny float32 model on a CPU, and groups that may name layers it does not have."""
    for section in ("training", "algorithm.critic", "algorithm.process", "sft", "preference", "reward_model"):
        if _get_key(tree, [*section.split("."), "optimizer"]) is not None:
            yield f"{section}.optimizer.precision", "master"
            yield f"{section}.optimizer.offload", False
            yield f"{section}.optimizer.groups", []


def _run_edits(tree: Tree) -> Iterator[Edit]:
    """Use a separate run folder, so that the full recipe can run at the same time, and no trackers."""
    if tree["run"]["name"] is not None:
        yield "run.name", tree["run"]["name"].removesuffix(SHRUNK_SUFFIX) + SHRUNK_SUFFIX
    yield "run.trackers", []


def _sft_edits(tree: Tree) -> Iterator[Edit]:
    yield "sft.data", _stage_sources(tree["sft"]["data"]) or [DEMONSTRATION_SOURCE]
    yield "template", PLAIN_TEMPLATE


def _preference_edits(tree: Tree) -> Iterator[Edit]:
    yield "preference.data", _stage_sources(tree["preference"]["data"]) or [PREFERENCE_SOURCE]
    if tree["preference"]["held_out"]:
        yield "preference.held_out", [PREFERENCE_SOURCE]
    yield "template", PLAIN_TEMPLATE


def _reward_model_edits(tree: Tree) -> Iterator[Edit]:
    yield "reward_model.data", _stage_sources(tree["reward_model"]["data"]) or [PREFERENCE_SOURCE]
    if tree["reward_model"]["held_out"]:
        yield "reward_model.held_out", [PREFERENCE_SOURCE]
    yield "template", PLAIN_TEMPLATE


def _stage_sources(sources: list[Tree]) -> list[Tree]:
    """The sources that are outputs of earlier stages, which are shrunk themselves."""
    return [source for source in sources if is_reference(source["path"])]


SECTION_EDITS = {"sft": _sft_edits, "preference": _preference_edits, "reward_model": _reward_model_edits}
"""Edits of configs without RL, by their main section."""


def _rl_edits(tree: Tree) -> Iterator[Edit]:
    rollout, stages = tree["rollout"], tree["rollout"]["stages"]
    yield "training.steps", max(NUM_STEPS, 1 + len(stages))
    drawn = _drawn_source(tree)
    max_tokens = MAX_NEW_TOKENS if drawn is None else min(rollout["max_tokens"], MAX_DRAWN_TOKENS)
    yield "rollout.max_tokens", max_tokens
    # The number of samples does not depend on n: a batch whose rewards are all equal gives no update.
    yield from _at_most(tree, "rollout.prompts", MAX_PROMPTS * MAX_SAMPLES // min(rollout["n"], MAX_SAMPLES))
    yield "placement", {"name": LOCAL}
    yield "parallel", Parallel().model_dump()
    yield "rollout.engine", "auto"
    yield "rollout.vllm", None
    yield "rollout.sglang", None
    yield "rollout.stages", [_shrink_rollout_stage(stage, number) for number, stage in enumerate(stages)]
    if drawn is not None:
        yield from _drawn_edits(tree, drawn)
        yield from _reward_edits(tree)
    elif tree["environment"]["name"] == SINGLE_TURN:
        yield "warm_start", WARM_START
        yield from _data_edits(tree["data"], _imitates(tree))
        yield from _reward_edits(tree)
    else:
        yield from _environment_edits(tree)
    if tree["validation"]["by"] is not None and tree["environment"]["name"] not in BARE_GAMES:
        yield "validation.by", NUMERIC_COLUMN
    for mode in tree["validation"]["modes"]:
        yield f"validation.modes.{mode}.max_tokens", max_tokens
        yield from _at_most(tree, f"validation.modes.{mode}.n", 2)
    yield from _algorithm_edits(tree)


def _imitates(tree: Tree) -> bool:
    auxiliary = tree["algorithm"]["auxiliary"]
    return bool(auxiliary["sft"] > 0 or auxiliary["chord"])


def _shrink_rollout_stage(stage: Tree, number: int) -> Tree:
    """Every stage keeps its own step and, if it sets max_tokens, longer answers than the stage before."""
    small = {"start": NUM_STEPS + number, "max_tokens": MAX_NEW_TOKENS + number + 1}
    return {k: None if v is None else small.get(k, min(v, MAX_SAMPLES)) for k, v in stage.items()}


def _data_edits(data: Tree, imitates: bool) -> Iterator[Edit]:
    yield "data.train", _stage_sources(data["train"]) or [TRAIN_SOURCE]
    yield "data.template", PLAIN_TEMPLATE
    if data["validation"]:
        yield "data.validation", [HELD_OUT_SOURCE]
    if data["demonstrations_per_group"]:  # the column of sort_digits rows with a correct answer
        yield "data.demonstration_column", "answer"
    if data["demonstrations"]:
        yield "data.demonstrations", [DEMONSTRATION_SOURCE] if imitates else []
    if data["budget"] is not None:
        yield "data.budget", LENGTH_BUDGET


def _drawn_source(tree: Tree) -> Tree | None:
    """The source of training rows if it is a task with drawn pictures and one answer."""
    sources = tree["data"]["train"]
    is_drawn = len(sources) == 1 and sources[0]["task"] in DRAWN_TASKS
    return sources[0] if is_drawn and tree["environment"]["name"] == SINGLE_TURN else None


def _drawn_edits(tree: Tree, source: Tree) -> Iterator[Edit]:
    """Keep the pictures, for a tiny model that sees."""
    options = {key: value for key, value in source["options"].items() if key != "words"}
    if "side" in options:
        options["side"] = min(options["side"], MAX_SIDE)
    shown = {"task": source["task"], "options": {**options, "num": 96}}
    new = {**TINY_MODEL["new"], "max_positions": DRAWN_POSITIONS, "family": "qwen3_vl"}
    yield "model", {**TINY_MODEL, "new": new}
    yield "warm_start", {**WARM_START, "data": shown, "updates": 60, "max_tokens": DRAWN_POSITIONS}
    yield from _row_edits(tree, {"task": source["task"], "options": options}, shown)


def _environment_edits(tree: Tree) -> Iterator[Edit]:
    name = tree["environment"]["name"]
    if name in BARE_GAMES:
        yield from _game_edits(tree)
    elif name in (TOOLS, *TAG_ENVIRONMENTS):
        yield from _tool_edits(tree)
    elif name == SELF_CORRECTION:
        yield from _correction_edits(tree)
    elif name == ABSOLUTE_ZERO:
        yield from _self_made_edits(tree)
    else:
        yield from _guessing_edits(tree)


def _game_edits(tree: Tree) -> Iterator[Edit]:
    """Keep a game, without words and with one action per answer. The warm start imitates a player who often moves at random."""
    environment = tree["environment"]
    name = environment["name"]
    options = {**environment["options"], "words": False, "format": "last_word"}
    shown = {"plugin": GAME_DEMONSTRATIONS, "options": {"name": name, "options": options, "num": 64, "noise": 0.3}}
    family = {"family": "qwen3_vl"} if options.get("observation") == "picture" else {}
    yield "model", {**TINY_MODEL, "new": {**TINY_MODEL["new"], "max_positions": GAME_POSITIONS, **family}}
    updates = LONG_WARM_STARTS.get(name, WARM_START["updates"])
    yield "warm_start", {**WARM_START, "data": shown, "max_tokens": GAME_POSITIONS, "updates": updates}
    turns = min(environment["max_turns"], GAME_TURNS[name])
    yield "environment", {"name": name, "options": options, "max_turns": turns, "max_tokens": None}
    yield from _row_edits(tree, {"task": name}, shown)


def _tool_edits(tree: Tree) -> Iterator[Edit]:
    """Keep episodes of calls and results, with a calculator in place of all tools."""
    digits = {"min_digits": 1, "max_digits": 1}
    shown = {"task": CALCULATOR, "options": {**digits, "num": 300, "calls": 0.7, "slips": 0.0}}
    yield "model", {**TINY_MODEL, "new": {**TINY_MODEL["new"], "max_positions": GAME_POSITIONS}}
    yield "warm_start", {**WARM_START, "data": shown, "updates": 60}
    yield "environment", CALCULATOR_ENVIRONMENT
    yield from _row_edits(tree, {"task": CALCULATOR, "options": digits}, shown)
    yield from _reward_edits(tree)


def _correction_edits(tree: Tree) -> Iterator[Edit]:
    """Keep the two attempts, at sorting digits."""
    environment = tree["environment"]
    options = {**environment["options"], "verifier": "task", "prompt": ">"}  # a character of the task
    options = {key: value for key, value in options.items() if key in ("verifier", "alpha", "prompt")}
    yield "warm_start", WARM_START
    yield "environment", {**environment, "options": options, "max_turns": 2, "max_tokens": None, "workers": 1}
    yield from _row_edits(tree, {"task": "sort_digits", "options": SORT_DIGITS_OPTIONS}, DEMONSTRATION_SOURCE)


def _self_made_edits(tree: Tree) -> Iterator[Edit]:
    """Keep proposing and solving, in a one-line language. The warm start imitates simple proposals and solutions."""
    options = {"references": 1, "inputs": 2, "format": "expression"}
    shown = {"task": ABSOLUTE_ZERO, "options": {**options, "num": 96}}
    yield "model", {**TINY_MODEL, "new": {**TINY_MODEL["new"], "max_positions": GAME_POSITIONS}}
    yield "warm_start", {**WARM_START, "data": shown, "updates": 60, "max_tokens": 64}
    yield "environment", {"name": ABSOLUTE_ZERO, "options": {"attempts": 2}, "max_turns": 3, "max_tokens": None}
    yield "data.max_prompt_tokens", 64
    yield "data.train", [{"task": ABSOLUTE_ZERO, "options": options}]
    yield "data.template", PLAIN_TEMPLATE
    if tree["data"]["validation"]:
        yield "data.validation", [{"task": ABSOLUTE_ZERO, "options": options, "limit": 8}]
    yield "rollout.prompts", 6  # two of each type


def _guessing_edits(tree: Tree) -> Iterator[Edit]:
    """Replace an environment by the built-in game, which gives the rewards itself."""
    numbers, environment = {"numbers": 7}, tree["environment"]
    demonstrations = {"task": GUESS_NUMBER, "options": {**numbers, "num": 200, "forgetful": 0.0, "guesses": 3}}
    yield "warm_start", {**WARM_START, "data": demonstrations, "updates": 60, "max_tokens": 64}
    turns = min(max(environment["max_turns"], 2), 3)  # the game needs at least two turns
    yield "environment", {"name": GUESS_NUMBER, "options": {}, "max_turns": turns, "max_tokens": None}
    yield from _row_edits(tree, {"task": GUESS_NUMBER, "options": numbers}, demonstrations)
    if tree["data"]["budget"] is not None:
        yield "data.budget", {**LENGTH_BUDGET, "text": "{n}?"}  # uses only characters of the game
    yield "reward.parts", [{"name": "task", "weight": 1.0, "options": {}, "sources": None}]


def _row_edits(tree: Tree, source: Tree, demonstrations: Tree) -> Iterator[Edit]:
    """Take rows of one task."""
    yield "data.train", [{**source, "limit": 32}]
    yield "data.template", PLAIN_TEMPLATE
    if tree["data"]["validation"]:
        yield "data.validation", [{**source, "limit": 8}]
    if tree["data"]["demonstrations"]:
        yield "data.demonstrations", [demonstrations]


def _reward_edits(tree: Tree) -> Iterator[Edit]:
    """Replace the first verifier by the task's checker. Parts that only read the text stay, others are removed."""
    kept: list[Tree] = []
    for part in tree["reward"]["parts"]:
        if part["name"] in STYLE_REWARDS or is_reference(part["options"].get("path")):
            kept.append({**part, "sources": None})
        elif all(other["name"] != "task" for other in kept):
            kept.append({**part, "name": "task", "options": {}, "sources": None})
    if all(part["name"] != "task" for part in kept):
        kept.insert(0, {"name": "task", "weight": 1.0, "options": {}, "sources": None})
    yield "reward.parts", kept
    weights = tree["algorithm"]["advantage"].get("weights")
    if weights:  # keyed by the names of the parts
        renamed = {name if name in STYLE_REWARDS else "task": weight for name, weight in reversed(weights.items())}
        yield "algorithm.advantage.weights", renamed


def _algorithm_edits(tree: Tree) -> Iterator[Edit]:
    for number in range(len(tree["algorithm"]["shaping"])):
        for option, most in SHAPER_LIMITS.items():
            yield from _at_most(tree, f"algorithm.shaping.{number}.{option}", most)
    for number, one in enumerate(tree["algorithm"]["filters"]):
        if "min_chars" in one:  # answers of the task have a few characters
            yield f"algorithm.filters.{number}.min_chars", 1
    if "branches" in tree["algorithm"]["advantage"]:
        yield "algorithm.advantage.branches", [2, 2]
    if tree["algorithm"]["kl"]["reference"].get(
        "path"
    ):  # no teacher has the tiny model's tokenizer: learn from the outcome instead
        yield "algorithm.kl.reference.path", None
        if tree["algorithm"]["loss"]["name"] == "gold":  # the tiny model teaches itself, with the answer in its prompt
            context = {"name": "demonstration", "column": "answer", "text": "{context}"}
            yield "algorithm.kl.context", context
        if "outcome" in tree["algorithm"]["advantage"]:
            yield "algorithm.advantage.outcome", 1.0
    if tree["algorithm"]["kl"]["reference"].get("url"):
        yield "algorithm.kl.reference.url", None
    if tree["algorithm"]["kl"]["reference"].get("paths"):  # the same holds for several
        yield "algorithm.kl.reference.paths", {TRAIN_SOURCE["task"]: None}
        yield "algorithm.kl.reference.column", "data_source"
        yield "algorithm.advantage.outcome", 1.0
    if "text" in tree["algorithm"]["kl"]["context"]:
        yield "algorithm.kl.context.text", "{context}"  # the tiny model reads only characters of its task
    if "column" in tree["algorithm"]["kl"]["context"]:
        yield "algorithm.kl.context.column", "answer"
    if (tree["algorithm"]["process"] or {}).get("path"):  # the same holds for a process reward model
        yield "algorithm.process.path", None
    curriculum = tree["algorithm"]["curriculum"]
    if "column" in curriculum:
        yield "algorithm.curriculum.column", NUMERIC_COLUMN
    if curriculum["name"] == "hard_only":
        yield "algorithm.curriculum.below", 1.0  # a step has four answers per prompt, so any wrong one counts


# --- trees and texts -----------------------------------------------------------------------------------------------------------


def _at_most(tree: Tree, key: str, most: float) -> Iterator[Edit]:
    old = _get_key(tree, key.split("."))
    if isinstance(old, int | float) and old > most:
        yield key, most


def _get_key(tree: Tree, parts: list[str]) -> Any:
    """The value at a key, or None."""
    for part in parts:
        if isinstance(tree, list):
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree


def _set_key(tree: Tree, parts: list[str], value: Any) -> Tree:
    """The tree with the value at a key replaced."""
    if not parts:
        return value
    if isinstance(tree, list):
        return [_set_key(item, parts[1:], value) if i == int(parts[0]) else item for i, item in enumerate(tree)]
    values = tree if isinstance(tree, dict) else {}
    return {**values, parts[0]: _set_key(values.get(parts[0]), parts[1:], value)}


def _describe_change(old: Any, new: Any) -> str:
    """`old -> new` in a few words. Sections without a name, or with equal names, are described by the values that differ."""
    one, other = _unwrap_single(old), _unwrap_single(new)
    needs_details = _describe(one) == _describe(other) or _describe(one).startswith("{")
    if isinstance(one, dict) and isinstance(other, dict) and needs_details:
        return ", ".join(
            f"{path} {_describe(was)} -> {_describe(now)}" for path, was, now in _value_differences(one, other, "")
        )
    return f"{_describe(old)} -> {_describe(new)}"


def _value_differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The values that differ between two sections, with their dotted keys."""
    old = _unwrap_single(old)
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in new.items():
            yield from _value_differences(old.get(key), value, f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def _unwrap_single(value: Any) -> Any:
    """The item of a list of one, which is how a single source may be written."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _describe(value: Any) -> str:
    """A value in a few words: a section by its name or its keys."""
    if isinstance(value, list):
        return ", ".join(_describe(item) for item in value) or "none"
    if isinstance(value, dict):
        named = next((str(value[k]) for k in ("path", "task", "plugin", "name") if value.get(k)), "")
        return named or f"{{{', '.join(k for k, v in value.items() if v is not None)}}}"
    return "unset" if value is None else str(value)
