"""Weights make the gradient unbiased, shown by enumeration: every sequence of a three-token vocabulary, weighted by its probability.

The engine samples y from mu; the gradient wanted is that of J = sum_y pi(y) R(y). With raw weights the expectation of
w R grad log pi over mu is exactly that. Cutting at C takes (pi - C mu)+ off each probability, a band drops whole ones.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import loss_view
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import bypass_correction, coupled_correction, decoupled_correction

UNBOUNDED = 1e9


class World:
    """All sequences of `length` tokens, a reward for each, a policy to train and an engine that differs."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(length)
        self.length = length
        self.sequences = torch.tensor(list(product(range(3), repeat=length)))  # [Y, length]
        contexts = sum(3**t for t in range(length))
        self.theta = torch.randn(contexts, 3, generator=generator, dtype=torch.float64)
        self.engine = self.theta + 1.5 * torch.randn(contexts, 3, generator=generator, dtype=torch.float64)
        self.reward = torch.rand(3**length, generator=generator, dtype=torch.float64)

    def logp(self, logits: Tensor) -> Tensor:
        """[Y, length] the log-prob of each token given its past; the first context is the empty one."""
        table = logits.log_softmax(-1)
        columns = []
        for t in range(self.length):
            past = torch.zeros(len(self.sequences), dtype=torch.long)
            for s in range(t):
                past = 3 * past + self.sequences[:, s]
            columns.append(table[sum(3**s for s in range(t)) + past, self.sequences[:, t]])
        return torch.stack(columns, 1)

    @property
    def mu(self) -> Tensor:
        return self.logp(self.engine).sum(1).exp()

    @property
    def pi(self) -> Tensor:
        return self.logp(self.theta).sum(1).exp()

    def batch(self) -> Batch:
        """Every sequence once; the loss's weights are how often the engine draws it."""
        num = len(self.sequences)
        mask = torch.ones(num * self.length, dtype=torch.bool)
        return Batch(
            tokens=self.sequences.flatten(),
            offsets=offsets_from_lengths(torch.full((num,), self.length)),
            token={
                "action_mask": mask,
                "loss_mask": mask,
                "old_logp": self.logp(self.theta).flatten(),
                "behaviour_logp": self.logp(self.engine).flatten(),
                "weight": self.mu.repeat_interleave(self.length),
            },
        )

    def weighted_gradient(self, values: Tensor) -> Tensor:
        """sum_y values(y) grad log pi(y)."""
        theta = self.theta.clone().requires_grad_()
        return torch.autograd.grad((values * self.logp(theta).sum(1)).sum(), theta)[0]

    def wanted(self) -> Tensor:
        """The gradient of J itself, by differentiating it."""
        theta = self.theta.clone().requires_grad_()
        return torch.autograd.grad((self.logp(theta).sum(1).exp() * self.reward).sum(), theta)[0]

    def corrected(self, weights: Tensor | None, keep: Tensor) -> Tensor:
        """What the learner does: minus the gradient of sum_t weight_t w_t (-R logp_t)."""
        batch = self.batch()
        w = torch.ones(batch.num_tokens, dtype=torch.float64) if weights is None else weights
        theta = self.theta.clone().requires_grad_()
        reward = self.reward.repeat_interleave(self.length)
        loss = -(batch.token["weight"] * w * keep * reward * self.logp(theta).flatten()).sum()
        return -torch.autograd.grad(loss, theta)[0]


def close(found: Tensor, expected: Tensor) -> None:
    assert found.flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-12)


FORMS: dict[str, Callable[[Batch, str], Any]] = {
    "seed": lambda b, level: coupled_correction(b, threshold=UNBOUNDED, level=level, veto=None),
    "decoupled": lambda b, level: decoupled_correction(b, weights=level, threshold=UNBOUNDED),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "level"), [(1, "token"), (1, "sequence"), (2, "sequence")])
