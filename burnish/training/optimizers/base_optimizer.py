"""Base class of the optimizers: gradient accumulation and clipping, master weights, state, and the order of an update.

Half-precision parameters have master weights and moments in float32: an update of 1e-6 is too small to be added to a bfloat16
weight, and would be lost. Alternatively they are rounded stochastically (`stochastic_rounding.py`) and have no master copy. Their
gradients are accumulated in float32 too: in bfloat16 the eighth micro-batch would change only the sum's last bits.

State consists of named tensors whose rows belong to the rows of their parameter. An update can therefore take a parameter in
parts, if a float32 copy of all of it would be too large, or if its state is in host memory (`offload.py`). A parameter that is
sharded over ranks has the state of the local shard.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.core.sharded_tensors import is_dtensor, local_tensor
from burnish.models.kernels.half_products import HALF_DTYPES, add_to
from burnish.training.optimizers.offload import HostStates, State, TensorSpec, num_bytes_of
from burnish.training.optimizers.parameter_groups import ParameterSetting, parameter_settings
from burnish.training.optimizers.stochastic_rounding import generator_for, seed_for, to_bfloat16

MAX_PART_SIZE = 1 << 23
"""Most elements of a part. An update needs a few float32 temporaries of this size besides the state."""

MeanOverRanks = Callable[[Tensor], Tensor]
"""Mean over all processes that hold the same parameters, whole or in shards; the sum of these means over pipeline stages."""


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a parameter."""

    name: str
    start: int
    stop: int


@dataclass
class ParameterPart:
    """Some rows of a parameter with everything that their update needs, on the device."""

    rows: RowRange
    parameter: Tensor
    weight: Tensor
    """The tensor to update: the master copy, the parameter itself if its type is wide, or a wide copy that is rounded afterwards."""
    gradient: Tensor
    """The gradient, in the type of the weight."""
    state: State
    lr: float
    decay: float
    updates: int
    """Updates of this parameter since its moments were zero, including this one."""
    number: int
    """Number of this update in the whole run. It keys the randomness: a count that restarts would repeat the noise, which biases rounding."""

    def seed(self, purpose: str) -> int:
        """Seed of this part in this update."""
        return seed_for(purpose, self.rows.name, self.number, self.rows.start)

    def generator(self, purpose: str) -> torch.Generator:
        """Random generator of this part in this update."""
        return generator_for(self.weight.device, purpose, self.rows.name, self.number, self.rows.start)

    def write(self) -> None:
        """Copy the updated weight into the parameter."""
        if "master" in self.state:
            self.parameter.copy_(self.weight)
        elif self.weight.dtype != self.parameter.dtype:
            self.parameter.copy_(to_bfloat16(self.weight, self.generator("weight")))


