"""Whole runs of GRPO that sample with vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from burnish.inference.vllm.vllm_engine import VllmEngine
from burnish.run.metrics import read_metrics
from burnish.trainers import rl
from tests.trainers.tiny import WARM, run_of

pytestmark = pytest.mark.vllm
RECIPE = """
data: {train: {task: sort_digits, limit: 24, options: {min_digits: 2, max_digits: 3}}, max_prompt_tokens: 16}
rollout: {prompts: 8, n: 4, max_tokens: 4, engine: vllm, vllm: {engine: {enforce_eager: true}}, cache_gib: 0.05}
training: {steps: 6, optimizer: {lr: 1.0e-3}}
algorithm: {kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 2}
reward: {workers: 1}
"""
NEW = "model: {new: {hidden_size: 64, num_layers: 1, num_heads: 2, mlp_size: 64, max_positions: 64}}\n"
SMALL = 1e-4
"""Log-probs in float32 of two implementations are closer, log-probs of weights a step apart are not."""


def gaps(folder: Path) -> list[float]:
    """Largest difference of the learner's log-probs from vLLM's in each step."""
    found = [row["mismatch/max"] for row in read_metrics(folder / "metrics.jsonl") if "mismatch/max" in row]
    assert len(found) == 6
    return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a warm start, after the engine is made."""
    return run_of(tmp_path_factory.mktemp("run") / "it", NEW + RECIPE + WARM, [])


def test_the_learner_gives_every_token_the_log_prob_it_was_sampled_with(warm: Path) -> None:
    assert max(gaps(warm)) < SMALL


def test_a_load_that_is_left_out_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = VllmEngine.load

    def once(self: VllmEngine, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if self._weights == "none":
            load(self, version, named_tensors)

    monkeypatch.setattr(VllmEngine, "load", once)
    first, *later = gaps(run_of(tmp_path / "it", NEW + RECIPE + WARM, []))
    assert first < SMALL
    assert min(later) > 10 * SMALL


@pytest.mark.parametrize(
    "lora", ["", ", lora: {rank: 4}", ", lora: {rank: 4, base: nf4}"], ids=["whole", "adapters", "in 4 bits"]
)
def test_a_run_that_stops_goes_on_with_the_weights_of_its_checkpoint(
    warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str
) -> None:
    """From a Hugging Face directory, with and without adapters."""
    recipe = f"model: {{path: {warm / 'warm_start'}{lora}}}\n{RECIPE}"
    learn = rl.learn

    def broken(job: Any, step: int, batch: Any) -> Any:
        if step == 4:
            raise ConnectionError("the lights went out")
        return learn(job, step, batch)

    with monkeypatch.context() as patch:
        patch.setattr(rl, "learn", broken)
        with pytest.raises(ConnectionError):
            run_of(tmp_path / "it", recipe, ["training.optimizer.lr=1e-2"])
    assert max(gaps(run_of(tmp_path / "it", recipe, ["training.optimizer.lr=1e-2"]))) < SMALL
