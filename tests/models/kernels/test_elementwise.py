from __future__ import annotations

import math

import pytest
import torch

from burnish.models.kernels.elementwise import RMSNorm, inverse_frequencies, rotate, rotation_table

pytestmark = pytest.mark.usefixtures("either_way")


def test_a_rotation_turns_each_pair_by_position_times_frequency() -> None:
    """The rotation with complex numbers: (x_i + i x_{i + D/2}) e^{i p f_i}."""
    inverse = inverse_frequencies(8, 100.0, None)
    assert torch.allclose(inverse.double(), torch.tensor([1, 100**-0.25, 0.1, 100**-0.75], dtype=torch.float64))
    cos, sin = rotation_table(16, inverse, torch.float64)
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 15, 3, 3, 9])
    angles = positions[:, None, None] * inverse.double()
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], -1)
    assert torch.allclose(rotate(x, cos[positions], sin[positions]), expected, atol=1e-5)


def test_llama3_scaling_keeps_blends_and_stretches() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }  # fmt: skip
    plain, scaled = inverse_frequencies(8, 10000.0, None), inverse_frequencies(8, 10000.0, scaling)
    ratio = (scaled / plain).tolist()
    blend = (128 / (2 * math.pi / 0.1) - 1) / 3
    assert ratio == pytest.approx([1.0, (1 - blend) / 8 + blend, 1 / 8, 1 / 8])
    linear = inverse_frequencies(8, 10000.0, {"rope_type": "linear", "factor": 4.0})
    assert torch.allclose(linear, plain / 4)


def test_gradients_of_the_rotation_and_of_the_norm_are_right() -> None:
    generator = torch.Generator().manual_seed(0)
    cos, sin = rotation_table(5, inverse_frequencies(6, 10000.0, None), torch.float64)
    x = torch.randn(5, 2, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (x,))
    norm = RMSNorm(6, 1e-5).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6, dtype=torch.float64, generator=generator))
    assert torch.autograd.gradcheck(
        lambda x, w: torch.func.functional_call(norm, {"weight": w}, (x,)), (x, norm.weight)
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
@pytest.mark.parametrize("grad", [True, False])
def test_the_norm_divides_by_the_root_mean_square(dtype: torch.dtype, tolerance: float, grad: bool) -> None:
    x = torch.randn(7, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = RMSNorm(6, 1e-5).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(6))
    with torch.set_grad_enabled(grad):
        got = norm(x)
    assert got.dtype == dtype
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * torch.arange(6)
    assert torch.allclose(got.double(), expected, rtol=tolerance, atol=tolerance)
