"""Where workers are and how they are reached: what a group asks of `local.py`, of `ray_group.py`, or of a test.

A backend knows ranks and messages, and nothing of batches, marks or what a call is for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from burnish.controller.splitting import Divided


class Gone(Exception):
    """There is no worker any more: whoever was called, or the `rank` that it could not do without. The message says how that is known."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass
class Traffic:
    """What went to workers and came back."""

    messages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    """Of both, what lay in an object store on its way."""

    def take(self) -> Traffic:
        """All since the last time."""
        taken = replace(self)
        self.messages, self.bytes_out, self.bytes_in, self.bytes_stored = 0, 0, 0, 0
        return taken


@dataclass(eq=False)
class Call:
    """One method of one rank, asked for."""

    rank: int
    method: str
    token: Any
    """What the backend knows it by."""
    started: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    """Whether it is known to have: then nobody need look again."""
    is_promised: bool = False
    """Whether it was sent before all of its arguments were there."""


@dataclass(frozen=True)
class Order:
    """A call to be sent to one rank."""

    rank: int
    method: str
    parcel: Any
    """Its arguments, as the backend packed them; parts of batches go into the marked places (`splitting.Slot`)."""
    lane: str
    parts: Sequence[tuple[Divided, int]] = ()
    promises: Sequence[Any] = ()
    """Results of other calls that go into the marked places; a call has either these or parts."""


class Backend(Protocol):
    """Where workers are and how they are reached."""

    size: int
    traffic: Traffic
    is_here: bool
    """Whether arguments are handed over as they are: in this process there is nothing to divide or to send."""

    @property
    def keeps_promises(self) -> bool:
        """Whether a call may be sent before all of its arguments are there."""

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments, ready to be sent to any number of ranks."""

    def send(self, orders: Sequence[Order]) -> list[Any]:
        """Begin calls; what is returned stands for them, in their order."""

    def wait(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended, well or badly: as soon as all have, or when the time is over. Those that ended badly first."""

    def any_of(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended: as soon as one has (of very many: a few have), or when the time is over."""

    def promise(self, token: Any) -> Any:
        """What stands for a call's result in orders of such a backend; None where it must be waited for."""

    def value(self, token: Any) -> Any:
        """What a call that has ended gave, as it travelled (`core/wire.py`). Raises a worker's `UserError`, `WorkerFailed` for
        any other error of its, and `Gone` where there is no worker any more."""

    def describe(self, rank: int) -> str:
        """Which process a rank is, and the last lines it wrote."""

    def silent(self, ranks: Sequence[int], what: str) -> str:
        """What ranks that do not answer are doing, as far as it can be found out."""

    def restart(self, rank: int) -> None:
        """A new worker in a rank's place."""

    def close(self) -> None:
        """End all workers."""
