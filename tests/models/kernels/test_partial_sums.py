"""Products cut over their inputs: parts that add up, only where a GPU has room for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from burnish.models.kernels.linear import num_parts, partial_linear, partial_products
from burnish.models.kernels.paged_attention import add_norm


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_parts_add_up_to_the_product(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (5, 7))
    found = partial_products(x, weight, parts)
    assert found.shape == (parts, 5, 7)
    torch.testing.assert_close(found.sum(0), x @ weight.t(), atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "parts"),
    [
        (256, 8960, 1536, 4),  # into the residual of a 1.5B model
        (512, 8960, 1536, 2),
        (1024, 8960, 1536, 1),
        (256, 1536, 1536, 2),
        (256, 18944, 3584, 2),
        (256, 1000, 1536, 1),  # no equal stretches
        (64, 768, 768, 1),
    ],
)
def test_a_product_is_cut_while_the_tiles_leave_processors_idle(
    rows: int, inputs: int, outputs: int, parts: int
) -> None:
    assert num_parts(rows, inputs, outputs) == parts


def test_elsewhere_a_layer_is_whole() -> None:
    layer, x = nn.Linear(8192, 128, bias=False), torch.randn(3, 8192)
    assert torch.equal(partial_linear(layer, x), layer(x))


def test_the_norm_adds_parts_up() -> None:
    x, parts, weight = torch.randn(3, 8), torch.randn(4, 3, 8), torch.rand(8)
    one, other = x.clone(), x.clone()
    torch.testing.assert_close(add_norm(one, parts, weight, 1e-6), add_norm(other, parts.sum(0), weight, 1e-6))
    torch.testing.assert_close(one, other)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cut on a GPU alone")
def test_on_a_gpu_a_layer_in_parts_is_as_exact_as_whole() -> None:
    layer = nn.Linear(8960, 1536, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 8960, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        found, whole = partial_linear(layer, x), layer(x)
        exact = x.double() @ layer.weight.double().t()
    assert found.shape == (4, 256, 1536)
    gaps = [(y.double() - exact).square().mean().sqrt() for y in (found.float().sum(0), whole)]
    assert gaps[0] < 1.2 * gaps[1]
