"""NF4: codes and numbers against a float64 oracle and bitsandbytes, products and their gradients, and the Triton kernel.

The kernels run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.lora.adapters import LoraLinear
from burnish.models.nf4 import (
    NF4_BLOCK,
    NF4_VALUES,
    SCALES_PER_GROUP,
    Nf4Linear,
    Nf4Weight,
    dense_weight,
    dequantise_nf4,
    nf4_linear,
    quantise_nf4,
)
from tests.kernels import CUDA, DEVICE, kernel

SHAPES = [(8, 128), (37, 64), (5, 77), (3, 7), (300, 192)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def nearest(weight: Tensor) -> tuple[list[int], list[float], list[float]]:
    """Codes, scales and numbers by the definition, one number at a time in float64."""
    flat = weight.flatten().double().tolist()
    codes, scales, numbers = list[int](), list[float](), list[float]()
    for start in range(0, len(flat), NF4_BLOCK):
        block = flat[start : start + NF4_BLOCK]
        scale = max(abs(x) for x in block)
        scales.append(scale)
        for x in block:
            code = min(range(16), key=lambda k: abs(NF4_VALUES[k] - (x / scale if scale else 0.0)))
            codes.append(code)
            numbers.append(NF4_VALUES[code] * scale)
    return codes, scales, numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_numbers_are_the_nearest_of_an_oracle(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = randn(*shape, dtype=torch.float32).to(dtype)
    weight.view(-1)[: min(NF4_BLOCK, weight.numel() // 2)] = 0  # a block of zeros must stay zero
    codes, scales, numbers = nearest(weight)
    matrix = quantise_nf4(weight, double=False)
    found = torch.stack([matrix.codes >> 4, matrix.codes & 15], 1).flatten()
    assert found[: weight.numel()].tolist() == codes
    assert matrix.scales.tolist() == scales
    plain = dequantise_nf4(matrix, torch.float64)
    torch.testing.assert_close(plain.flatten(), torch.tensor(numbers, dtype=torch.float64), atol=1e-6, rtol=1e-6)
    assert torch.equal(dequantise_nf4(matrix, torch.bfloat16), dequantise_nf4(matrix, torch.float32).bfloat16())
    assert (plain - weight).abs().max() <= (1 - 0.6961928009986877) / 2 * max(scales) + 1e-6


@pytest.mark.parametrize("shape", [*SHAPES, (700, 192)], ids=str)
def test_scales_in_8_bits_are_off_by_half_a_step_of_their_group_at_most(shape: tuple[int, int]) -> None:
    weight = randn(*shape) * (1 + 5 * torch.rand(shape[0], 1, generator=torch.Generator().manual_seed(3)))
    single, double = quantise_nf4(weight, False), quantise_nf4(weight, True)
    assert torch.equal(single.codes, double.codes)
    assert double.ranges is not None
    for group, (low, step) in enumerate(double.ranges.tolist()):
        mine = slice(256 * group, 256 * (group + 1))
        scales, codes = single.scales[mine], double.scales[mine].float()
        assert low == scales.min()
        assert step == pytest.approx(float(scales.max() - scales.min()) / 255, abs=1e-7)
        assert (low + step * codes - scales).abs().max() <= step / 2 + 1e-6
    gap = (dequantise_nf4(double, torch.float32) - dequantise_nf4(single, torch.float32)).abs().mean()
    assert gap < 0.05 * (dequantise_nf4(single, torch.float32) - weight).abs().mean()


@pytest.mark.skipif(not CUDA, reason="compares a GPU with the CPU")
@pytest.mark.parametrize("double", [False, True])
def test_bits_do_not_depend_on_the_device(double: bool) -> None:
    weight = randn(700, 192) * (1 + 5 * torch.rand(700, 1, generator=torch.Generator().manual_seed(3)))
    here, there = quantise_nf4(weight, double), quantise_nf4(weight.to(DEVICE), double)
    for one, other in zip(here[:3], there[:3], strict=True):
        assert (one is None and other is None) or torch.equal(one, other.cpu())


def test_quantising_plain_numbers_again_gives_the_same_codes() -> None:
    matrix = quantise_nf4(randn(40, 128), False)
    again = quantise_nf4(dequantise_nf4(matrix, torch.float32), False)
    assert torch.equal(matrix.codes, again.codes)
    assert torch.equal(matrix.scales, again.scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bitsandbytes_has_the_same_codes_and_numbers(dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").functional
    weight = randn(300, 192).to(DEVICE, dtype)
    codes, state = theirs.quantize_4bit(weight, blocksize=NF4_BLOCK, quant_type="nf4")
    ours = quantise_nf4(weight, False)
    assert torch.equal(codes.view(-1), ours.codes)
    assert torch.equal(state.absmax, ours.scales)
    assert torch.equal(theirs.dequantize_4bit(codes, state), dequantise_nf4(ours, dtype))


# --- products ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_and_its_gradient_are_those_of_the_plain_matrix(has_bias: bool, double: bool) -> None:
    matrix, bias = quantise_nf4(randn(30, 77), double), randn(30, seed=1, dtype=torch.float64) if has_bias else None
    x, slope = randn(9, 77, seed=2, dtype=torch.float64).requires_grad_(), randn(9, 30, seed=3, dtype=torch.float64)
    other = x.detach().clone().requires_grad_()
    found, expected = nf4_linear(x, matrix, bias), functional.linear(other, dequantise_nf4(matrix, torch.float64), bias)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    found.backward(slope)
    expected.backward(slope)
    torch.testing.assert_close(x.grad, other.grad, atol=1e-10, rtol=0)
    with torch.no_grad():
        assert torch.equal(nf4_linear(x, matrix, bias), found)


@pytest.mark.parametrize("double", [False, True])
def test_gradients_of_adapters_are_those_over_the_plain_matrix(double: bool) -> None:
    plain = nn.Linear(70, 50, dtype=torch.float64)
    frozen = Nf4Linear(plain, double)
    plain.weight.data = dense_weight(frozen.weight, torch.float64)
    layers = [LoraLinear(base, [(0, 20), (30, 50)], 3, 0.7, torch.float64) for base in (frozen, plain)]
    found = []
    for layer in layers:
        with torch.no_grad():
            layer.lora_a.copy_(randn(6, 70, seed=1))
            layer.lora_b.copy_(randn(40, 3, seed=2))
        x = randn(9, 70, seed=3, dtype=torch.float64).requires_grad_()
        y = layer(x)
        (y.square()).sum().backward()
        found.append((y.detach(), x.grad, layer.lora_a.grad, layer.lora_b.grad))
        assert layer.bias is None or layer.bias.grad is None
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_the_backward_pass_keeps_no_plain_matrix() -> None:
    from tests.alive import Alive

    layer = LoraLinear(Nf4Linear(nn.Linear(256, 512, bias=False), False), [(0, 512)], 4, 1.0, torch.float32)
    x = randn(3, 256).requires_grad_()
    layer(x)
    with Alive(*layer.parameters(), *layer.buffers(), x) as alive:
        y = layer(x)
        assert alive.bytes == y.nbytes + 3 * 4 * 4  # the result, and A x


def test_another_type_of_the_module_leaves_the_4_bits_as_they_are() -> None:
    for double in (False, True):
        layer = Nf4Linear(nn.Linear(130, 20), double)
        before = dense_weight(layer.weight, torch.float64)
        layer.to(torch.bfloat16).double()
        assert torch.equal(dense_weight(layer.weight, torch.float64), before)
        assert layer(torch.ones(2, 130, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4.129)])
def test_bytes_of_a_matrix(double: bool, bits: float) -> None:
    weight = Nf4Weight((1024, 1024), double)
    assert 8 * sum(b.nbytes for b in weight.buffers()) / 1024**2 == pytest.approx(bits, abs=1e-3)


# --- kernels -------------------------------------------------------------------------------------------------------------


@kernel
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_the_plain_numbers(shape: tuple[int, int], double: bool) -> None:
    from burnish.models.kernels.triton import elementwise_kernels as kernel

    matrix, values = quantise_nf4(randn(*shape).to(DEVICE), double), torch.tensor(NF4_VALUES, device=DEVICE)
    host = matrix._replace(**{name: t.cpu() for name, t in matrix._asdict().items() if isinstance(t, Tensor)})
    for dtype in (
        torch.float32,
        torch.float16,
        *([torch.bfloat16] if CUDA else []),
    ):  # the interpreter truncates to bfloat16
        found, expected = (
            kernel.dequantise_nf4(matrix, values, dtype, NF4_BLOCK, SCALES_PER_GROUP).cpu(),
            dequantise_nf4(host, dtype),
        )
        if double:  # the scale may be computed with one fused multiply-add
            torch.testing.assert_close(found, expected, atol=0, rtol=1e-6 if dtype == torch.float32 else 1e-2)
        else:
            assert torch.equal(found, expected)
