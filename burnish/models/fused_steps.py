"""One new token a row through a small decoder on a CPU, in one call of a C kernel (`ops/cpu/decode.c`).

The arithmetic of `Decoder.forward` and its output head. For a hundred rows of a small model torch's calls cost as much as what they
compute, and threads that meet in each of them wait for each other; here they meet once a step. The kernel reads copies of
the weights in an order of its own, so it is for models whose copy is small; it is made anew whenever weights were written.
"""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder, Layer
from burnish.models.ops.attention import window_of
from burnish.models.ops.cpu.build import kernels, num_threads

MOST_PARAMETERS = 1 << 24
"""Larger models gain nothing: their time is in the products, and a copy would cost memory."""

Pointer, Long = ctypes.c_void_p, ctypes.c_long


class _Linear(ctypes.Structure):
    _fields_ = [("weight", Pointer), ("bias", Pointer)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, _Linear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Pointer) for name in ("cos", "sin", "keys", "values")),
        ("window", Long),
    ]  # fmt: skip


class _Decoder(ctypes.Structure):
    _fields_ = [
        *((name, Long) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab", "is_gelu")),
        *((name, ctypes.c_double) for name in ("eps", "shift", "query_scale", "embedding_scale")),
        ("embedding", Pointer), ("norm", Pointer), ("head", _Linear), ("layers", ctypes.POINTER(_Layer)),
    ]  # fmt: skip


def fused_steps(model: Decoder) -> FusedSteps | None:
    """The model's steps in one call each; None where it is too large, not all its own, or there is no kernel."""
    is_plain = type(model).forward is Decoder.forward and all(type(linear) is nn.Linear for linear in _linears(model))
    parameters = list(model.parameters())
    is_small = sum(p.numel() for p in parameters) <= MOST_PARAMETERS
    is_followed = not any(p.is_inference() for p in parameters)  # those do not tell whether they were written
    library = kernels(*parameters) if is_plain and is_small and is_followed else None
    return None if library is None else FusedSteps(model, library)


class FusedSteps:
    """A model's steps, for as long as its modules are the same ones; weights may be written to in place."""

    def __init__(self, model: Decoder, library: ctypes.CDLL) -> None:
        self.model, self.library = model, library
        library.decode_room.restype = library.panel_width.restype = Long
        self.panel = library.panel_width()
        self.packed: dict[int, Tensor] = {}
        self.parameters = list(model.parameters())
        self.places = _places(model)
        self.seen = self._written()
        self.layers = (_Layer * model.arch.num_layers)()
        self.decoder = self._describe()
        self.space = torch.empty(0, dtype=model.embedding.weight.dtype)

    def __call__(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, longest: int) -> Tensor:
        """Logits [n, vocab] of the token after each row's last, [n] tokens at their positions, `longest` the greatest.

        Keys are [layers, rows, kv_heads, head_dim, capacity], values [layers, rows, kv_heads, capacity, head_dim].
        """
        self.refresh()
        for index, layer in enumerate(self.layers):
            cos, sin = self.model.rotations(longest + 1, index)
            layer.cos, layer.sin = cos.data_ptr(), sin.data_ptr()
            layer.keys, layer.values = keys[index].data_ptr(), values[index].data_ptr()
        threads, room = num_threads(), self.library.decode_room(ctypes.byref(self.decoder), Long(longest))
        if self.space.numel() < threads * room:
            self.space = self.space.new_empty(threads * room)
        logits = self.space.new_empty(tokens.shape[0], self.decoder.vocab)
        self.library.decode(
            ctypes.byref(self.decoder), Long(tokens.shape[0]), Pointer(tokens.data_ptr()), Pointer(positions.data_ptr()),
            Long(keys.shape[-1]), Pointer(logits.data_ptr()), Pointer(self.space.data_ptr()), Long(room), Long(threads),
        )  # fmt: skip
        return logits

    @property
    def is_current(self) -> bool:
        """Whether the model's parameters are those it was made of, and where they were."""
        return _places(self.model) == self.places

    def refresh(self) -> None:
        """Copy the weights again if any was written since."""
        written = self._written()
        if written == self.seen:
            return
        for linear in _linears(self.model):
            self._pack(linear.weight)
        self._pack(self.model.head_weight)
        self.seen = written

    def _written(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _pack(self, weight: Tensor) -> int:
        """The kernel's copy of a matrix; its address."""
        outputs, inputs = weight.shape
        into = self.packed.get(id(weight))
        if into is None:
            self.packed[id(weight)] = into = weight.new_empty(-(-outputs // self.panel) * self.panel * inputs).detach()
        self.library.pack(Pointer(weight.data_ptr()), Pointer(into.data_ptr()), Long(outputs), Long(inputs))
        return into.data_ptr()

    def _linear(self, linear: nn.Linear) -> _Linear:
        return _Linear(self._pack(linear.weight), None if linear.bias is None else linear.bias.data_ptr())

    def _describe(self) -> _Decoder:
        model, arch = self.model, self.model.arch
        for index, (entry, module) in enumerate(zip(self.layers, model.layers, strict=True)):
            layer = cast(Layer, module)
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(entry, name, self._linear(getattr(layer, name)))
            for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm"):
                norm = getattr(layer, name, None)
                setattr(entry, name, None if norm is None else norm.weight.data_ptr())
            entry.window = window_of(arch.windows, index) or 0
        scale = arch.hidden_size**0.5 if arch.scaled_embedding else 1.0
        return _Decoder(
            arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.mlp_size, arch.vocab_size,
            arch.activation == "gelu_tanh", arch.norm_eps, arch.norm_shift, arch.query_scale, scale,
            model.embedding.weight.data_ptr(), model.norm.weight.data_ptr(), _Linear(self._pack(model.head_weight), None), self.layers,
        )  # fmt: skip


def _places(model: Decoder) -> list[tuple[int, int]]:
    return [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]


def _linears(model: Decoder) -> list[nn.Linear]:
    """The matrices of all layers."""
    layers = [cast(Layer, layer) for layer in model.layers]
    return [module for layer in layers for module in (layer.qkv, layer.out, layer.gate_up, layer.down)]
