"""How the processes that `torchrun` starts divide the work of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from burnish.config.errors import UserError
from burnish.config.slots.base import Record

if TYPE_CHECKING:
    from burnish.config.model import Model
    from burnish.config.optimizer import Optimizer


class Parallel(Record):
    """Several processes on one model; their number is replicate x shard x sequence x tensor."""

    replicate: int = Field(1, ge=1)
    """Copies of the sharded model, each in the hands of `shard` x `sequence` x `tensor` processes (HSDP)."""
    shard: int | None = Field(None, ge=1)
    """Processes with sequences of their own that hold a piece of every parameter each (FSDP2); null means all that are left."""
    sequence: int = Field(1, ge=1)
    """Processes that cut the tokens of the same micro-batches among them, for long sequences (Ulysses); they share parameters too."""
    tensor: int = Field(1, ge=1)
    """Processes that cut every layer's heads and MLP among them; must divide the model's heads and MLP width."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in the CPU's memory, and bring a layer to the GPU when it is its turn."""

    def sizes(self, num_processes: int) -> tuple[int, int, int, int]:
        """(replicate, shard, sequence, tensor) for so many processes."""
        others = self.replicate * self.sequence * self.tensor
        shard = max(1, num_processes // others) if self.shard is None else self.shard
        if others * shard != num_processes:
            wanted = f"replicate={self.replicate} x shard={self.shard or 'the rest'} x sequence={self.sequence} x tensor={self.tensor}"
            raise UserError(
                f"parallel: {wanted} does not make {num_processes} processes; their number is torchrun's --nproc-per-node times --nnodes, "
                "or placement.workers"
            )
        return self.replicate, shard, self.sequence, self.tensor


def check_parallel_fits(parallel: Parallel, model: Model, optimizer: Optimizer, activations: str) -> None:
    """Refuse what cannot be divided, or would have no effect."""
    if model.backend == "transformers" and (parallel.sequence > 1 or parallel.tensor > 1):
        raise ValueError(
            "parallel.sequence and parallel.tensor need the native decoder, and model.backend=transformers"
        )
    if parallel.tensor > 1 and model.lora is not None and model.lora.base != "dtype":
        raise ValueError(
            f"parallel.tensor cannot cut matrices in 4 bits (model.lora.base={model.lora.base}): use parallel.shard, or base=dtype"
        )
    if parallel.tensor > 1 and activations == "selective":
        raise ValueError("activations=selective cannot follow tensors that parallel.tensor cuts: use recompute or keep")
    if parallel.offload and model.device == "cpu":
        raise ValueError("parallel.offload has no effect with model.device=cpu: host memory is all there is")
    if parallel.offload and optimizer.offload:
        raise ValueError(
            "optimizer.offload has no effect with parallel.offload, which keeps the optimizer's state on the CPU too"
        )
