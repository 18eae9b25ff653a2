"""The exact KL to a reference, with log-probs and entropies, in one chunked pass over both output heads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.algorithms.terms.loss_terms import full_kl
from burnish.models.kernels import logprob
from burnish.models.kernels.logprob import Distribution, head_kl


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Distribution]:
    generator = torch.Generator().manual_seed(5)
    hidden, other = (torch.randn(9, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, ref_weight = (torch.randn(13, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(13, (9,), generator=generator)
    own = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
    return *own, targets, Distribution(other.to(dtype), ref_weight.to(dtype))


def oracle(
    hidden: Tensor, weight: Tensor, targets: Tensor, reference: Distribution, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden @ weight.t() / temperature
    log_p = logits.log_softmax(-1)
    kl = full_kl(logits, reference.hidden @ reference.weight.t() / temperature)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), kl


@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_are_those_of_whole_logits(
    rows: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(logprob.CHUNK_ELEMENTS, "cpu", 13 * rows)
    hidden, weight, targets, reference = inputs()
    slopes = torch.randn(3, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = []
    for function in (head_kl, oracle):
        outputs = function(hidden, weight, targets, reference, temperature)
        total = sum((output * slope).sum() for output, slope in zip(outputs, slopes, strict=True))
        found.append((*outputs, *torch.autograd.grad(total, (hidden, weight))))
    for got, expected in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_each_output_alone_has_its_gradient(which: int) -> None:
    hidden, weight, targets, reference = inputs()
    got, expected = (
        torch.autograd.grad(f(hidden, weight, targets, reference, 0.9)[which].square().sum(), (hidden, weight))
        for f in (head_kl, oracle)
    )
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_half_types_compute_in_float32() -> None:
    hidden, weight, targets, reference = inputs(torch.bfloat16)
    outputs = head_kl(hidden, weight, targets, reference, 1.0)
    assert {output.dtype for output in outputs} == {torch.float32}
    assert bool((outputs[2] >= 0).all())
