"""What a learner did and how long its parts took: the clock it carries, read once a step.

A part is marked where it happens, `with meter("forward"):`. Parts may stand inside each other, and a moment belongs to
the innermost one. On a GPU a mark is an event put into the stream, so nothing waits; on a CPU it is the time. The shapes
of the micro-batches that went through the model are kept too, and become operations when the meter is read.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from burnish.config.model import Lora
from burnish.models.architecture import Architecture, Windows
from burnish.models.decoder import Decoder
from burnish.models.flops import ForwardCounts, backward_flops, forward_flops, packed_counts, recomputed_flops
from burnish.models.heads import ScoreModel, ValueModel
from burnish.models.kernels.shared_prefix import SharedPrefixes
from burnish.training.parallel.ranks import SOLO, Ranks

# --- The operations of the models a learner trains, as `models/flops.py` counts them.


@dataclass(frozen=True)
class ModelFlops:
    """What the operations of a model follow from, besides the shapes of its batches."""

    arch: Architecture
    head_size: int | None = None
    """Outputs of a token where they are not the vocabulary's logits."""
    lora: Lora | None = None
    activations: str = "keep"
    fused_attention: bool = False
    processes: int = 1
    """How many divide each micro-batch among them, by its rows or by the weights: this one does its part."""

    def of(self, counts: ForwardCounts, with_gradient: bool) -> tuple[int, int]:
        """Operations that the mathematics needs, and those that are executed."""
        needed = forward_flops(self.arch, counts, self.head_size, self.lora).total
        if not with_gradient:
            return needed // self.processes, needed // self.processes
        needed += backward_flops(self.arch, counts, self.head_size, self.lora).total
        again = recomputed_flops(self.arch, counts, self.head_size, self.lora, self.activations, self.fused_attention)
        return needed // self.processes, (needed + again.total) // self.processes


def model_flops(model: nn.Module, ranks: Ranks = SOLO) -> ModelFlops | None:
    """Of our decoder as a policy or below a scalar head, on one of several ranks; None where transformers does the forward."""
    decoder = model.backbone if isinstance(model, ValueModel | ScoreModel) else model
    if not isinstance(decoder, Decoder):
        return None
    return ModelFlops(
        decoder.arch,
        None if decoder is model else 1,
        decoder.lora,
        decoder.activations,
        fused_attention=decoder.embedding.weight.is_cuda,
        processes=(ranks.sequence_group.size() if ranks.sequence_group is not None else 1)
        * (ranks.mesh["tensor"].size() if ranks.mesh is not None else 1),
    )


LEARNER_PHASES = ("forward", "backward", "optimizer", "communication", "other")
"""What the learner's time is divided into."""
MAX_MARKS = 10_000


