"""All randomness of a run follows from its seed and its checkpoint: no generator keeps its own state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.core.random_keys import fold
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run import Run
from burnish.training.optimizers import stochastic_rounding
from burnish.training.optimizers.update_rules import Adam8bit
from tests.trainers.tiny import TINY, run_of

STEPS = 6
OVERRIDES = [
    f"training.steps={STEPS}",
    "run.save_every=2",
    "reward.workers=1",
    "model={device: cpu, dtype: bfloat16, new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 160, max_positions: 64}}",
    "training.optimizer={name: adam8bit, precision: stochastic, lr: 0.01}",
    "algorithm.auxiliary.sft=0.5",
    "data.demonstrations={task: sort_digits, options: {num: 64, clean: true, min_digits: 2, max_digits: 3}}",
    "data.demonstrations_per_update=4",
]
"""Weights and moments that are rounded at random in every update, sampled answers, a shuffled order of demonstrations."""


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    rows = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    return rows, {file.name: file.read_bytes() for file in sorted(last.iterdir())}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed_everything(1)
    return run_of(tmp_path_factory.mktemp("unbroken") / "run", TINY, OVERRIDES)


def test_the_generators_of_the_process_have_no_say(unbroken: Path, tmp_path: Path) -> None:
    seed_everything(2)
    assert result(run_of(tmp_path / "run", TINY, OVERRIDES)) == result(unbroken)


class Killed(BaseException):
    """The end of a life; nothing catches it."""


@pytest.mark.parametrize("last", [3, 4, 5])
def test_rounding_at_random_goes_on_where_it_was(unbroken: Path, tmp_path: Path, last: int) -> None:
    commit = Run.commit

    def dies(self: Run, step: int, *rest: Any) -> None:
        commit(self, step, *rest)
        if step == last:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "commit", dies)
        with pytest.raises(Killed):
            run_of(tmp_path / "run", TINY, OVERRIDES)
    assert result(run_of(tmp_path / "run", TINY, OVERRIDES)) == result(unbroken)


def test_something_is_rounded_at_random(unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: with other random numbers a run ends differently."""
    monkeypatch.setattr(stochastic_rounding, "fold", lambda *words: fold("other", *words))
    quantised: list[bool] = []
    asked = Adam8bit.is_quantised
    monkeypatch.setattr(
        Adam8bit, "is_quantised", lambda self, name: quantised.append(asked(self, name)) or quantised[-1]
    )
    assert result(run_of(tmp_path / "run", TINY, OVERRIDES))[1] != result(unbroken)[1]
    assert any(quantised)
