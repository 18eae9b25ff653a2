"""AdamW equals torch's bit for bit. On half-precision parameters small updates add up, and survive a checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.config.model import Optimizer
from burnish.training.optimizers.update_rules import AdamW

CONFIG = Optimizer(lr=1e-4)


def stepped(optimizer: AdamW, parameter: Tensor, num: int) -> None:
    for _ in range(num):
        parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step(CONFIG.lr, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_below_the_resolution_of_a_half_type_add_up(dtype: torch.dtype) -> None:
    parameter = torch.ones(3, 2, dtype=dtype)
    stepped(AdamW({"p": parameter}, CONFIG), parameter, 200)
    # Under a constant gradient every step of Adam is lr: 200 of them take 0.02 off, of which bfloat16 could take none alone.
    assert (1 - torch.tensor(1e-4)).to(torch.bfloat16) == 1
    torch.testing.assert_close(parameter, torch.full_like(parameter, 0.98), atol=2e-3, rtol=0)


def test_moments_and_master_of_a_half_type_are_float32_and_come_back() -> None:
    parameter = torch.ones(3, 2, dtype=torch.bfloat16)
    optimizer = AdamW({"p": parameter}, CONFIG)
    stepped(optimizer, parameter, 3)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    copy = parameter.clone()
    stepped(optimizer, parameter, 60)
    again = AdamW({"p": copy}, CONFIG)
    again.restore(saved)
    stepped(again, copy, 60)
    assert torch.equal(copy, parameter)
    assert all(torch.equal(t, again.tensors()[name]) for name, t in optimizer.tensors().items())


def test_a_float32_parameter_is_its_own_master() -> None:
    parameter = torch.ones(3, 2)
    optimizer = AdamW({"p": parameter}, CONFIG)
    stepped(optimizer, parameter, 1)
    assert set(optimizer.tensors()) == {"step/p", "exp_avg/p", "exp_avg_sq/p"}


def test_a_reset_keeps_the_master_of_a_half_type() -> None:
    parameter = torch.ones(3, 2, dtype=torch.bfloat16)
    optimizer = AdamW({"p": parameter}, CONFIG)
    stepped(optimizer, parameter, 3)
    master = optimizer.tensors()["master/p"].clone()
    assert not torch.equal(master.bfloat16().float(), master)
    optimizer.reset()
    assert torch.equal(optimizer.tensors()["master/p"], master)
    assert not any(t.any() for name, t in optimizer.tensors().items() if name != "master/p")


def test_a_backward_is_absorbed_once() -> None:
    parameter = torch.ones(3, 2, dtype=torch.bfloat16)
    optimizer = AdamW({"p": parameter}, CONFIG)
    for grad in (1.0, 2**-9, 2**-9):  # bfloat16 has 8 bits: 1 + 2^-9 is 1 there
        parameter.grad = torch.full_like(parameter, grad)
        optimizer.accumulate_gradients()
        optimizer.accumulate_gradients()
    assert torch.equal(optimizer.gradients()["p"], torch.full((3, 2), 1 + 2**-8))
    optimizer.zero_grad()
    assert optimizer.gradients() == {}


def test_it_is_torchs_fused_adamw_bit_for_bit() -> None:
    config = Optimizer(lr=3e-3, betas=(0.8, 0.95), eps=1e-7, weight_decay=0.1)
    torch.manual_seed(0)
    mine = {"matrix": torch.randn(7, 5), "scale": torch.randn(5), "number": torch.randn(())}
    theirs = {name: value.clone() for name, value in mine.items()}
    ours = AdamW(mine, config)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["scale"], theirs["number"]], "weight_decay": 0.0},
    ]
    peer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.8, 0.95), eps=1e-7, fused=True)
    for _ in range(5):
        for name in mine:
            mine[name].grad = torch.randn_like(mine[name])
            theirs[name].grad = mine[name].grad.clone()
        ours.step(3e-3, 0)
        peer.step()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
