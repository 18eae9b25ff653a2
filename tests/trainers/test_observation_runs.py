"""ECHO on a calculator: what the tool returns becomes likelier, and a run that died goes on with the same observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.run.journal import Journal
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from tests.trainers.test_resume_everything import Moment, dies, event, killing
from tests.trainers.tiny import run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

TEXT = """
model: {new: {hidden_size: 32, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 64}}
data: {train: {task: calculator, limit: 16, options: {min_digits: 1, max_digits: 1}}}
environment:
  name: tags
  max_turns: 2
  tools: [calculator]
  options:
    actions: [{open: '[', close: ']', tool: calculator, argument: expression}]
    observation: '>{result};'
    answer: ['(', ')']
reward: {workers: 1, parts: task}
rollout: {prompts: 8, n: 4, max_tokens: 10}
algorithm: echo
training: {steps: 8, optimizer: {lr: 2.0e-3}}
run: {samples_every: 100, save_every: 100, threads: 1}
"""
WARM = """
warm_start:
  data: {task: calculator, options: {min_digits: 1, max_digits: 1, num: 200, calls: 1.0, slips: 0.0}}
  updates: 60
  batch_size: 32
  optimizer: {lr: 1.0e-2}
"""


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that begin with a model that calls the calculator."""
    run = run_of(tmp_path_factory.mktemp("warm") / "run", TEXT + WARM, ["training.steps=1", "rollout.prompts=1"])
    return ["model.new=null", f"model.path={run / 'warm_start'}"]


def nlls(folder: Path, overrides: list[str]) -> list[float]:
    rows = read_metrics(run_of(folder, TEXT, overrides) / "metrics.jsonl")
    return [row["actor/observation_nll"] for row in rows if "actor/observation_nll" in row]


def test_what_the_tool_returns_becomes_likelier(tmp_path: Path, warm: list[str]) -> None:
    learnt = nlls(tmp_path / "echo", [*warm, "algorithm.auxiliary.observations.tool=1"])
    barely = nlls(tmp_path / "barely", [*warm, "algorithm.auxiliary.observations.tool=1.0e-9"])
    assert learnt[0] == pytest.approx(barely[0])
    assert sum(learnt[-3:]) / 3 < 0.7 * learnt[0]
    assert sum(learnt[-3:]) < 0.8 * sum(barely[-3:])


def test_a_run_that_died_before_scoring_goes_on_with_the_same_observations(tmp_path: Path, warm: list[str]) -> None:
    """The journal keeps the marks: the answers of the second step are read from it."""
    short = [*warm, "training.steps=3", "rollout.exact=true", "run.save_every=1"]

    def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
        rows = read_metrics(folder / "metrics.jsonl")
        weights = load_file(folder / "checkpoints" / "step-000003" / "model.safetensors")
        plain = [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in rows]
        return plain, {name: tensor.flatten().tolist() for name, tensor in weights.items()}

    expected = left(run_of(tmp_path / "unbroken", TEXT, short))
    with killing(Moment(Journal, "append", event("scored", 2, 0))):
        assert dies(lambda: run_of(tmp_path / "broken", TEXT, short))
    assert left(run_of(tmp_path / "broken", TEXT, short)) == expected
    assert all("actor/observation_nll" in row for row in expected[0] if row["step"] > 0)


def test_a_role_that_never_speaks_is_named(tmp_path: Path, warm: list[str]) -> None:
    silent = [*warm, "training.steps=1", "algorithm.auxiliary.observations={tool: 0, user: 0.1}"]
    run = run_of(tmp_path, TEXT, silent)
    assert "selects no token of this step" in (run / "log.txt").read_text()


def refusal(tmp_path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as error:
        run_of(tmp_path / "refused", TEXT, list(overrides))
    return str(error.value)


def test_a_run_without_observations_is_refused(tmp_path: Path) -> None:
    single = refusal(tmp_path, "environment={name: single_turn}")
    assert "single_turn says nothing" in single
    assert "max_turns=1 ends an episode with the first" in refusal(tmp_path, "environment.max_turns=1")
    nothing = "algorithm.auxiliary.observations={tool: 0}"
    assert "set one, or observations=null" in refusal(tmp_path, nothing)
    game = ["environment={name: guess_number, max_turns: 3}", "data.train=[{task: guess_number}]"]
    assert "works on tokens" in refusal(tmp_path, *game)
