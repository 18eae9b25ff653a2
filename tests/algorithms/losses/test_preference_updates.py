"""The worked numbers of preferences through a learner's update, and the metrics of a batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.algorithms.losses.preference_losses import PreferenceLoss, implicit_rewards, preference_metrics
from burnish.algorithms.losses.spec import PREFERENCE_LOSS_RECORDS
from burnish.config.model import Optimizer
from burnish.config.records import default_options
from burnish.data.supervised import Example
from burnish.trainers.preference import AnswerPair, gathered_view, mean_logprobs, pack_answer_pairs
from burnish.training.learner import Learner

DEFAULTS = default_options(*PREFERENCE_LOSS_RECORDS)


class Spoken(nn.Module):
    """A model whose log-prob of a token is a number of its own, whatever came before."""

    def __init__(self, logp: list[float]) -> None:
        super().__init__()
        self.logp = nn.Parameter(torch.tensor(logp, dtype=torch.float64))

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        return self.logp[tokens[wanted]], None


def answer(first: int, length: int) -> Example:
    """A prompt of one token, then `length` tokens that nothing else has."""
    return Example(str(first), [0, *range(first, first + length)], [False] + [True] * length)


def speak(sums: list[tuple[float, int]]) -> list[float]:
    """Log-probs of token 0 and of each answer's tokens, unevenly, with these sums."""
    return [0.0] + [total * (k + 1) / (n * (n + 1) / 2) for total, n in sums for k in range(n)]


def learner_of(sums: list[tuple[float, int]], budget: int = 100) -> Learner:
    return Learner(Spoken(speak(sums)), Optimizer(lr=1e-9, clip_norm=1e9), 1, budget)


def update(
    name: str, units: list[AnswerPair], policy: list[tuple[float, int]], reference: list[tuple[float, int]] | None,
    budget: int = 100, **options: Any,
) -> tuple[float, dict[str, float], Tensor]:  # fmt: skip
    """Loss, measures and d loss / d logp of the tokens of an update by the learner, the reference asked as in a run."""
    learner, loss = learner_of(policy, budget), PreferenceLoss(name, {**DEFAULTS[name], **options})
    batch = pack_answer_pairs(units, loss)
    if reference is not None:
        batch = batch.with_sequence(ref_logp=mean_logprobs(learner_of(reference).logprobs, learner, batch))
    result = learner.update(batch, loss)
    assert result.logp is not None
    gradient = learner.optimizer.gradients()["logp"]
    return result.stats["loss"], preference_metrics(gathered_view(learner, batch, result.logp), loss), gradient


POLICY, REFERENCE = [(-10.0, 5), (-14.0, 7)], [(-11.0, 5), (-12.5, 7)]
PAIR = [AnswerPair("p", answer(1, 5), answer(6, 7))]


@pytest.mark.parametrize("budget", [100, 1])
def test_direct_preference_optimisation(budget: int) -> None:
    loss, told, gradient = update("dpo", PAIR, POLICY, REFERENCE, budget, beta=0.1)
    assert loss == pytest.approx(0.575939, abs=1e-6)
    assert (told["reward_chosen"], told["reward_rejected"]) == pytest.approx((0.1, -0.15))
    assert (told["logp_chosen"], told["logp_rejected"]) == pytest.approx((-10, -14))
    assert (told["margin"], told["accuracy"]) == pytest.approx((0.25, 1))
    slope = 0.1 / (1 + math.exp(0.25))
    assert gradient.tolist() == pytest.approx([0.0] + [-slope] * 5 + [slope] * 7)
    assert update("dpo", PAIR, POLICY, REFERENCE, budget, beta=0.1, smoothing=0.1)[0] == pytest.approx(
        0.600939, abs=1e-6
    )


