"""A model spread over the processes that train it: rows, layers and parameters, in the order they must be cut."""

from __future__ import annotations

from torch import nn

from burnish.training.parallel.ranks import Ranks


def distribute(model: nn.Module, ranks: Ranks, offload: bool = False) -> None:
    """Cut a whole model over ranks, in place: this process has its part from now on. Its learner is made afterwards."""
    if ranks.weights is None:
        return
    from burnish.training.parallel.sequence import split_rows
    from burnish.training.parallel.shard import shard
    from burnish.training.parallel.tensor import cut_layers

    if ranks.weights["tensor"].size() > 1:
        cut_layers(model, ranks.weights["tensor"])
    if ranks.sequence is not None:
        split_rows(model, ranks.sequence)
    if offload or ranks.weights["replicate"].size() * ranks.weights["shard"].size() > 1:
        shard(model, ranks, offload)
    else:
        model.to(ranks.device)
