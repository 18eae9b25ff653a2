"""A recipe of stages with every kind of command in it, each a moment long, and what its runs leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.cli.main import main
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.stage_index import StageIndex

RECIPES = Path(__file__).parents[2] / "recipes"
COLD = 60
"""Updates after which some answers are right."""
DIGITS = {"min_digits": 2, "max_digits": 3}
TASK = {"task": "sort_digits", "options": DIGITS}
CLEAN = {"task": "sort_digits", "options": {**DIGITS, "num": 200, "clean": True}}
PAIRS = {"task": "sort_digits", "options": {**DIGITS, "num": 16}}
RL = {
    "data": {"train": {**TASK, "limit": 12}},
    "reward": {"workers": 1},
    "rollout": {"prompts": 4, "n": 4, "max_tokens": 4},
    "training": {"steps": 3, "optimizer": {"lr": 1e-3}},
    "algorithm": {"kl": {"loss": {"coef": 0}, "reference": "none"}},
}
SAMPLES = {"data": "task:sort_digits", "limit": 12, "n": 4, "temperature": 1.0, "max_tokens": 4}
SETTINGS = {"data.source.options": DIGITS, "data.source.split": "train", "reward.workers": 1}


def sft(source: dict[str, Any], updates: int = COLD) -> dict[str, Any]:
    optimizer = {"lr": 1e-2, "schedule": "linear"}
    return {"sft": {"data": source, "updates": updates, "batch_size": 32, "max_tokens": 32, "optimizer": optimizer}}


def recipe() -> dict[str, Any]:
    """Every kind of stage, each from what an earlier one made."""
    scorer = {"data": PAIRS, "updates": 2, "batch_size": 4, "max_tokens": 32}
    parts = ["task", {"name": "model", "weight": 0.1, "options": {"path": "stage:scorer"}}]
    prefer = {"loss": "dpo", "data": PAIRS, "updates": 2, "batch_size": 4, "max_tokens": 32}
    tree = {
        "model": {
            "new": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 32, "max_positions": 64},
            "device": "cpu",
        },
        "run": {"threads": 1, "save_every": 20, "name": "all", "samples_every": 1},
        "stages": {
            "cold": {"command": "sft", "config": sft(CLEAN)},
            "reasoning": {"command": "train", "config": RL},
            "samples": {"command": "eval", "options": {**SAMPLES, "settings": SETTINGS}},
            "right": {"command": "data reject", "options": {"source": "stage:samples"}},
            "seen": {"command": "data reject", "options": {"source": "run:reasoning", "most": 2}},
            "again": {"command": "sft", "start": "base", "config": sft({"path": "stage:right"}, 4)},
            "scorer": {"command": "reward-model", "config": {"reward_model": scorer}},
            "preferred": {"command": "prefer", "config": {"preference": prefer}},
            "merged": {"command": "merge", "options": {"models": ["stage:reasoning", "stage:preferred"]}},
            "last": {"command": "train", "config": {**RL, "reward": {"workers": 1, "parts": parts}}},
        },
    }
    return json.loads(json.dumps(tree))  # two stages may have one section, and a test changes that of one


def stages(tree: dict[str, Any], *words: str, name: str = "all") -> int:
    Path("all.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return main(["stages", "all.yaml", f"run.name={name}", *words])


def short(*names: str) -> dict[str, Any]:
    """The recipe with some of its stages."""
    tree = recipe()
    if "samples" not in names:
        tree["stages"]["cold"]["config"]["sft"]["updates"] = 20  # nobody asks whether answers are right
    return {**tree, "stages": {name: tree["stages"][name] for name in names}}


def refused(capsys: pytest.CaptureFixture[str], tree: dict[str, Any], *words: str, name: str = "all") -> str:
    capsys.readouterr()
    assert stages(tree, *words, name=name) == 2
    return capsys.readouterr().err


def remains(folder: Path) -> dict[str, Any]:
    """What all stages left, without what depends on time or place."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        is_product = file.suffix == ".jsonl" and file.stem == file.parent.name
        if is_product or (file.suffix == ".safetensors" and "journal" not in file.parts):
            found[str(file.relative_to(folder))] = file.read_bytes()
        elif file.name == "metrics.jsonl":
            rows = [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(file)]
            found[str(file.relative_to(folder))] = rows
    products = {name: entry.outcome.product for name, entry in StageIndex.read(folder).entries.items() if entry.outcome}
    return {**found, "products": products}
