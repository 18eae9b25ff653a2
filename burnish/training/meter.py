"""Measures a learner: seconds per phase, tokens and FLOPs, peak FLOP/s of the GPU, and memory.

A phase is marked where it happens: `with meter("forward"):`. Phases may be nested, and time belongs to the innermost one. On a GPU
a mark is an event in the stream, so that nothing waits; on a CPU it is the time. The shapes of the micro-batches are recorded too,
and are turned into FLOPs when the meter is read, once a step.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from burnish.config.model import Lora, Vision
from burnish.models.architecture import Architecture, Windows
from burnish.models.decoder import Decoder
from burnish.models.flops import ForwardCounts, backward_flops, forward_flops, packed_counts, recomputed_flops
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.vision.tower_cost import Grid, pass_flops
from burnish.models.vision.training import trained_part
from burnish.training.parallel.ranks import SOLO, Ranks

LEARNER_PHASES = ("forward", "backward", "optimizer", "communication", "other")
"""The phases of a learner's time."""
MAX_MARKS = 10_000
"""Marks after which a meter that is never read adds them up, so that it does not grow."""
HALF_DTYPES = (torch.bfloat16, torch.float16)
GIB = 2**30


@dataclass(frozen=True)
class ModelFlops:
    """What a model's FLOPs depend on, besides the shapes of its batches (`models/flops.py`)."""

    arch: Architecture
    head_size: int | None = None
    """Outputs per token, if they are not the vocabulary's logits."""
    lora: Lora | None = None
    activations: str = "keep"
    fused_attention: bool = False
    tower: Vision = "frozen"
    """What of a vision tower is trained."""
    processes: int = 1
    """Number of processes that divide each micro-batch, by its rows or by the weights; this one does its part."""

    def of(self, counts: ForwardCounts, with_gradient: bool, grids: Sequence[Grid] = ()) -> tuple[int, int]:
        """FLOPs that the mathematics needs, and FLOPs that are executed; `grids` are those of the pass's pictures."""
        needed = forward_flops(self.arch, counts, self.head_size, self.lora).total
        executed = needed
        if with_gradient:
            needed += backward_flops(self.arch, counts, self.head_size, self.lora).total
            options = self.head_size, self.lora, self.activations, self.fused_attention
            executed = needed + recomputed_flops(self.arch, counts, *options).total
        if self.arch.vision is not None:
            tower = pass_flops(self.arch.vision, grids, self.tower, with_gradient, self.activations != "keep")
            needed, executed = needed + tower[0], executed + tower[1]
        return needed // self.processes, executed // self.processes


def model_flops(model: nn.Module, ranks: Ranks = SOLO) -> ModelFlops | None:
    """FLOPs of a native decoder, as a policy or below a scalar head, on this rank; None for a transformers model."""
    decoder = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    if not isinstance(decoder, Decoder):
        return None
    return ModelFlops(
        decoder.arch,
        None if decoder is model else 1,
        decoder.lora,
        decoder.activations,
        fused_attention=decoder.embedding.weight.is_cuda,
        tower=trained_part(decoder),
        processes=1
        if ranks.mesh is None
        else ranks.mesh.sizes.pipeline * ranks.mesh.sizes.context * ranks.mesh.sizes.tensor,
    )


