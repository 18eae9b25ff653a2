"""Letting waiting requests in: shared beginnings are found, the rest is prefilled, first tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from burnish.rollout.native.pages import Pages
from burnish.rollout.native.plan import PREFILL_TOKENS
from burnish.rollout.native.runner import Stretch
from burnish.rollout.native.seats import Seat
from burnish.rollout.native.state import NewRow

if TYPE_CHECKING:
    from burnish.rollout.native.paged import PagedEngine

SHARE = 16  # rows are filled when at least this fraction of them is free: larger prefills, fewer of them

_order = count()


@dataclass
class Intake:
    """Requests let in together: what must be computed for them, and how each row gets its first token."""

    stretches: list[Stretch] = field(default_factory=list)
    leaders: dict[tuple[int, ...], tuple[int, Seat]] = field(default_factory=dict)
    """Of each distinct context: its line of logits and the seat that computes it."""
    sources: list[int] = field(default_factory=list)
    rows: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    tokens: int = 0
    reserve: int = 0
    """Pages that the rows will ask for soon."""


def admit(engine: PagedEngine) -> bool:
    """Fill free rows from the queue as far as pages last, a forward at a time: the device computes while the next is planned.
    Whether there are new rows."""
    free = len(engine.seats.rows) - engine.seats.taken
    enough = min(len(engine.queue), max(1, engine.max_rows // SHARE))
    if engine.seats.taken and free < enough:
        return False
    before = free
    while engine.queue and free:
        intake = _plan(engine)
        if not intake.rows:
            break
        _start(engine, intake)
        free -= len(intake.rows)
    return free < before


def _plan(engine: PagedEngine) -> Intake:
    """Seat the first of the queue, as many as one forward can compute; the samples of a context stay together."""
    pages, soon = engine.pages, max(engine.window, engine.pages.size)
    intake = Intake(reserve=sum(seat.lacking(soon, pages) for seat in engine.seats.present()))
    for row in engine.seats.free_rows():
        if not engine.queue:
            break
        seat = engine.queue[0]
        seat.context = seat.request.tokens + tuple(seat.tokens)
        leader = intake.leaders.get(seat.context)
        if leader is None and intake.tokens >= PREFILL_TOKENS:
            break
        shared = pages.match(seat.context) if leader is None else leader[1].pages[: len(seat.context) // pages.size]
        held = _take(pages, seat, shared, soon, intake.reserve)
        if held is None:
            break
        engine.queue.popleft()
        engine.seats.put(seat, row, held)
        intake.rows.append(seat.sit(row, held, next(_order)))
        intake.reserve += seat.lacking(soon, pages)
        if leader is None:
            pages.publish(seat.context, held)
            start = len(shared) * pages.size
            intake.leaders[seat.context] = (len(intake.stretches), seat)
            intake.sources.append(len(intake.stretches))
            intake.stretches.append(Stretch(row, seat.context, start))
            intake.tokens += len(seat.context) - start
        else:
            intake.sources.append(leader[0])
            if len(seat.context) % pages.size:
                intake.copies.append((leader[1].pages[-1], held[-1]))
    return intake


def _take(pages: Pages, seat: Seat, shared: list[int], soon: int, reserve: int) -> list[int] | None:
    """The pages of a context, shared ones held and the rest taken; None when too few would be left.

    Left must be what the rows and this one ask for within `soon` steps: else the next window would throw it out again,
    for ever. A row at its limit asks for nothing, so rows that all fit at their longest never wait for one another.
    """
    fresh = pages.needed(len(seat.context)) - len(shared)
    longest = len(seat.request.tokens) + seat.request.sampling.max_tokens - 1  # the last token is never stored
    growth = pages.needed(min(len(seat.context) + soon, longest)) - pages.needed(len(seat.context))
    idle = sum(page in pages.idle for page in shared)
    if fresh + growth + idle + reserve > pages.available:
        return None
    pages.hold(shared)
    return [*shared, *pages.take(fresh)]


def _start(engine: PagedEngine, intake: Intake) -> None:
    runner = engine.runner
    engine.seats.send_table(runner.state, len(engine.seats.rows))
    logits = []
    for forward in _forwards(intake.stretches):
        logits.append(runner.prefill([piece for piece, _ in forward], [last for _, last in forward]))
        engine.stats.prefilled_tokens += sum(len(piece.tokens) - piece.start for piece, _ in forward)
    if intake.copies:
        runner.copy_pages(*zip(*intake.copies, strict=True))
    runner.state.start(intake.rows)
    runner.draw(torch.cat(logits), intake.sources, [row.row for row in intake.rows], engine.seats.wants)


def _forwards(stretches: list[Stretch]) -> list[list[tuple[Stretch, bool]]]:
    """The stretches in order, cut so that no forward has more than PREFILL_TOKENS; True marks a stretch's last piece."""
    forwards: list[list[tuple[Stretch, bool]]] = [[]]
    room = PREFILL_TOKENS
    for stretch in stretches:
        start, end = stretch.start, len(stretch.tokens)
        while start < end:
            stop = min(end, start + room)
            forwards[-1].append((Stretch(stretch.row, stretch.tokens[:stop], start), stop == end))
            room -= stop - start
            start = stop
            if room == 0:
                forwards.append([])
                room = PREFILL_TOKENS
    return [forward for forward in forwards if forward]
