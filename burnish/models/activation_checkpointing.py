"""What of a layer's forward pass waits for the backward pass, and what is made again there: memory against time.

Bytes per token and layer, `b` the bytes of a number, h the width of the residual stream, q and k the widths of all query and
of all key heads, H the number of query heads, m the width of the MLP; attention and activation by the kernels of a GPU, in a
half type (`memory_plan/planner.py` has the same for every device and type, a test counts):

    keep       b (4 h + 3 q + 3 k + 3 m) + 4 (H + 2)    everything that a formula of the backward pass reads
    selective  b (2 h + 2 q + 2 k + 2 m) + 4 H          results of matmuls and of attention; norms, rotations and gates again
    recompute  b h                                      the layer's input; its whole forward again, a third more arithmetic
    offload    0                                        as recompute, the inputs in pinned host memory

and with the last two one layer's `keep` once, for the layer that is being differentiated. Samples that share a prompt
(`models/kernels/shared_prefix.py`) keep another 2 k b for each token of the packing, except with the last two. With a norm on queries and keys
`keep` has 4 more for every such head. Gradients are the same to the bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from burnish.config.errors import UserError
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.shared_prefix import Attend

# --- Forward results that are made again in the backward pass instead of being kept.
#
# Autograd asks a pair of hooks what to keep of every tensor that a backward formula needs. Here it keeps a number, and the
# stretch of forward that made the tensor runs again when the first of them is asked for. `recomputed` does that with all that
# a function saves. `lent` does it with a cheap function whose result an expensive one reads: the expensive one runs once.
#
# torch.utils.checkpoint does the former too, but imports the compiler for it, seconds of every start, and always runs
# everything that comes before the last tensor needed.

InputsGetter = Callable[[], tuple[Any, ...]]
"""The inputs of a stretch, from wherever they wait."""


class _AllRecomputed(Exception):
    """All tensors that were saved have been made again."""


class _Recomputation:
    """A function run once in the forward pass, and again in the backward pass for what it saved and gave."""

    def __init__(self, function: Callable[..., Tensor], inputs: InputsGetter) -> None:
        self.function, self.inputs = function, inputs
        self.num_saved = 0
        self.is_lent = False
        self.saved: list[Tensor | None] | None = None
        self.result: Tensor | None = None

    def pack(self, tensor: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def unpack(self, index: int) -> Tensor:
        self.run_again()
        assert self.saved is not None
        tensor, self.saved[index] = (
            self.saved[index],
            None,
        )  # its memory goes when the formula that asked is done with it
        if tensor is None:
            raise RuntimeError("a saved tensor was read twice; an autograd function must read ctx.saved_tensors once")
        return tensor

    def run_again(self) -> None:
        """Once; what is found is there until the last formula that needs it has run."""
        if self.saved is not None:
            return
        found: list[Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            found.append(tensor.detach())
            # Formulas save what they read before they compute: after the last one nothing is worth computing.
            if len(found) == self.num_saved and not self.is_lent:
                raise _AllRecomputed

        def unpack(nothing: None) -> Tensor:
            raise RuntimeError("the graph of a forward that runs again has no backward")

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                result = self.function(*self.inputs())
            self.result = result.detach() if self.is_lent else None
        except _AllRecomputed:
            pass
        if len(found) != self.num_saved:
            raise RuntimeError(f"a forward saved {self.num_saved} tensors, and {len(found)} when it ran again")
        self.saved = found


def detached_leaf(x: Any) -> Any:
    """A tensor without its history, which asks for a gradient if it did; anything else as it is."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def checkpointed(function: Callable[..., Tensor], *inputs: Any, held: InputsGetter | None = None) -> Tensor:
    """function(*inputs), of which the backward pass keeps the inputs alone, or what `held` gives for them."""
    if held is None:
        leaves = tuple(detached_leaf(x) for x in inputs)
        held = lambda: leaves  # noqa: E731
    stretch = _Recomputation(function, held)
    with saved_tensors_hooks(stretch.pack, stretch.unpack):
        return function(*inputs)


@contextmanager
def recomputed_output(function: Callable[..., Tensor], *inputs: Any) -> Iterator[Tensor]:
    """function(*inputs) for the operations of a `with` block, which do not keep it: it is made again when they need it."""
    leaves = tuple(detached_leaf(x) for x in inputs)
    stretch = _Recomputation(function, lambda: leaves)
    stretch.is_lent = True
    with saved_tensors_hooks(stretch.pack, stretch.unpack):
        result = function(*inputs)
    place, borrowers = result.untyped_storage().data_ptr(), 0

    def pack(tensor: Tensor) -> Any:
        nonlocal borrowers
        if tensor.untyped_storage().data_ptr() != place:
            return tensor
        borrowers += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        nonlocal borrowers
        if isinstance(packed, Tensor):
            return packed
        stretch.run_again()
        if stretch.result is None:
            raise RuntimeError("a lent tensor was read twice; an autograd function must read ctx.saved_tensors once")
        found = stretch.result.as_strided(*packed)
        borrowers -= 1
        if not borrowers:  # the function's own backward, which comes next, does not need it
            stretch.result = None
        return found

    with saved_tensors_hooks(pack, unpack):
        yield result