@dataclass(frozen=True)
class MeterReading:
    """The work between two readings of a meter."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEARNER_PHASES, 0.0))
    tokens: int = 0
    """Tokens of the batches, in passes with gradient."""
    needed: int | None = 0
    """FLOPs that the mathematics needs; None if the model's FLOPs are unknown."""
    executed: int | None = 0
    """FLOPs including recomputed activations."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __add__(self, other: MeterReading) -> MeterReading:
        """The readings of two learners, added."""
        seconds = {phase: self.seconds[phase] + other.seconds[phase] for phase in LEARNER_PHASES}
        return MeterReading(
            seconds,
            self.tokens + other.tokens,
            None if self.needed is None or other.needed is None else self.needed + other.needed,
            None if self.executed is None or other.executed is None else self.executed + other.executed,
        )


@dataclass(frozen=True)
class _ForwardPass:
    """A micro-batch that went through the model. Its small tensors stay on their device until the meter is read."""

    offsets: Tensor
    shared_prefix: Tensor | None
    num_outputs: int
    with_gradient: bool
    grids: Sequence[Grid] = ()
    """Grids of its pictures, each once."""

    def counts(self, windows: Windows) -> tuple[ForwardCounts, int]:
        """What was computed, and the number of tokens in the micro-batch."""
        lengths = self.offsets.diff().tolist()
        shared = None if self.shared_prefix is None else self.shared_prefix.tolist()
        return packed_counts(lengths, self.num_outputs, windows, shared), sum(lengths)


class Meter:
    """Clock and FLOP counter of one learner on a device; `cost` is None for a model whose FLOPs are unknown."""

    def __init__(self, device: torch.device, cost: ModelFlops | None) -> None:
        self.device, self.cost = device, cost
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []
        """Moments, and the phase that each begins; None between the learner's phases."""
        self._passes: list[_ForwardPass] = []
        self._read = self._nothing()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Attribute the time spent here to a phase, except for phases opened inside."""
        if not self._open and len(self._marks) > MAX_MARKS:
            self._read = self._read + self._recent()
        self._open.append(phase)
        self._mark()
        try:
            if torch.autograd._profiler_enabled():
                with record_function(phase):
                    yield
            else:
                yield
        finally:
            self._open.pop()
            self._mark()

    def count_pass(
        self,
        offsets: Tensor,
        num_outputs: int,
        shared_prefix: Tensor | None,
        with_gradient: bool,
        grids: Sequence[Grid] = (),
    ) -> None:
        """Record a micro-batch that went through the model, forward only or also backward, with the grids of its pictures."""
        self._passes.append(_ForwardPass(offsets, shared_prefix, num_outputs, with_gradient, grids))

    def read(self) -> MeterReading:
        """The work since the last reading. Waits for the device, so call it when the step is done."""
        reading, self._read = self._read + self._recent(), self._nothing()
        return reading

    def _nothing(self) -> MeterReading:
        return MeterReading() if self.cost is not None else MeterReading(needed=None, executed=None)

    def _recent(self) -> MeterReading:
        """Add up the recorded marks and passes, and clear them."""
        seconds = dict.fromkeys(LEARNER_PHASES, 0.0)
        for (start, phase), (end, _) in pairwise(self._marks):
            if phase is not None:
                seconds[phase] += self._between(start, end)
        needed, executed, tokens = 0, 0, 0
        for seen in self._passes:
            counts, size = seen.counts(None if self.cost is None else self.cost.arch.windows)
            tokens += size if seen.with_gradient else 0
            if self.cost is not None:
                flops = self.cost.of(counts, seen.with_gradient, seen.grids)
                needed, executed = needed + flops[0], executed + flops[1]
        self._marks, self._passes = self._marks[-1:], []
        known = self.cost is not None
        return MeterReading(seconds, tokens, needed if known else None, executed if known else None)

    def _mark(self) -> None:
        moment: Any
        if self.device.type == "cuda":
            moment = torch.cuda.Event(enable_timing=True)
            moment.record(torch.cuda.current_stream(self.device))
        else:
            moment = time.perf_counter()
        self._marks.append((moment, self._open[-1] if self._open else None))

    def _between(self, start: Any, end: Any) -> float:
        if self.device.type != "cuda":
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


class HasMeter(Protocol):
    """An object with a meter."""

    meter: Meter


Owner = TypeVar("Owner", bound=HasMeter)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Arguments], Result]


def metered(phase: str) -> Callable[[Method[Owner, Arguments, Result]], Method[Owner, Arguments, Result]]:
    """Decorator: attribute the time of a method to a phase of its owner's meter."""

    def mark(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
        @wraps(method)
        def timed(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self.meter(phase):
                return method(self, *args, **kwargs)

        return timed

    return mark


# --- Peak FLOP/s of GPUs -----------------------------------------------------------------------------------------------

HALF_TFLOPS = {
    "B200": 2250.0,
    "B300": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 150.0,
    "A30": 165.0,
    "A10": 125.0,
    "A10G": 70.0,
    "A6000": 155.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 209.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}
"""Vendors' figures for dense bfloat16 and float16 with float32 accumulation, in TFLOP/s. A real product reaches less: 790 of an
H200's 989. A GPU that is not in the table gets no MFU, only a rate."""


def peak_half_flops(name: str) -> float | None:
    """Peak half-precision FLOP/s of the GPU with this device name; None if it is not in the table.

    Of the rows whose words are all in the name, the one with the most words counts: "H100 PCIe" before "H100".
    """
    words = set(name.replace("-", " ").split())
    found = [row for row in HALF_TFLOPS if set(row.split()) <= words]
    return HALF_TFLOPS[max(found, key=lambda row: len(row.split()))] * 1e12 if found else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device for matmuls in a type; None if unknown (a CPU, an unknown GPU, a wide type)."""
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return None
    return peak_half_flops(torch.cuda.get_device_name(device))


# --- Memory: allocated by torch on a GPU, resident size of the process on a CPU ------------------------------------------


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of GPU memory. The peak resident size of a process cannot be reset: on a CPU it is that of its lifetime."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`memory/peak_gib` since the last reset, and `memory/current_gib` if the system reports it."""
    if device.type == "cuda":
        peak, current = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return {"memory/peak_gib": peak / GIB, "memory/current_gib": current / GIB}
    unit = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss
    values = {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    pages = Path("/proc/self/statm")
    if pages.is_file():
        values["memory/current_gib"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    return values
