"""Divergences between student and teacher: the worked numbers of ALGORITHMS-2026.md N4.3, invariants, and gradients through the head."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.models.kernels import logprob
from burnish.models.kernels.divergence import divergence, generalised_jsd, head_comparison
from burnish.models.kernels.logprob import Distribution, Distributions, Divergence

S = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()
Q = torch.tensor([0.3, 0.5, 0.1, 0.1], dtype=torch.float64).log()
SUPPORTS = [
    Divergence(),
    *(Divergence(1.0, side, 3, rest) for side in ("student", "teacher") for rest in ("renormalise", "tail", "raw")),
]


@pytest.mark.parametrize(
    ("support", "top", "rest", "expected"),
    [
        ("full", None, "renormalise", [0.130933, 0.032032, 0.128328]),
        ("student", 2, "renormalise", [0.127706, 0.031584, 0.127706]),
        ("student", 2, "tail", [0.102165, 0.025267, 0.102165]),
    ],
)
def test_worked_numbers(support: str, top: int | None, rest: str, expected: list[float]) -> None:
    found = [float(divergence(S, Q, Divergence(alpha, support, top, rest))) for alpha in (0, 0.5, 1)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_the_teachers_likeliest_tokens_with_raw_masses() -> None:
    assert float(divergence(S, Q, Divergence(0.0, "teacher", 2, "raw"))) == pytest.approx(0.102165, abs=1e-5)
    far = torch.tensor([0.6, 0.35, 0.03, 0.02], dtype=torch.float64).log()
    near = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64).log()
    assert float(divergence(far, near, Divergence(0.0, "teacher", 2, "raw"))) == 0  # it would be negative


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_invariants(alpha: float) -> None:
    torch.manual_seed(0)
    s, q = torch.randn(2, 50, 12, dtype=torch.float64).log_softmax(-1)
    for options in SUPPORTS:
        options = options._replace(alpha=alpha)
        assert float(divergence(s, s, options).abs().max()) < 1e-9
        assert float(divergence(s, q, options).min()) >= 0
    whole = divergence(s, q, Divergence(alpha))
    assert bool((divergence(s, q, Divergence(alpha, "student", 4, "tail")) <= whole + 1e-9).all())
    if alpha == 0.5:
        torch.testing.assert_close(whole, divergence(q, s, Divergence(alpha)))
        sharp = [(20 * x).log_softmax(-1) for x in (s, q)]
        assert 0.6 < float(generalised_jsd(*sharp, 0.5).max()) <= math.log(2) + 1e-9


@pytest.mark.parametrize("options", [o._replace(alpha=alpha) for o in SUPPORTS for alpha in (0.0, 0.4)], ids=str)
def test_the_head_gives_value_and_gradient_of_the_plain_formula(
    options: Divergence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of two rows, at a temperature, with two teachers of different width."""
    monkeypatch.setitem(logprob.CHUNK_ELEMENTS, "cpu", 22)
    torch.manual_seed(1)
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (7, 11))
    targets, rows = torch.arange(7), (torch.tensor([0, 2, 3, 6]), torch.tensor([1, 4, 5]))
    teachers = [(torch.randn(len(r), 4 + k), torch.randn(11, 4 + k)) for k, r in enumerate(rows)]
    teachers = [(h.double(), w.double()) for h, w in teachers]
    parts = tuple((r, Distribution(h, w, divergence=options)) for r, (h, w) in zip(rows, teachers, strict=True))
    factors = torch.randn(3, 7, dtype=torch.float64)
    outputs = head_comparison(hidden, weight, targets, Distributions(parts), 0.7)
    found = torch.autograd.grad((factors * torch.stack(outputs)).sum(), [hidden, weight])
    log_s = (hidden @ weight.t() / 0.7).log_softmax(-1)
    log_q = torch.empty_like(log_s)
    for r, (h, w) in zip(rows, teachers, strict=True):
        log_q[r] = (h @ w.t() / 0.7).log_softmax(-1)
    entropy = -(log_s.exp() * log_s).sum(-1)
    plain = torch.stack([log_s.gather(1, targets[:, None])[:, 0], entropy, divergence(log_s, log_q, options)])
    torch.testing.assert_close(torch.stack(outputs), plain)
    torch.testing.assert_close(found, torch.autograd.grad((factors * plain).sum(), [hidden, weight]))
