"""Reward-model training: equal gradients for any micro-batch split, and the measurements."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.losses.model_losses import RewardModelLoss
from burnish.config.model import NewModel, Optimizer
from burnish.config.schema import RewardModel
from burnish.data.preference_pairs import PreferencePair
from burnish.data.supervised import Example
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ScoreModel, new_score_model
from burnish.trainers.reward_model import measure, pack_pairs, row_order
from burnish.training.learner import Learner

PAD = 0


def answer(tokens: list[int]) -> Example:
    return Example("it", tokens, [False] * 2 + [True] * (len(tokens) - 2))


def pairs() -> list[PreferencePair]:
    """Answers of different lengths to shared prompts, one that begins with the other, with margins."""
    texts = [
        ([3, 4, 5, 6, 1], [3, 4, 7, 1]),
        ([8, 9, 2, 1], [8, 9, 2, 5, 6, 7, 1]),
        ([5, 5, 6, 1], [5, 5, 6]),
        ([2, 3, 4, 1], [2, 3, 9, 9, 1]),
    ]
    return [PreferencePair(str(i), answer(c), answer(r), margin=0.3 * i) for i, (c, r) in enumerate(texts)]


def scorer() -> ScoreModel:
    new = NewModel(hidden_size=16, num_layers=2, num_heads=2, mlp_size=24, max_positions=32)
    decoder = Decoder(new_architecture(new, 12)).double()
    initialise(decoder, 0, std=0.3)
    return new_score_model(decoder, seed=1)


def learner(model: ScoreModel, budget: int) -> Learner:
    return Learner(model, Optimizer(), 10, budget)


@pytest.mark.parametrize("budget", [1, 8, 13, 10_000])
def test_gradient_is_the_same_for_any_micro_batch_split(budget: int) -> None:
    """A budget of one token puts every sequence into a micro-batch of its own: the two of a pair never meet."""
    model, loss = scorer(), RewardModelLoss(margin=0.2, centre=0.05)
    total = []
    for pair in pairs():
        scores = []
        for one in (pair.chosen, pair.rejected):
            tokens = torch.tensor(one.tokens)
            last = torch.tensor([len(one.tokens) - 1])
            scores.append(model.token_values(tokens, torch.tensor([0, len(one.tokens)]), last)[0])
        ahead = scores[0] - scores[1] - 0.2 - pair.margin
        total.append(-torch.nn.functional.logsigmoid(ahead) + 0.05 * (scores[0] + scores[1]) ** 2)
    expected = torch.stack(total).mean()
    names = dict(model.named_parameters())
    wanted = torch.autograd.grad(expected, list(names.values()))
    teacher = learner(model, budget)
    found = teacher._accumulate(pack_pairs(pairs(), PAD), loss)[0]
    assert found == pytest.approx(float(expected.detach()), abs=1e-12)
    for parameter, gradient in zip(names.values(), wanted, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=0, atol=1e-12)


def test_what_is_measured_does_not_depend_on_the_chunks() -> None:
    teacher, config = learner(scorer(), 1000), RewardModel(margin=0.2, centre=0.05)
    whole, halves = (measure(teacher, pairs(), PAD, config, chunk) for chunk in (100, 1))
    assert whole.values == pytest.approx(halves.values)
    batch = pack_pairs(pairs(), PAD)
    found, sums, _ = teacher._accumulate(batch, RewardModelLoss(0.2, 0.05))
    assert whole.loss == pytest.approx(found)
    assert whole.accuracy == pytest.approx(sums["accuracy"] / 8)
    assert whole.margin == pytest.approx(sums["margin"] / 8)
    assert whole.mean == pytest.approx(sums["score"] / 8)
    scores = teacher.outputs(batch, frozenset({"value"}))["value"][batch.loss_mask]
    assert whole.std == pytest.approx(math.sqrt(float(scores.var(correction=0))))


def test_every_pair_is_used_once_an_epoch() -> None:
    order = row_order(5, seed=0, num_draws=12)
    assert sorted(order[:5]) == sorted(order[5:10]) == [0, 1, 2, 3, 4]
    assert order[:5] != order[5:10]
    assert order != row_order(5, seed=1, num_draws=12)
