"""Activation checkpointing: what a layer saves for the backward pass, and what is recomputed there.

Bytes per token and layer with the GPU kernels in a half type. b is the bytes per element, h the width of the residual
stream, q and k the widths of all query and all key heads, H the number of query heads, m the width of the MLP.
`activation_bytes.py` has the formulas for every device and dtype, and a test counts the bytes.

    keep       b (4 h + 3 q + 3 k + 3 m) + 4 (H + 2)    everything that the backward pass reads
    selective  b (2 h + 2 q + 2 k + 2 m) + 4 H          outputs of matmuls and attention; recomputes norms, rotations, gates
    recompute  b h                                      the layer's input; recomputes the layer, a third more arithmetic
    offload    0                                        as recompute, with the inputs in pinned host memory

The last two also need one layer's `keep` for the layer whose backward is running. A token of a shared prefix
(`kernels/shared_prefix.py`) counts once. With norms on queries and keys `keep` saves 4 more bytes for every such head. Gradients are
the same bit for bit with every policy.
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
from burnish.models.experts import dispatch
from burnish.models.kernels.shared_prefix import Attend
from burnish.models.vision.interfaces import VisionTower

InputsGetter = Callable[[], tuple[Any, ...]]
"""Returns the saved inputs of a recomputation."""
CheckpointFunction = Callable[..., Any]
"""(forward of a layer, its input, other arguments) -> its output."""


# --- recomputation ---
#
# Autograd calls a pair of hooks for every tensor that a backward formula saves. Here the hooks save an index, and the
# function that produced the tensor runs again when the first of its tensors is read. `checkpointed` does that for all
# tensors that a function saves. `recomputed_output` does it for a cheap function whose output an expensive one reads, so
# that the expensive one runs once.
#
# torch.utils.checkpoint also does the former, but it imports the compiler, which takes seconds at every start, and its
# recomputation does not stop at the last saved tensor.


class _AllRecomputed(Exception):
    """All saved tensors have been recomputed."""


class _Recomputation:
    """A function that runs in the forward pass, and again in the backward pass for its saved tensors and its output."""

    def __init__(self, function: Callable[..., Tensor], inputs: InputsGetter) -> None:
        self.function, self.inputs = function, inputs
        self.num_saved = 0
        self.has_output = False
        self.saved: list[Tensor | None] | None = None
        self.result: Tensor | None = None

    def pack(self, tensor: Tensor) -> int:
        self.num_saved += 1
        return self.num_saved - 1

    def unpack(self, index: int) -> Tensor:
        self.run_again()
        assert self.saved is not None
        tensor = self.saved[index]
        self.saved[index] = None  # free the memory as soon as the backward formula has used it
        if tensor is None:
            raise RuntimeError("a saved tensor was read twice; an autograd function must read ctx.saved_tensors once")
        return tensor

    def run_again(self) -> None:
        """Recompute once; the tensors stay until the last backward formula has read them."""
        if self.saved is not None:
            return
        found: list[Tensor | None] = []

        def pack(tensor: Tensor) -> None:
            found.append(tensor.detach())
            # An operation saves its tensors before it computes, so nothing after the last saved tensor is needed.
            if len(found) == self.num_saved and not self.has_output:
                raise _AllRecomputed

        def unpack(nothing: None) -> Tensor:
            raise RuntimeError("the graph of a recomputed forward pass has no backward")

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                result = self.function(*self.inputs())
            self.result = result.detach() if self.has_output else None
        except _AllRecomputed:
            pass
        if len(found) != self.num_saved:
            raise RuntimeError(
                f"a forward pass saved {self.num_saved} tensors, but {len(found)} when it was recomputed"
            )
        self.saved = found


def detached_leaf(x: Any) -> Any:
    """A tensor detached from its graph, which requires a gradient if it did before; anything else unchanged."""
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def checkpointed(function: Callable[..., Tensor], *inputs: Any, saved_inputs: InputsGetter | None = None) -> Tensor:
    """function(*inputs), of which only the inputs are saved for the backward pass, or what `saved_inputs` returns for them."""
    if saved_inputs is None:
        leaves = tuple(detached_leaf(x) for x in inputs)
        saved_inputs = lambda: leaves  # noqa: E731
    recomputation = _Recomputation(function, saved_inputs)
    with saved_tensors_hooks(recomputation.pack, recomputation.unpack):
        return function(*inputs)


@contextmanager
def recomputed_output(function: Callable[..., Tensor], *inputs: Any) -> Iterator[Tensor]:
    """function(*inputs) for the operations of a `with` block. They do not save it; it is recomputed when their backward reads it."""
    leaves = tuple(detached_leaf(x) for x in inputs)
    recomputation = _Recomputation(function, lambda: leaves)
    recomputation.has_output = True
    with saved_tensors_hooks(recomputation.pack, recomputation.unpack):
        result = function(*inputs)
    place, num_readers = result.untyped_storage().data_ptr(), 0

    def pack(tensor: Tensor) -> Any:
        nonlocal num_readers
        if tensor.untyped_storage().data_ptr() != place:
            return tensor
        num_readers += 1
        return tensor.shape, tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        nonlocal num_readers
        if isinstance(packed, Tensor):
            return packed
        recomputation.run_again()
        if recomputation.result is None:
            raise RuntimeError(
                "a recomputed tensor was read twice; an autograd function must read ctx.saved_tensors once"
            )
        found = recomputation.result.as_strided(*packed)
        num_readers -= 1
        if not num_readers:  # the function's own backward, which comes next, does not need it
            recomputation.result = None
        return found

    with saved_tensors_hooks(pack, unpack):
        yield result


# --- offloading ---
#
# Tensors are in host memory between the forward and the backward pass. On a GPU both copies run on a side stream: a tensor
# is copied out while the next layer computes, and copied back while the backward of that layer runs. On a CPU the copy is
# synchronous, so that the same code can be tested.


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class OffloadedTensor:
    """A tensor offloaded to host memory. `before` was offloaded before it, and will be read after it."""

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
        self._source = tensor  # until the copy is complete, so that its memory is not reused

    def get(self) -> Tensor:
        """The tensor on its device. This also starts the copy of the one before it."""
        if self.device.type != "cuda":
            return self.host
        found = self._source  # the last offloaded tensor is read first and still on the device
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
        """Free the device's copy once it has been copied out."""
        if self._source is not None:
            torch.cuda.current_stream(self.device).wait_event(self._left)
            self._source = None

    def _fetch(self) -> None:
        if self._source is not None or self._coming is not None:
            return
        side, current = _side_stream(self.device), torch.cuda.current_stream(self.device)
        self._coming = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
        side.wait_stream(current)  # the previous user of this memory may still be running
        with torch.cuda.stream(side):
            self._coming.copy_(self.host, non_blocking=True)
        self._arrived = side.record_event()


