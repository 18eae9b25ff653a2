"""`@dispatch` declares how a method of one worker is called on a group of workers. Also the protocols of such a group.

    class Scorer:
        @dispatch("sequences", "sequences")
        def scores(self, batch: Batch) -> Tensor:
            \"\"\"[N] a score for each token.\"\"\"

A group of such workers also has a method `scores`. It splits every `Batch` argument over the ranks, and returns
the columns in the order of the whole batch. The first line of the method's docstring names the call in error messages.

`split` says how arguments reach the ranks:

- `sequences`: every `Batch` argument is split into parts of about equal work; all other arguments go to every rank.
- `broadcast`: every rank gets the same arguments.
- `each`: every argument is a list with one entry per rank.
- `first`: only the first rank is called.

`join` says what the caller gets:

- `sequences`: columns are joined in the order of the first `Batch` argument; everything else comes from the first rank.
- `list`: one result per rank.
- `first`: the result of the first rank.
- `nothing`: None, at once. If the call fails, a later call raises its error.

`distributed/worker_group.py` implements the groups. Lower packages receive a group as an argument and use only these protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

from burnish.config.errors import UserError, did_you_mean

Split = Literal["sequences", "broadcast", "each", "first"]
Join = Literal["sequences", "list", "first", "nothing"]
Lane = Literal["work", "side"]
"""A worker runs one call at a time per lane. Calls in `side`, such as writing a checkpoint, do not delay calls in `work`."""
ATTRIBUTE = "__dispatch__"
"""Attribute of a marked method, which holds its `Dispatch`."""
Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Dispatch:
    """The mark of a method: how it is called on a group. The module's docstring describes the values."""

    split: Split = "broadcast"
    join: Join = "first"
    lane: Lane = "work"

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("split", self.split, Split),
            ("join", self.join, Join),
            ("lane", self.lane, Lane),
        ):
            if value not in get_args(choices):
                raise ValueError(
                    f"dispatch: {name}={value!r}{did_you_mean(value, get_args(choices))} (one of {get_args(choices)})"
                )
        if self.join == "sequences" and self.split != "sequences":
            raise ValueError(
                "dispatch: join='sequences' needs split='sequences': the arguments are not divided by sequences"
            )
        if self.split == "first" and self.join == "list":
            raise ValueError("dispatch: split='first' calls one rank only, so join='list' has no list of results")


def dispatch(split: Split = "broadcast", join: Join = "first", lane: Lane = "work") -> Callable[[Method], Method]:
    """Mark a method of a worker as callable on a group."""
    mark = Dispatch(split, join, lane)

    def marked(method: Method) -> Method:
        setattr(method, ATTRIBUTE, mark)
        return method

    return marked


def dispatch_of(worker_class: type, name: str) -> Dispatch:
    """Return the mark of a method; AttributeError if the method is missing or not marked."""
    mark = getattr(getattr(worker_class, name, None), ATTRIBUTE, None)
    if mark is None:
        known = [n for n in dir(worker_class) if hasattr(getattr(worker_class, n, None), ATTRIBUTE)]
        raise AttributeError(
            f"{worker_class.__name__} has no method {name!r} that is marked with @dispatch{did_you_mean(name, known)}"
        )
    assert isinstance(mark, Dispatch)
    return mark


def method_summary(worker_class: type, name: str) -> str:
    """Return the first line of a method's docstring, or its name if it has none."""
    text = (getattr(worker_class, name).__doc__ or name).strip().splitlines()[0]
    return str(text).rstrip(".")


class WorkerLost(UserError):
    """A worker died or does not answer. The message names the rank, the call and the worker's last output."""

    def __init__(self, text: str, rank: int) -> None:
        super().__init__(text)
        self.rank = rank


class WorkerFailed(RuntimeError):
    """A worker raised an error other than a `UserError`. The message holds its traceback."""


class CallHandle(Protocol):
    """A call that was sent to one worker."""

    @property
    def rank(self) -> int:
        """Rank of the worker."""


class Workers(Protocol):
    """A group whose workers are called one by one."""

    size: int

    def send(self, rank: int, method: str, *arguments: Any) -> CallHandle:
        """Call a marked method of one worker."""

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> Sequence[CallHandle]:
        """Make the same call on several workers. Large arguments are packed once; a pending result may be an argument."""

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> Sequence[CallHandle]:
        """Call a method on several workers, with separate arguments for each rank."""

    def ready(self, handles: Sequence[CallHandle], timeout_s: float) -> list[CallHandle]:
        """Return the calls that have ended, with a result or an error. Waits for at least one, or until the timeout."""

    def wait_all(self, handles: Sequence[CallHandle]) -> None:
        """Wait until all calls have ended or one has passed its deadline. `result` does not block afterwards."""

    def result(self, handle: CallHandle) -> Any:
        """Wait for a call and return its result. Raises `WorkerLost` if its worker is gone."""

    def restart(self, rank: int) -> None:
        """Start a new worker in place of a lost one, with the same arguments. The first call to it waits until it is ready."""


class ObjectStore(Protocol):
    """A store through which workers exchange large objects."""

    def put(self, value: Any) -> Any:
        """Store a value and return a reference that can be sent to any worker."""

    def get(self, reference: Any) -> Any:
        """Return the value of a reference."""


class InProcessStore:
    """The store of workers in one process: a value is its own reference."""

    def put(self, value: Any) -> Any:
        return value

    def get(self, reference: Any) -> Any:
        return reference
