"""Rows of sharded adapters. That a sharded layer computes what the whole one does is tested in `test_several_ranks.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.lora.adapters import add_lora
from burnish.models.weight_layout import fused_row_counts, row_order, row_order_of
from burnish.training.parallel.tensor_parallel import (
    _reorder_rows,
    apply_tensor_parallel,
    local_architecture,
    local_spans,
)

ARCH = Architecture("llama", 11, 16, 1, 4, 2, 4, 24, 32)


def test_the_outputs_of_an_adapter_are_a_ranks_share_of_the_matrices_before_it_and_of_its_own() -> None:
    heights = (16, 8, 8)  # queries, keys, values
    assert local_spans(((0, 16), (24, 32)), heights, 2) == ((0, 8), (12, 16))
    assert local_spans(((16, 24),), heights, 4) == ((4, 6),)


def test_rows_of_b_are_in_the_order_of_their_layers_and_those_of_a_as_they_are() -> None:
    model = Decoder(ARCH)
    add_lora(model, Lora(rank=2, targets=["q_proj", "v_proj", "up_proj"]), 0)
    assert row_order_of(model, "layers.0.qkv.lora_b") is None
    model.layers[0].arch = local_architecture(ARCH, 2)
    orders = {kind: row_order_of(model, f"layers.0.qkv.{kind}") for kind in ("weight", "lora_a", "lora_b")}
    assert orders["lora_a"] is None
    assert orders["weight"] is not None
    assert orders["lora_b"] is not None
    assert orders["lora_b"].tolist() == [*range(8), *range(16, 20), *range(8, 16), *range(20, 24)]
    assert orders["weight"].numel() == 32
    single = row_order_of(model, "layers.0.gate_up.lora_b")
    assert single is not None
    assert torch.equal(single, torch.arange(24))
    assert row_order_of(model, "layers.0.down.lora_b") is None
    assert row_order_of(model, "norm.weight") is None


def test_matrices_in_4_bits_are_not_cut() -> None:
    model = Decoder(ARCH)
    add_lora(model, Lora(rank=2, base="nf4"), 0)
    with pytest.raises(UserError, match=r"parallel.tensor cannot cut matrices in 4 bits"):
        apply_tensor_parallel(model, cast(Any, SimpleNamespace(size=lambda: 2)))


def test_the_frozen_weights_of_a_critic_are_put_in_order_without_the_policys() -> None:
    policy = Decoder(ARCH)
    add_lora(policy, Lora(rank=2), 0)
    weight = policy.layers[0].qkv.weight
    before, critic = weight.detach().clone(), ValueModel(policy).backbone
    assert critic.layers[0].qkv.weight.data_ptr() == weight.data_ptr()
    order = row_order(fused_row_counts(ARCH, "qkv"), 2)
    _reorder_rows(critic.layers[0].qkv, order)
    assert torch.equal(policy.layers[0].qkv.weight, before)
    assert torch.equal(critic.layers[0].qkv.weight, before[order])
    assert not critic.layers[0].qkv.weight.requires_grad
