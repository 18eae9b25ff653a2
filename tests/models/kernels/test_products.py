"""The products in CUDA C++: their choice of tiles, where they run, and agreement with the torch operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from burnish.models.decoder import GATED_ACTIVATIONS
from burnish.models.kernels import inference_ops
from burnish.models.kernels.cuda.products import (
    GATED_WIDTHS,
    REGISTERS_PER_THREAD,
    WARP_GROUPS,
    Tile,
    all_partial_tiles,
    all_tiles,
    choose_parts,
    choose_tile,
    gated_product,
    has_gated_product,
    has_partial_product,
    partial_product,
    product_source,
)
from burnish.models.kernels.fp8 import dequantised, quantise_rows
from burnish.models.kernels.inference_ops import gated_linear, has_gated_kernel
from tests.kernels import error, on_hopper

PROCESSORS = 132
TRUTHS = {"silu": functional.silu, "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh")}


@pytest.mark.parametrize(("rows", "outputs", "waves"), [(256, 8960, 1), (256, 18944, 2), (192, 8960, 1), (8, 4864, 1)])
def test_the_tiles_of_known_layers_end_together(rows: int, outputs: int, waves: int) -> None:
    tile = choose_tile(rows, outputs, PROCESSORS)
    tiles = -(-outputs // tile.width)
    assert rows <= tile.rows
    assert -(-tiles // PROCESSORS) == waves
    assert tiles > 0.9 * waves * PROCESSORS  # few processors are idle


def test_every_tile_fits_into_a_processor() -> None:
    for rows, (groups, blocks) in WARP_GROUPS.items():
        assert rows == 64 * groups * blocks
        threads = 128 * (groups + 1)
        at_entry = min(65536 // threads // 8 * 8, 232)  # registers of each thread at launch
        assert 24 * 128 + REGISTERS_PER_THREAD[groups] * 128 * groups <= at_entry * threads
        for width in GATED_WIDTHS:
            tile = Tile(rows, width)
            assert width % 16 == 8  # an odd multiple of eight
            assert tile.stages >= 4
            # A processor has 228 KiB and reserves one; barriers and the ring's alignment need some of the rest.
            assert tile.shared_bytes + 2 * 8 * tile.stages + 1024 <= 227 * 1024
            assert blocks * width + 24 < REGISTERS_PER_THREAD[groups]


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(256, 8960, 1536), (64, 8960, 1536), (256, 18944, 3584)])
def test_partial_products_keep_all_processors_busy_for_a_few_sums(rows: int, inputs: int, outputs: int) -> None:
    tile, parts = choose_parts(rows, inputs, outputs, PROCESSORS)
    tiles = -(-rows // tile.rows) * -(-outputs // tile.width) * parts
    waves = -(-tiles // PROCESSORS)
    assert tiles > 0.8 * waves * PROCESSORS
    assert 1 < parts <= 8
    assert tile.width % 16 == 8
    assert tile.stages >= 4
    assert tile in all_partial_tiles(1024, inputs, outputs, PROCESSORS)
    groups, blocks = WARP_GROUPS[tile.rows]
    assert blocks * tile.columns // 2 + 24 < REGISTERS_PER_THREAD[groups]


def test_a_source_is_complete() -> None:
    text = product_source(Tile(256, 72), False, "gelu_tanh")
    assert "//MULTIPLY" not in text
    assert "m64n144k16" in text
    assert "#define GELU 1" in text
    assert "#define GELU 0" in product_source(Tile(256, 72), False, "silu")
    partial = product_source(Tile(128, 120, is_gated=False), True, "none")
    assert "m64n120k32.f32.e4m3.e4m3" in partial
    assert "#define GATED 0" in partial
    assert "#define EIGHT 1" in partial


@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
def test_without_the_kernel_it_is_a_product_and_an_activation(activation: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(24, 32, bias=False), torch.randn(5, 24)
    with torch.no_grad():
        assert not has_gated_product(x, module.weight, activation)
        assert torch.equal(
            gated_linear(module, x, activation, GATED_ACTIVATIONS[activation]), GATED_ACTIVATIONS[activation](module(x))
        )


class Adapted(nn.Linear):
    """A linear layer with more than its weight."""


@pytest.mark.parametrize(
    ("module", "has_grad", "is_one"),
    [
        (nn.Linear(24, 32, bias=False), False, True),
        (nn.Linear(24, 32), False, False),
        (Adapted(24, 32, bias=False), False, False),
        (nn.Linear(24, 32, bias=False), True, False),
    ],
)
def test_only_a_plain_layer_without_gradient_is_one_kernel(
    module: nn.Linear, has_grad: bool, is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference_ops, "has_gated_product", lambda x, weight, activation: True)
    with torch.set_grad_enabled(has_grad):
        assert has_gated_kernel(module, torch.zeros(1, 24), "silu") is is_one


def test_all_tiles_of_a_run_are_known_before_it() -> None:
    known = all_tiles(16384, 8960, PROCESSORS)
    assert known[0] == Tile(64, 72)
    assert {choose_tile(rows, 8960, PROCESSORS) for rows in (1, 64, 128, 192, 256, 384, 1024, 16384)} <= set(known)


@on_hopper
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 640, 2048),
        (7, 1000, 1000),
        (17, 72, 24),
        (64, 896, 4864),
        (100, 896, 4864),
        (130, 64, 8),
        (192, 1536, 8960),
        (256, 1536, 8960),
        (300, 1536, 8960),
        (5000, 896, 4864),
    ],
)
def test_it_gives_what_the_plain_operations_give(rows: int, inputs: int, outputs: int, activation: str) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(2 * outputs, inputs, device="cuda") * inputs**-0.5).bfloat16()
    torch.full(
        (rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16
    )  # fills memory that the result may reuse
    assert has_gated_product(x, weight, activation)
    with torch.no_grad():
        found = gated_product(x, weight, activation)
        plain = GATED_ACTIVATIONS[activation](functional.linear(x, weight))
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    truth = TRUTHS[activation](gate) * up
    assert error(found, truth) < 1.02 * error(plain, truth) + 1e-5
    assert error(found, truth) < 5e-3
    assert (found == plain).float().mean() > 0.99


@on_hopper
def test_extremes_are_those_of_the_plain_operations() -> None:
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(16, 64, device="cuda", dtype=torch.bfloat16)
    values = torch.tensor([-3e4, -100, -20, -1e-3, 0, 1e-3, 20, 3e4], device="cuda").bfloat16()
    x[:, 0] = 1
    weight[:8, 0], weight[8:, 0] = values, 1
    for activation in GATED_ACTIVATIONS:
        found = gated_product(x, weight, activation)
        plain = GATED_ACTIVATIONS[activation](functional.linear(x, weight))
        assert found.isfinite().all()
        assert torch.allclose(found.float(), plain.float(), rtol=1e-2, atol=1e-6)


@on_hopper
def test_what_it_cannot_multiply_is_left_to_torch() -> None:
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    assert has_gated_product(x, weight, "silu")
    assert not has_gated_product(x.half(), weight.half(), "silu")
    assert not has_gated_product(x.T, weight, "silu")
    assert not has_gated_product(x[:0], weight, "silu")
    assert not has_gated_product(x[:, :63].contiguous(), weight[:, :63].contiguous(), "silu")
    assert not has_gated_product(x, weight[:24], "silu")
    assert not has_gated_product(x, weight, "relu")


@on_hopper
def test_it_runs_in_a_graph_with_weights_that_change() -> None:
    x = torch.randn(16, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)
    gated_product(x, weight, "silu")  # compile first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gated_product(x, weight, "silu")
    for _ in range(2):
        weight.normal_()
        x.normal_()
        graph.replay()
        assert torch.equal(out, gated_product(x, weight, "silu"))


@on_hopper
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 640, 2048),
        (7, 1008, 1000),
        (17, 80, 24),
        (100, 896, 4864),
        (192, 1536, 8960),
        (256, 1536, 8960),
        (5000, 896, 4864),
    ],
)
def test_the_gated_product_in_8_bits_is_that_of_the_rounded_factors(
    rows: int, inputs: int, outputs: int, activation: str
) -> None:
    torch.manual_seed(rows)
    x = quantise_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))
    weight = quantise_rows((torch.randn(2 * outputs, inputs, device="cuda") * inputs**-0.5).bfloat16())
    torch.full((rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert has_gated_product(x, weight, activation)
    found = gated_product(x, weight, activation)
    gate, up = (dequantised(x, torch.float64) @ dequantised(weight, torch.float64).T).chunk(2, -1)
    assert error(found, TRUTHS[activation](gate) * up) < 6e-3


@on_hopper
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [
        (1, 64, 32),
        (9, 2048, 40),
        (64, 8960, 1536),
        (130, 1536, 1536),
        (192, 8960, 1536),
        (256, 8960, 1536),
        (300, 18944, 3584),
        (2048, 8960, 1536),
    ],
)
def test_partial_products_add_up_to_the_product_of_the_rounded_factors(rows: int, inputs: int, outputs: int) -> None:
    torch.manual_seed(rows)
    x = quantise_rows(torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16))
    weight = quantise_rows((torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16())
    truth = dequantised(x, torch.float64) @ dequantised(weight, torch.float64).T
    torch.full((8, rows, outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    assert has_partial_product(x, weight)
    found = partial_product(x, weight).double()
    assert error(found.sum(0) if found.dim() == 3 else found, truth) < 6e-3
