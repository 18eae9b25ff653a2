"""`--shrink`: any recipe as a job that runs anywhere in seconds, through every slot it names.

The model becomes a tiny new decoder, the data the built-in task sort_digits, the verifier that task's own checker (with an
environment of several turns: the built-in game guess_number); what counts steps, samples or tokens becomes small enough for two steps. The algorithm keeps every choice it has: only
numbers that would not come into play in two steps of ten tokens change. A short warm start stays or is added, because
a model that is never right has groups without signal, and filters would leave nothing to go through the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from burnish.config.consistency import TEXT_ONLY
from burnish.config.plugins import is_reference
from burnish.config.rollout import GUESS_NUMBER, SINGLE_TURN

Tree = Any
Edit = tuple[str, Any]
"""A dotted key and its new value."""

STEPS, PROMPTS, SAMPLES, TOKENS = 2, 4, 4, 10
SUFFIX = "-shrunk"
MODEL = {
    "new": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "mlp_size": 64, "max_positions": 64},
    "device": "cpu",
}
DIGITS = {"min_digits": 2, "max_digits": 3}
TRAIN = {"task": "sort_digits", "options": DIGITS, "limit": 32}
HELD_OUT = {"task": "sort_digits", "options": DIGITS, "limit": 8}
DEMONSTRATIONS = {"task": "sort_digits", "options": {**DIGITS, "num": 96, "clean": True}}
PREFERENCES = {"task": "sort_digits", "options": {**DIGITS, "num": 24}}
WARM_START: dict[str, Any] = {
    "data": DEMONSTRATIONS,
    "updates": 20,
    "batch_size": 32,
    "max_tokens": 32,
    "optimizer": {"lr": 1e-2},
}
COLUMN = "length"
"""The one column of a sort_digits row that holds a number; rows of guess_number have it too."""
BUDGET = {"low": 1, "high": 9, "text": "{n}>"}
TEMPLATE: dict[str, Any] = {"kind": "auto", "text": "{prompt}", "system": None, "kwargs": {}, "prerendered": False}

AT_MOST = {
    "run.save_every": STEPS,
    "reward.workers": 1,
    "rollout.n": SAMPLES,
    "rollout.max_rows": 64,
    "rollout.cache_gib": 0.01,
    "rollout.source.max_staleness": 1,
    "training.mini_batches": 2,
    "training.epochs": 2,
    "training.optimizer.warmup": 1,
    "validation.limit": 8,
    "validation.every": STEPS,
    "algorithm.aggregation.horizon": TOKENS,
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
    "sft.updates": STEPS,
    "sft.batch_size": 4,
    "sft.max_tokens": 32,
    "sft.optimizer.warmup": 1,
    "reward_model.updates": STEPS,
    "reward_model.batch_size": 4,
    "reward_model.max_tokens": 32,
    "reward_model.held_out_every": 1,
    "reward_model.optimizer.warmup": 1,
    "preference.updates": STEPS,
    "preference.batch_size": 4,
    "preference.max_tokens": 32,
    "preference.held_out_every": STEPS,
    "preference.optimizer.warmup": 1,
}
SHAPER_AT_MOST = {"max_tokens": TOKENS, "cache": 4, "margin": 2, "ngram": 2, "warmup_steps": 1}


def shrink(tree: Tree) -> tuple[Tree, list[str]]:
    """The values of a whole configuration made small, and what was changed, one `key: old -> new` each."""
    notes = []
    for key, new in _edits(tree):
        old = _get(tree, key.split("."))
        if old != new:
            tree = _put(tree, key.split("."), new)
            notes.append(f"{key}: {_change(old, new)}")
    return tree, notes


def _edits(tree: Tree) -> Iterator[Edit]:
    yield "model", MODEL
    yield from _optimizers(tree)
    yield from _run(tree)
    yield from next((make(tree) for name, make in STAGES.items() if name in tree), _rl(tree))
    for key, most in AT_MOST.items():
        yield from _at_most(tree, key, most)


def _optimizers(tree: Tree) -> Iterator[Edit]:
    """A small float32 model on a CPU has nothing to round or to move, and not the layers a group may name."""
    for section in ("training", "algorithm.critic", "algorithm.process", "sft", "preference", "reward_model"):
        if _get(tree, [*section.split("."), "optimizer"]) is not None:
            yield f"{section}.optimizer.precision", "master"
            yield f"{section}.optimizer.offload", False
            yield f"{section}.optimizer.groups", []


def _run(tree: Tree) -> Iterator[Edit]:
    """Its own folder, so that the recipe at full size can run beside it, and nothing sent anywhere."""
    if tree["run"]["name"] is not None:
        yield "run.name", tree["run"]["name"].removesuffix(SUFFIX) + SUFFIX
    yield "run.trackers", []


def _sft(tree: Tree) -> Iterator[Edit]:
    yield "sft.data", _of_stages(tree["sft"]["data"]) or [DEMONSTRATIONS]
    yield "template", TEMPLATE


def _preference(tree: Tree) -> Iterator[Edit]:
    yield "preference.data", _of_stages(tree["preference"]["data"]) or [PREFERENCES]
    if tree["preference"]["held_out"]:
        yield "preference.held_out", [PREFERENCES]
    yield "template", TEMPLATE


def _reward_model(tree: Tree) -> Iterator[Edit]:
    yield "reward_model.data", _of_stages(tree["reward_model"]["data"]) or [PREFERENCES]
    if tree["reward_model"]["held_out"]:
        yield "reward_model.held_out", [PREFERENCES]
    yield "template", TEMPLATE


def _of_stages(sources: list[Tree]) -> list[Tree]:
    """The sources that an earlier stage makes, which is shrunk itself."""
    return [source for source in sources if is_reference(source["path"])]


STAGES = {"sft": _sft, "preference": _preference, "reward_model": _reward_model}
"""What is trained where it is not RL, by its section."""


def _rl(tree: Tree) -> Iterator[Edit]:
    rollout, stages = tree["rollout"], tree["rollout"]["stages"]
    yield "training.steps", max(STEPS, 1 + len(stages))
    yield "rollout.max_tokens", TOKENS
    # As many samples with n=1 as with more of each prompt: a batch whose rewards are all alike teaches nothing.
    yield from _at_most(tree, "rollout.prompts", PROMPTS * SAMPLES // min(rollout["n"], SAMPLES))
    yield "rollout.engine", "auto"
    yield "rollout.vllm", None
    yield "rollout.sglang", None
    yield "rollout.stages", [_stage(stage, number) for number, stage in enumerate(stages)]
    if tree["environment"]["name"] == SINGLE_TURN:
        yield "warm_start", WARM_START
        yield from _data(tree["data"], tree["algorithm"]["auxiliary"]["sft"] > 0)
        yield from _rewards(tree)
    else:
        yield from _game(tree)
    if tree["validation"]["by"] is not None:
        yield "validation.by", COLUMN
    for mode in tree["validation"]["modes"]:
        yield f"validation.modes.{mode}.max_tokens", TOKENS
        yield from _at_most(tree, f"validation.modes.{mode}.n", 2)
    yield from _algorithm(tree)


def _stage(stage: Tree, number: int) -> Tree:
    """Every stage keeps a step of its own, and a longer answer than the one before if it had a length."""
    small = {"start": STEPS + number, "max_tokens": TOKENS + number + 1}
    return {k: None if v is None else small.get(k, min(v, SAMPLES)) for k, v in stage.items()}


def _data(data: Tree, imitates: bool) -> Iterator[Edit]:
    yield "data.train", _of_stages(data["train"]) or [TRAIN]
    yield "data.template", TEMPLATE
    yield "data.prerendered", False
    if data["validation"]:
        yield "data.validation", [HELD_OUT]
    if data["demonstrations_per_group"]:  # the one column of a sort_digits row that is a right answer
        yield "data.demonstration_column", "answer"
    if data["demonstrations"]:
        yield "data.demonstrations", [DEMONSTRATIONS] if imitates else []
    if data["budget"] is not None:
        yield "data.budget", BUDGET


def _game(tree: Tree) -> Iterator[Edit]:
    """Any environment of several turns becomes the built-in game, which gives the rewards itself."""
    numbers, environment = {"numbers": 7}, tree["environment"]
    demonstrations = {"task": GUESS_NUMBER, "options": {**numbers, "num": 200, "forgetful": 0.0, "guesses": 3}}
    yield "warm_start", {**WARM_START, "data": demonstrations, "updates": 60, "max_tokens": 64}
    turns = min(max(environment["max_turns"], 2), 3)  # the game takes two
    yield "environment", {"name": GUESS_NUMBER, "options": {}, "max_turns": turns, "max_tokens": None}
    yield "data.train", [{"task": GUESS_NUMBER, "options": numbers, "limit": 32}]
    yield "data.template", TEMPLATE
    yield "data.prerendered", False
    if tree["data"]["validation"]:
        yield "data.validation", [{"task": GUESS_NUMBER, "options": numbers, "limit": 8}]
    if tree["data"]["demonstrations"]:
        yield "data.demonstrations", [demonstrations]
    if tree["data"]["budget"] is not None:
        yield "data.budget", {**BUDGET, "text": "{n}?"}  # in the game's characters
    yield "reward.parts", [{"name": "task", "weight": 1.0, "options": {}, "sources": None}]


def _rewards(tree: Tree) -> Iterator[Edit]:
    """The task's checker in the place of the first verifier; parts that only read the text stay, others go."""
    kept: list[Tree] = []
    for part in tree["reward"]["parts"]:
        if part["name"] in TEXT_ONLY or is_reference(part["options"].get("path")):
            kept.append({**part, "sources": None})
        elif all(other["name"] != "task" for other in kept):
            kept.append({**part, "name": "task", "options": {}, "sources": None})
    if all(part["name"] != "task" for part in kept):
        kept.insert(0, {"name": "task", "weight": 1.0, "options": {}, "sources": None})
    yield "reward.parts", kept
    weights = tree["algorithm"]["advantage"].get("weights")
    if weights:  # named after the parts
        renamed = {name if name in TEXT_ONLY else "task": weight for name, weight in reversed(weights.items())}
        yield "algorithm.advantage.weights", renamed


