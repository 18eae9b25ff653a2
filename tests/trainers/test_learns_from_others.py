"""A student that has mostly seen wrong answers learns to sort from a teacher, and from right answers in its groups.

Two warm starts and three short runs: about half a minute on two quiet cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.data.tasks.sort_digits import SortDigits
from burnish.run.metrics import read_metrics
from tests.trainers.tiny import run_of

pytestmark = pytest.mark.slow

TEXT = """
model: {new: {hidden_size: 64, num_layers: 2, num_heads: 4, mlp_size: 168, max_positions: 64}}
data: {train: {task: sort_digits, options: {min_digits: 3, max_digits: 5}}, validation: {task: sort_digits, options: {min_digits: 3, max_digits: 5}}}
rollout: {prompts: 32, n: 8, max_tokens: 8}
reward: {workers: 1}
training: {steps: 30, optimizer: {lr: 5.0e-4, betas: [0.9, 0.95], schedule: linear, final: 0.1}}
validation: {limit: 200}
algorithm: {aggregation: token-mean, kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 100, threads: 1}
"""
WARM = """
warm_start:
  data: {DATA}
  updates: 150
  batch_size: 128
  optimizer: {lr: 3.0e-3, betas: [0.9, 0.95], warmup: 20, schedule: linear, final: 0.1}
"""


def started(folder: Path, data: str) -> Path:
    text = TEXT + WARM.replace("{DATA}", data)
    return run_of(folder, text, ["training.steps=1", "training.optimizer.lr=1.0e-12"]) / "warm_start"


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine of ten answers it has seen copy their prompt."""
    folder = tmp_path_factory.mktemp("student")
    rows = SortDigits(0, 3, 5).demonstrations(num=2000, right={3: 0.2, 4: 0.1, 5: 0.05})
    (folder / "flawed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return started(folder / "run", f"[{{path: {folder / 'flawed.jsonl'}}}]")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All answers it has seen are right."""
    clean = "{task: sort_digits, options: {num: 2000, clean: true, min_digits: 3, max_digits: 5}}"
    return started(tmp_path_factory.mktemp("teacher") / "run", clean)


def accuracies(folder: Path, student: Path, *overrides: str) -> tuple[float, float]:
    """Held-out accuracy before and after."""
    run = run_of(folder, TEXT, ["model.new=null", f"model.path={student}", *overrides])
    found = [
        row["validation/greedy/accuracy"]
        for row in read_metrics(run / "metrics.jsonl")
        if "validation/greedy/accuracy" in row
    ]
    return found[0], found[-1]


def test_a_teachers_distributions_teach_a_student_on_its_own_samples(
    student: Path, teacher: Path, tmp_path: Path
) -> None:
    kl = f"algorithm.kl={{reward: {{coef: 0}}, loss: {{estimator: full, coef: 1}}, reference: {{path: '{teacher}'}}}}"
    many = ["rollout.prompts=128", "rollout.n=1"]
    before, after = accuracies(tmp_path / "run", student, "algorithm=on_policy_distillation", kl, *many)
    assert before < 0.4
    assert after > before + 0.3


def test_right_answers_in_the_groups_teach_more_than_rewards_alone(student: Path, tmp_path: Path) -> None:
    shown = ["data.demonstration_column=answer", "data.demonstrations_per_group=1", "rollout.n=7"]
    before, after = accuracies(
        tmp_path / "luffy", student, "algorithm=luffy", "algorithm.aggregation=token-mean", *shown
    )
    _, alone = accuracies(tmp_path / "grpo", student)
    assert after > before + 0.3
    assert after > alone
