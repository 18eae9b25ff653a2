"""Workers in this process: one rank, and a call is a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.controller.backend import Order, Traffic


@dataclass(eq=False)
class _Done:
    """What a call gave, or what it raised."""

    value: Any = None
    error: Exception | None = None


class LocalBackend:
    """One worker, called directly: nothing is packed, copied or waited for."""

    size = 1
    is_here = True
    keeps_promises = False

    def __init__(self, worker: Any) -> None:
        self.worker, self.traffic = worker, Traffic()

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs

    def send(self, orders: Sequence[Order]) -> list[_Done]:
        return [self._call(order) for order in orders]

    def _call(self, order: Order) -> _Done:
        args, kwargs = order.parcel
        try:
            return _Done(getattr(self.worker, order.method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (raised where the result is asked for, as of any other worker)
            return _Done(error=error)

    def wait(self, tokens: Sequence[_Done], timeout_s: float) -> list[_Done]:
        return list(tokens)

    def any_of(self, tokens: Sequence[_Done], timeout_s: float) -> list[_Done]:
        return list(tokens)

    def promise(self, token: _Done) -> None:
        return None

    def value(self, token: _Done) -> Any:
        if token.error is not None:
            raise token.error
        return token.value

    def describe(self, rank: int) -> str:
        return "it is this process"

    def silent(self, ranks: Sequence[int], what: str) -> str:
        return "it is this process"

    def restart(self, rank: int) -> None:
        raise RuntimeError("a worker in this process cannot be replaced")

    def close(self) -> None:
        """Nothing to end: the worker is this process."""
