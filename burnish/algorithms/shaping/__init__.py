"""Slot `shaping`: what is done to rewards between the verifier and the advantages, in the listed order."""

from collections.abc import Callable

from torch import Tensor

from burnish.algorithms.shaping.length import cosine, kimi_length, lcpo_exact, lcpo_max, soft_overlong
from burnish.algorithms.shaping.outcome import signed, stop_properly, t1_penalty
from burnish.algorithms.shaping.repetition import repetition, repetition_dense

SHAPERS: dict[str, Callable[..., Tensor]] = {
    "soft_overlong": soft_overlong,
    "kimi_length": kimi_length,
    "cosine": cosine,
    "repetition": repetition,
    "repetition_dense": repetition_dense,
    "lcpo_exact": lcpo_exact,
    "lcpo_max": lcpo_max,
    "stop_properly": stop_properly,
    "t1_penalty": t1_penalty,
    "signed": signed,
}
"""`f(batch, step, **options)`: [S] the new reward column, or [N] token rewards to add where the record says `dense`.

`step` is the training step the batch is for, counted from 1. A shaper never changes the accuracy.
"""

__all__ = ["SHAPERS"]