def test_averaged_over_tokens_a_long_answer_counts_no_more_than_a_short_one() -> None:
    loss, told, gradient = update("dpo", PAIR, POLICY, REFERENCE, beta=5.0, average=True)
    h = 1 / 5 + 1.5 / 7
    assert loss == pytest.approx(math.log1p(math.exp(-5 * h)))
    assert told["margin"] == pytest.approx(5 * h)
    assert float(gradient[1:6].sum()) == pytest.approx(-float(gradient[6:].sum()))


def test_bounded_preference() -> None:
    assert update("ipo", PAIR, POLICY, REFERENCE, beta=0.1, average=False)[0] == pytest.approx(6.25)
    loss, told, _ = update("ipo", PAIR, POLICY, REFERENCE, beta=0.1, average=True)
    assert loss == pytest.approx(21.028776, abs=1e-6)
    assert told["margin"] == pytest.approx(0.1 * (1 / 5 + 1.5 / 7))


def test_good_and_bad_answers() -> None:
    """u of the good answer is 1, of the bad one -1.5, of the mismatched rows 0.4 and -0.2."""
    units = [AnswerPair("g", answer(1, 2), answer(3, 3), True), AnswerPair("b", answer(6, 2), answer(8, 3), False)]
    policy = [(-4.0, 2), (-3.6, 3), (-6.5, 2), (-5.2, 3)]
    reference = [(-5.0, 2), (-4.0, 3), (-5.0, 2), (-5.0, 3)]
    loss, told, gradient = update("kto", units, policy, reference, beta=0.1)
    assert loss == pytest.approx((0.477515 + 0.460085) / 2, abs=1e-6)
    assert told["z0"] == pytest.approx(0.1 * 0.1)
    assert (told["reward_good"], told["reward_bad"], told["accuracy"]) == pytest.approx((0.1, -0.15, 1))
    assert gradient[3:6].tolist() == gradient[8:11].tolist() == [0.0] * 3  # z0 has none
    twice = update("kto", units, policy, reference, beta=0.1, desirable=2.0, undesirable=1.0)[0]
    assert twice == pytest.approx((2 * 0.477515 + 0.460085) / 2, abs=1e-6)


def test_without_a_reference() -> None:
    loss, told, _ = update("simpo", PAIR, [(-5.0, 5), (-14.0, 7)], None, beta=2.0, margin=0.5)
    assert loss == pytest.approx(math.log1p(math.exp(-(2 * (-1 + 2) - 0.5))))
    assert (told["reward_chosen"], told["margin"]) == pytest.approx((-2, 2))
    loss, told, _ = update("orpo", PAIR, [(-5.0, 5), (-14.0, 7)], None, coef=0.1)
    odds = [math.log(p / (1 - p)) for p in (math.exp(-1), math.exp(-2))]
    assert loss == pytest.approx(1 + 0.1 * math.log1p(math.exp(-(odds[0] - odds[1]))))
    assert (told["reward_chosen"], told["reward_rejected"]) == pytest.approx(tuple(odds))


def test_a_tie_is_half_right() -> None:
    assert update("dpo", PAIR, POLICY, POLICY)[1]["accuracy"] == 0.5


def test_a_batch_without_bad_answers_tells_nothing_of_them() -> None:
    units = [AnswerPair("g", answer(1, 2), answer(3, 3), True), AnswerPair("h", answer(6, 2), answer(8, 3), True)]
    sums = [(-4.0, 2), (-3.6, 3), (-6.5, 2), (-5.2, 3)]
    told = update("kto", units, sums, sums)[1]
    assert "reward_good" in told
    assert "reward_bad" not in told


def test_implicit_rewards_are_the_ones_the_margin_is_made_of() -> None:
    learner, loss = learner_of(POLICY), PreferenceLoss("dpo", {**DEFAULTS["dpo"], "beta": 0.5})
    batch = pack_answer_pairs(PAIR, loss).with_sequence(
        ref_logp=torch.tensor([-11 / 5, -12.5 / 7], dtype=torch.float64)
    )
    rewards = implicit_rewards(gathered_view(learner, batch, learner.logprobs(batch)), loss)
    assert rewards.tolist() == pytest.approx([0.5, -0.75])
