"""Modules without memory, and the memory they are given."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.quantization.nf4_decoder import quantise_layers
from burnish.models.weight_loading import with_memory, without_memory

ARCH = Architecture("llama", 97, 64, 2, 2, 1, 32, 96, 256)


def test_tensors_keep_their_shapes_and_kinds_and_get_memory() -> None:
    with without_memory():
        model = Decoder(ARCH)
        quantise_layers(model, "nf4")
    model.embedding.weight.requires_grad_(False)
    before = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    with_memory(model, torch.bfloat16, torch.device("cpu"))
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        shape, dtype = before[name]
        assert tensor.device.type == "cpu"
        assert tensor.shape == shape
        assert tensor.dtype == (torch.bfloat16 if dtype.is_floating_point else dtype)
    assert torch.uint8 in {tensor.dtype for tensor in after.values()}
    assert not model.embedding.weight.requires_grad
    assert model.norm.weight.requires_grad
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_torchs_compiler_is_not_imported_for_it() -> None:
    """Nor the algebra it stands on: half a second, and two where there is no bytecode of it."""
    code = """
import sys, torch
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.weight_loading import with_memory, without_memory
with without_memory():
    model = Decoder(Architecture("llama", 97, 64, 2, 2, 1, 32, 96, 256))
with_memory(model, torch.bfloat16, torch.device("cpu"))
assert not {"sympy", "torch._dynamo"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
