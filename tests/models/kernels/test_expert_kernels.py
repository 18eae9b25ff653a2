"""The kernels of experts against plain torch.

Triton kernels run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from burnish.models import experts
from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import MAX_DECODE_ROWS, ExpertMlp, choose_experts, dispatch
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.grouped_products import expert_spans
from tests.kernels import CUDA, DEVICE, error, kernel

on_gpu = pytest.mark.skipif(not CUDA, reason="torch._grouped_mm and CUDA graphs need a GPU")


def choices(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    """Two experts for each token; the second expert and the last have no token."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.tensor([e for e in range(num_experts - 1) if e != 1])
    picks = [allowed[torch.randperm(len(allowed), generator=generator)[:2]] for _ in range(num_tokens)]
    return torch.stack(picks).to(DEVICE)


def plain(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    product = rows.new_zeros(rows.shape[0], matrices.shape[1])
    for expert, span in expert_spans(ends):
        product[span] = rows[span] @ matrices[expert].t()
    return product


@kernel
@pytest.mark.parametrize(("num_tokens", "size", "depth"), [(3, 20, 24), (75, 130, 70)])
def test_the_grouped_product_and_the_sum_over_slots(num_tokens: int, size: int, depth: int) -> None:
    from burnish.models.kernels.triton import expert_kernels

    generator = torch.Generator().manual_seed(1)
    way = dispatch(choices(num_tokens, 6), 6)
    rows = torch.randn(2 * num_tokens, depth, generator=generator).to(DEVICE)
    matrices = torch.randn(6, size, depth, generator=generator).to(DEVICE)
    found, expected = expert_kernels.grouped_product(rows, matrices, way.ends), plain(rows, matrices, way.ends)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    # A row has the same bits with other rows beside it.
    few = dispatch(choices(num_tokens, 6)[:2], 6)
    alone = expert_kernels.grouped_product(rows[way.rows[:2].flatten()][few.slots], matrices, few.ends)
    assert torch.equal(alone, found[way.rows[:2].flatten()][few.slots])
    summed = expert_kernels.sum_slots(found, way.rows)
    torch.testing.assert_close(summed, found[way.rows[:, 0]] + found[way.rows[:, 1]], atol=1e-6, rtol=1e-6)


# --- decode kernels ------------------------------------------------------------------------------------------------------

HALF = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]
"""Triton's interpreter has no bfloat16."""


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("num_experts", "chosen", "normalised"), [(6, 2, True), (20, 3, False), (8, 8, True)])
def test_the_chosen_experts_are_those_of_float64(
    num_experts: int, chosen: int, normalised: bool, dtype: torch.dtype
) -> None:
    from burnish.models.kernels.triton import expert_decode

    # Scores far enough apart for all types; equal ones go to the expert with the lower number.
    order = torch.stack([torch.randperm(num_experts, generator=torch.Generator().manual_seed(i)) for i in range(7)])
    logits = (0.25 * order).to(dtype)
    logits[3] = 0.5
    found, weights = expert_decode.route(logits.to(DEVICE), chosen, normalised, 1.5)
    scores = logits.double().softmax(1)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :chosen]
    assert torch.equal(found.cpu(), best)
    expected = scores.gather(1, best)
    expected = 1.5 * (expected / expected.sum(1, keepdim=True) if normalised else expected)
    torch.testing.assert_close(weights.cpu().double(), expected, atol=1e-6, rtol=1e-6)


@kernel
@pytest.mark.parametrize("num_tokens", [1, 75, 600])
def test_rows_are_sorted_as_by_a_stable_sort(num_tokens: int) -> None:
    """1,200 pairs are more than one block of the kernel."""
    from burnish.models.kernels.triton import expert_decode

    chosen = choices(num_tokens, 6)
    for found, expected in zip(expert_decode.sort_pairs(chosen, 6), dispatch(chosen, 6), strict=True):
        assert torch.equal(found, expected)


@kernel
@pytest.mark.parametrize("rows", [4, 16, 32, 64, 128])
def test_the_products_of_each_tile_are_those_of_float64(rows: int) -> None:
    """Sizes are no multiples of a tile, and the experts have 0 to many rows."""
    from burnish.models.kernels.triton import expert_decode

    generator = torch.Generator().manual_seed(3)
    num_tokens, size, depth = 75, 70, 150
    way, weights = dispatch(choices(num_tokens, 6), 6), torch.rand(num_tokens, 2, generator=generator).to(DEVICE)
    x = torch.randn(num_tokens, depth, generator=generator).to(DEVICE, torch.float16)
    gate_up, down = (
        (0.1 * torch.randn(6, *sizes, generator=generator)).to(DEVICE, torch.float16)
        for sizes in ((2 * size, depth), (depth, size))
    )
    tile = expert_decode.GATE_UP_TILES[rows]
    found = expert_decode.gate_up(x, gate_up, weights, way.tokens, way.slots, way.ends, tile)
    gate, up = plain(x[way.tokens].double(), gate_up.double(), way.ends).chunk(2, 1)
    assert error(found, nn.functional.silu(gate) * up * weights.double().flatten()[way.slots, None]) < 2e-3
    product = expert_decode.down(found, down, way.ends, expert_decode.DOWN_TILES[rows])
    assert error(product, plain(found.double(), down.double(), way.ends)) < 1e-3


