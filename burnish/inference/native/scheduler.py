"""The host's side of the rows: who sits where, what each has produced, which pages it holds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from itertools import count
from operator import or_
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.device_state import RING_SIZE, DeviceRows, NewRow, RingSnapshot, SamplerFlags
from burnish.inference.native.model_runner import PrefillChunk
from burnish.memory_plan.kv_cache import MAX_PREFILL_TOKENS

if TYPE_CHECKING:
    from burnish.inference.native.paged_engine import PagedEngine


Number = TypeVar("Number", int, float)
TEXT_TAIL = 8  # tokens that show no text, which a stop string may span besides one for each of its bytes


def sampler_flags(request: Request) -> SamplerFlags:
    """What the draws of a request must do."""
    s = request.sampling
    return SamplerFlags(s.top_k > 0 or s.top_p < 1 or s.min_p > 0, bool(s.logit_bias), s.raw_logprobs)


@dataclass(eq=False)
class RequestState:
    """A request on its way: waiting (`row` is None), running, or leaving: its last draws are on their way, its row is another's."""

    request: Request
    arrival: int
    # Plain numbers in a row, which a completion copies at once: a thousand completions of lists take as long as four steps.
    tokens: array[int] = field(default_factory=lambda: array("q"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    raw_logp: array[float] = field(default_factory=lambda: array("f"))
    finish: CompletionFinish | None = None
    row: int | None = None
    is_leaving: bool = False
    pages: list[int] = field(default_factory=list)
    admitted: int = -1
    context: tuple[int, ...] = ()  # what it was admitted with: the prompt, and the tokens it had
    seen: int = 0  # tokens drawn since it was admitted, as far as the host has read
    reach: int = 0  # tokens drawn since, when every window that was started has run
    wants: SamplerFlags = field(init=False)  # what its draws must do

    def __post_init__(self) -> None:
        self.wants = sampler_flags(self.request)

    @property
    def limit(self) -> int:
        """Tokens it may draw since it was admitted."""
        return self.request.sampling.max_tokens - (len(self.context) - len(self.request.tokens))

    @property
    def left(self) -> int:
        """Tokens it may still draw, beyond the windows that were started."""
        return self.limit - self.reach

    def lacking(self, steps: int, pages: BlockManager) -> int:
        """Pages it still needs for so many steps; the last token drawn is never stored."""
        tokens = len(self.context) + min(self.reach + steps, self.limit) - 1
        return max(0, pages.needed(tokens) - len(self.pages))

    def sit(self, row: int, pages: list[int], admitted: int) -> NewRow:
        """Take a row, with the pages of the context."""
        self.row, self.pages, self.admitted, self.seen, self.reach = row, pages, admitted, 0, 1
        s = self.request.sampling
        return NewRow(
            row=row,
            position=len(self.context) - 1,
            limit=self.limit,
            key=self.request.key,
            drawn=self.request.generated + len(self.tokens),
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            min_p=s.min_p,
            stop_tokens=s.stop_tokens,
            bias=s.logit_bias,
        )

    def record(
        self, tokens: list[int], logp: list[float], raw: list[float], decode: Callable[[list[int]], str] | None
    ) -> int:
        """Append what was drawn; returns how many of the tokens came after its end and were cut off again."""
        options = self.request.sampling
        self.seen += len(tokens)
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.logp.extend(logp)
        self.raw_logp.extend(raw)
        if options.stop_tokens or options.stop:
            for k, token in enumerate(tokens):
                end = before + k + 1
                if token in options.stop_tokens or (options.stop and self._has_stop(end, decode)):
                    self.finish = "stop"
                    for numbers in (self.tokens, self.logp, self.raw_logp):
                        del numbers[end:]
                    return len(tokens) - k - 1
        if len(self.tokens) >= options.max_tokens:
            self.finish = "length"
        return 0

    def _has_stop(self, end: int, decode: Callable[[list[int]], str] | None) -> bool:
        """Whether the text of the tokens before `end` has come to a stop string."""
        assert decode is not None, "checked when the request was submitted"
        stop = self.request.sampling.stop
        tail = max(len(s.encode()) for s in stop) + TEXT_TAIL
        text = decode(self.tokens[max(0, end - tail) : end].tolist())
        return any(s in text for s in stop)

    def completion(self, finish: CompletionFinish, version: int) -> Completion:
        """What it has produced."""
        return Completion(
            self.request.id,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.logp, dtype=np.float32),
            finish,
            version,
            raw_logp=np.array(self.raw_logp, dtype=np.float32) if self.request.sampling.raw_logprobs else None,
        )


@dataclass(frozen=True)
class InFlightSteps:
    """A window that was started: who sat where, and what the rows will have drawn after it."""

    rows: list[RequestState | None]
    after: RingSnapshot

    def wait(self) -> None:
        """Until the window has run and what it drew is here."""
        if self.after.ready is not None:
            self.after.ready.synchronize()

    def arrivals(self) -> Iterator[tuple[RequestState, list[int], list[float], list[float], bool]]:
        """(seat, new tokens, their log-probs, those of the model itself where asked for, whether the row is live) of each seat
        that still waits for them."""
        live, produced = self.after.ints.tolist()
        tokens, logp = self.after.tokens.tolist(), self.after.logp.tolist()
        raw = self.after.raw.tolist() if self.after.raw is not None else None
        for i, seat in enumerate(self.rows):
            # A seat that has left meanwhile, or sits elsewhere now after losing its row, has nothing to come.
            if seat is None or (seat.row is None and not seat.is_leaving) or (live[i] and produced[i] <= seat.seen):
                continue
            drawn = range(seat.seen, produced[i])
            own = _read_ring(raw[i], drawn) if raw is not None and seat.request.sampling.raw_logprobs else []
            yield seat, _read_ring(tokens[i], drawn), _read_ring(logp[i], drawn), own, bool(live[i])


def _read_ring(ring: list[Number], drawn: range) -> list[Number]:
    """What stands in a row's ring of the numbers it has drawn from one on to another."""
    start = drawn.start % RING_SIZE
    stop = start + len(drawn)
    return ring[start:stop] if stop <= RING_SIZE else ring[start:] + ring[: stop - RING_SIZE]


class Scheduler:
    """All rows of a device and the table of their pages."""

    def __init__(self, size: int, width: int) -> None:
        self.width = width
        self.rows: list[RequestState | None] = [None] * size
        self.taken = 0
        self.table = np.zeros((size, width), dtype=np.int32)
        self.changed = False

    def present(self) -> list[RequestState]:
        """The seats that sit."""
        return [seat for seat in self.rows if seat is not None]

    @property
    def height(self) -> int:
        """The rows up to the last one taken."""
        return max((i + 1 for i, seat in enumerate(self.rows) if seat is not None), default=0)

    @property
    def wants(self) -> SamplerFlags:
        """What draws must do for any of the rows."""
        return reduce(or_, {seat.wants for seat in self.present()}, SamplerFlags())

    def free_rows(self) -> list[int]:
        """Where nobody sits, from the first row on."""
        return [i for i, seat in enumerate(self.rows) if seat is None]

    def put(self, seat: RequestState, row: int, pages: list[int]) -> None:
        """The row is the seat's, and so are the pages."""
        self.rows[row] = seat
        self.taken += 1
        self._write(row, pages)

    def give(self, seat: RequestState, pages: list[int]) -> None:
        """Further pages for a seat."""
        assert seat.row is not None
        seat.pages = seat.pages + pages
        self._write(seat.row, seat.pages)

    def remove(self, seat: RequestState) -> int:
        """The seat's row, which is nobody's now."""
        row, seat.row = seat.row, None
        assert row is not None
        self.rows[row] = None
        self.taken -= 1
        return row

    def compact(self) -> list[int]:
        """Move the seats to the first rows; returns where each came from."""
        order = [i for i, seat in enumerate(self.rows) if seat is not None]
        seats = self.present()
        self.rows = [*seats, *[None] * (len(self.rows) - len(seats))]
        for row, seat in enumerate(seats):
            seat.row = row
            self._write(row, seat.pages)
        return order

    def send_table(self, state: DeviceRows, rows: int) -> None:
        """The device learns which pages are whose, if that has changed."""
        if self.changed:
            wide = max((len(seat.pages) for seat in self.present()), default=0)
            state.set_table(self.table[:rows, :wide].copy())
            self.changed = False

    def _write(self, row: int, pages: list[int]) -> None:
        self.table[row, : len(pages)] = pages
        self.changed = True


# --- Letting waiting requests in: shared beginnings are found, the rest is prefilled, first tokens are drawn.

ADMIT_FRACTION = 16  # rows are filled when at least this fraction of them is free: larger prefills, fewer of them

_admissions = count()


@dataclass
class PrefillBatch:
    """Requests let in together: what must be computed for them, and how each row gets its first token."""

    stretches: list[PrefillChunk] = field(default_factory=list)
    leaders: dict[tuple[int, ...], tuple[int, RequestState]] = field(default_factory=dict)
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
    enough = min(len(engine.queue), max(1, engine.max_rows // ADMIT_FRACTION))
    if engine.seats.taken and free < enough:
        return False
    before = free
    while engine.queue and free:
        intake = _plan_prefill(engine)
        if not intake.rows:
            break
        _prefill(engine, intake)
        free -= len(intake.rows)
    return free < before


def _plan_prefill(engine: PagedEngine) -> PrefillBatch:
    """Seat the first of the queue, as many as one forward can compute; the samples of a context stay together."""
    pages, soon = engine.pages, max(engine.window, engine.pages.size)
    intake = PrefillBatch(reserve=sum(seat.lacking(soon, pages) for seat in engine.seats.present()))
    for row in engine.seats.free_rows():
        if not engine.queue:
            break
        seat = engine.queue[0]
        seat.context = seat.request.tokens + tuple(seat.tokens)
        leader = intake.leaders.get(seat.context)
        if leader is None and intake.tokens >= MAX_PREFILL_TOKENS:
            break
        shared = pages.match(seat.context) if leader is None else leader[1].pages[: len(seat.context) // pages.size]
        held = _allocate(pages, seat, shared, soon, intake.reserve)
        if held is None:
            break
        engine.queue.popleft()
        engine.seats.put(seat, row, held)
        intake.rows.append(seat.sit(row, held, next(_admissions)))
        intake.reserve += seat.lacking(soon, pages)
        if leader is None:
            pages.publish(seat.context, held)
            start = len(shared) * pages.size
            intake.leaders[seat.context] = (len(intake.stretches), seat)
            intake.sources.append(len(intake.stretches))
            intake.stretches.append(PrefillChunk(row, seat.context, start))
            intake.tokens += len(seat.context) - start
        else:
            intake.sources.append(leader[0])
            if len(seat.context) % pages.size:
                intake.copies.append((leader[1].pages[-1], held[-1]))
    return intake


def _allocate(pages: BlockManager, seat: RequestState, shared: list[int], soon: int, reserve: int) -> list[int] | None:
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


def _prefill(engine: PagedEngine, intake: PrefillBatch) -> None:
    runner = engine.runner
    engine.seats.send_table(runner.state, len(engine.seats.rows))
    logits = []
    for forward in _split_into_forwards(intake.stretches):
        logits.append(runner.prefill([piece for piece, _ in forward], [last for _, last in forward]))
        engine.stats.prefilled_tokens += sum(len(piece.tokens) - piece.start for piece, _ in forward)
    if intake.copies:
        runner.copy_pages(*zip(*intake.copies, strict=True))
    runner.state.start(intake.rows)
    runner.draw(torch.cat(logits), intake.sources, [row.row for row in intake.rows], engine.seats.wants)


def _split_into_forwards(stretches: list[PrefillChunk]) -> list[list[tuple[PrefillChunk, bool]]]:
    """The stretches in order, cut so that no forward has more than PREFILL_TOKENS; True marks a stretch's last piece."""
    forwards: list[list[tuple[PrefillChunk, bool]]] = [[]]
    room = MAX_PREFILL_TOKENS
    for stretch in stretches:
        start, end = stretch.start, len(stretch.tokens)
        while start < end:
            stop = min(end, start + room)
            forwards[-1].append((PrefillChunk(stretch.row, stretch.tokens[:stop], start), stop == end))
            room -= stop - start
            start = stop
            if room == 0:
                forwards.append([])
                room = MAX_PREFILL_TOKENS
    return [forward for forward in forwards if forward]
