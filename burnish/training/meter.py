"""What a learner did and how long its parts took: the clock it carries, read once a step.

A part is marked where it happens, `with meter("forward"):`. Parts may stand inside each other, and a moment belongs to
the innermost one. On a GPU a mark is an event put into the stream, so nothing waits; on a CPU it is the time. The shapes
of the micro-batches that went through the model are kept too, and become operations when the meter is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from burnish.models.architecture import Windows
from burnish.models.flops import Counts, packed_counts
from burnish.models.ops.trunks import Trunks
from burnish.training.cost import Cost

PARTS = ("forward", "backward", "optimizer", "communication", "other")
"""What the learner's time is divided into."""
MOST_MARKS = 10_000


@dataclass(frozen=True)
class Reading:
    """What was done between two readings of a meter."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    tokens: int = 0
    """Of the batches as they were given, in passes with a gradient."""
    needed: int | None = 0
    """Operations that the mathematics needs; None where a model's are not known."""
    executed: int | None = 0
    """The same with what is calculated twice to save memory."""

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())

    def __add__(self, other: Reading) -> Reading:
        """Of two learners."""
        seconds = {part: self.seconds[part] + other.seconds[part] for part in PARTS}
        return Reading(
            seconds,
            self.tokens + other.tokens,
            None if self.needed is None or other.needed is None else self.needed + other.needed,
            None if self.executed is None or other.executed is None else self.executed + other.executed,
        )


@dataclass(frozen=True)
class _Pass:
    """A micro-batch that went through the model; its small tensors stay where they are until the meter is read."""

    offsets: Tensor
    trunks: Trunks | None
    num_outputs: int
    with_gradient: bool

    def counts(self, windows: Windows) -> tuple[Counts, int]:
        """What was computed, and how many tokens the micro-batch has."""
        lengths = self.offsets.diff().tolist()
        shared = None
        if self.trunks is not None:
            rows = zip(self.trunks.owner.tolist(), self.trunks.length.tolist(), strict=True)
            shared = [0 if owner == s else length for s, (owner, length) in enumerate(rows)]
        return packed_counts(lengths, self.num_outputs, windows, shared), sum(lengths)


class Meter:
    """The clock of one learner on a device; `cost` is None for a model whose operations are not known."""

    def __init__(self, device: torch.device, cost: Cost | None) -> None:
        self.device, self.cost = device, cost
        self._open: list[str] = []
        self._marks: list[tuple[Any, str | None]] = []
        """Moments, and the part that each begins (None: the learner's work is interrupted)."""
        self._passes: list[_Pass] = []
        self._read = self._nothing()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time spent here belongs to `part`, but for parts that are opened inside."""
        if not self._open and len(self._marks) > MOST_MARKS:  # a meter that nobody reads must not grow
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

    def saw(self, offsets: Tensor, num_outputs: int, trunks: Trunks | None, with_gradient: bool) -> None:
        """A micro-batch went through the model, and back again if with gradient."""
        self._passes.append(_Pass(offsets, trunks, num_outputs, with_gradient))

    def read(self) -> Reading:
        """All since the last reading. Waits for the device, so call it when the step is done."""
        reading, self._read = self._read + self._recent(), self._nothing()
        return reading

    def _nothing(self) -> Reading:
        return Reading() if self.cost is not None else Reading(needed=None, executed=None)

    def _recent(self) -> Reading:
        """What the marks and passes kept so far come to; they are forgotten."""
        seconds = dict.fromkeys(PARTS, 0.0)
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
        return Reading(seconds, tokens, needed if known else None, executed if known else None)

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


class Metered(Protocol):
    """What carries a meter."""

    meter: Meter


Owner = TypeVar("Owner", bound=Metered)
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
