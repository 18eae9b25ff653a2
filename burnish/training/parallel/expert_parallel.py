"""Expert parallelism: the ranks of a group divide the experts of every layer, and send each other the rows of their tokens.

All other parameters treat these ranks as data-parallel: each rank has sequences of its own, and routes their tokens itself. The
(token, slot) pairs of a rank are sorted by expert (`models/experts.py`). Expert e is on rank e // (experts / ranks), so the rows for
one rank are contiguous, and four all-to-alls suffice (GShard, 2006.16668): the number of rows for each expert, the rows, the
weights of their experts, and the outputs on their way back. No row is dropped and no expert has a capacity. A token's outputs are added
by the rank that has the token, in the order of its slots.

    sorted rows of this rank  ->  all-to-all  ->  rows of all ranks for this rank's experts  ->  experts  ->  all-to-all  ->  sum

An expert sees the tokens of all ranks of the group, so its gradient is complete within the group, and is only summed over the ranks
that hold the same experts: FSDP shards experts over data and context alone (`mesh.py`).

Tensor parallelism divides the columns within each expert, as it divides the MLP of a dense layer (`tensor_parallel.py`). The ranks of a
tensor-parallel group have the same tokens and choose the same experts for them. The gradients of the input and of the experts' weights
are then sums over these ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, Layer
from burnish.models.experts import Choice, Dispatch, ExchangeRows, ExpertLinear, ExpertMlp, dispatch
from burnish.models.kernels.grouped_products import sum_slots
from burnish.models.lora.adapters import LoraExpertLinear
from burnish.models.weight_layout import expert_row_order
from burnish.training.parallel.fsdp import backbone_of
from burnish.training.parallel.tensor_parallel import copy_to_tensor_parallel, reduce_from_tensor_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

EXPERT_PROJECTIONS = frozenset({"gate_proj", "up_proj", "down_proj"})
IN_4_BITS = "experts in 4 bits cannot be divided over processes: set model.lora.base=dtype, or parallel.expert=1"
WITH_ADAPTERS = "parallel.tensor cannot split experts with adapters: use parallel.expert, or adapt attention only"
ComputeExperts = Callable[[Tensor, Choice], Tensor]
"""(rows [N, hidden], their experts among this rank's) -> outputs [N, hidden]."""


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the experts of a whole model, if it has any, over the dimensions `expert` and `tensor` of a mesh, or one of them.

    Call it before FSDP.
    """
    backbone, sizes = backbone_of(model), dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    if not isinstance(backbone, Decoder):
        raise UserError("parallel.expert needs the native decoder; this model runs through transformers")
    shape, num_ranks, columns = backbone.arch.experts, sizes.get("expert", 1), sizes.get("tensor", 1)
    check_experts_divisible(backbone.arch, num_ranks, columns, backbone.lora)
    if shape is None:
        return
    backbone.expert_ranks = num_ranks
    for layer in cast("list[Layer]", backbone.layers):
        if layer.experts is not None:
            _divide(layer.experts, mesh, expert_row_order(shape, num_ranks, columns) if columns > 1 else None)
            if num_ranks > 1:
                layer.experts.exchange = ExpertExchange(mesh.get_group("expert"), shape.num_experts)
            if columns > 1:
                layer.experts.exchange = ExpertColumns(mesh.get_group("tensor"), layer.experts.exchange)


def check_experts_divisible(arch: Architecture, num_ranks: int, columns: int, lora: Lora | None) -> None:
    """Refuse experts that cannot be divided over `num_ranks` processes, or each over `columns` of them."""
    shape = arch.experts
    if num_ranks == 1 and (shape is None or columns == 1):
        return
    if shape is None:
        raise UserError(f"parallel.expert={num_ranks} has no effect: the model has no experts; use parallel.data")
    for key, parts, what, size in (
        ("expert", num_ranks, "experts", shape.num_experts),
        ("tensor", columns, "columns of an expert", shape.expert_size),
    ):
        if size % parts:
            raise UserError(f"parallel.{key}={parts} does not divide the model's {size} {what}")
    if lora is not None and lora.base != "dtype":
        raise UserError(IN_4_BITS)
    if lora is not None and columns > 1 and not EXPERT_PROJECTIONS.isdisjoint(lora.projections):
        raise UserError(WITH_ADAPTERS)


def _divide(experts: ExpertMlp, mesh: DeviceMesh, order: Tensor | None) -> None:
    """Leave this rank its experts, or its columns of them. `order` makes the rows of its columns contiguous.

    The adapters of an expert stay with it: all of their tensors are stacked by expert, as the matrices are.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    names = mesh.mesh_dim_names or ()
    for linear in (experts.gate_up, experts.down):
        has_adapters = isinstance(linear, LoraExpertLinear)
        if not isinstance(linear, ExpertLinear | LoraExpertLinear) or not isinstance(linear.weight, Tensor):
            raise UserError(IN_4_BITS)
        if has_adapters and "tensor" in names:
            raise UserError(WITH_ADAPTERS)
        is_first = linear is experts.gate_up
        places = [Shard(0 if name == "expert" or is_first else 1) for name in names]
        for name in ("weight", "lora_a", "lora_b") if has_adapters else ("weight",):
            parameter = cast(nn.Parameter, getattr(linear, name))
            tensor = parameter.detach()
            if is_first and order is not None:
                tensor = tensor[order.to(tensor.device)]
            # Every rank has the same values, so src_data_rank=None sends nothing.
            own = distribute_tensor(tensor, mesh, places, src_data_rank=None)
            setattr(linear, name, nn.Parameter(own, requires_grad=parameter.requires_grad))
        if "expert" in names:
            linear.num_experts //= mesh["expert"].size()
        if "tensor" in names and not is_first:
            linear.in_features //= mesh["tensor"].size()


@dataclass(frozen=True)
class ExpertExchange:
    """Computes each row of this rank where its expert is."""

    group: ProcessGroup
    num_experts: int

    def __call__(self, x: Tensor, choice: Choice, compute_own: ComputeExperts) -> Tensor:
        """The weighted sum of the chosen experts' outputs of tokens [N, hidden]. Every rank of the group must call this."""
        way = dispatch(choice.experts, self.num_experts)
        own_experts, sent, received = self.row_counts(way)
        rows: Tensor = _SortedRows.apply(x, way)
        weights = choice.weights.reshape(-1).index_select(0, way.slots)
        rows, weights = (_exchanged(part, sent, received, self.group) for part in (rows, weights))
        if not sum(received):  # one row of weight 0, so that the experts take part in the backward pass
            rows, weights, own_experts = (
                torch.cat([part, part.new_zeros(1, *part.shape[1:])]) for part in (rows, weights, own_experts)
            )
        out = compute_own(rows, Choice(own_experts[:, None], weights[:, None]))[: sum(received)]
        return cast(Tensor, _SumOfSlots.apply(_exchanged(out, received, sent, self.group), way))

    def row_counts(self, way: Dispatch) -> tuple[Tensor, list[int], list[int]]:
        """The expert of each row that this rank will receive, and the number of rows for and from each rank."""
        from torch.distributed import all_to_all_single

        num_ranks = self.group.size()
        counts = way.ends.diff(prepend=way.ends.new_zeros(1)).view(num_ranks, -1)  # [ranks, experts of a rank]
        incoming = torch.empty_like(counts)
        all_to_all_single(incoming, counts, group=self.group)
        sent, received = torch.stack([counts.sum(1), incoming.sum(1)]).tolist()  # waits for the device
        numbers = torch.arange(counts.shape[1], device=counts.device).repeat(num_ranks)
        own_experts = numbers.repeat_interleave(incoming.flatten(), output_size=sum(received))
        return own_experts, sent, received


@dataclass(frozen=True)
class ExpertColumns:
    """Computes this rank's columns of each expert, and sums the outputs over the ranks."""

    group: ProcessGroup
    exchange: ExchangeRows | None
    """Divides the experts as well, if set."""

    def __call__(self, x: Tensor, choice: Choice, compute_own: ComputeExperts) -> Tensor:
        x, weights = (copy_to_tensor_parallel(part, self.group) for part in (x, choice.weights))
        choice = Choice(choice.experts, weights)
        partial = compute_own(x, choice) if self.exchange is None else self.exchange(x, choice, compute_own)
        return reduce_from_tensor_parallel(partial, self.group)


class _SortedRows(torch.autograd.Function):
    """Tokens [N, hidden] to the row of every pair [M, hidden]. The gradient of a token is the sum in the order of its slots."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, way: Dispatch) -> Tensor:
        ctx.save_for_backward(way.rows)
        return x[way.tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return sum_slots(grads[0], rows), None


class _SumOfSlots(torch.autograd.Function):
    """The outputs of all pairs [M, hidden] to their sums [N, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Dispatch) -> Tensor:
        # On ctx, not saved: activation checkpointing recomputes up to the last saved tensor, and needs no third exchange for this one.
        ctx.tokens = way.tokens
        return sum_slots(rows, way.rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0][ctx.tokens], None


def _exchanged(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """[sum of sent, ...] to [sum of received, ...]: `sent[r]` rows go to rank r, and `received[r]` arrive from it."""
    return cast(Tensor, _Exchange.apply(x, sent, received, group))


class _Exchange(torch.autograd.Function):
    """An all-to-all of uneven parts. The gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.plan = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        sent, received, group = ctx.plan
        return _all_to_all(grads[0], received, sent, group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    from torch.distributed import all_to_all_single

    out = x.new_empty(sum(received), *x.shape[1:])
    all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
