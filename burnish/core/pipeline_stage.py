"""The pipeline stage of a model that this process has: which tensors of the whole model it holds, and how it gets the others.

A stage has some consecutive layers of a model (`training/parallel/pipeline.py`). Its tensors keep the names that they have in the whole
model. Code that reads or writes whole models asks the stage for the names, shapes and owners of all tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from burnish.core.sharded_tensors import full_tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class StageTensor:
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stage: int
    """The stage that owns it. Another stage may hold a copy, as the last one does of a tied embedding."""
    is_trained: bool
    is_parameter: bool
    """False for a buffer of a 4-bit matrix."""

    def meta(self) -> Tensor:
        """A tensor of this shape and type without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class PipelineStage:
    """This process's stage of a model. `group` has one process of every stage, in their order."""

    index: int
    count: int
    tensors: Mapping[str, StageTensor]
    """All parameters and buffers of the whole model by name, in its order."""
    group: ProcessGroup
    first_rank: int
    """The first process of the stage. It saves what all processes of the stage hold alike."""
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def owns(self, name: str) -> bool:
        """Whether a tensor belongs to this stage. A stage that holds a copy does not save it, nor count it in a norm."""
        return self.tensors[name].stage == self.index

    @property
    def trained_names(self) -> list[str]:
        """Names of the trained parameters of the whole model."""
        return [name for name, tensor in self.tensors.items() if tensor.is_trained]

    def global_rank(self, stage: int) -> int:
        """The process of another stage that this one communicates with."""
        from torch.distributed import get_global_rank

        return get_global_rank(self.group, stage)

    def shared(self, name: str, own: Tensor | None) -> Tensor:
        """A whole tensor on all stages, given the owner's. A collective: all stages must call it in the same order."""
        from torch.distributed import broadcast

        about = self.tensors[name]
        tensor = torch.empty(about.shape, dtype=about.dtype, device=self.device)
        if about.stage == self.index:
            assert own is not None, f"{name} belongs to this stage"
            tensor = own.to(self.device).contiguous()
        broadcast(tensor, src=self.global_rank(about.stage), group=self.group)
        return tensor


def stage_of(model: nn.Module) -> PipelineStage | None:
    """The stage of a model that is divided into stages; None for any other model."""
    return getattr(model, "pipeline_stage", None)


def whole_tensor(name: str, tensors: Mapping[str, Tensor], stage: PipelineStage | None) -> Tensor:
    """A tensor of the whole model, gathered from the processes and the stage that hold it. All processes must call this."""
    if stage is None:
        return full_tensor(tensors[name])
    return stage.shared(name, full_tensor(tensors[name]) if stage.owns(name) else None)


def whole_tensors(
    names: Iterable[str], tensors: Mapping[str, Tensor], stage: PipelineStage | None
) -> Iterator[tuple[str, Tensor]]:
    """`whole_tensor` of several names."""
    for name in names:
        yield name, whole_tensor(name, tensors, stage)
