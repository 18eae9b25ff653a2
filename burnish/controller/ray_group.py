"""Messages to workers that are Ray's actors (`ray_processes.py`), and their answers.

A worker that ends is noticed by the next look at any call (half a second); the message has its last lines. Arguments are packed
once however many ranks get them, and lie in the object store where they are large; parts of a batch are stored once, however many
calls are given it. Large groups are spoken to through relays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from burnish.controller.backend import Gone, Order, Traffic
from burnish.controller.ray_host import Message, Outcome, begin_call, outcome_of
from burnish.controller.ray_processes import RayProcesses
from burnish.controller.splitting import Divided
from burnish.core.wire import Packed, encode, num_bytes

STORED = 1 << 16
"""Bytes from which arguments go through the object store."""


class RayBackend(RayProcesses):
    """A group of workers in other processes (`backend.Backend`)."""

    is_here = False

    def __init__(self, *args: Any, **options: Any) -> None:
        """As of `RayProcesses`."""
        super().__init__(*args, **options)
        self.traffic = Traffic()

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Parcel:
        packed = encode((args, kwargs))
        return _Parcel(packed, num_bytes(packed))

    def send(self, orders: Sequence[Order]) -> list[_Sent]:
        sent: dict[int, _Sent] = {}
        by_relay: dict[int, list[Order]] = {}
        for order in orders:
            if self._relays:
                by_relay.setdefault(order.rank // self.fan_out, []).append(order)
            else:
                kept = [self._kept(divided, share, divided.parts[share]) for divided, share in order.parts]
                parts = [*kept, *order.promises]
                parcel = self._content(order.parcel)
                reference = begin_call(self._actors[order.rank], order.lane, order.method, parcel, parts)
                self.traffic.messages += 1
                sent[id(order)] = _Sent(order.rank, _Reply(reference, is_many=False), 0)
        for relay, group in by_relay.items():
            reply = self._forward(relay, group)
            sent |= {id(order): _Sent(order.rank, reply, k) for k, order in enumerate(group)}
        return [sent[id(order)] for order in orders]

    def _forward(self, relay: int, orders: Sequence[Order]) -> _Reply:
        """One message for all ranks of a relay that are called."""
        first, ranks = orders[0], [order.rank for order in orders]
        same = all(order.parcel is first.parcel for order in orders)
        parcels = [self._content(order.parcel) for order in (orders[:1] if same else orders)]
        bales = []
        for j, (divided, _) in enumerate(first.parts):
            parts = [divided.parts[order.parts[j][1]] for order in orders]
            bales.append(self._kept(divided, tuple(ranks), parts))
        message = Message(ranks, first.method, first.lane, parcels)
        host = self._relays[relay]
        self.traffic.messages += 1
        return _Reply(
            (host.forward_side if first.lane == "side" else host.forward).remote(message, *bales), is_many=True
        )

    def _content(self, parcel: _Parcel) -> Any:
        """Arguments as they are sent: in the store where they are large, once."""
        if parcel.stored is None and parcel.size > STORED:
            parcel.stored = ray.put(parcel.content)
            self.traffic.bytes_out += parcel.size
            self.traffic.bytes_stored += parcel.size
        elif parcel.stored is None:
            self.traffic.bytes_out += parcel.size
        return parcel.content if parcel.stored is None else parcel.stored

    def _kept(self, divided: Divided, key: Any, parts: Packed | list[Packed]) -> Any:
        """Parts of a batch as they are sent: in the store where they are large, once."""
        if key not in divided.stored:
            size = num_bytes(parts)
            self.traffic.bytes_out += size
            self.traffic.bytes_stored += size if size > STORED else 0
            divided.stored[key] = ray.put(parts) if size > STORED else parts
        return divided.stored[key]

    def wait(self, tokens: Sequence[_Sent], timeout_s: float) -> list[_Sent]:
        return self._ended(tokens, 1.0, timeout_s)

    def any_of(self, tokens: Sequence[_Sent], timeout_s: float) -> list[_Sent]:
        # Each look costs time for every call that is looked at: of many, a sixteenth are waited for.
        return self._ended(tokens, 1 / 16, timeout_s)

    def _ended(self, tokens: Sequence[_Sent], share: float, timeout_s: float) -> list[_Sent]:
        references = list(dict.fromkeys(token.reply.reference for token in tokens))
        if not references:
            return []
        ready, _ = ray.wait(references, num_returns=max(1, int(share * len(references))), timeout=timeout_s)
        found = set(ready)
        ended = [token for token in tokens if token.reply.reference in found]
        return sorted(ended, key=lambda token: not token.outcome.is_bad)  # those that ended badly first

    @property
    def keeps_promises(self) -> bool:
        return not self._relays  # Ray waits for what a message is given, not for what is inside of it

    def promise(self, token: _Sent) -> Any:
        return None if token.reply.is_many else token.reply.reference

    def value(self, token: _Sent) -> Any:
        found = token.outcome
        if found.gone is not None:
            raise Gone(found.gone)
        if found.error is not None:
            if not found.is_users:
                self._blame(token.rank, found.error)
            raise self._failed(token.rank, found)
        size = num_bytes(found.value)
        self.traffic.bytes_in += size
        self.traffic.bytes_stored += size if size > STORED else 0
        return found.value


@dataclass
class _Parcel:
    """Arguments of a call."""

    content: Any
    size: int
    stored: Any = None


class _Reply:
    """What comes back for one call, or for those that a relay passes on; read once."""

    def __init__(self, reference: Any, is_many: bool) -> None:
        self.reference, self.is_many = reference, is_many
        self._outcomes: list[Outcome] | Outcome | None = None

    def outcome(self, index: int) -> Outcome:
        if self._outcomes is None:
            found = outcome_of(self.reference)
            # A relay that is gone takes everyone's answer with it.
            self._outcomes = found.value if self.is_many and not found.is_bad else found
        return self._outcomes[index] if isinstance(self._outcomes, list) else self._outcomes


@dataclass(eq=False)
class _Sent:
    """A call on its way."""

    rank: int
    reply: _Reply
    index: int

    @property
    def outcome(self) -> Outcome:
        """Of a call that has ended."""
        return self.reply.outcome(self.index)
