"""The dense, paged and exact engines sample with the adapter; log-probs match the learner's."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.model import Lora, LoraBase
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import adapter_weights, adapters_disabled, add_lora

SOME = Lora(rank=3, alpha=6, targets=["k_proj", "v_proj", "gate_proj"])
IN_4_BITS = SOME.model_copy(update={"base": "nf4-double"})
LORAS = {"all": Lora(rank=4, alpha=6), "some": SOME, "in 4 bits": IN_4_BITS}
LATENT = LatentShape(10, 9, 6, 4, 5)
GROUPS = ExpertShape(6, 2, 20, (False, True), False, "sigmoid", True, 3, 2, shared_size=24)
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"qk_norm": True, "experts": ExpertShape(6, 2, 20, (True, True))},
    "deepseek_v3": {"latent": LATENT, "head_dim": 10, "num_kv_heads": 4, "experts": GROUPS},
}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def adapted(model: Decoder, lora: Lora, seed: int = 1) -> Decoder:
    """A model whose adapters matter."""
    add_lora(model, lora, seed=0)
    move(model, seed)
    return model


@torch.no_grad()
def move(model: Decoder, seed: int) -> None:
    """Change the adapters as an optimizer step would, only further."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_weights(model).values():
        parameter.add_((0.2 * torch.randn(parameter.shape, generator=generator)).to(parameter))


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("options", [{"qkv_bias": True}, {"qk_norm": True, "tied": True}], ids=str)
def test_both_engines_draw_the_tokens_of_the_model_with_its_adapter(
    lora: str, options: dict[str, Any], tools: Any, native: Any, make: Any
) -> None:
    model = adapted(tools.decoder(**options), LORAS[lora])
    wanted = native.mixed_requests()
    got = tools.run(make(model, max_rows=4), wanted)
    native.agree(tools, model, got, wanted)
    with adapters_disabled(model):
        other = tools.run(make(model, max_rows=4), wanted)
        native.agree(tools, model, other, wanted)
    assert any(got[r.id].tokens.tolist() != other[r.id].tokens.tolist() for r in wanted)


@pytest.mark.parametrize("base", ["dtype", "nf4"])
@pytest.mark.parametrize("family", EXPERTS)
def test_both_engines_draw_the_tokens_of_experts_with_adapters(
    family: str, base: LoraBase, tools: Any, native: Any, make: Any
) -> None:
    """Both parts of the experts change the distribution: their adapters, and the rounding of the frozen matrices to 4 bits."""
    model = tools.decoder(family=family, **EXPERTS[family])
    before = copy.deepcopy(model)
    adapted(model, Lora(rank=4, alpha=6, targets=["gate_proj", "up_proj", "down_proj"], base=base))
    wanted = tools.requests([(3,), (9, 8, 7, 1)], 2, max_tokens=12)
    got = tools.run(make(model, max_rows=3), wanted)
    native.agree(tools, model, got, wanted)

    def furthest(other: Decoder) -> float:
        gaps = [native.learner_logp(other, r, got[r.id]) - native.learner_logp(before, r, got[r.id]) for r in wanted]
        return float(np.abs(np.concatenate(gaps)).max())

    assert furthest(model) > 0.1
    with adapters_disabled(model):
        assert (furthest(model) > 1e-3) == (base == "nf4")


def test_an_adapter_that_moved_is_read_at_the_next_request(tools: Any, native: Any, make: Any) -> None:
    model = adapted(tools.decoder(), SOME)
    engine, wanted = make(model, max_rows=4), native.mixed_requests()
    before = tools.run(engine, wanted)
    move(model, 2)
    engine.load(1, ())
    after = tools.run(engine, wanted)
    native.agree(tools, model, after, wanted)
    assert any(before[r.id].tokens.tolist() != after[r.id].tokens.tolist() for r in wanted)


@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_the_learner_sees_the_engines_very_bits(
    lora: str, device: str, dtype: torch.dtype, tools: Any, native: Any
) -> None:
    model = adapted(tools.decoder(dtype, qkv_bias=True), LORAS[lora]).to(device)
    model.exact = partial(exact_logprobs, model)
    wanted = tools.requests([(3,), (4, 5, 6), (6,) * 40, (9, 8, 7) * 6], 2, max_tokens=30)
    for rows in (2, 64):
        got = tools.run(PagedEngine(model, rows, exact=True), wanted)
        for request in wanted:
            np.testing.assert_array_equal(
                native.learner_logp(model, request, got[request.id]), got[request.id].logp, err_msg=request.id
            )
    plain = copy.deepcopy(model)
    plain.exact = None
    gap = [np.abs(native.learner_logp(plain, r, got[r.id]) - got[r.id].logp).mean() for r in wanted]
    assert max(gap) <= (1e-5 if dtype == torch.float32 else 0.1)


# --- on a GPU ------------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("lora", LORAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_read_an_adapter_that_moves_in_place(lora: str, dtype: torch.dtype, tools: Any, native: Any) -> None:
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "mlp_size": 192, "qkv_bias": True}
    model = adapted(tools.decoder(dtype, max_positions=1024, **sizes), LORAS[lora]).to("cuda")
    engine = PagedEngine(model, max_rows=4)
    wanted = tools.requests([(3,), (4, 5, 6), (6,) * 40], 2, max_tokens=20)
    seen = []
    for version in range(3):
        got = tools.run(engine, wanted)
        gap = [np.abs(got[r.id].logp - native.learner_logp(model, r, got[r.id])).mean() for r in wanted]
        # In bfloat16 so wild a model is 0.16 from float64 on average, on a CPU too; another adapter is further away.
        assert max(gap) <= (1e-5 if dtype == torch.float32 else 0.4)
        seen.append(got["2.0"].logp)
        graphs = dict(engine.runner._graphs)
        move(model, version)
        engine.load(version + 1, ())
        assert engine.runner._graphs == graphs
    assert not np.allclose(seen[0], seen[1], atol=1e-2)
    assert not np.allclose(seen[1], seen[2], atol=1e-2)


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_the_adapters_on_a_gpu_are_those_of_float64(dtype: torch.dtype, tools: Any) -> None:
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "mlp_size": 192, "qkv_bias": True}
    exact = adapted(tools.decoder(torch.float64, **sizes), LORAS["all"])
    model, twin = copy.deepcopy(exact).to("cuda", dtype), copy.deepcopy(exact).to(dtype)
    tokens = torch.randint(0, 13, (96,), generator=torch.Generator().manual_seed(0))
    offsets, wanted = torch.tensor([0, 40, 41, 96]), torch.tensor([3, 20, 39, 45, 60, 95])
    for one in (exact, model, twin):
        where = [x.to(one.embedding.weight.device) for x in (tokens, offsets, wanted)]
        one.token_logprobs(*where)[0].sum().backward()
    for name, parameter in adapter_weights(model).items():
        theirs = adapter_weights(exact)[name].grad
        assert theirs is not None
        errors = []
        for gradient in (parameter.grad, adapter_weights(twin)[name].grad):
            assert gradient is not None
            errors.append(float((gradient.cpu().double() - theirs).norm() / theirs.norm()))
        assert errors[0] <= (1e-4 if dtype == torch.float32 else 2 * errors[1] + 0.02), name
    assert all(p.grad is None for name, p in model.named_parameters() if name not in adapter_weights(model))
