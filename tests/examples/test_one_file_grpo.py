"""The one-file example and the library are the same algorithm: same model, same loss, same gradient."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from burnish.config.loading import algorithm_from_preset
from burnish.config.model import NewModel, Optimizer
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.data.tasks.registry import make_task
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from burnish.training.learner import Learner

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file_grpo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def models(example: ModuleType) -> tuple[torch.nn.Module, Decoder]:
    ours = Decoder(new_architecture(NewModel(max_positions=64), vocab_size=13))
    initialise(ours, seed=3, std=0.2)
    theirs = example.Decoder()
    theirs.load_state_dict(ours.state_dict())
    return theirs.double(), ours.double()


def rollouts(example: ModuleType) -> list[tuple[list[int], list[int], float]]:
    """(prompt, completion, reward) of two groups of three with different lengths, made by hand."""
    ids = {c: i for i, c in enumerate(example.CHARACTERS)}
    groups = [
        ("5075>", ["0557", "5075", "05"], [1.0, 0.0, 0.0]),
        ("918273>", ["123789", "1", "9182731"], [1.0, 0.5, 0.0]),
    ]
    return [
        ([ids[c] for c in prompt], [ids[c] for c in answer] + [example.EOS], reward)
        for prompt, answers, rewards in groups
        for answer, reward in zip(answers, rewards, strict=True)
    ]


def example_loss(example: ModuleType, model: torch.nn.Module) -> torch.Tensor:
    rows = rollouts(example)
    tokens = example.pack([prompt + completion for prompt, completion, _ in rows])
    start = torch.tensor([len(p) for p, _, _ in rows])[:, None]
    stop = torch.tensor([len(p) + len(c) for p, c, _ in rows])[:, None]
    position = torch.arange(1, tokens.shape[1])
    advantages = example.group_advantages(torch.tensor([r for *_, r in rows], dtype=torch.float64).view(2, 3)).view(
        -1, 1
    )
    new = example.logprobs(model, tokens)
    return example.grpo_loss(new, new.detach(), advantages, (position >= start) & (position < stop))


def test_loss_and_gradient_are_the_librarys(example: ModuleType, models: tuple[torch.nn.Module, Decoder]) -> None:
    theirs, ours = models
    loss = example_loss(example, theirs)
    loss.backward()
    trajectories = []
    for k, (prompt, completion, reward) in enumerate(rollouts(example)):
        tokens = np.array(prompt + completion)
        written = np.arange(len(tokens)) >= len(prompt)
        nodes = chain_nodes(tokens, written, np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32))
        trajectories.append(Trajectory(f"p{k // 3}", 0, k % 3, nodes, "stop", "", reward=reward))
    algorithm = algorithm_from_preset("grpo").model_copy(
        update={"kl": algorithm_from_preset("dr_grpo").kl, "aggregation": _token_mean()}
    )
    pipeline = AlgorithmPipeline(algorithm, num_updates=1)
    learner = Learner(ours, Optimizer(clip_norm=1e9), total_updates=1, token_budget=20)
    context = StepContext(learner)
    batch = pipeline.prepare(pipeline.select(pack(trajectories)), context)
    (mini_batch,) = mini_batches(pipeline.trim(batch, context), algorithm, 1, 1, horizon=10)
    value, _, _ = learner._accumulate(mini_batch, pipeline.loss)
    assert value == pytest.approx(float(loss.detach()), abs=1e-12)
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name].grad, parameter.grad, atol=1e-10, rtol=1e-8)


def _token_mean():
    from burnish.algorithms.terms.spec import Aggregation

    return Aggregation(name="token-mean")


def test_the_clip_acts_as_in_the_specification(example: ModuleType) -> None:
    # Fixture F1 and oracle 5.1 of the algorithm notes: dropped entries are masked.
    old = torch.tensor([[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2, 0, 0], [-1.8, -0.9, -1.5, 0], [-2.2, -0.4, -0.6, -1.1]])
    new = torch.tensor([[-0.8, -0.9, -1.5, -0.1], [-0.9, -0.6, 0, 0], [-0.5, -2.4, -1.2, 0], [-1.0, -0.4, -0.5, -1.4]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]])
    advantages = torch.tensor([1.0, -1.0, -0.8, 0.6])[:, None]
    assert float(example.grpo_loss(new, old, advantages, mask)) == pytest.approx(0.061405, abs=1e-5)


def test_the_task_is_the_librarys(example: ModuleType) -> None:
    import random

    rng = random.Random(0)
    task = make_task("sort_digits", {}, seed=0)
    digits, answer = example.problem(rng), None
    row = task.row("train", 0)
    answer = "".join(sorted(digits))
    assert task.score(answer, answer, {}) == 1.0
    assert row.prompt.endswith(">")
    assert row.answer == "".join(sorted(row.prompt[:-1]))
    assert not any(example.is_held_out(example.problem(rng)) for _ in range(50))
    assert all(example.is_held_out(example.problem(rng, held_out=True)) for _ in range(50))
