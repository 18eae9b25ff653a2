"""Pipeline parallelism: stages of consecutive layers on different processes, which pass hidden states on (1F1B, PipeDream 1806.03377).

All processes of a pipeline have the same micro-batches and know the rows of each. A stage therefore receives hidden states [rows, hidden]
of the right shape without being told, and ragged micro-batches travel without padding. `torch.distributed.pipelining` is not used,
because its `PipelineStage` allocates the buffers of all micro-batches from the shape of one.

Communication is part of the model's forward and backward pass. The first layer of a stage reads what the stage before it sent; the
gradient of that input is sent back. The output of a stage that is not the last is sent on; its gradient is received when the backward pass
reaches it. So every stage makes the same calls: a forward pass for each micro-batch, and a backward pass on its result, which is the loss
on the last stage and a placeholder of value 0 on the others. `OneForwardOneBackward` orders the calls.

The first stage has the embedding and the vision tower, the last one the final norm and the head. A tied embedding is on both, and its two gradients are summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.pipeline_stage import PipelineStage, StageTensor, stage_of
from burnish.core.sharded_tensors import local_tensor
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.flops import matrix_sizes
from burnish.models.heads import ValueModel
from burnish.models.nf4 import quantised_tensors
from burnish.models.tensor_shards import layer_ranges
from burnish.models.vision.tensor_names import TOWER
from burnish.training.parallel.fsdp import backbone_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from burnish.training.parallel.mesh import LearnerMesh

EMBEDDING = "embedding.weight"
VALUE_HEAD = "head"


# --- Dividing a model --------------------------------------------------------------------------------------------------


def head_layers(arch: Architecture) -> float:
    """The work of the output head for a token, in layers."""
    layers = sum(sum(matrix_sizes(arch, layer).values()) for layer in range(arch.num_layers))
    return arch.vocab_size * arch.hidden_size * arch.num_layers / layers


def stage_layers(arch: Architecture, num_stages: int, has_head: bool = True) -> list[range]:
    """The layers of each stage; raise if there are too few of them."""
    ranges = layer_ranges(arch.num_layers, num_stages, head_layers(arch) if has_head and num_stages > 1 else 0.0)
    num_deep = 0 if arch.vision is None else arch.vision.num_deep_layers
    if len(ranges[0]) < num_deep:
        raise UserError(
            f"parallel.pipeline={num_stages}: the first stage has {len(ranges[0])} layers, and the vision tower adds to {num_deep}; "
            "use fewer stages"
        )
    return ranges


def apply_pipeline(model: nn.Module, mesh: LearnerMesh, device: torch.device) -> None:
    """Leave a whole model with the layers of this process's stage, in place; names stay. Call it before all other divisions."""
    backbone = backbone_of(model)
    if not isinstance(backbone, Decoder):
        raise UserError("parallel.pipeline needs the native decoder; this model runs through transformers")
    arch, is_policy = backbone.arch, backbone is model
    ranges = stage_layers(arch, mesh.sizes.pipeline, is_policy)
    stage = PipelineStage(
        mesh.stage,
        mesh.sizes.pipeline,
        _stage_tensors(model, ranges),
        mesh.pipeline_group,
        int(mesh.parameters.mesh[mesh.stage].min()),
        device,
    )
    weight = backbone.embedding.weight
    absent = HeldElsewhere(weight.detach().new_empty(0, weight.shape[1]))
    has_head = stage.is_last and is_policy
    backbone.layers = StageLayers({index: backbone.layers[index] for index in ranges[stage.index]})
    if not stage.is_first and not (has_head and arch.tied):
        backbone.embedding = cast(Any, absent)
    if not stage.is_first:
        backbone.vision = None
    if not stage.is_last:
        backbone.norm = cast(Any, absent)
        backbone.head = None if backbone.head is None else cast(Any, absent)
        if isinstance(model, ValueModel):
            model.register_parameter(VALUE_HEAD, None)
    assert mesh.gradient_group is not None, "a model without stages is not divided here"
    link = StageLink(stage, mesh.gradient_group, weight.shape[1], weight.dtype)
    backbone.receive = None if stage.is_first else link.receive
    backbone.send = None if stage.is_last else link.send
    model.pipeline_stage = stage  # type: ignore[assignment]  # torch declares that attributes are tensors or modules


def _stage_tensors(model: nn.Module, ranges: list[range]) -> dict[str, StageTensor]:
    owners = {f"layers.{index}": stage for stage, layers in enumerate(ranges) for index in layers}
    last = len(ranges) - 1

    def owner(name: str) -> int:
        inner = name.removeprefix("backbone.")
        if inner.startswith("layers."):
            return owners[".".join(inner.split(".")[:2])]
        return 0 if inner == EMBEDDING or inner.startswith(TOWER) else last

    tensors: dict[str, Tensor] = dict(model.named_parameters()) | quantised_tensors(model)
    return {
        name: StageTensor(
            tuple(tensor.shape), tensor.dtype, owner(name), tensor.requires_grad, isinstance(tensor, nn.Parameter)
        )
        for name, tensor in tensors.items()
    }


