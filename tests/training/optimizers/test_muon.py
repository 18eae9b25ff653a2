"""Muon: orthogonalisation against the singular value decomposition, fused matrices, and parameters that use AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.models.decoder import Decoder
from burnish.training.optimizers.parameter_groups import FusedMatrices, fused_matrices
from burnish.training.optimizers.update_rules import MOMENTUM, NEWTON_SCHULZ, AdamW, Muon, make_optimizer, orthogonalise

CONFIG = Config(name="muon", lr=0.1)


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_svd(m: Tensor) -> Tensor:
    """U f(S) V^T with f written out for numbers."""
    u, s, v = torch.linalg.svd(m, full_matrices=False)
    a, b, c = NEWTON_SCHULZ
    s = s / s.norm()
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize("shape", [(8, 8), (6, 20), (20, 6)])
def test_every_singular_value_goes_to_about_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    m = matrix(*shape)
    found = orthogonalise(m)
    torch.testing.assert_close(found, by_svd(m), atol=1e-11, rtol=0)
    values = torch.linalg.svdvals(found)
    assert 0.68 < float(values.min()) <= float(values.max()) < 1.21
    torch.testing.assert_close(orthogonalise(1e-20 * m), found, atol=1e-11, rtol=0)


def test_small_singular_values_are_brought_up_too() -> None:
    q, _ = torch.linalg.qr(matrix(30, 30))
    p, _ = torch.linalg.qr(matrix(30, 30, 1))
    values = torch.linalg.svdvals(orthogonalise(q @ torch.logspace(-2.5, 0, 30, dtype=torch.float64).diag() @ p))
    assert 0.68 < float(values.min()) <= float(values.max()) < 1.21


def test_a_gradient_of_zero_moves_nothing() -> None:
    assert not orthogonalise(torch.zeros(4, 6)).any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_bfloat16_products_on_a_gpu_are_close_enough() -> None:
    m = matrix(256, 512).float()
    found = orthogonalise(m.cuda()).cpu()
    exact = by_svd(m.double()).float()
    assert float((found - exact).norm() / exact.norm()) < 0.03


def test_updates_are_momentum_orthogonalised_as_large_as_those_of_adamw() -> None:
    start = matrix(6, 20)
    parameter, momentum, weight = start.clone(), torch.zeros_like(start), start.clone()
    optimizer = Muon({"layers.0.out.weight": parameter}, Config(name="muon", weight_decay=0.2))
    for seed in range(1, 4):
        gradient = matrix(6, 20, seed)
        parameter.grad = gradient.clone()
        optimizer.step(0.1, 0)
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        weight = weight - 0.1 * (0.2 * math.sqrt(20) * by_svd(ahead) + 0.2 * weight)
        torch.testing.assert_close(parameter, weight, atol=1e-10, rtol=0)
    change = by_svd(ahead) * 0.2 * math.sqrt(20)
    assert 0.15 < float(change.square().mean().sqrt()) < 0.25


def test_fused_matrices_are_orthogonalised_one_by_one_in_any_order_of_rows() -> None:
    heights, gradient = [6, 2, 2], matrix(10, 8)
    apart = torch.cat([0.2 * math.sqrt(8) * by_svd(m) for m in gradient.split(heights)])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    for fused, rows in ((FusedMatrices(heights), torch.arange(10)), (FusedMatrices(heights, order), order)):
        parameter = torch.zeros(10, 8, dtype=torch.float64)
        parameter.grad = gradient[rows].clone()
        Muon({"layers.0.qkv.weight": parameter}, CONFIG, fused={"layers.0.qkv.weight": fused}).step(1.0, 0)
        torch.testing.assert_close(parameter, -apart[rows], atol=1e-10, rtol=0)


def test_the_decoder_s_fused_matrices_are_known(make_model: Callable[..., Decoder]) -> None:
    """Two query heads of 4, one key/value head, an MLP of 12."""
    assert {name: list(f.heights) for name, f in fused_matrices(make_model()).items()} == {
        "layers.0.qkv.weight": [8, 4, 4],
        "layers.0.qkv.bias": [8, 4, 4],
        "layers.0.gate_up.weight": [12, 12],
    }
    inside = nn.ModuleDict({"backbone": make_model()})
    assert set(fused_matrices(inside)) == {f"backbone.{name}" for name in fused_matrices(make_model())}


def test_embedding_head_norms_and_biases_are_adamw_s(make_model: Callable[..., Decoder]) -> None:
    def trained(name: str) -> dict[str, Tensor]:
        model = make_model()
        parameters = dict(model.named_parameters())
        optimizer = make_optimizer(model, parameters, Config(name=name, lr=0.1))
        for seed, parameter in enumerate(parameters.values()):
            parameter.grad = matrix(*(*parameter.shape, 1)[:2], seed).view(parameter.shape)
        optimizer.step(0.1, 0)
        return {key: parameter.detach() for key, parameter in parameters.items()}

    ours, theirs = trained("muon"), trained("adamw")
    moved = {name for name in ours if not torch.equal(ours[name], theirs[name])}
    assert moved == {f"layers.0.{matrix}.weight" for matrix in ("qkv", "out", "gate_up", "down")}


@pytest.mark.parametrize(
    ("name", "is_hidden"),
    [
        ("inner.model.layers.3.self_attn.q_proj.weight", True),
        ("inner.transformer.h.0.mlp.c_fc.weight", True),
        ("layers.0.qkv.lora_a", True),
        ("inner.model.embed_tokens.weight", False),
        ("inner.lm_head.weight", False),
        ("inner.transformer.wte.weight", False),
        ("backbone.embedding.weight", False),
        ("inner.score.weight", False),
    ],
)
def test_matrices_of_layers_are_known_by_name_in_other_architectures(name: str, is_hidden: bool) -> None:
    optimizer = Muon({name: torch.zeros(4, 6), "layers.0.out.weight": torch.zeros(4, 4)}, CONFIG)
    assert optimizer.is_whole(name) == is_hidden
    assert not Muon({"head": torch.zeros(1, 6), "layers.0.out.weight": torch.zeros(4, 4)}, CONFIG).is_whole("head")


def test_a_model_without_such_matrices_is_refused() -> None:
    with pytest.raises(UserError, match="no parameter that is trained is a matrix of a layer"):
        Muon({"embedding.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}, CONFIG)


def test_it_keeps_one_moment_where_adamw_keeps_two() -> None:
    parameters = {"layers.0.out.weight": torch.zeros(8, 8)}
    assert Muon(parameters, CONFIG).state_bytes() == 4 + 4 * 64
    assert AdamW(parameters, CONFIG).state_bytes() == 4 + 8 * 64