# --- Tensors that wait in host memory between the forward and the backward pass.
#
# On a GPU both copies run on a stream of their own beside the arithmetic: a tensor leaves while the next layer computes, and
# comes back while the layer after it, which the backward pass reaches first, is differentiated. Elsewhere a copy is made at
# once, so that the same code can be tested.


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class OffloadedTensor:
    """A tensor in host memory; `before` is the one that went before it, and will be wanted after it."""

    def __init__(self, tensor: Tensor, before: OffloadedTensor | None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self._source: Tensor | None = None
        self._coming: Tensor | None = None
        self.device = tensor.device
        if not tensor.is_cuda:
            self.host = tensor.to("cpu", copy=True)
            return
        if before is not None:
            before._gone()
        side = _side_stream(tensor.device)
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        side.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(side):
            self.host.copy_(tensor, non_blocking=True)
        self._left = side.record_event()
        self._source = tensor  # until the copy is made: its memory must not be given to another

    def get(self) -> Tensor:
        """The tensor on its device; the one before it sets out."""
        if self.device.type != "cuda":
            return self.host
        found = self._source  # the last to leave is wanted first, and still here
        if found is None:
            self._fetch()
            torch.cuda.current_stream(self.device).wait_event(self._arrived)
            found = self._coming
            assert found is not None
        self._source = self._coming = None
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()
        return found

    def _gone(self) -> None:
        """The device's copy is let go of once it has left."""
        if self._source is not None:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._source = None

    def _fetch(self) -> None:
        if self._source is not None or self._coming is not None:
            return
        side, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        self._coming = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        side.wait_stream(current)  # what had this memory before may still be in use
        with torch.cuda.stream(side):
            self._coming.copy_(self.host, non_blocking=True)
        self._arrived = side.record_event()


class OffloadQueue:
    """Where tensors go to wait, one after the other; each knows the one before it."""

    def __init__(self) -> None:
        self._last: weakref.ref[OffloadedTensor] | None = None

    def put(self, tensor: Tensor) -> OffloadedTensor:
        waiting = OffloadedTensor(tensor, None if self._last is None else self._last())
        self._last = weakref.ref(waiting)
        return waiting


CheckpointFunction = Callable[..., Any]
"""(forward of a layer, its input, anything else) -> its output."""


def selective_forward(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """The layer's forward; what is cheap is made again when it is needed."""
    with recomputed_output(layer.attention_norm, x) as normed:
        qk, v = layer.split_heads(layer.qkv(normed))
    with recomputed_output(layer.rotate_heads, qk, cos, sin) as rotated:
        mixed = layer.attention(rotated, v, attend)
    x = x + layer.attention_output(mixed)
    with recomputed_output(layer.mlp_norm, x) as normed:
        gate_up = layer.gate_up(normed)
    with recomputed_output(layer.gated_activation, gate_up) as activated:
        return x + layer.mlp_output(activated)


class OffloadedCheckpoint:
    """`recomputed` with the layer's first input in host memory; one of these for all layers of a model."""

    def __init__(self) -> None:
        self.queue = OffloadQueue()

    def __call__(self, function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        waiting, asks = self.queue.put(x.detach()), x.requires_grad
        rest = tuple(detached_leaf(other) for other in others)
        return checkpointed(function, x, *others, held=lambda: (waiting.get().requires_grad_(asks), *rest))


def check_activations(model: nn.Module, policy: str) -> None:
    """Raise where the model's layers cannot do what is asked."""
    if policy == "keep" or any(isinstance(module, Layer) for module in model.modules()):
        return
    if policy == "selective":
        raise UserError(
            "activations=selective needs the native decoder, and this model runs through transformers: use recompute, offload or keep"
        )
    if not _transformers_layers(model):
        raise UserError(f"activations={policy}: transformers does not say what the layers of this model are: use keep")


def set_activations(model: nn.Module, policy: str) -> None:
    """Have every layer of the model keep its activations by a policy: keep, selective, recompute or offload."""
    check_activations(model, policy)
    ways: dict[str, CheckpointFunction] = {"recompute": checkpointed, "offload": OffloadedCheckpoint()}
    around = ways.get(policy)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.activations = policy
        if isinstance(module, Layer):
            module.activation_policy = (
                selective_forward
                if policy == "selective"
                else None
                if around is None
                else partial(_checkpoint_native_layer, around)
            )
    for layer in _transformers_layers(model):
        vars(layer).pop("forward", None)
        if around is not None:
            layer.forward = partial(_checkpoint_transformers_layer, around, layer.forward)


def _checkpoint_native_layer(
    around: CheckpointFunction, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    return around(layer.run, x, cos, sin, attend)


def _checkpoint_transformers_layer(
    around: CheckpointFunction, forward: Callable[..., Any], hidden: Tensor, *others: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden, *others, **options)
    return around(partial(forward, **options), hidden, *others)


def _transformers_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself would checkpoint.

    Its own way acts in training mode only, in which some models drop out: the log-probs would not be those sampled from.
    """
    from burnish.models.transformers_model import TransformersBackbone, TransformersPolicy

    inner = [m.inner for m in model.modules() if isinstance(m, TransformersPolicy | TransformersBackbone)]
    if not inner:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for one in inner for m in one.modules() if isinstance(m, GradientCheckpointingLayer)]