class StageLayers(nn.ModuleList):
    """The layers of one stage, under the numbers that they have in the whole model, so that parameter names stay."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        super().__init__()
        for index, layer in layers.items():
            self.add_module(str(index), layer)

    def __getitem__(self, index: Any) -> Any:
        """A layer by its place in the stage."""
        return list(self._modules.values())[index]


class HeldElsewhere(nn.Module):
    """Stands for a module that another stage has. Its weight has no rows, but the type and the device of the model."""

    weight: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)


# --- Passing on --------------------------------------------------------------------------------------------------------


class StageLink:
    """Sends hidden states to the next stage and gradients to the one before, and receives them.

    Hidden states and gradients have process groups of their own. NCCL executes the messages between two processes in their order on each
    side, and with one group a stage that sends hidden states while the next one sends a gradient would wait for it forever.
    """

    def __init__(self, stage: PipelineStage, gradients: ProcessGroup, width: int, dtype: torch.dtype) -> None:
        self.stage, self.gradients, self.width, self.dtype = stage, gradients, width, dtype
        self._sent: deque[tuple[Work, Tensor]] = deque()

    def receive(self, tokens: Tensor) -> Tensor:
        """The hidden states of these rows from the stage before. In the backward pass their gradient is sent to it."""
        x = self._received(tokens.shape[0], self.stage.index - 1, self.stage.group)
        if torch.is_grad_enabled():
            x.requires_grad_()
            x.register_hook(lambda gradient: self._send(gradient, self.stage.index - 1, self.gradients))
        return x

    def send(self, x: Tensor) -> Tensor:
        """Send the hidden states of a micro-batch to the next stage. Returns zeros with their shape, whose gradient is that of the stage."""
        return cast(Tensor, _SendToNext.apply(x, self))

    def send_states(self, x: Tensor) -> None:
        self._send(x, self.stage.index + 1, self.stage.group)

    def receive_gradient(self, rows: int) -> Tensor:
        """The gradient of the hidden states that were sent to the next stage."""
        return self._received(rows, self.stage.index + 1, self.gradients)

    def _received(self, rows: int, stage: int, group: ProcessGroup) -> Tensor:
        from torch.distributed import recv

        x = torch.empty(rows, self.width, dtype=self.dtype, device=self.stage.device)
        recv(x, src=self.stage.global_rank(stage), group=group)
        return x

    def _send(self, x: Tensor, stage: int, group: ProcessGroup) -> None:
        from torch.distributed import isend

        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        x = x.detach().contiguous()
        work = isend(x, dst=self.stage.global_rank(stage), group=group)
        assert work is not None, "this process is in the group"
        self._sent.append((work, x))  # the tensor must live until it has been sent


class _SendToNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, link: StageLink) -> Tensor:
        link.send_states(x)
        ctx.link, ctx.rows = link, x.shape[0]
        return torch.zeros_like(
            x
        )  # not an expanded view: FSDP attaches its hook to this output, and a view may lose it

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.link.receive_gradient(ctx.rows), None


# --- The schedule ------------------------------------------------------------------------------------------------------


class OneForwardOneBackward:
    """Calls `backward` on the results of forward passes in their order, each after as many more forward passes as stages follow.

    Then the last stage goes backward at once, and a stage never holds the activations of more micro-batches than there are stages from it to
    the end. Without a pipeline, every forward pass is followed by its backward pass.
    """

    def __init__(self, model: nn.Module, backward: Callable[[Tensor], None]) -> None:
        stage = stage_of(model)
        self.num_ahead = 0 if stage is None else stage.count - 1 - stage.index
        self.backward = backward
        self._waiting: deque[Tensor] = deque()

    def add(self, result: Tensor) -> None:
        """Take the result of a forward pass, and go backward with the oldest one if enough are waiting."""
        self._waiting.append(result)
        if len(self._waiting) > self.num_ahead:
            self.backward(self._waiting.popleft())

    def finish(self) -> None:
        """Go backward with all results that are left."""
        while self._waiting:
            self.backward(self._waiting.popleft())


# --- Gradients that two stages have ------------------------------------------------------------------------------------


def sum_tied_gradient(gradients: Mapping[str, Tensor], model: nn.Module) -> None:
    """Add the gradients of a tied embedding: the first stage has that of the lookup, the last one that of the head."""
    stage = stage_of(model)
    if stage is None or EMBEDDING not in gradients or not (cast(Decoder, model).arch.tied):
        return
    from torch.distributed import P2POp, batch_isend_irecv, irecv, isend

    own = local_tensor(gradients[EMBEDDING]).contiguous()
    other, peer = torch.empty_like(own), stage.global_rank(stage.count - 1 if stage.is_first else 0)
    operations = [P2POp(isend, own, peer, stage.group), P2POp(irecv, other, peer, stage.group)]
    for work in batch_isend_irecv(operations):
        work.wait()
    # Both stages add in the same order, so that the copies stay equal to the bit.
    first, last = (own, other) if stage.is_first else (other, own)
    local_tensor(gradients[EMBEDDING]).copy_(first + last)
