"""Experts: routing against its definition and transformers, products and gradients against dense matrices, adapters and 4 bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from burnish.config.errors import UserError
from burnish.config.model import Lora, NewModel
from burnish.models.architecture import Architecture, new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import ExpertMlp, choose_experts, route
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.shared_prefix import UnshardedRows
from burnish.models.lora.adapters import adapters, adapters_disabled, add_lora, merged_tensors
from burnish.models.lora.peft_files import load_adapter, save_adapter
from burnish.models.nf4 import quantised_weights
from burnish.models.router_pass import LearnerRouting, RouterSums, router_stats
from burnish.models.weight_files import hf_tensors, load_decoder, load_tensors, save_decoder

CPU = torch.device("cpu")
SHAPE = ExpertShape(num_experts=5, experts_per_token=2, expert_size=7)
ARCH = Architecture(
    "qwen3_moe", 61, 32, 3, 4, 2, 8, 48, 64, qk_norm=True, experts=ExpertShape(6, 2, 16, (False, True, True))
)
TOKENS, OFFSETS = torch.arange(20) * 7 % 61, torch.tensor([0, 8, 20])
TinyModel = Callable[..., tuple[Any, Path]]


def made(dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(ARCH)
    initialise(model, 0, 0.3)
    return model.to(dtype)


def dense_experts(mlp: ExpertMlp, x: Tensor) -> Tensor:
    """The definition: every expert computes every token, and the weights of those that were not chosen are 0."""
    shape, scores = mlp.shape, functional.linear(x, mlp.router.weight).softmax(-1)
    best = scores.topk(shape.experts_per_token, -1)
    kept = torch.zeros_like(scores).scatter(1, best.indices, best.values)
    weights = kept / kept.sum(-1, keepdim=True)
    gate_up = mlp.gate_up.weight.view(shape.num_experts, 2, shape.expert_size, -1)
    down = mlp.down.weight.view(shape.num_experts, -1, shape.expert_size)
    gate, up = (torch.einsum("nh,esh->nes", x, gate_up[:, part]) for part in (0, 1))
    return torch.einsum("nes,ehs,ne->nh", functional.silu(gate) * up, down, weights)


def test_experts_and_their_gradients_equal_the_dense_definition() -> None:
    torch.manual_seed(0)
    mlp = ExpertMlp(12, SHAPE, swiglu).double()
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    wanted = torch.randn(9, 12, dtype=torch.float64)
    found, expected = (
        torch.autograd.grad((f(x) * wanted).sum(), [x, *mlp.parameters()])
        for f in (mlp, lambda rows: dense_experts(mlp, rows))
    )
    assert torch.allclose(mlp(x), dense_experts(mlp, x), atol=1e-12)
    for got, grad in zip(found, expected, strict=True):
        assert grad.abs().max() > 1e-3
        assert torch.allclose(got, grad, atol=1e-12)


def test_routing_by_groups_and_a_bias_equals_deepseek_v3_of_transformers() -> None:
    config = transformers.DeepseekV3Config(
        hidden_size=12, moe_intermediate_size=8, n_routed_experts=12, num_experts_per_tok=3, n_group=4, topk_group=2
    )
    theirs = DeepseekV3TopkRouter(config)
    torch.manual_seed(1)
    logits, bias = torch.randn(50, 12), 0.3 * torch.randn(12)
    theirs.e_score_correction_bias.copy_(bias)
    theirs.weight.data.copy_(torch.eye(12))
    shape = ExpertShape(
        12, 3, 8, scoring="sigmoid", has_score_bias=True, num_groups=4, chosen_groups=2,
        weight_scale=config.routed_scaling_factor,
    )  # fmt: skip
    choice, _ = route(logits, shape, bias)
    _, weights, experts = theirs(logits)
    order = [choice.experts.argsort(-1), experts.argsort(-1)]
    assert torch.equal(choice.experts.gather(1, order[0]), experts.gather(1, order[1]))
    assert torch.allclose(choice.weights.gather(1, order[0]), weights.gather(1, order[1]), atol=1e-6)
    assert not torch.equal(route(logits, shape)[0].experts, choice.experts), "the bias changes the choice"


def test_a_replayed_choice_has_the_routers_weights_and_a_gradient() -> None:
    logits = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = route(logits, SHAPE)[0]
    recorded = torch.tensor([[0, 1], [2, 3], [4, 0], [-1, -1]])
    choice = route(logits, SHAPE, replayed=recorded)[0]
    assert torch.equal(choice.experts[:3], recorded[:3])
    assert torch.equal(choice.experts[3], own.experts[3]), "without a record the router chooses"
    scores = logits.softmax(-1).gather(1, choice.experts)
    assert torch.allclose(choice.weights, scores / scores.sum(-1, keepdim=True))
    grad = torch.autograd.grad(choice.weights[:, 0].sum(), logits)[0]
    assert grad.gather(1, choice.experts).abs().min() > 0


@pytest.mark.parametrize(
    ("normalised", "replayed", "weights"),
    [
        (True, None, [0.731059, 0.268941]),
        (True, [0, 2], [0.817574, 0.182426]),
        (False, [0, 2], [0.579259, 0.12925]),
    ],
)
def test_weights_and_agreement_are_those_of_the_worked_example(
    normalised: bool, replayed: list[int] | None, weights: list[float]
) -> None:
    mlp = ExpertMlp(4, ExpertShape(4, 2, 3, normalised=normalised), swiglu)
    record = torch.tensor([[-1, -1] if replayed is None else replayed])
    routing = LearnerRouting(RouterSums.zeros(1, 4, CPU), record[:, None], replays=True)
    routing.begin(torch.tensor([0, 1]), None, UnshardedRows(torch.tensor([0])), has_exact_pass=False)
    logits = torch.tensor([[2, 1, 0.5, 0]], dtype=torch.float64)
    choice = routing.choose(mlp, logits, None)
    assert choice.weights[0].tolist() == pytest.approx(weights, abs=1e-6)
    assert choice.experts[0].tolist() == (replayed or [0, 1])
    assert routing.sums is not None
    assert router_stats(routing.sums).get("router/agreement") == (None if replayed is None else 0.5)


def test_a_model_whose_layers_are_all_dense_is_read_back_here_and_by_transformers(tmp_path: Path) -> None:
    model = Decoder(replace(ARCH, experts=None))
    initialise(model, 0, 0.3)
    save_decoder(model, tmp_path, source=None)
    found = load_decoder(tmp_path, torch.float32, CPU)
    assert found.arch.experts is None
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        ours = found.logits(found.hidden(TOKENS[:8], OFFSETS[:2]))
        torch.testing.assert_close(ours, theirs(TOKENS[None, :8]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_row_that_is_known_in_part_has_no_expert_twice(groups: int) -> None:
    shape = ExpertShape(9, 4, 8, scoring="sigmoid", num_groups=groups, chosen_groups=min(groups, 2))
    logits = torch.randn(60, 9, generator=torch.Generator().manual_seed(1))
    own = route(logits, shape)[0].experts
    unknown = torch.rand(own.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    recorded = own.flip(0).masked_fill(unknown, -1)  # experts of other tokens
    chosen = route(logits, shape, replayed=recorded)[0].experts
    assert torch.equal(chosen[~unknown], recorded[~unknown])
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    best = choose_experts(logits.sigmoid(), shape)
    for row, known, ranked in zip(chosen.tolist(), recorded.tolist(), best.tolist(), strict=True):
        open_slots = [expert for expert, before in zip(row, known, strict=True) if before < 0]
        free = [expert for expert in ranked if expert not in known]
        assert open_slots[: len(free)] == free[: len(open_slots)], "the best of those that the row has not"


@pytest.mark.parametrize("base", ["dtype", "nf4"])
def test_adapters_of_experts_equal_merged_weights_with_their_gradients(base: Any, tmp_path: Path) -> None:
    model, lora = made(), Lora(rank=3, alpha=6, base=base)
    plain = made()
    add_lora(model, lora, seed=0)
    assert len(quantised_weights(model)) == (12 if base == "nf4" else 0)
    with torch.no_grad():
        for _, _, _, b in adapters(model):
            b.normal_(std=0.3, generator=torch.Generator().manual_seed(2))
    load_tensors(plain, merged_tensors(model), "merged")
    wanted = torch.arange(1, 8)
    found, expected = (m.token_logprobs(TOKENS, OFFSETS, wanted)[0] for m in (model, plain))
    assert torch.allclose(found, expected, atol=1e-5 if base == "nf4" else 1e-10)
    found.sum().backward()
    expected.sum().backward()
    for index, target, _, b in adapters(model):
        module: Any = model.layers[index].get_submodule(target.module)
        whole: Any = plain.layers[index].get_submodule(target.module)
        place = next(i for i, (start, _) in enumerate(module.spans) if start == target.start)
        grad = module.lora_a.grad[place * 3 : place * 3 + 3]
        through = lora.scale * b.t() @ whole.weight.grad[target.start : target.stop]
        assert torch.allclose(grad, through, atol=1e-5 if base == "nf4" else 1e-10), target.path
    names = {target.path for index, target, _, _ in adapters(model) if index == 1}
    assert {"mlp.experts.0.gate_proj", "mlp.experts.5.down_proj", "self_attn.q_proj"} < names
    with adapters_disabled(model), torch.no_grad():
        assert not torch.allclose(model.token_logprobs(TOKENS, OFFSETS, wanted)[0], found)
    if base == "dtype":
        save_adapter(model, tmp_path, None)
        again = made()
        add_lora(again, lora, seed=5)
        load_adapter(again, tmp_path)
        assert torch.equal(again.token_logprobs(TOKENS, OFFSETS, wanted)[0], found)


@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral", "olmoe"])
def test_a_published_directory_is_written_as_it_was_read(tiny_model: TinyModel, tmp_path: Path, variant: str) -> None:
    theirs, directory = tiny_model(variant)
    ours = load_decoder(directory, torch.float32, CPU)
    assert any(".experts.0." in name for name, _ in hf_tensors(ours)), "one tensor for each expert, as published"
    save_decoder(ours, tmp_path, source=directory)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_experts_of_a_new_model_are_checked() -> None:
    arch = new_architecture(NewModel(family="qwen3_moe", experts=[16, 4, 20]), 61)
    assert arch.experts == ExpertShape(16, 4, 20)
    assert arch.num_active_parameters < arch.num_parameters == sum(p.numel() for p in Decoder(arch).parameters())
    with pytest.raises(UserError, match="family llama has no experts"):
        new_architecture(NewModel(experts=[16, 4, 20]), 61)
    with pytest.raises(UserError, match="5 experts compute a token, and there are 4"):
        new_architecture(NewModel(family="olmoe", experts=[4, 5, 20]), 61)
