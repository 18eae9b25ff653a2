"""`burnish stages --shrink`: every stage of a recipe as a job of seconds (`shrink.py`), on what the shrunk stages before it make."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.load import Loaded, load, load_tree
from burnish.config.references import is_reference
from burnish.config.shrink import DEMONSTRATIONS, DIGITS, MODEL, SAMPLES, SUFFIX, TEMPLATE, TOKENS, WARM_START, shrink
from burnish.config.stage_trees import load_stages
from burnish.config.stages import BASE, StagesConfig

PROMPTS = 32
"""Of an evaluation."""
IMITATED = {**WARM_START, "updates": 60}
"""Of a stage that imitates demonstrations: a later one may sample from it and take what is right, and two updates would leave it nothing."""
OF_DATA = ("reward", "data_dir", "prompt_key", "answer_key", "template", "system", "best_by", "dtype", "device")
"""Options of an evaluation that go with its data or its model."""
READ = ("source", "scores", "prompts", "guesses", "against", "run")
"""Options of other commands that name files."""


def load_small_stages(path: Path, overrides: Sequence[str] = ()) -> tuple[Loaded[StagesConfig], list[str]]:
    """A recipe of stages made small, and what was changed in it."""
    whole = load(StagesConfig, path)
    loaded = load_stages(whole, path, Path())
    tree, notes = dict(whole.resolved), list[str]()
    for name, stage in whole.config.stages.items():
        if name in loaded:
            small, changes = _trained(loaded[name].resolved)
            own: dict[str, Any] = {"config": small, "recipe": None}
            notes += [f"{name}: {change}" for change in changes]
        else:
            own = {"options": _options(name, stage.command, stage.options)}
            notes += [f"{name}: {key}: {stage.options.get(key)} -> {own['options'].get(key)}" for key in stage.options]
        tree["stages"] = {**tree["stages"], name: {**tree["stages"][name], **own}}
    run: dict[str, Any] = {"trackers": [], "threads": whole.config.run.threads}
    run |= {"name": whole.config.run.name.removesuffix(SUFFIX) + SUFFIX} if whole.config.run.name else {}
    tree |= {"model": MODEL, "template": TEMPLATE, "run": run, "measure": _measure(whole.config.measure)}
    return load_tree(StagesConfig, tree, path, overrides), [note for note in notes if _is_change(note)]


def _trained(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    small, changes = shrink(values)
    if "sft" in small and small["sft"]["data"] == [DEMONSTRATIONS]:
        small["sft"] = {
            **small["sft"],
            **IMITATED,
            "optimizer": {**small["sft"]["optimizer"], **WARM_START["optimizer"]},
        }
        changes = [change for change in changes if not change.startswith(("sft.updates:", "sft.batch_size:"))]
        changes += [f"sft.{key}: {values['sft'][key]} -> {small['sft'][key]}" for key in ("updates", "batch_size")]
    kept = {key: value for key, value in small.items() if key not in ("model", "seed")}
    kept["run"] = {key: value for key, value in small["run"].items() if key not in ("directory", "name", "threads")}
    return kept, [change for change in changes if not change.startswith(("model:", "run.name:"))]


def _options(name: str, command: str, options: dict[str, Any]) -> dict[str, Any]:
    if command == "eval":
        return _evaluation(options, "train")
    if command == "merge":
        models = [model if is_reference(model) else f"stage:{BASE}" for model in options.get("models", [])]
        return {**options, "models": models}
    outside = {key: value for key, value in options.items() if key in READ and not is_reference(value)}
    if "prompts" in outside:  # those of the built-in task are plain text, which completions have in them
        del outside["prompts"]
        options = {key: value for key, value in options.items() if key != "prompts"}
    if outside:
        key, value = next(iter(outside.items()))
        raise UserError(f"stage {name} cannot be shrunk: {command} reads {key}={value}, which no stage makes")
    return {key: value for key, value in options.items() if key != "language"}  # digits are of none


def _evaluation(options: dict[str, Any], split: str) -> dict[str, Any]:
    """On the built-in task; of training problems where the completions will be trained on."""
    if is_reference(options.get("data")):
        return options
    small = {key: value for key, value in options.items() if key not in OF_DATA}
    settings = {"data.source.options": DIGITS, "data.source.split": split}
    small |= {"data": "task:sort_digits", "limit": PROMPTS, "max_tokens": TOKENS, "settings": settings}
    return small | ({"n": min(options["n"], SAMPLES)} if "n" in options else {})


def _measure(options: dict[str, Any]) -> dict[str, Any]:
    return _evaluation(options, "test") if options else {}


def _is_change(note: str) -> bool:
    old, _, new = note.partition(" -> ")
    return not old.endswith(f": {new}")
