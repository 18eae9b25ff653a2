"""Several workers in this process, with all that a wire does to arguments and results: what a group sees of Ray, without Ray."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.core.serialization import decode, encode, num_array_bytes
from burnish.distributed.batch_dispatch import fill_placeholders
from burnish.distributed.resident_batches import ResidentShard
from burnish.distributed.worker_group import RankCall, Traffic, WorkerGone


@dataclass(eq=False)
class Sent:
    """A call and what came of it."""

    rank: int
    method: str
    parcel: Any
    lane: str
    value: Any = None
    error: Exception | None = None


class HereBackend:
    """Workers of `make(rank)`, called one after the other; those in `dead` are gone, those in `mute` never answer."""

    is_here = False
    keeps_promises = True

    def __init__(self, make: Callable[[int], Any], size: int) -> None:
        self.make, self.workers = make, [make(rank) for rank in range(size)]
        self.size, self.traffic = size, Traffic()
        self.keepers = [ResidentShard() for _ in range(size)]
        self.dead: set[int] = set()
        self.mute: set[int] = set()
        self.restarted: list[int] = []
        self.sent: list[Sent] = []

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return encode((args, kwargs))

    def send(self, orders: Sequence[RankCall]) -> list[Sent]:
        return [self._send(order) for order in orders]

    def _send(self, order: RankCall) -> Sent:
        parts = [sharded.parts[share] for sharded, share in order.parts]
        parts += [promised.value for promised in order.promises]
        self.traffic.messages += 1
        self.traffic.bytes_out += num_array_bytes(order.parcel) + num_array_bytes(parts)
        sent = Sent(order.rank, order.method, fill_placeholders(order.parcel, parts), order.lane)
        self.sent.append(sent)
        failed = [promised.error for promised in order.promises if promised.error is not None]
        if order.rank in self.dead:
            sent.error = WorkerGone("killed")
        elif failed:
            sent.error = failed[0]
        elif order.rank not in self.mute:
            try:
                keeper = self.keepers[order.rank]
                args, kwargs = fill_placeholders(decode(order.parcel), [keeper.open(part) for part in parts])
                result = self.call(order.rank, order.method, args, kwargs)
                keeper.keep(parts, result)
                sent.value = encode(result)
            except Exception as error:  # noqa: BLE001 (raised where the result is asked for)
                sent.error = error
        return sent

    def call(self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.workers[rank], method)(*args, **kwargs)

    def wait(self, tokens: Sequence[Sent], timeout_s: float) -> list[Sent]:
        return [token for token in tokens if token.rank not in self.mute or token.value is not None]

    any_of = wait

    def promise(self, token: Sent) -> Sent:
        return token

    def value(self, token: Sent) -> Any:
        if token.error is not None:
            raise token.error
        self.traffic.bytes_in += num_array_bytes(token.value)
        return token.value

    def describe(self, rank: int) -> str:
        return f"last words of {rank}"

    def silent(self, ranks: Sequence[int], what: str) -> str:
        return f"{ranks} sleep in {what}"

    def restart(self, rank: int) -> None:
        self.dead.discard(rank)
        self.mute.discard(rank)
        self.workers[rank] = self.make(rank)
        self.restarted.append(rank)

    def close(self) -> None:
        self.workers = []