class BaseOptimizer(ABC):
    """Named parameters with their gradients and state. State is created when a parameter has its first gradient.

    `settings` has each parameter's learning-rate factor and decay. `reduce` is the mean over ranks if parameters are sharded.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        config: Config,
        settings: Mapping[str, ParameterSetting] | None = None,
        reduce: MeanOverRanks | None = None,
    ) -> None:
        self.parameters, self.config, self.reduce = dict(parameters), config, reduce
        self.settings = parameter_settings(self.parameters, config) if settings is None else dict(settings)
        self.state: dict[str, State] = {}
        self.updates: dict[str, int] = {}
        self.sums: dict[str, Tensor] = {}
        self.host: HostStates | None = None
        self.copies: Collection[str] = ()
        """Parameters that another pipeline stage owns; their gradients are equal there, and count once in a norm."""
        if config.precision == "stochastic" and not any(self._is_rounded(name) for name in self.parameters):
            raise UserError("optimizer.precision=stochastic rounds weights to bfloat16, and no parameter is bfloat16")

    # --- update rules implement these ------------------------------------------------------------------------------------

    @abstractmethod
    def moments(self, name: str) -> dict[str, TensorSpec]:
        """State tensors of a parameter besides its update count and master copy; their rows match the parameter's."""

    @abstractmethod
    def update(self, parts: Sequence[ParameterPart]) -> None:
        """Update the weights and states of these parts in place."""

    def is_whole(self, name: str) -> bool:
        """Whether a parameter must be updated in one part."""
        return False

    # --- gradients -----------------------------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Clear all gradients."""
        self.sums = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of half-precision parameters to float32 sums; call this after each backward."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.dtype in HALF_DTYPES:
                gradient = local_tensor(parameter.grad)
                if name in self.sums:
                    add_to(self.sums[name], gradient)
                else:
                    self.sums[name] = gradient.float()
                parameter.grad = None

    @torch.no_grad()
    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every parameter that has one; of the local shard if it is sharded."""
        return self.sums | {name: local_tensor(p.grad) for name, p in self.parameters.items() if p.grad is not None}

    def num_counted(self, name: str) -> int:
        """How often the square of a gradient counts in the mean over ranks: once for each shard."""
        return 0 if name in self.copies else num_shards(self.parameters[name])

    @torch.no_grad()
    def clip(self, limit: float) -> float:
        """Scale all gradients to a total norm of at most `limit`; returns the norm before scaling."""
        named = self.gradients()
        gradients = list(named.values())
        if self.reduce is None:
            norm = nn.utils.get_total_norm(gradients, foreach=True)
        else:  # mean over ranks of (shard x number of shards) = sum over shards; replicas of a shard count once
            squares = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square()
            counts = torch.tensor([self.num_counted(name) for name in named], device=squares.device)
            norm = self.reduce((squares * counts).sum()).sqrt().to(gradients[0].dtype)
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return float(norm)

    # --- the update ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, lr: float, number: int) -> None:
        """Update every parameter that has a gradient. `lr` applies to parameters in no group; `number` counts the run's updates."""
        gradients = self.gradients()
        names = [name for name in self.parameters if name in gradients]
        for name in names:
            self._make_state(name)
            self.updates[name] += 1
        if names:
            torch._foreach_add_([self.state[name]["step"] for name in names], 1)
        batches = self._batches([rows for name in names for rows in self._row_ranges(name)])
        resting = [[self._rows_of_state(rows) for rows in batch] for batch in batches]
        visits = resting if self.host is None else self.host.visits(resting)
        for states, batch in zip(visits, batches, strict=True):  # `visits` first, so that zip exhausts it
            pairs = zip(batch, states, strict=True)
            parts = [self._part(rows, state, gradients[rows.name], lr, number) for rows, state in pairs]
            self.update(parts)
            for part in parts:
                part.write()

    def _row_ranges(self, name: str) -> list[RowRange]:
        rows = _at_least_1d(local_tensor(self.parameters[name]))
        if self.is_whole(name):  # also if this rank has no row of it: gathering the matrix needs all ranks
            return [RowRange(name, 0, len(rows))]
        if rows.numel() == 0:
            return []
        height = max(1, MAX_PART_SIZE * len(rows) // rows.numel())
        return [RowRange(name, start, min(start + height, len(rows))) for start in range(0, len(rows), height)]

    def _batches(self, ranges: list[RowRange]) -> list[list[RowRange]]:
        """Groups of row ranges that are on the device at once: all, unless state is offloaded or weights are rounded."""
        if self.host is None and self.config.precision == "master":
            return [ranges]
        batches: list[list[RowRange]] = []
        room = 0
        for rows in ranges:
            size = math.prod(_at_least_1d(local_tensor(self.parameters[rows.name])).shape[1:]) * (
                rows.stop - rows.start
            )
            if size > room:
                batches.append([])
                room = MAX_PART_SIZE
            batches[-1].append(rows)
            room -= size
        return batches

    def _rows_of_state(self, rows: RowRange) -> State:
        return {key: t[rows.start : rows.stop] for key, t in self.state[rows.name].items() if key != "step"}

    def _part(self, rows: RowRange, state: State, gradient: Tensor, lr: float, number: int) -> ParameterPart:
        parameter = _at_least_1d(local_tensor(self.parameters[rows.name]))[rows.start : rows.stop]
        weight = parameter.float() if self._is_rounded(rows.name) else state.get("master", parameter)
        setting = self.settings[rows.name]
        return ParameterPart(
            rows,
            parameter,
            weight,
            _at_least_1d(gradient)[rows.start : rows.stop].to(weight.dtype),
            {"step": self.state[rows.name]["step"], **state},
            lr * setting.lr_scale,
            setting.decay,
            self.updates[rows.name],
            number,
        )

    # --- state ---------------------------------------------------------------------------------------------------------

    def _is_rounded(self, name: str) -> bool:
        return self.config.precision == "stochastic" and self.parameters[name].dtype == torch.bfloat16

    def wide_type(self, name: str) -> torch.dtype:
        """The type that an update is computed in."""
        return torch.promote_types(self.parameters[name].dtype, torch.float32)

    @torch.no_grad()
    def layout(self, name: str) -> dict[str, TensorSpec]:
        """State tensors of a parameter besides its update count."""
        needs_master = self.parameters[name].dtype in HALF_DTYPES and not self._is_rounded(name)
        shape = tuple(_at_least_1d(local_tensor(self.parameters[name])).shape)
        return {**self.moments(name), **({"master": (shape, torch.float32)} if needs_master else {})}

    def state_bytes(self) -> int:
        """Bytes of the whole state once every parameter has had a gradient; known before any is allocated."""
        return sum(4 + sum(map(num_bytes_of, self.layout(name).values())) for name in self.parameters)

    def _make_state(self, name: str) -> None:
        if name in self.state:
            return
        parameter = _at_least_1d(local_tensor(self.parameters[name]))
        self.state[name] = self._zeros(name)
        self.updates[name] = 0
        if "master" in self.state[name]:
            self.state[name]["master"].copy_(parameter)

    def _zeros(self, name: str) -> State:
        device = local_tensor(self.parameters[name]).device
        step = torch.zeros((), dtype=torch.float32, device=device)
        layout = self.layout(name)
        if not self.config.offload:
            return {"step": step, **{key: torch.zeros(s, dtype=d, device=device) for key, (s, d) in layout.items()}}
        if self.host is None:
            specs = {f"{key}/{n}": spec for n in self.parameters for key, spec in self.layout(n).items()}
            self.host = HostStates(specs, device)
        return {"step": step, **{key: self.host.tensors[f"{key}/{name}"] for key in layout}}

    def reset(self) -> None:
        """Reset the moments. Master copies stay: they are the weights, in more precision than the parameters."""
        if self.host is not None:
            self.host.synchronize()
        for name, state in self.state.items():
            self.updates[name] = 0
            for key, tensor in state.items():
                if key != "master":
                    tensor.zero_()

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by flat names, for a checkpoint."""
        if self.host is not None:
            self.host.synchronize()
        return {f"{key}/{name}": t for name, state in self.state.items() for key, t in state.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the state that `tensors` returned."""
        if self.host is not None:
            self.host.synchronize()
        found: dict[str, State] = {}
        for flat, tensor in tensors.items():
            key, name = flat.split("/", 1)
            found.setdefault(name, {})[key] = tensor
        self.state, self.updates = {}, {}
        for tensor in self.host.tensors.values() if self.host is not None else ():
            tensor.zero_()  # a parameter that is not in the file starts without state
        for name, state in found.items():
            self._check(name, state)
            self.updates[name] = int(state["step"])
            self.state[name] = self._zeros(name)
            for key, tensor in state.items():
                self.state[name][key].copy_(tensor)

    def _check(self, name: str, state: State) -> None:
        step: dict[str, TensorSpec] = {"step": ((), torch.float32)}
        expected = step | self.layout(name)
        got = {key: (tuple(t.shape), t.dtype) for key, t in state.items()}
        if got != expected:
            raise UserError(
                f"the optimizer state of {name} was saved by another optimizer: it is {_describe_layout(got)}, and "
                f"{self.config.name} with precision {self.config.precision} keeps {_describe_layout(expected)}"
            )


def _at_least_1d(tensor: Tensor) -> Tensor:
    """A tensor with at least one dimension, so that it has rows."""
    return tensor.view(1) if tensor.dim() == 0 else tensor


def _describe_layout(layout: Mapping[str, TensorSpec]) -> str:
    return ", ".join(
        f"{key} {list(shape)} {str(dtype).removeprefix('torch.')}" for key, (shape, dtype) in layout.items()
    )


# --- Parameters that are sharded over ranks (`DTensor`) ------------------------------------------------------------------
#
# An elementwise update works on the local shard (`core/sharded_tensors.py`). One that needs a whole matrix gathers it here.


def num_shards(tensor: Tensor) -> int:
    """Number of distinct shards of a tensor."""
    if not is_dtensor(tensor):
        return 1
    places = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in places if not placement.is_replicate())


def gather_whole(part: Tensor, like: Tensor) -> Tensor:
    """Gather a tensor that is sharded like the parameter `like`; all ranks must call this."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    full: Tensor = spread.full_tensor()
    return full


def local_part(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a tensor that every rank holds whole; the inverse of `gather_whole`."""
    if not is_dtensor(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate() for _ in like.placements]
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    part: Tensor = spread.redistribute(placements=like.placements).to_local()
    return part