SHAPES = {
    "qwen3_moe": ExpertShape(6, 2, 20),
    "olmoe": ExpertShape(20, 3, 36, normalised=False),
    "deepseek_v3": ExpertShape(8, 3, 20, None, True, "sigmoid", True, 4, 2, 2.5),
}


@kernel
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_that_infers_with_the_kernels_equals_float64(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from burnish.models.kernels.triton import expert_decode

    monkeypatch.setattr(experts, "use_triton", lambda x: True)  # in the interpreter, tensors are on the CPU
    called = []
    for kernels in ("gate_up", "down"):
        run = getattr(expert_decode, kernels)
        monkeypatch.setattr(expert_decode, kernels, lambda *a, name=kernels, run=run: called.append(name) or run(*a))
    shape = SHAPES[name]
    torch.manual_seed(4)
    mlp = ExpertMlp(48, shape, swiglu).to(DEVICE, dtype).requires_grad_(False)
    for matrices in (mlp.gate_up, mlp.down):
        matrices.weight.normal_(std=0.3)
    if shape.has_score_bias:
        mlp.score_bias.normal_(std=0.1)
    for num_tokens in (1, 33):
        x = torch.randn(num_tokens, 48, device=DEVICE, dtype=dtype)
        found = mlp.infer(x)
        assert error(found, float64_layer(mlp, x)) < (3e-3 if dtype == torch.float16 else 2e-2)
    assert called == ["gate_up", "down"] * 2
    many = MAX_DECODE_ROWS * shape.num_experts // shape.experts_per_token + 1
    x = torch.randn(many, 48, device=DEVICE, dtype=dtype)
    monkeypatch.setattr(mlp, "forward", lambda x: called.append("torch") or x)
    mlp.infer(x)
    assert called[4:] == ["torch"]


def float64_layer(mlp: ExpertMlp, x: Tensor) -> Tensor:
    """One expert of one token after another. The logits are the layer's own: their rounding may change the choice."""
    shape, wide = mlp.shape, x.double()
    logits = mlp.router(x).double()
    scores = logits.softmax(1) if shape.scoring == "softmax" else logits.sigmoid()
    chosen = choose_experts(scores, shape, mlp.score_bias.double() if shape.has_score_bias else None)
    weights = scores.gather(1, chosen)
    weights = shape.weight_scale * (weights / weights.sum(1, keepdim=True) if shape.normalised else weights)
    out = torch.zeros_like(wide)
    gate_up, down = mlp.gate_up.matrices().double(), mlp.down.matrices().double()
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            gate, up = (gate_up[expert] @ wide[token]).chunk(2)
            out[token] += weight * (down[expert] @ (nn.functional.silu(gate) * up))
    return out


@on_gpu
def test_experts_on_a_gpu_equal_those_of_float64_and_run_in_a_graph() -> None:
    mlp = ExpertMlp(128, ExpertShape(8, 2, 64), swiglu).to("cuda", torch.bfloat16)
    truth = ExpertMlp(128, ExpertShape(8, 2, 64), swiglu).double()
    truth.load_state_dict({name: t.double().cpu() for name, t in mlp.state_dict().items()})
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    wide = x.detach().double().cpu().requires_grad_()
    choice = mlp.choose(mlp.router(x))
    own = truth.choose(truth.router(wide))._replace(experts=choice.experts.cpu())
    weights = truth.router(wide).softmax(-1).gather(1, own.experts)
    expected = truth.compute(wide, own._replace(weights=weights / weights.sum(-1, keepdim=True)))
    found = mlp.compute(x, choice)
    assert error(found.detach().cpu(), expected.detach()) < 2e-2
    found.float().square().sum().backward()
    expected.square().sum().backward()
    for (name, mine), (_, theirs) in zip(mlp.named_parameters(), truth.named_parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert error(mine.grad.cpu(), theirs.grad) < 5e-2, name
    with torch.inference_mode():
        static = x.detach().clone()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            mlp(static)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = mlp(static)
        static.copy_(torch.randn_like(static))
        graph.replay()
        assert torch.equal(replayed, mlp(static))