def test_without_a_bound_the_gradient_is_the_on_policy_one(form: str, length: int, level: str) -> None:
    world = World(length)
    found = FORMS[form](world.batch(), level)
    close(world.corrected(found.weights, found.keep), world.wanted())
    close(world.weighted_gradient(world.pi * world.reward), world.wanted())
    uncorrected = world.corrected(None, found.keep)
    assert float((uncorrected - world.wanted()).abs().max()) > 0.01, "the engine is far enough to matter"


def test_token_weights_of_longer_sequences_leave_a_bias() -> None:
    world = World(2)
    found = decoupled_correction(world.batch(), weights="token", threshold=UNBOUNDED)
    assert float((world.corrected(found.weights, found.keep) - world.wanted()).abs().max()) > 1e-3


@pytest.mark.parametrize("length", [1, 2])
def test_bypass_reinforce_is_unbiased_too(length: int) -> None:
    world = World(length)
    theta = world.theta.clone().requires_grad_()
    view = loss_view(world.batch(), world.logp(theta).flatten())
    reward = world.reward.repeat_interleave(length)
    per_token, _ = bypass_correction(
        view, view.column("behaviour_logp"), reward, None, loss="reinforce", weights="sequence", threshold=UNBOUNDED
    )
    (gradient,) = torch.autograd.grad((view.column("weight") * per_token).sum(), theta)
    close(-gradient, world.wanted())


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("cut", [0.8, 1.2, 2.0])
def test_truncation_takes_the_excess_off_each_probability(length: int, cut: float) -> None:
    world = World(length)
    found = coupled_correction(world.batch(), threshold=cut, level="sequence", veto=None, lower=0.1)
    bias = world.corrected(found.weights, found.keep) - world.wanted()
    excess = (world.pi - cut * world.mu).clamp(min=0)
    assert float(excess.max()) > 0, "the bound acts"
    close(bias, -world.weighted_gradient(excess * world.reward))


@pytest.mark.parametrize("length", [1, 2])
def test_a_band_drops_whole_probabilities_and_so_does_rejection(length: int) -> None:
    world = World(length)
    low, high = 0.5, 2.0
    ratio = world.pi / world.mu
    dropped = torch.where((ratio < low) | (ratio > high), world.pi, 0.0)
    assert 0 < int((dropped > 0).sum()) < len(dropped)
    expected = -world.weighted_gradient(dropped * world.reward)
    options: list[dict[str, Any]] = [
        {"threshold": (low, high)},
        {"threshold": UNBOUNDED, "reject": {"seq_sum_k1": (low, high)}},
    ]
    for one in options:
        found = decoupled_correction(world.batch(), weights="sequence", **one)
        close(world.corrected(found.weights, found.keep) - world.wanted(), expected)


def test_truncation_underrates_what_the_engine_rarely_draws() -> None:
    # One action, rewarded, that the engine draws at a tenth of the policy's rate: its logit rises less than it should,
    # by exactly (pi - C mu) (1 - pi).
    world = World(1)
    pi, mu = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.05, 0.55, 0.4]).double()
    world.theta, world.engine = pi.log()[None], mu.log()[None]
    world.reward = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    found = decoupled_correction(world.batch(), weights="token", threshold=2.0)
    bias = (world.corrected(found.weights, found.keep) - world.wanted())[0]
    assert bias[0] == pytest.approx(-(0.5 - 2 * 0.05) * (1 - 0.5))
    assert bias[1] > 0
    assert bias[2] > 0


def test_truncation_has_less_variance() -> None:
    world = World(2)
    ratio = world.pi / world.mu
    raw, cut = (float((world.mu * w**2).sum() - (world.mu * w).sum() ** 2) for w in (ratio, ratio.clamp(max=1.5)))
    found = decoupled_correction(world.batch(), weights="sequence", threshold=1.5)
    assert found.weights is not None
    applied = found.weights.view(-1, 2)[:, 0]
    assert float((world.mu * applied**2).sum() - (world.mu * applied).sum() ** 2) == pytest.approx(cut)
    assert cut < raw
