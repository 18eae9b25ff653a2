"""The mark that says how a method of a worker is called on a whole group of them. Metadata only.

    class Scorer:
        @spread("sequences", "sequences")
        def scores(self, batch: Batch) -> Tensor:
            \"\"\"[N] a number for every token.\"\"\"

A group of such workers has a method `scores` too: every batch among its arguments is divided over the ranks, and the
columns they return come back in the order of the whole batch. The first line of the docstring is also what a message says
the controller was waiting for.

Arguments (`split`): `sequences` divides every batch into parts of about the same work, and gives all else to everyone;
`broadcast` gives everyone the same; `each` takes a list with one entry a rank for every argument; `first` calls the first
rank alone. Results (`join`): `sequences` puts columns back in the order of the first batch among the arguments, and takes
whatever else a result holds from the first rank; `list` has one entry a rank; `first` is the first rank's; `nothing` does not
wait: an error is raised by a later call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from burnish.config.errors import UserError, did_you_mean

Split = Literal["sequences", "broadcast", "each", "first"]
Join = Literal["sequences", "list", "first", "nothing"]
Lane = Literal["work", "side"]
"""A worker does one thing at a time in each lane: what a checkpoint's writer or a listener waits for does not hold up the work."""
ATTRIBUTE = "__spread__"
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """How a method is called on a group."""

    split: Split = "broadcast"
    join: Join = "first"
    lane: Lane = "work"

    def __post_init__(self) -> None:
        for name, value, words in (("split", self.split, Split), ("join", self.join, Join), ("lane", self.lane, Lane)):
            if value not in get_args(words):
                raise ValueError(
                    f"spread: {name}={value!r}{did_you_mean(value, get_args(words))} (one of {get_args(words)})"
                )
        if self.join == "sequences" and self.split != "sequences":
            raise ValueError("spread: results cannot be joined by sequences that the arguments were not divided by")
        if self.split == "first" and self.join == "list":
            raise ValueError("spread: one rank alone is called, so there is no list of results")


def dispatch(split: Split = "broadcast", join: Join = "first", lane: Lane = "work") -> Callable[[Method], Method]:
    """Marks a method of a worker."""
    mark = Dispatch(split, join, lane)

    def marked(method: Method) -> Method:
        setattr(method, ATTRIBUTE, mark)
        return method

    return marked


def dispatch_of(kind: type, name: str) -> Dispatch:
    """The mark of a class's method; AttributeError where it has none."""
    mark = getattr(getattr(kind, name, None), ATTRIBUTE, None)
    if mark is None:
        known = [n for n in dir(kind) if hasattr(getattr(kind, n, None), ATTRIBUTE)]
        raise AttributeError(
            f"{kind.__name__} has no method {name!r} that is marked with @spread{did_you_mean(name, known)}"
        )
    assert isinstance(mark, Dispatch)
    return mark


def method_summary(kind: type, name: str) -> str:
    """What a method is for, in a line."""
    text = (getattr(kind, name).__doc__ or name).strip().splitlines()[0]
    return str(text).rstrip(".")


# --- What code below the controller may know of workers: that they can be asked, can be lost, and share a store.
#
# `distributed/worker_group.py` has the groups themselves; whoever needs one is handed it.


class WorkerLost(UserError):
    """A worker ended or does not answer. The message says which, doing what, and what it said last."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class WorkerFailed(RuntimeError):
    """A worker raised an error that is no user's; the message has its traceback."""


class CallHandle(Protocol):
    """A call on its way to one worker."""

    @property
    def rank(self) -> int:
        """Whose."""


class Workers(Protocol):
    """A group whose workers are asked one by one."""

    size: int

    def send(self, rank: int, method: str, *arguments: Any) -> CallHandle:
        """Call a marked method of one worker."""

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> Sequence[CallHandle]:
        """The same call to several: what is large in it is packed once. What another call will give may be an argument."""

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Sequence[CallHandle]:
        """A call to several, each with arguments of its own."""

    def ready(self, handles: Sequence[CallHandle], timeout_s: float) -> list[CallHandle]:
        """Those that have ended, well or badly; returns as soon as there is one, or when the time is over."""

    def settle(self, handles: Sequence[CallHandle]) -> None:
        """Wait until all have ended, well or badly, or one is late: to ask for each result is quick then."""

    def result(self, handle: CallHandle) -> Any:
        """What a call gave; waits for it. Raises `WorkerLost` where there is nobody left to give it."""

    def restart(self, rank: int) -> None:
        """A new worker in a lost one's place, made as that one was. The first call to it waits until it is there."""


class ObjectStore(Protocol):
    """Where workers leave large things for each other."""

    def put(self, value: Any) -> Any:
        """A reference to a value, which may be sent anywhere."""

    def get(self, reference: Any) -> Any:
        """The value."""


class InProcessStore:
    """The store of workers that share a process: a value is its own reference."""

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Any) -> Any:
        return reference
