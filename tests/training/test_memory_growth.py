"""The process does not grow over many updates of changing lengths (`bench/soak.py` is the long version)."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import pytest
import torch

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.training.learner import Learner
from burnish.training.meter import memory_metrics

EARLY, LATE = 13, 27
BOUND = 2.0
"""MiB that may come between the two: the noise is a few hundred KiB; a quarter MiB that every update leaves is 3.5."""


def resident() -> float:
    """MiB of the process, without what its allocator only keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return memory_metrics(torch.device("cpu"))["memory/current_gib"] * 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the resident size from /proc")
@pytest.mark.parametrize(
    ("activations", "leaks"),
    [("keep", False), ("selective", False), ("recompute", False), ("offload", False), ("keep", True)],
)
def test_the_resident_size_stays_what_it_is(make_batch: Callable[..., Batch], activations: str, leaks: bool) -> None:
    model = Decoder(Architecture("qwen3", 11, 64, 2, 4, 2, 16, 256, 64, qk_norm=True))
    initialise(model, seed=0)
    set_activations(model, activations)
    learner = Learner(model, Optimizer(lr=1e-4), LATE, token_budget=64)
    kept, sizes = list[torch.Tensor](), list[float]()
    for update in range(LATE + 1):
        random = torch.Generator().manual_seed(update % 7)  # both sizes are measured after the same lengths
        shapes = [(k // 2, 2 + k // 2, int(torch.randint(1, 20, (), generator=random))) for k in range(8)]
        learner.update(make_batch(shapes, update % 7), PolicyLoss())
        learner.meter.read()
        if leaks:
            kept.append(torch.ones(1 << 16))
        if update in (EARLY, LATE):
            sizes.append(resident())
    assert (sizes[1] - sizes[0] > BOUND) == leaks, sizes
