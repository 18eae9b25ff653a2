"""A linear layer with its three products in 8 bits: the rounding, the bounds of its errors, and the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.kernels.fp8 import FP8_MAX, Fp8Rows, dequantised
from burnish.models.kernels.fp8_linear import columns, fp8_linear, plain_columns, power_scale, quantise_by_powers
from tests.kernels import CUDA, DEVICE, error, kernel

Factors = tuple[Tensor, Tensor, Tensor]


def draw(seed: int, rows: int = 40, inputs: int = 64, outputs: int = 48) -> Factors:
    """x, W and the gradient of the outputs. Rows and columns have very different sizes, as activations and gradients do."""
    generator = torch.Generator().manual_seed(seed)
    x, w, g = (
        torch.randn(*shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs))
    )
    sizes = torch.randn(rows, 2, generator=generator).exp()
    return x * sizes[:, :1] * torch.randn(inputs, generator=generator).exp(), w, g * sizes[:, 1:] * 1e-6


def passes(x: Tensor, w: Tensor, g: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """The output and the gradients of x and W."""
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = fp8_linear(*leaves, b)
    return y.detach(), *torch.autograd.grad(y, leaves, g)


def e4m3(x: Tensor) -> Tensor:
    """The nearest e4m3 numbers of float64 numbers up to 448, from the definition: 4 significant bits, steps of 2^-9 below 2^-6."""
    exponent = torch.floor(torch.log2(x.abs().clamp_min(2.0**-6)))
    step = torch.exp2(exponent - 3)
    return torch.round(x / step) * step


def oracle(x: Tensor) -> Tensor:
    """Rows rounded with the smallest power of two as their scale that keeps them within 448; float64."""
    scale = torch.exp2(torch.ceil(torch.log2(x.double().abs().amax(1, keepdim=True) / FP8_MAX)))
    return e4m3(x.double() / scale) * scale


def test_the_scale_is_the_smallest_power_of_two_that_fits() -> None:
    largest = torch.tensor([448.0, 448.01, 447.0, 1.0, 1.75, 1.76, 0.0, 3e38, torch.inf, torch.nan])
    expected = torch.tensor([1, 2, 1, 2.0**-8, 2.0**-8, 2.0**-7, 1, 2.0**120, torch.nan, torch.nan])
    assert torch.equal(power_scale(largest).nan_to_num(-1), expected.nan_to_num(-1))


def test_products_are_those_of_the_rounded_factors() -> None:
    x, w, g = draw(0)
    bias = torch.randn(48, generator=torch.Generator().manual_seed(9))
    y, grad_x, grad_w = passes(x, w, g, bias)
    qx, qw, qg = oracle(x), oracle(w), oracle(g)
    assert error(y, qx @ qw.T + bias) < 1e-6
    assert error(grad_x, qg @ qw) < 1e-6  # no weight is 2^-14 of the largest one of its column
    assert error(grad_w, qg.T @ qx) < 1e-4  # a token that adds 2^-14 of what another adds loses digits
    again = torch.randn(5, 48).requires_grad_()
    torch.autograd.grad(fp8_linear(torch.randn(5, 64), w, again[0]).sum(), again)  # the bias has a gradient too


def test_errors_are_within_what_four_significant_bits_imply() -> None:
    # A factor's error is uniform within half a step of 2^-3: at most 2^-4 of a number, 2^-4 / sqrt(3) in the mean square. Two factors.
    bound = 2**0.5 * 2**-4 / 3**0.5
    for seed in range(5):
        x, w, g = (t.double() for t in draw(seed))
        y, grad_x, grad_w = passes(*draw(seed))
        for found, truth in ((y, x @ w.T), (grad_x, g @ w), (grad_w, g.T @ x)):
            assert 0.2 * bound < error(found, truth) < bound


def test_gradients_are_unbiased_over_many_draws() -> None:
    slopes = []
    for seed in range(60):
        x, w, g = draw(seed)
        truth = g.double().T @ x.double()
        found = passes(x, w, g)[2].double()
        slopes.append(float((found * truth).sum() / truth.square().sum()))
    slope = torch.tensor(slopes)
    # Rounding towards 0 instead would give about 0.94: each factor would lose half a step, 3% of itself.
    assert abs(slope.mean() - 1) < 4 * slope.std() / len(slopes) ** 0.5
    assert slope.std() < 0.02


def test_the_gradient_of_the_weight_does_not_depend_on_the_split() -> None:
    x, w, g = draw(3)
    whole = passes(x, w, g)[2]
    parts = [passes(x[i:j], w, g[i:j])[2] for i, j in ((0, 7), (7, 8), (8, 40))]
    assert error(torch.stack(parts).sum(0), whole.double()) < 1e-4
    rows = [torch.cat([passes(x[i:j], w, g[i:j])[k] for i, j in ((0, 7), (7, 8), (8, 40))]) for k in (0, 1)]
    assert torch.allclose(rows[0], passes(x, w, g)[0], rtol=1e-6)
    assert torch.allclose(rows[1], passes(x, w, g)[1], rtol=1e-6, atol=0)


def test_a_gradient_that_is_not_finite_stays_so() -> None:
    for value in (torch.inf, torch.nan):
        x, w, g = draw(0)
        g[3, 5] = value
        _, grad_x, grad_w = passes(x, w, g)
        assert not grad_x[3].isfinite().any()
        assert not grad_w[5].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_types_round_to_the_same_numbers(dtype: torch.dtype) -> None:
    x, w, g = (t.to(torch.bfloat16) for t in draw(1))
    expected = passes(x.float(), w.float(), g.float())
    for found, truth in zip(passes(x.to(dtype), w.to(dtype), g.to(dtype)), expected, strict=True):
        assert found.dtype == dtype
        assert error(found, truth.double()) < (4e-3 if dtype == torch.bfloat16 else 1e-6)


def assert_same_numbers(mine: Fp8Rows, truth: Fp8Rows) -> None:
    assert torch.equal(mine.scale.cpu(), truth.scale)
    data, numbers = mine.data.cpu().float()[:, : truth.data.shape[1]], truth.data.float()
    differs = data != numbers
    if not CUDA:  # Triton's interpreter halves fp8 numbers that round up to a power of two, and cuts small ones
        differs &= (data != numbers / 2) & (numbers.abs() > 2.0**-6)
    assert not differs.any()
    assert not mine.data.cpu().float()[:, truth.data.shape[1] :].any()


@kernel
@pytest.mark.parametrize("shape", [(3, 40), (70, 130), (600, 48), (5, 9000), (2, 17000)])
def test_the_kernels_round_as_torch_does(shape: tuple[int, int]) -> None:
    from burnish.models.kernels.triton import fp8_linear_kernels

    x = draw(0, *shape)[0]
    x[1] = 0
    rows = quantise_by_powers(x)
    assert_same_numbers(fp8_linear_kernels.quantise_by_powers(x.to(DEVICE)), rows)
    on_device = rows.data.to(DEVICE)
    assert_same_numbers(fp8_linear_kernels.columns(on_device, rows.scale.to(DEVICE)), columns(rows.data, rows.scale))
    assert_same_numbers(fp8_linear_kernels.columns(on_device, None), plain_columns(rows.data))


@pytest.mark.skipif(not CUDA, reason="compares the product of a GPU's tensor cores; there is no GPU")
def test_the_gpu_multiplies_the_same_numbers() -> None:
    for rows, inputs, outputs in ((17, 64, 32), (1000, 1536, 2048), (4096, 1536, 17920)):
        factors = tuple(t.to(torch.bfloat16) for t in draw(0, rows, inputs, outputs))
        on_gpu = passes(*(t.cuda() for t in factors))
        for found, truth in zip(on_gpu, passes(*(t.float() for t in factors)), strict=True):
            assert found.dtype == torch.bfloat16
            assert error(found.cpu(), truth.double()) < 5e-3


def test_the_layer_saves_its_input_in_8_bits() -> None:
    saved: list[Tensor] = []
    x, w, _ = draw(0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        fp8_linear(x.requires_grad_(), w.requires_grad_(), None)
        functional.linear(x, w)
    sizes = [t.numel() * t.itemsize for t in saved if t.data_ptr() != w.data_ptr()]
    assert sizes == [40 * 64, 40 * 4, 40 * 64 * 4]


def test_dequantised_rows_are_the_rounded_ones() -> None:
    x = draw(4)[0]
    assert torch.equal(dequantised(quantise_by_powers(x), torch.float64), oracle(x).float().double())
