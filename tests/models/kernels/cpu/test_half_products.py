"""Products of bfloat16 matrices in float32 on a processor without bfloat16 instructions, beside torch's and float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels import half_products
from burnish.models.kernels.half_products import MIN_ROWS, Linear
from tests.kernels import error


def set_processor(has_bfloat16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "has_bfloat16_products", lambda: has_bfloat16)


def logprobs_and_gradients(model: Decoder) -> list[Tensor]:
    """Log-probs of two packed sequences, and the gradients of all parameters."""
    offsets, generator = torch.tensor([0, 25, 70]), torch.Generator().manual_seed(0)
    tokens = torch.randint(model.arch.vocab_size, (70,), generator=generator)
    wanted = torch.cat([torch.arange(1, 25), torch.arange(26, 70)])
    logp, entropy = model.token_logprobs(tokens, offsets, wanted, with_entropy=True)
    assert entropy is not None
    model.zero_grad()
    (logp.sum() + 0.1 * entropy.sum()).backward()
    return [logp.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("tied", [True, False])
def test_float32_products_of_a_bfloat16_model_are_as_near_to_float64_as_torchs(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder(Architecture("qwen2", 67, 40, 2, 4, 2, 10, 56, 128, qkv_bias=True, tied=tied))
    initialise(model, seed=0, std=0.2)
    model.to(torch.bfloat16)
    truth = logprobs_and_gradients(copy.deepcopy(model).double())
    found = []
    for has_bfloat16 in (False, True):
        set_processor(has_bfloat16, monkeypatch)
        found.append(logprobs_and_gradients(model))
    wide, torchs = found
    assert [x.dtype for x in wide] == [x.dtype for x in torchs]
    assert len(wide) == len(truth)
    assert any(not torch.equal(a, b) for a, b in zip(wide, torchs, strict=True))
    for a, b, expected in zip(wide, torchs, truth, strict=True):
        assert error(a, expected) < max(1.2 * error(b, expected), 0.01)


def test_a_float32_product_is_the_rounded_one_and_few_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Linear(72, 50).to(torch.bfloat16)
    x = torch.randn(2 * MIN_ROWS, 72, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight, bias = layer.weight.double(), layer.bias.double()
    set_processor(False, monkeypatch)
    with torch.no_grad():
        expected = (x.double() @ weight.t() + bias).bfloat16()
        assert (layer(x) == expected).double().mean() > 0.99  # a sum between two roundings may fall on either side
        few = x[: MIN_ROWS - 1]
        assert torch.equal(layer(few), torch.nn.functional.linear(few, layer.weight, layer.bias))


def test_a_frozen_weight_saves_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    set_processor(False, monkeypatch)
    layer = Linear(24, 30, bias=False).to(torch.bfloat16)
    x = torch.randn(MIN_ROWS, 24).bfloat16().requires_grad_()
    for is_trained in (True, False):
        layer.weight.requires_grad_(is_trained)
        y = layer(x)
        first, second = y.grad_fn.saved_tensors  # type: ignore[union-attr]
        assert (first is not None) == is_trained
        assert second.data_ptr() == layer.weight.data_ptr()  # in bfloat16
        y.sum().backward()
    assert x.grad is not None
    expected = 2 * layer.weight.double().sum(0)
    assert error(x.grad[0], expected.detach()) < 0.01