def _algorithm(tree: Tree) -> Iterator[Edit]:
    for number in range(len(tree["algorithm"]["shaping"])):
        for option, most in SHAPER_AT_MOST.items():
            yield from _at_most(tree, f"algorithm.shaping.{number}.{option}", most)
    if "branches" in tree["algorithm"]["advantage"]:
        yield "algorithm.advantage.branches", [2, 2]
    if tree["algorithm"]["kl"]["reference"].get("path"):  # the tiny model has no teacher: the outcome moves it
        yield "algorithm.kl.reference.path", None
        if "outcome" in tree["algorithm"]["advantage"]:
            yield "algorithm.advantage.outcome", 1.0
    if (tree["algorithm"]["process"] or {}).get("path"):  # nor another tokenizer's process reward model
        yield "algorithm.process.path", None
    curriculum = tree["algorithm"]["curriculum"]
    if "column" in curriculum:
        yield "algorithm.curriculum.column", COLUMN
    if curriculum["name"] == "hard_only":
        yield "algorithm.curriculum.below", 1.0  # one wrong answer of four is all a step can show


# --- trees -----------------------------------------------------------------------------------------------------------


def _at_most(tree: Tree, key: str, most: float) -> Iterator[Edit]:
    old = _get(tree, key.split("."))
    if isinstance(old, int | float) and old > most:
        yield key, most


