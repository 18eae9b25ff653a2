"""Runs of `burnish sft` and `burnish prefer` on two ranks: whole runs, and runs that are stopped and resumed, also by one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.data import Source
from burnish.config.loading import load
from burnish.config.model import Lora
from burnish.config.schema import PreferConfig, SftConfig
from burnish.distributed.roles import build_policy
from burnish.trainers import preference
from burnish.trainers.sft import execute
from burnish.training.learner import Learner

RECIPE = """
model:
  new: {family: qwen3, hidden_size: 16, num_layers: 2, num_heads: 4, num_kv_heads: 2, mlp_size: 24, max_positions: 32}
  device: cpu
  dtype: float64
sft:
  data: {task: sort_digits, options: {num: 60}}
  updates: 6
  batch_size: 7
  token_budget: 64
  optimizer: {lr: 1.0e-2, warmup: 2, schedule: linear}
run: {save_every: 2}
"""
PREFERENCE = """
preference:
  data: {task: sort_digits, options: {num: 20}}
  held_out: {task: sort_digits, options: {num: 5}}
  updates: 3
  batch_size: 5
  token_budget: 64
  optimizer: {lr: 1.0e-2}
"""
RUNS: dict[str, list[str]] = {
    "plain": [],
    "tensor": ["parallel.tensor=2"],
    "stages": ["parallel.pipeline=2"],
    "from-files": ["model.new=null", "model.path=base"],
    "stages-from-files": ["model.new=null", "model.path=base", "parallel.pipeline=2"],
    "experts": ["model.new=null", "model.path=base-experts", "parallel.expert=2"],
    "transformers": ["model.new=null", "model.path=base", "model.backend=transformers"],
    "adapters": ["model.new=null", "model.path=base", "model.lora.rank=2"],
    "cut-adapters": [
        *(
            "model.new=null",
            "model.path=base",
            "model.lora.rank=2",
            "model.lora.targets=[q_proj, v_proj, up_proj, down_proj]",
        ),
        *("sft.optimizer.name=muon", "parallel.tensor=2"),
    ],
    "adapters-in-stages": [
        "model.new=null",
        "model.path=base",
        "model.lora={rank: 2, base: nf4}",
        "parallel.pipeline=2",
    ],
}
"""Overrides by name; those that are cut are stopped once and go on with the same processes."""
ADAPTER = ["model.new=null", "model.adapter=adapter"]
PREFERENCES: dict[str, list[str]] = {
    "pairs": ["preference.loss=dpo"],
    "pairs in two passes": ["preference.loss={name: dpo, average: true}", "preference.token_budget=12"],
    "asked": ["preference.loss=ipo", "preference.reference=live"],
    "asked of an adapter": [*ADAPTER, "preference.loss=dpo", "preference.reference=live"],
    "asked of stages": ["preference.loss=dpo", "preference.reference=live", "parallel.pipeline=2"],
    "asked of a cut adapter": [*ADAPTER, "preference.loss=dpo", "preference.reference=live", "parallel.tensor=2"],
    "labels": ["preference.loss=kto", "preference.batch_size=3"],
}
"""Runs of `burnish prefer`; the tokens of a pair are more than 12."""
HANDED_OVER = "handed-over"
"""Begun by two ranks, ended by one process alone, as `experts` is."""
STOPS_AFTER = 3


def prepare(folder: Path) -> None:
    """The recipe, and a model for adapters to adapt."""
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "preference.yaml").write_text(RECIPE.split("sft:")[0] + PREFERENCE)
    for name in ("base", "base-experts"):
        (folder / name).mkdir()
    loaded = load(SftConfig, folder / "recipe.yaml", [])
    build_policy(loaded.config.model, [Source(task="sort_digits")], 0, folder).save(folder / "base")
    experts = load(SftConfig, folder / "recipe.yaml", ["model.new={family: qwen3_moe, experts: [4, 2, 12]}"]).config
    build_policy(experts.model, [Source(task="sort_digits")], 0, folder).save(folder / "base-experts")
    other = loaded.config.model.model_copy(update={"new": None, "path": "base", "backend": "transformers"})
    adapted = other.model_copy(update={"backend": "auto", "lora": Lora(rank=2)})
    policy = build_policy(adapted, [], 0, folder)
    for name, parameter in policy.module.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    policy.save(folder / "adapter")


def run(folder: Path, name: str, overrides: list[str]) -> None:
    recipe = folder / "recipe.yaml"
    loaded = load(SftConfig, recipe, [f"run.directory={folder}", f"run.name={name}", *overrides])
    execute(loaded.config, loaded.resolved, loaded.base, name)


def prefer(folder: Path, name: str, overrides: list[str]) -> None:
    recipe = folder / "preference.yaml"
    folder_of_run = [f"run.directory={folder}", f"run.name={name.replace(' ', '_')}"]
    loaded = load(PreferConfig, recipe, [*folder_of_run, *overrides])
    preference.execute(loaded.config, loaded.resolved, loaded.base, name)


def run_until_told_to_stop(folder: Path, name: str, overrides: list[str], is_told: bool) -> None:
    """Only one process gets the signal; all must stop after the same update."""
    plain, count = Learner.update, 0

    def update(self: Learner, *args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if is_told and count == STOPS_AFTER:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "update", update)
        run(folder, name, overrides)


def all_of(folder: Path, rank: int) -> None:
    """What every rank runs."""
    run(folder, "plain", [])
    for name in ("adapters", "from-files", "stages-from-files"):
        run(folder, name, RUNS[name])
    run(folder, "transformers", RUNS["transformers"])
    stopped = ("tensor", "cut-adapters", "stages", "adapters-in-stages")
    handed_over = (("experts", RUNS["experts"]), (HANDED_OVER, ["parallel.pipeline=2"]))
    for name, overrides in (*((name, RUNS[name]) for name in stopped), *handed_over):
        run_until_told_to_stop(folder, name, overrides, is_told=rank == 1)
    for name in stopped:
        run(folder, name, RUNS[name])
    for name, overrides in PREFERENCES.items():
        prefer(folder, name, overrides)


def alone(folder: Path) -> None:
    """The same runs in one process, under names of their own."""
    for name, overrides in RUNS.items():
        run(folder, f"{name}-alone", [o for o in overrides if not o.startswith("parallel")])
    for name, overrides in PREFERENCES.items():
        prefer(folder, f"{name}-alone", [o for o in overrides if not o.startswith("parallel")])


def end_alone(folder: Path) -> None:
    """The rest of the runs that two ranks began."""
    run(folder, HANDED_OVER, [])
    run(folder, "experts", [o for o in RUNS["experts"] if not o.startswith("parallel")])
