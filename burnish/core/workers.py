"""What code below the controller may know of workers: that they can be asked, can be lost, and share a store.

`controller/group.py` has the groups themselves; whoever needs one is handed it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from burnish.config.errors import UserError


class WorkerLost(UserError):
    """A worker ended or does not answer. The message says which, doing what, and what it said last."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class WorkerFailed(RuntimeError):
    """A worker raised an error that is no user's; the message has its traceback."""


class Handle(Protocol):
    """A call on its way to one worker."""

    @property
    def rank(self) -> int:
        """Whose."""


class Workers(Protocol):
    """A group whose workers are asked one by one."""

    size: int

    def send(self, rank: int, method: str, *arguments: Any) -> Handle:
        """Call a marked method of one worker."""

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> Sequence[Handle]:
        """The same call to several: what is large in it is packed once. What another call will give may be an argument."""

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Sequence[Handle]:
        """A call to several, each with arguments of its own."""

    def ready(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        """Those that have ended, well or badly; returns as soon as there is one, or when the time is over."""

    def settle(self, handles: Sequence[Handle]) -> None:
        """Wait until all have ended, well or badly, or one is late: to ask for each result is quick then."""

    def result(self, handle: Handle) -> Any:
        """What a call gave; waits for it. Raises `WorkerLost` where there is nobody left to give it."""

    def restart(self, rank: int) -> None:
        """A new worker in a lost one's place, made as that one was. The first call to it waits until it is there."""


class Store(Protocol):
    """Where workers leave large things for each other."""

    def put(self, value: Any) -> Any:
        """A reference to a value, which may be sent anywhere."""

    def get(self, reference: Any) -> Any:
        """The value."""


class InProcess:
    """The store of workers that share a process: a value is its own reference."""

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Any) -> Any:
        return reference