class OffloadQueue:
    """Offloads tensors one after the other; each has a reference to the one before it."""

    def __init__(self) -> None:
        self._last: weakref.ref[OffloadedTensor] | None = None

    def put(self, tensor: Tensor) -> OffloadedTensor:
        offloaded = OffloadedTensor(tensor, None if self._last is None else self._last())
        self._last = weakref.ref(offloaded)
        return offloaded


def selective_forward(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """A layer's forward pass that recomputes its cheap operations in the backward pass."""
    with recomputed_output(layer.attention_norm, x) as normed:
        qk, v = layer.split_heads(layer.qkv(normed))
    with recomputed_output(layer.rotate_heads, qk, cos, sin) as rotated:
        mixed = layer.attention(rotated, v, attend)
    x = x + layer.attention_output(mixed)
    if layer.experts is not None:
        with recomputed_output(layer.mlp_norm, x) as normed:
            choice = layer.experts.choose(layer.experts.router(normed))
            way = dispatch(choice.experts, layer.experts.shape.num_experts)
            gate_up = layer.experts.gate_up.from_tokens(normed, way)
            shared = layer.gate_up(normed) if layer.has_dense_mlp else None
        if shared is not None:
            with recomputed_output(layer.gated_activation, shared) as activated:
                shared = layer.down(activated)
        with recomputed_output(layer.experts.activated, gate_up, choice.weights, way.slots) as activated:
            computed = layer.experts.down.to_tokens(activated, way)
            return x + layer.experts_output(computed if shared is None else computed + shared)
    with recomputed_output(layer.mlp_norm, x) as normed:
        gate_up = layer.gate_up(normed)
    with recomputed_output(layer.gated_activation, gate_up) as activated:
        return x + layer.mlp_output(activated)


class OffloadedCheckpoint:
    """`checkpointed` with the layer's first input in host memory. All layers of a model share one of these."""

    def __init__(self) -> None:
        self.queue = OffloadQueue()

    def __call__(self, function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        offloaded, requires_grad = self.queue.put(x.detach()), x.requires_grad
        rest = tuple(detached_leaf(other) for other in others)
        return checkpointed(
            function, x, *others, saved_inputs=lambda: (offloaded.get().requires_grad_(requires_grad), *rest)
        )


def check_activations(model: nn.Module, policy: str) -> None:
    """Raise if the model's layers do not support an activation policy."""
    if policy == "keep" or any(isinstance(module, Layer) for module in model.modules()):
        return
    if policy == "selective":
        raise UserError(
            "activations=selective needs the native decoder, and this model runs through transformers: use recompute, offload or keep"
        )
    if not _transformers_layers(model):
        raise UserError(f"activations={policy}: transformers does not expose the layers of this model: use keep")


def set_activations(model: nn.Module, policy: str) -> None:
    """Set the activation policy of every layer of a model: keep, selective, recompute or offload."""
    check_activations(model, policy)
    functions: dict[str, CheckpointFunction] = {"recompute": checkpointed, "offload": OffloadedCheckpoint()}
    checkpoint = functions.get(policy)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.activations = policy
        if isinstance(module, VisionTower):  # a tower that is trained saves the inputs of its blocks at most
            module.checkpoint = None if policy == "keep" else checkpoint or checkpointed
        if isinstance(module, Layer):
            if policy == "selective":
                module.activation_policy = selective_forward
            else:
                module.activation_policy = checkpoint and partial(_checkpoint_native_layer, checkpoint)
    for layer in _transformers_layers(model):
        vars(layer).pop("forward", None)
        if checkpoint is not None:
            layer.forward = partial(_checkpoint_transformers_layer, checkpoint, layer.forward)


def _checkpoint_native_layer(
    checkpoint: CheckpointFunction, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    run = layer.run if layer.experts is None else layer.experts.in_this_pass(layer.run)
    return checkpoint(run, x, cos, sin, attend)


def _checkpoint_transformers_layer(
    checkpoint: CheckpointFunction, forward: Callable[..., Any], hidden: Tensor, *others: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden, *others, **options)
    return checkpoint(partial(forward, **options), hidden, *others)


def _transformers_layers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself would checkpoint.

    Its own checkpointing works only in training mode, in which some models apply dropout; log-probs would then not be
    those of the sampling distribution.
    """
    from burnish.models.transformers_model import TransformersBackbone, TransformersPolicy

    inner = [m.inner for m in model.modules() if isinstance(m, TransformersPolicy | TransformersBackbone)]
    if not inner:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for one in inner for m in one.modules() if isinstance(m, GradientCheckpointingLayer)]
