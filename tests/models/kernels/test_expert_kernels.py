"""The kernels of experts against plain torch.

Triton kernels run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import ExpertMlp, dispatch
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