@dataclass(frozen=True)
class MeterReading:
    """What was done between two readings of a meter."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(LEARNER_PHASES, 0.0))
    tokens: int = 0
    """Of the batches as they were given, in passes with a gradient."""
    needed: int | None = 0
    """Operations that the mathematics needs; None where a model's are not known."""
    executed: int | None = 0
    """The same with what is calculated twice to save memory."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __add__(self, other: MeterReading) -> MeterReading:
        """Of two learners."""
        seconds = {part: self.seconds[part] + other.seconds[part] for part in LEARNER_PHASES}
        return MeterReading(
            seconds,
            self.tokens + other.tokens,
            None if self.needed is None or other.needed is None else self.needed + other.needed,
            None if self.executed is None or other.executed is None else self.executed + other.executed,
        )


@dataclass(frozen=True)
class _ForwardPass:
    """A micro-batch that went through the model; its small tensors stay where they are until the meter is read."""

    offsets: Tensor
    shared_prefix: SharedPrefixes | None
    num_outputs: int
    with_gradient: bool

    def counts(self, windows: Windows) -> tuple[ForwardCounts, int]:
        """What was computed, and how many tokens the micro-batch has."""
        lengths = self.offsets.diff().tolist()
        shared = None
        if self.shared_prefix is not None:
            rows = zip(self.shared_prefix.owner.tolist(), self.shared_prefix.length.tolist(), strict=True)
            shared = [0 if owner == s else length for s, (owner, length) in enumerate(rows)]
        return packed_counts(lengths, self.num_outputs, windows, shared), sum(lengths)


class Meter:
    """The clock of one learner on a device; `cost` is None for a model whose operations are not known."""

    def __init__(self, device: torch.device, cost: ModelFlops | None) -> None:
        self.device, self.cost = device, cost
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []
        """Moments, and the part that each begins (None: the learner's work is interrupted)."""
        self._passes: list[_ForwardPass] = []
        self._read = self._nothing()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time spent here belongs to `part`, but for parts that are opened inside."""
        if not self._open and len(self._marks) > MAX_MARKS:  # a meter that nobody reads must not grow
            self._read = self._read + self._recent()
        self._open.append(part)
        self._mark()
        try:
            if torch.autograd._profiler_enabled():
                with record_function(part):
                    yield
            else:
                yield
        finally:
            self._open.pop()
            self._mark()

    def saw(self, offsets: Tensor, num_outputs: int, shared_prefix: SharedPrefixes | None, with_gradient: bool) -> None:
        """A micro-batch went through the model, and back again if with gradient."""
        self._passes.append(_ForwardPass(offsets, shared_prefix, num_outputs, with_gradient))

    def read(self) -> MeterReading:
        """All since the last reading. Waits for the device, so call it when the step is done."""
        reading, self._read = self._read + self._recent(), self._nothing()
        return reading

    def _nothing(self) -> MeterReading:
        return MeterReading() if self.cost is not None else MeterReading(needed=None, executed=None)

    def _recent(self) -> MeterReading:
        """What the marks and passes kept so far come to; they are forgotten."""
        seconds = dict.fromkeys(LEARNER_PHASES, 0.0)
        for (start, part), (end, _) in pairwise(self._marks):
            if part is not None:
                seconds[part] += self._between(start, end)
        needed, executed, tokens = 0, 0, 0
        for seen in self._passes:
            counts, size = seen.counts(None if self.cost is None else self.cost.arch.windows)
            tokens += size if seen.with_gradient else 0
            if self.cost is not None:
                flops = self.cost.of(counts, seen.with_gradient)
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
    """What carries a meter."""

    meter: Meter


Owner = TypeVar("Owner", bound=HasMeter)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Method = Callable[Concatenate[Owner, Arguments], Result]


def metered(part: str) -> Callable[[Method[Owner, Arguments, Result]], Method[Owner, Arguments, Result]]:
    """Makes all of a method one part of its owner's time."""

    def mark(method: Method[Owner, Arguments, Result]) -> Method[Owner, Arguments, Result]:
        @wraps(method)
        def timed(self: Owner, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with self.meter(part):
                return method(self, *args, **kwargs)

        return timed

    return mark


# --- How fast a GPU multiplies matrices at best, by its name.
#
# The makers' figures for dense bfloat16 and float16 with float32 accumulation, in TFLOP/s; what a real product reaches is
# less (790 of an H200's 989). A GPU that is not in the table has no share of a peak, only a rate.

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
HALF_DTYPES = (torch.bfloat16, torch.float16)


def peak_half_flops(name: str) -> float | None:
    """Operations a second in a half type of the GPU that calls itself `name`; None where the table has none.

    Of the rows whose words are all in the name the one with the most counts: "H100 PCIe" before "H100".
    """
    words = set(name.replace("-", " ").split())
    found = [row for row in HALF_TFLOPS if set(row.split()) <= words]
    return HALF_TFLOPS[max(found, key=lambda row: len(row.split()))] * 1e12 if found else None


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak of a device for products in a type; None where it is not known (a CPU, an unknown GPU, a wide type)."""
    if device.type != "cuda" or dtype not in HALF_DTYPES:
        return None
    return peak_half_flops(torch.cuda.get_device_name(device))


# --- How much memory a run holds: what torch has allocated on a GPU, the resident size of the process on a CPU.

GIB = 2**30


def reset_peak_memory(device: torch.device) -> None:
    """The next peak is counted from here. A process cannot do so with its resident size: there it is that of its life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_metrics(device: torch.device) -> dict[str, float]:
    """`memory/peak_gib` since the peak was restarted, and `memory/current_gib` where the system tells it."""
    if device.type == "cuda":
        peak, current = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        return {"memory/peak_gib": peak / GIB, "memory/current_gib": current / GIB}
    unit = 1 if sys.platform == "darwin" else 1024  # of getrusage
    values = {"memory/peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}
    pages = Path("/proc/self/statm")
    if pages.is_file():
        values["memory/current_gib"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / GIB
    return values
