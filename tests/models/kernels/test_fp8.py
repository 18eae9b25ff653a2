"""Rows and matrices in 8-bit floats: the rounding, the products, and the kernels that compute them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.models.kernels.fp8 import FP8, FP8_MAX, Fp8Rows, dequantised, quantise_rows, scaled_product
from tests.kernels import CUDA, DEVICE, error, kernel

HALF_STEP = 2.0**-4
"""Half the distance of two e4m3 numbers over the smaller one, at most."""


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.floats(1e-20, 1e20))
def test_a_row_is_rounded_to_the_nearest_numbers_of_its_own_scale(seed: int, size: float) -> None:
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * size
    x[1] = 0
    rows = quantise_rows(x)
    back = dequantised(rows, torch.float32)
    assert torch.equal(rows.scale[[0, 2]], x[[0, 2]].abs().amax(-1) * (1 / FP8_MAX))
    assert rows.scale[1] == 1
    assert torch.equal(back[1], x[1])
    smallest = 2.0**-9 * rows.scale[:, None]  # the step of the numbers next to 0
    assert ((back - x).abs() <= torch.maximum(HALF_STEP * x.abs(), smallest / 2) * 1.001).all()


def test_a_product_is_that_of_the_rounded_factors() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 64), torch.randn(48, 64), torch.randn(48)
    rows, matrix = quantise_rows(x), quantise_rows(weight)
    truth = dequantised(rows, torch.float64) @ dequantised(matrix, torch.float64).T
    assert error(scaled_product(rows, matrix, torch.float32), truth) < 1e-6
    assert error(scaled_product(rows, matrix, torch.float32, bias), truth + bias) < 1e-6
    assert 0 < error(truth, x.double() @ weight.double().T) < 0.05


@kernel
@pytest.mark.parametrize("shape", [(3, 40), (2, 5, 128), (4, 5000), (2, 17000), (0, 16)])
def test_the_kernel_rounds_as_torch_does(shape: tuple[int, ...]) -> None:
    from burnish.models.kernels.triton import fp8_kernels

    x = torch.randn(shape, device=DEVICE)
    if x.numel():
        x.view(-1, shape[-1])[1] = 0
    truth = quantise_rows(x.cpu())
    data, scale = torch.empty(shape, dtype=FP8, device=DEVICE), torch.empty(shape[:-1], device=DEVICE)
    fp8_kernels.quantise_rows(x, data, scale, FP8_MAX)
    assert torch.equal(scale.cpu(), truth.scale)
    mine, numbers = data.cpu().float(), truth.data.float()
    differs = mine != numbers
    if not CUDA:  # Triton's interpreter halves fp8 numbers that round up to a power of two, and cuts small ones
        differs &= (mine != numbers / 2) & (numbers.abs() > 2.0**-6)
    assert not differs.any()


@pytest.mark.skipif(not CUDA, reason="a GPU's product")
def test_the_gpu_multiplies_the_same_numbers() -> None:
    torch.manual_seed(0)
    for rows, inputs, outputs in ((1, 64, 32), (17, 1536, 2048), (256, 8960, 1536)):
        x = quantise_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))
        weight = quantise_rows(torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16))
        bias = torch.randn(outputs, device="cuda", dtype=torch.bfloat16)
        truth = dequantised(x, torch.float64) @ dequantised(weight, torch.float64).T + bias
        assert isinstance(x, Fp8Rows)
        assert error(scaled_product(x, weight, torch.bfloat16, bias), truth) < 5e-3
