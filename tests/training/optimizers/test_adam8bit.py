"""8-bit Adam: precision and unbiasedness of its moments, their memory, and the distance to AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.training.optimizers.stochastic_rounding import block_size, dequantise, quantise
from burnish.training.optimizers.update_rules import Adam8bit
from tests.training.optimizers.toy_regression import regression


def coded(numbers: Tensor, signed: bool, seed: int = 0) -> Tensor:
    codes, scales = quantise(numbers, signed, torch.Generator().manual_seed(seed))
    assert codes.dtype == torch.uint8
    assert codes.shape == numbers.shape
    return dequantise(codes, scales, signed)


def spread(rows: int, columns: int, seed: int = 0) -> Tensor:
    """Numbers over four decades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(2 * torch.randn(rows, columns, generator=generator))


@pytest.mark.parametrize(("columns", "size"), [(1536, 256), (896, 224), (300, 150), (257, 1), (16, 16), (1, 1)])
def test_blocks_divide_a_row(columns: int, size: int) -> None:
    assert block_size(columns) == size


@pytest.mark.parametrize(("signed", "mantissa"), [(True, 3), (False, 4)])
def test_a_number_is_rounded_to_one_of_its_neighbours(signed: bool, mantissa: int) -> None:
    numbers = spread(16, 512)
    if signed:
        numbers = numbers * torch.randn(numbers.shape, generator=torch.Generator().manual_seed(1)).sign()
    error = (coded(numbers, signed) / numbers - 1).abs()
    scale = numbers.view(16, 2, 256).abs().amax(2, keepdim=True).expand(16, 2, 256).reshape(16, 512)
    error = error[numbers.abs() > scale * 2**-15]
    assert float(error.max()) <= 2**-mantissa
    assert float(error.mean()) < 2 ** -(mantissa + 1)
    assert torch.equal(coded(numbers, signed)[numbers.abs() == scale], numbers[numbers.abs() == scale]), "the largest"


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_is_right_on_average(signed: bool) -> None:
    numbers = spread(1, 256)
    mean = torch.stack([coded(numbers, signed, seed) for seed in range(3000)]).double().mean(0)
    level = numbers * 2.0 ** (-3 if signed else -4)  # the distance of neighbours, at most
    large = numbers > numbers.max() * 2**-15
    assert float(((mean - numbers).abs() / level)[large].max()) < 5 * 0.5 / math.sqrt(3000)


def test_zeros_stay_zeros_and_a_small_second_moment_does_not_become_one() -> None:
    zeros = torch.zeros(2, 256)
    assert not coded(zeros, True).any()
    assert not coded(zeros, False).any()
    row = torch.zeros(1, 256)
    row[0, :2] = torch.tensor([1.0, 1e-9])
    assert torch.equal(coded(row, True)[0, 2:], torch.zeros(254))
    assert float(coded(row, False)[0, 1]) == pytest.approx(2**-15.9375, rel=0.05)


def test_codes_and_scales_can_be_cut_by_rows() -> None:
    """So a state is divided among ranks, or put together again, as its parameter is."""
    numbers = spread(6, 300)
    codes, scales = quantise(numbers, False, torch.Generator().manual_seed(0))
    _, above = quantise(numbers[:4], False, torch.Generator().manual_seed(0))
    assert torch.equal(scales[:4], above)
    assert torch.equal(dequantise(codes[4:], scales[4:], False), dequantise(codes, scales, False)[4:])


def test_second_moments_fall_as_well_as_they_rise() -> None:
    """In a thousand updates with beta 0.999; rounded to nearest they would never move by a thousandth."""
    numbers = spread(8, 256)
    expected = numbers.clone()
    root = numbers.sqrt()
    generator = torch.Generator().manual_seed(0)
    for update in range(1000):
        gradient = torch.randn(8, 256, generator=generator) * 0.1 * numbers.sqrt()
        expected = 0.999 * expected + 0.001 * gradient.square()
        root = coded((0.999 * root.square() + 0.001 * gradient.square()).sqrt(), False, update)
    ratio = root.square() / expected
    assert 0.97 < float(ratio.median()) < 1.03
    assert float(ratio.log().std()) < 0.3


def test_updates_point_where_those_of_adamw_do() -> None:
    """Gradients of very different sizes in one block, where a moment rounded to zero would divide by nothing."""
    scale = spread(16, 256)
    generator = torch.Generator().manual_seed(1)
    m = v = torch.zeros(16, 256, dtype=torch.float64)
    parameter = torch.zeros(16, 256)
    optimizer = Adam8bit({"w": parameter}, Config(name="adam8bit", lr=1.0))
    for update in range(1, 301):
        gradient = scale * (torch.randn(16, 256, generator=generator) + 0.3)
        parameter.grad = gradient
        before = parameter.clone()
        optimizer.step(1.0, update)
        m, v = 0.9 * m + 0.1 * gradient.double(), 0.999 * v + 0.001 * gradient.double() ** 2
        ours = (before - parameter).flatten().double()
        theirs = ((m / (1 - 0.9**update)) / ((v / (1 - 0.999**update)).sqrt() + 1e-8)).flatten()
        assert float(torch.cosine_similarity(ours, theirs, 0)) > 0.97, update
        assert 0.95 < float(ours.norm() / theirs.norm()) < 1.1, update


def test_it_learns_as_fast_as_adamw() -> None:
    exact, bytes_ = (regression(name, 0.01, 120) for name in ("adamw", "adam8bit"))
    for update in (30, 60, 90):
        assert bytes_[update] == pytest.approx(exact[update], rel=0.15)


def test_a_moment_takes_a_byte_and_a_sixty_fourth() -> None:
    parameter = torch.zeros(64, 512)
    optimizer = Adam8bit({"w": parameter}, Config(name="adam8bit"))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3, 0)
    state = optimizer.tensors()
    assert sum(t.numel() * t.element_size() for t in state.values()) == 4 + 2 * parameter.numel() * (1 + 4 / 256)


@pytest.mark.parametrize("shape", [(4096,), (63, 64), (1024, 7), (20, 257)])
def test_vectors_small_matrices_and_rows_that_do_not_divide_keep_float32(shape: tuple[int, ...]) -> None:
    parameter = torch.zeros(shape)
    optimizer = Adam8bit({"w": parameter, "large": torch.zeros(64, 64)}, Config(name="adam8bit"))
    assert {dtype for _, dtype in optimizer.layout("w").values()} == {torch.float32}
    with pytest.raises(UserError, match="no parameter that is trained is a matrix of 4096 numbers"):
        Adam8bit({"w": parameter}, Config(name="adam8bit"))


def test_weight_decay_is_that_of_adamw() -> None:
    parameter = torch.ones(64, 256)
    optimizer = Adam8bit({"w": parameter}, Config(name="adam8bit", weight_decay=0.5))
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, 0)
    assert torch.equal(parameter, torch.full_like(parameter, 0.95))
