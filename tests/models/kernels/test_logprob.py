"""The chunked output head against plain autograd on materialised logits, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from burnish.algorithms.terms.loss_terms import full_kl
from burnish.models.kernels import logprob
from burnish.models.kernels.half_products import widened
from burnish.models.kernels.logprob import Distribution, head_kl, head_logprob
from tests.kernels import without_c

ROWS, HIDDEN, VOCAB = 7, 5, 11


@pytest.fixture(params=["C", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both implementations of the head on a CPU."""
    with without_c() if request.param == "torch" else nullcontext():
        yield


def chunks_of(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every implementation of the head compute at most so many logits at once."""
    for table in (logprob.CHUNK_ELEMENTS, logprob.KERNEL_CHUNK_ELEMENTS):
        monkeypatch.setitem(table, "cpu", elements)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = 2 * torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(VOCAB, (ROWS,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = (hidden @ weight.T) / temperature
    shifted = logits - logits.max(1, keepdim=True).values.detach()
    p = shifted.exp() / shifted.exp().sum(1, keepdim=True)
    return p[torch.arange(ROWS), targets].log(), -(p * p.log()).sum(1)


@pytest.mark.parametrize("elements", [1, 3 * VOCAB, 1 << 20])  # one row, three rows, everything in a chunk
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.usefixtures("backend")
def test_values_and_gradients_equal_plain_autograd(
    monkeypatch: pytest.MonkeyPatch, elements: int, temperature: float, with_entropy: bool
) -> None:
    chunks_of(elements, monkeypatch)
    scales = torch.linspace(-1, 2, ROWS, dtype=torch.float64)

    def objective(logp: Tensor, entropy: Tensor | None) -> Tensor:
        total = (scales * logp).sum() + (logp**2).sum()
        return total if entropy is None else total + (scales.flip(0) * entropy).sum()

    hidden, weight, targets = inputs()
    logp, entropy = head_logprob(hidden, weight, targets, temperature, with_entropy)
    got = torch.autograd.grad(objective(logp, entropy), [hidden, weight])
    expected_logp, expected_entropy = plain(hidden, weight, targets, temperature)
    torch.testing.assert_close(logp, expected_logp, atol=1e-12, rtol=0)
    if with_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-12, rtol=0)
    else:
        assert entropy is None
    oracle = objective(expected_logp, expected_entropy if with_entropy else None)
    for mine, theirs in zip(got, torch.autograd.grad(oracle, [hidden, weight]), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=0)


@pytest.mark.usefixtures("backend")
def test_only_one_of_log_prob_and_entropy_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(2 * VOCAB, monkeypatch)
    for pick in (0, 1):
        hidden, weight, targets = inputs()
        output = head_logprob(hidden, weight, targets, 0.7, with_entropy=True)[pick]
        assert output is not None
        got = torch.autograd.grad(output.sum(), [hidden, weight])
        expected = torch.autograd.grad(plain(hidden, weight, targets, 0.7)[pick].sum(), [hidden, weight])
        for mine, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_a_frozen_head_gives_the_same_gradient_of_the_hidden_states() -> None:
    hidden, weight, targets = inputs()
    (expected,) = torch.autograd.grad(plain(hidden, weight, targets, 1.0)[0].sum(), [hidden])
    (got,) = torch.autograd.grad(head_logprob(hidden, weight.detach(), targets)[0].sum(), [hidden])
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_the_worked_entropies() -> None:
    """Logits [2, 1, 0] and [0, 0, 0]."""
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    _, entropy = head_logprob(logits, torch.eye(3, dtype=torch.float64), torch.tensor([0, 1]), 1.0, True)
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([0.832396, 1.098612], abs=1e-6)


def test_certain_tokens_are_finite_and_have_no_entropy() -> None:
    logits = torch.tensor([[0.0, -2000.0, 2000.0]], dtype=torch.float64, requires_grad=True)
    logp, entropy = head_logprob(logits, torch.eye(3, dtype=torch.float64), torch.tensor([1]), 1.0, True)
    assert entropy is not None
    assert (logp.item(), entropy.item()) == (-4000.0, 0.0)
    (gradient,) = torch.autograd.grad((logp + entropy).sum(), [logits])
    assert gradient.tolist() == [[0.0, 1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_hidden_states_give_float32_log_probs(dtype: torch.dtype) -> None:
    hidden, weight, targets = inputs()
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    logp, entropy = head_logprob(hidden, weight, targets, 0.7, with_entropy=True)
    assert entropy is not None
    assert logp.dtype == entropy.dtype == torch.float32
    gradients = torch.autograd.grad(logp.sum() + entropy.sum(), [hidden, weight])
    assert [g.dtype for g in gradients] == [dtype, dtype]
    # The product is rounded to `dtype` unless the processor's half types are slow; everything after it is at least float32.
    first, second = widened(hidden.detach(), weight.detach())
    logits = (first @ second.T).double()
    expected = (logits / 0.7).log_softmax(1)[torch.arange(ROWS), targets]
    torch.testing.assert_close(logp.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("backend")
def test_the_heads_gradient_in_bfloat16_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 512
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(rows, HIDDEN, generator=generator).bfloat16()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16().requires_grad_()
    targets = torch.zeros(rows, dtype=torch.int64)
    wide = weight.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(head_logprob(hidden.double(), wide, targets)[0].sum(), [wide])
    chunks_of(VOCAB, monkeypatch)  # 512 chunks, whose sum in bfloat16 would be off by tenths
    (got,) = torch.autograd.grad(head_logprob(hidden, weight, targets)[0].sum(), [weight])
    torch.testing.assert_close(got.double(), expected, atol=0.02 * float(expected.abs().max()), rtol=0)


# --- the exact KL to a reference ---


def kl_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Distribution]:
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
    chunks_of(13 * rows, monkeypatch)
    hidden, weight, targets, reference = kl_inputs()
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
    hidden, weight, targets, reference = kl_inputs()
    got, expected = (
        torch.autograd.grad(f(hidden, weight, targets, reference, 0.9)[which].square().sum(), (hidden, weight))
        for f in (head_kl, oracle)
    )
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_half_types_compute_in_float32() -> None:
    hidden, weight, targets, reference = kl_inputs(torch.bfloat16)
    outputs = head_kl(hidden, weight, targets, reference, 1.0)
    assert {output.dtype for output in outputs} == {torch.float32}
    assert bool((outputs[2] >= 0).all())
