"""A model spread over the processes that train it: rows, layers and parameters, in the order they must be cut."""

from __future__ import annotations

import os

import torch
from torch import nn

from burnish.config.errors import UserError
from burnish.config.placement import Parallel
from burnish.training.parallel.ranks import SOLO, Ranks


def distribute(model: nn.Module, ranks: Ranks, offload: bool = False) -> None:
    """Cut a whole model over ranks, in place: this process has its part from now on. Its learner is made afterwards."""
    if ranks.weights is None:
        return
    from burnish.training.parallel.fsdp import shard
    from burnish.training.parallel.sequence import split_rows
    from burnish.training.parallel.tensor import cut_layers

    if ranks.weights["tensor"].size() > 1:
        cut_layers(model, ranks.weights["tensor"])
    if ranks.sequence is not None:
        split_rows(model, ranks.sequence)
    if offload or ranks.weights["replicate"].size() * ranks.weights["shard"].size() > 1:
        shard(model, ranks, offload)
    else:
        model.to(ranks.device)


# --- Joining the other processes: `torchrun` tells each its number, and the config how the work is divided.
#
# Ranks are numbered with `tensor` fastest, then `sequence`, then `shard`, then `replicate`: those that speak most often are
# neighbours on one machine.


def is_launched() -> bool:
    """Whether a launcher (torchrun) started this process as one of several, or as one that may have peers."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def refuse_several(command: str) -> None:
    """For commands that one process runs: several would do the same work and get in each other's way."""
    if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"burnish {command} runs in one process, and torchrun started {os.environ['WORLD_SIZE']}: start it without torchrun "
            "(burnish sft is the command that several processes can share)"
        )


def join(config: Parallel, on_gpu: bool) -> Ranks:
    """This process's place among its peers; `SOLO` where no launcher started it."""
    if not is_launched():
        if config != Parallel():
            raise UserError(
                "parallel has no effect on one process: start several with torchrun --nproc-per-node <number> -m burnish.cli.main ..."
            )
        return SOLO
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    num_processes, kind = int(os.environ["WORLD_SIZE"]), "cuda" if on_gpu else "cpu"
    replicate, shard, sequence, tensor = config.sizes(num_processes)
    device = torch.device(kind)
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        # Small values travel as objects, and offloaded tensors from the CPU: both backends, each for its device.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    weights = init_device_mesh(
        kind, (replicate, shard * sequence, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    work = init_device_mesh(kind, (replicate * shard, sequence, tensor), mesh_dim_names=("data", "sequence", "columns"))
    return Ranks(
        index=work.get_local_rank("data"),
        count=replicate * shard,
        is_first=distributed.get_rank() == 0,
        device=device,
        data=work.get_group("data"),
        sequence=work.get_group("sequence") if sequence > 1 else None,
        weights=weights,
    )


def leave() -> None:
    """Say goodbye to the others, where there are any: a process that ends without it is reported as a failure."""
    if is_launched():
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
