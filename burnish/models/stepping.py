"""One new token a row through the decoder on a CPU, without gradient.

The arithmetic of `Decoder.forward` in fewer and cheaper calls: for a hundred rows of a small model the calls cost as much as what
they compute. Views of the weights, as a product reads them, are made once for many steps, and what a layer adds goes into
the residual in place. A test holds it to the decoder's forward for every family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder, Layer
from burnish.models.ops.norm import RMSNorm, rms_norm
from burnish.models.ops.split import Attend

Project = Callable[[Tensor], Tensor]


def step_of(model: Decoder) -> Callable[[Tensor, Tensor, Attend, int], Tensor]:
    """The forward pass of a model for one token a row: in fewer calls where it is the decoder's own."""
    return Steps(model) if type(model).forward is Decoder.forward else model


class Steps:
    """A model's forward pass, for as long as its modules are the same ones; weights may be written to in place."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.layers = [_LayerStep(cast(Layer, layer)) for layer in model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        """Final hidden states [N, hidden], as `Decoder.forward` gives them."""
        model, turns = self.model, dict[bool, tuple[Tensor, Tensor]]()
        x = model.embedded(tokens)
        for index, layer in enumerate(self.layers):
            is_local = model.arch.is_local(index)
            if is_local not in turns:
                cos, sin = model.rotations(num_positions, index)
                turns[is_local] = cos[positions], sin[positions]
            layer.add_to(x, *turns[is_local], attend)
        return _normed(model.norm, x)


class _LayerStep:
    """A layer with its products at hand."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.qkv, self.out = _project(layer.qkv), _project(layer.out)
        self.gate_up, self.down = _project(layer.gate_up), _project(layer.down)

    def add_to(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """What the layer makes of its input [N, hidden] is added to it."""
        layer, has_out_norms = self.layer, self.layer.arch.out_norms
        qk, v = layer.heads(self.qkv(_normed(layer.attention_norm, x)))
        attended = self.out(layer.mix(layer.rotated(qk, cos, sin), v, attend))
        x += _normed(layer.attention_out_norm, attended) if has_out_norms else attended
        computed = self.down(layer.gated(self.gate_up(_normed(layer.mlp_norm, x))))
        x += _normed(layer.mlp_out_norm, computed) if has_out_norms else computed


def _project(module: nn.Linear) -> Project:
    """A linear layer on rows [N, in]; by views of its tensors where it is no more than that."""
    if type(module) is not nn.Linear:
        return module
    weight = module.weight.detach().t()
    if module.bias is None:
        return lambda x: torch.mm(x, weight)
    bias = module.bias.detach()
    return lambda x: torch.addmm(bias, x, weight)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    assert norm.eps is not None
    return rms_norm(x, norm.weight, norm.eps, norm.shift)
