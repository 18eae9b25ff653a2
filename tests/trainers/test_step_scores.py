"""Process reward models: the exact loss and gradient for any micro-batch split, and the held-out measurements."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.losses.model_losses import StepValueLoss
from burnish.config.model import NewModel, Optimizer
from burnish.data.step_values import SteppedAnswer
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ScoreModel, new_score_model
from burnish.trainers.step_scores import measure_steps, pack_steps, step_measurements
from burnish.training.learner import Learner

ANSWERS = [
    SteppedAnswer("a", [3, 4, 5, 6, 1], [2, 4], [0.25, 0.0]),
    SteppedAnswer("b", [8, 9, 2, 5, 6, 7, 1], [3, 4, 6], [1.0, None, 0.7]),
    SteppedAnswer("c", [5, 5, 6], [1, 2], [None, None]),
    SteppedAnswer("d", [2, 3, 9, 9, 1], [4], [0.5]),
]
"""Soft and hard values; a step without label in the middle, and an answer without any."""


def scorer() -> ScoreModel:
    new = NewModel(hidden_size=16, num_layers=2, num_heads=2, mlp_size=24, max_positions=32)
    decoder = Decoder(new_architecture(new, 12)).double()
    initialise(decoder, 0, std=0.3)
    return new_score_model(decoder, seed=1)


def expected_loss(model: ScoreModel) -> torch.Tensor:
    """The mean over the five labels of -v log p - (1 - v) log (1 - p), one sequence at a time."""
    terms = []
    for answer in ANSWERS:
        for at, value in zip(answer.positions, answer.values, strict=True):
            if value is not None:
                tokens = torch.tensor(answer.tokens)
                chance = model.token_values(tokens, torch.tensor([0, len(tokens)]), torch.tensor([at]))[0].sigmoid()
                terms.append(-value * chance.log() - (1 - value) * (1 - chance).log())
    assert len(terms) == 5
    return torch.stack(terms).mean()


@pytest.mark.parametrize("budget", [1, 8, 13, 10_000])
def test_loss_and_gradient_are_exact_for_any_micro_batch_split(budget: int) -> None:
    model = scorer()
    expected = expected_loss(model)
    names = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(names.values()))
    found, sums, _ = Learner(model, Optimizer(), 10, budget)._accumulate(pack_steps(ANSWERS), StepValueLoss())
    assert found == pytest.approx(float(expected.detach()), abs=1e-12)
    assert sums["value"] == pytest.approx(0.25 + 0.0 + 1.0 + 0.7 + 0.5)
    for parameter, gradient in zip(names.values(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_a_batch_divided_among_processes_has_the_gradient_of_the_whole() -> None:
    """Weights are fixed on the whole mini-batch, so the gradients of its shards add up, however labels are spread over them."""
    model, whole = scorer(), pack_steps(ANSWERS)
    names = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected_loss(model), list(names.values()))
    learner = Learner(model, Optimizer(), 10, 100)
    for shard in ([0], [1, 3]):
        learner._accumulate(whole.select(torch.tensor(shard)), StepValueLoss())
    for parameter, gradient in zip(names.values(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-12)  # type: ignore[arg-type]


def test_what_is_measured_does_not_depend_on_the_chunks_and_has_the_training_loss() -> None:
    model = scorer()
    learner, answers = Learner(model, Optimizer(), 10, 1000), [ANSWERS[0], ANSWERS[1], ANSWERS[3]]
    whole, single = (measure_steps(learner, answers, chunk) for chunk in (100, 1))
    assert whole.values == pytest.approx(single.values)
    assert whole.loss == pytest.approx(float(expected_loss(model).detach()), abs=1e-12)
    assert (whole.steps, whole.answers, whole.value) == (5, 3, pytest.approx(2.45 / 5))


def test_measurements_by_hand() -> None:
    """Four answers: an error found, an error called too early, an answer without error accepted, and one refused."""
    chances = [0.9, 0.2, 0.8, 0.4, 0.3, 0.6, 0.7, 0.6, 0.1]
    values = [1.0, 0.0, 0.0, 1.0, 0.4, 1.0, 0.5, 0.9, 0.8]
    scores = torch.logit(torch.tensor(chances, dtype=torch.float64))
    found = step_measurements(scores, torch.tensor(values, dtype=torch.float64), [3, 2, 2, 2])
    assert (found.first_error, found.no_error, found.f1) == (0.5, 0.5, 0.5)
    # Without the value 0.5: right at 0.9, 0.2, (not 0.8), (not 0.4), 0.3, 0.6, 0.6, (not 0.1).
    assert found.accuracy == pytest.approx(5 / 8)
    # Right steps 0.9 0.4 0.6 0.6 0.1 against wrong ones 0.2 0.8 0.3: 3 + 2 + 2 + 2 + 0 of 15 pairs.
    assert found.ranking == pytest.approx(9 / 15)
    terms = [v * math.log(p) + (1 - v) * math.log(1 - p) for p, v in zip(chances, values, strict=True)]
    assert found.loss == pytest.approx(-sum(terms) / 9)
    assert (found.predicted, found.value) == (pytest.approx(4.6 / 9), pytest.approx(5.6 / 9))
    assert found.values["validation/steps/score_mean"] == pytest.approx(float(scores.mean()))


def test_a_figure_without_anything_to_count_is_missing() -> None:
    found = step_measurements(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), [2])
    assert (found.ranking, found.first_error, found.f1) == (None, None, None)
    assert found.no_error == 1.0
    assert "validation/steps/ranking" not in found.values
    assert "found" not in " ".join(found.lines)