def _get(tree: Tree, parts: list[str]) -> Any:
    """What stands at a key, or None where nothing does."""
    for part in parts:
        if isinstance(tree, list):
            tree = tree[int(part)]
        elif isinstance(tree, dict):
            tree = tree.get(part)
        else:
            return None
    return tree


def _put(tree: Tree, parts: list[str], value: Any) -> Tree:
    """The tree with a value at a key, whatever stood there."""
    if not parts:
        return value
    if isinstance(tree, list):
        return [_put(item, parts[1:], value) if i == int(parts[0]) else item for i, item in enumerate(tree)]
    held = tree if isinstance(tree, dict) else {}
    return {**held, parts[0]: _put(held.get(parts[0]), parts[1:], value)}


def _change(old: Any, new: Any) -> str:
    """`old -> new` in a few words; of two sections that would read the same, or that have no name, the values that differ."""
    one, other = _only(old), _only(new)
    is_alike = _brief(one) == _brief(other) or _brief(one).startswith("{")
    if isinstance(one, dict) and isinstance(other, dict) and is_alike:
        return ", ".join(f"{path} {_brief(was)} -> {_brief(now)}" for path, was, now in _differences(one, other, ""))
    return f"{_brief(old)} -> {_brief(new)}"


def _differences(old: Any, new: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The values of the new section that the old one has otherwise, with their dotted keys."""
    old = _only(old)
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in new.items():
            yield from _differences(old.get(key), value, f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new


def _only(value: Any) -> Any:
    """The item of a list of one, as which a source may be written."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _brief(value: Any) -> str:
    """A value in a few words: a section by what it names or holds."""
    if isinstance(value, list):
        return ", ".join(_brief(item) for item in value) or "none"
    if isinstance(value, dict):
        named = next((str(value[k]) for k in ("path", "task", "plugin", "name") if value.get(k)), "")
        return named or f"{{{', '.join(k for k, v in value.items() if v is not None)}}}"
    return "unset" if value is None else str(value)
