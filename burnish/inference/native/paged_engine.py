"""The native engine for a GPU: continuous batching over a paged KV cache, on the learner's own weights.

The host works in windows: it admits waiting requests into free rows, has the device decode a few steps, and while those
run it reads what the window before has drawn. No step waits for the host; a row that comes to its limit is another's in
the next window, one that ends before is noticed a window later and idles until then. Prompts that begin alike share the
pages of their common beginning, and a request that continues another finds the pages of what that one computed. When
pages run out the youngest rows give theirs back and wait again with what they have; their keys and values are computed
anew later, their tokens stay. On a CPU the same code runs, step by step instead of by graphs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from itertools import count
from operator import or_

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.device_state import RING_SIZE, SamplerFlags
from burnish.inference.native.engine_common import EngineStats, check_requests, copy_weights
from burnish.inference.native.model_runner import ModelRunner
from burnish.inference.native.scheduler import InFlightSteps, RequestState, Scheduler, admit, sampler_flags
from burnish.memory_plan.kv_cache import BLOCK_SIZE, CachePlan, kv_token_bytes, plan_cache
from burnish.models.decoder import Decoder
from burnish.models.kernels.device import use_triton
from burnish.models.kernels.paged_cache import FP8_SCALE_BYTES

STEPS_PER_LAUNCH = 8  # steps between two looks of the host


class PagedEngine:
    """Samples from a decoder. `listener(request_id, token)` hears every token, a window late; `on_cache` hears of every cache
    that is made. `cache_bytes` fixes the cache's size; `quantised` keeps it in 8 bits."""

    def __init__(
        self,
        model: Decoder,
        max_rows: int = 256,
        decode: Callable[[list[int]], str] | None = None,
        listener: Callable[[str, int], None] | None = None,
        num_pages: int | None = None,
        window: int = STEPS_PER_LAUNCH,
        exact: bool = False,
        cache_bytes: int | None = None,
        on_cache: Callable[[CachePlan], None] | None = None,
        quantised: bool = False,
    ) -> None:
        if not 0 < window < RING_SIZE:
            raise ValueError(
                f"a window of {window} steps: it must be from 1 to {RING_SIZE - 1}, what a row's ring holds"
            )
        self.model, self.max_rows, self.decode, self.listener = model, max_rows, decode, listener
        self.window, self.exact, self.on_cache = window, exact, on_cache
        self.quantised = quantised
        self.token_bytes = _kv_token_bytes(model, quantised)
        self.cache_bytes = num_pages * BLOCK_SIZE * self.token_bytes if num_pages is not None else cache_bytes
        self.queue: deque[RequestState] = deque()  # by priority, then by arrival; those that lost their row first
        self.flights: deque[InFlightSteps] = deque()
        self.ready: deque[Completion] = deque()  # finished, not handed over yet
        self.version = 0
        self.stats = EngineStats()
        self._ids: dict[str, RequestState] = {}
        self._arrivals = count()
        self._runner: ModelRunner | None = None
        self._interrupted = False
        self.pages = BlockManager(1, BLOCK_SIZE)
        self.seats = Scheduler(0, 0)

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._ids.keys() | {completion.id for completion in self.ready}
        check_requests(requests, known, self.model, self.decode)
        if self.exact and (biased := [r.id for r in requests if r.sampling.logit_bias]):
            raise UserError(
                f"request {biased[0]}: logit_bias in exact mode: the engine would report log-probs of the biased distribution, and "
                "the learner's are of the model's own"
            )
        if requests:
            self._make_room(requests)
            self.wake()
        for request in requests:
            seat = RequestState(request, next(self._arrivals))
            self._ids[request.id] = seat
            self._enqueue(seat)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self._ids and not self._interrupted):
            if not self.ready:
                with torch.inference_mode():
                    self._turn()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = dict.fromkeys(ids)
        ended = {completion.id for completion in self.ready}
        unknown = [i for i in wanted if i not in self._ids and i not in ended]
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        with torch.inference_mode():
            self._land_all()
            kept = [c for c in self.ready if c.id in wanted]
            self.ready = deque(c for c in self.ready if c.id not in wanted)
            for seat in [self._ids[i] for i in wanted if i in self._ids]:
                if seat.row is None:
                    self.queue.remove(seat)
                else:
                    self._leave(seat)
                del self._ids[seat.request.id]
                kept.append(seat.completion("aborted", self.version))
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        begun = sum(seat.admitted >= 0 for seat in self._ids.values())
        if begun:
            raise RuntimeError(
                f"new weights while {begun} rows are running: their cache would be stale; finish or abort first"
            )
        copy_weights(self.model, named_tensors)
        self.version = version
        self.pages.forget()

    def sleep(self) -> None:
        if self._ids:
            raise RuntimeError(f"the engine cannot sleep with {len(self._ids)} requests unfinished")
        if self._runner is not None and not self._runner.sleep():
            self._runner = None  # memory without an arena can only be given back for good
        self.pages.forget()

    def wake(self) -> None:
        if self._runner is not None:
            with torch.inference_mode():
                self._runner.wake()

    # --- room --------------------------------------------------------------------------------------------------------

    def plan(self, longest: int) -> CachePlan:
        """The cache for requests of up to so many tokens, by the memory that is free now."""
        free, device = None, self.model.embedding.weight.device
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later may be had too
            free, _ = torch.cuda.mem_get_info(device)
            if self._runner is not None:
                free += self._runner.held_bytes  # given back before a new cache is made
        is_cut = use_triton(self.model.embedding.weight) and not self.exact
        return plan_cache(
            token_bytes=self.token_bytes,
            max_rows=self.max_rows,
            longest=longest,
            free_bytes=free,
            cache_bytes=self.cache_bytes,
            page=BLOCK_SIZE,
            kv_heads=self.model.arch.num_kv_heads if is_cut else None,
        )

    def reserve(self, longest: int, rows: int = 1) -> None:
        """Make the cache for requests of up to `longest` tokens, and kernels for `rows` rows, before the first one comes."""
        plan = self.plan(longest)
        plan.require_one("the KV cache")
        self._make_cache(plan, rows, SamplerFlags())

    def prepare(self, longest: int, rows: int, sampling: SamplingOptions) -> None:
        """The same for requests drawn in one way, with the graphs of all numbers of rows of like length: what would else be made
        on the way."""
        wants = sampler_flags(Request("", (), sampling, 0))
        plan = self.plan(longest)
        plan.require_one("the KV cache")
        rows = min(rows, self.max_rows)
        self._make_cache(plan, rows, wants)
        with torch.inference_mode():
            self.runner.capture(rows, wants)

    def _make_room(self, requests: Sequence[Request]) -> None:
        """A cache that the longest of the requests fits into, made anew if need be once nothing runs."""
        longest = max(len(r.tokens) + r.sampling.max_tokens for r in requests)
        if self._runner is not None and -(-longest // BLOCK_SIZE) <= self.seats.width:
            return
        longest = max(longest, self.seats.width * BLOCK_SIZE)
        plan = self.plan(longest)
        if any(
            r.may_continue for r in requests
        ):  # longer ones will follow: a cache for each length would forget what is kept for them
            roomy = self.plan(min(2 * longest, self.model.arch.max_positions))
            plan = roomy if roomy.rows >= plan.rows else plan
        if plan.rows < 1:
            worst = max(requests, key=lambda r: len(r.tokens) + r.sampling.max_tokens)
            raise UserError(
                f"request {worst.id}: {len(worst.tokens)} prompt tokens + {worst.sampling.max_tokens} new ones need {plan.width} "
                f"pages of {BLOCK_SIZE} tokens, and the cache has {max(0, plan.num_pages - 1)}; lower max_tokens or free memory"
            )
        before = self.stats.plan if self._ids else None
        if before is not None:
            with torch.inference_mode():
                self._set_aside()
        rows, wants = min(len(requests), self.max_rows), reduce(or_, {sampler_flags(r) for r in requests})
        try:
            self._make_cache(plan, rows, wants)
        except UserError:
            if before is not None:  # what runs goes on in a cache as it was
                self._make_cache(before, rows, wants)
            raise

    def _make_cache(self, plan: CachePlan, rows: int, wants: SamplerFlags) -> None:
        self._runner = None  # its memory first
        self.pages = BlockManager(plan.num_pages, BLOCK_SIZE)
        self.seats = Scheduler(self.max_rows, plan.width)
        with torch.inference_mode():
            self._runner = ModelRunner(self.model, plan, self.stats, self.exact, self.quantised)
            self._runner.compile(self._runner.bucket(rows), wants)
        self.stats.plan = plan
        if self.on_cache is not None:
            self.on_cache(plan)

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "made when the first request is submitted"
        return self._runner

    # --- one turn of the loop ----------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Admit, start the next window, then see what was drawn before it."""
        if admit(self):
            self._look()  # first tokens are heard while the window runs
        started = self._launch()
        while self.flights and (len(self.flights) > 1 or not started):
            self._land()

    def _launch(self) -> bool:
        """Start a window of decode steps, if a row may have one to make."""
        runner, seats = self.runner, self.seats
        steps = min(self.window, max((s.left for s in seats.rows if s is not None), default=0))
        if steps <= 0:
            return False
        if not self._grow(steps):
            return True  # rows were landed or set aside: look again before decoding
        self._compact()
        rows = runner.bucket(seats.height)
        seats.send_table(runner.state, rows)
        lengths = [len(seat.context) + min(seat.reach + steps, seat.limit) for seat in seats.present()]
        runner.decode(rows, steps, seats.wants, lengths)
        self.stats.decode_steps += steps
        self.stats.row_steps += steps * seats.taken
        for seat in seats.present():
            seat.reach = min(seat.reach + steps, seat.limit)
        self._look()
        return True

    def _look(self) -> None:
        """Have what was drawn so far sent to the host; the rows that draw no more are free for others."""
        rows = self.seats.height
        self.flights.append(InFlightSteps(self.seats.rows[:rows], self.runner.state.snapshot(rows, self.seats.wants)))
        for seat in self.seats.present():
            if seat.left <= 0:
                self.seats.remove(seat)
                seat.is_leaving = True
                if not seat.request.may_continue:  # else the pages are kept for what follows, once its tokens are known
                    self._drop_pages(seat)

    def _grow(self, steps: int) -> bool:
        """Pages for the tokens of the next steps. False when rows had to land or to leave for it."""
        wanted = {seat: seat.lacking(steps, self.pages) for seat in self.seats.present()}
        if sum(wanted.values()) > self.pages.available:
            if self.flights:
                self._land_all()
            else:
                self._preempt(max(self.seats.present(), key=lambda seat: seat.admitted))
            return False
        for seat, number in wanted.items():
            if number:
                self.seats.give(seat, self.pages.take(number))
        return True

    def _preempt(self, seat: RequestState) -> None:
        """The row waits again, first of all, with the tokens it has."""
        self._leave(seat)
        self.queue.appendleft(seat)
        self.stats.preemptions += 1

    def _set_aside(self) -> None:
        self._land_all()
        for seat in sorted(self.seats.present(), key=lambda s: -s.admitted):
            self._preempt(seat)

    def _leave(self, seat: RequestState) -> None:
        self.runner.state.stop_rows([self.seats.remove(seat)])
        self._drop_pages(seat)

    def _drop_pages(self, seat: RequestState) -> None:
        self.pages.drop(seat.pages)
        seat.pages = []

    def _compact(self) -> None:
        """Move the rows together when that makes the step smaller and nobody waits for the free ones."""
        seats, runner = self.seats, self.runner
        if not self.queue and runner.bucket(seats.taken) < runner.bucket(seats.height):
            runner.state.reorder(seats.compact())

    # --- what the device has drawn -------------------------------------------------------------------------------------

    def _land_all(self) -> None:
        while self.flights:
            self._land()

    def _land(self) -> None:
        """Read the tokens of the oldest window; it is done with when all of them are: a listener that raises loses nobody."""
        flight = self.flights[0]
        started = time.perf_counter()
        flight.wait()
        self.stats.waited_s += time.perf_counter() - started
        early: list[int] = []
        try:
            for seat, tokens, logp, raw, live in flight.arrivals():
                cut = seat.record(tokens, logp, raw, self.decode)
                self.stats.tokens += len(tokens) - cut
                if seat.finish is not None or not live:
                    early += self._end(seat, live)
                if self.listener is not None:
                    for token in tokens[: len(tokens) - cut]:
                        self.listener(seat.request.id, token)
        finally:
            if early:
                self.runner.state.stop_rows(early)
        self.flights.popleft()

    def _end(self, seat: RequestState, live: bool) -> list[int]:
        """The seat gives its pages back. Its row, if the device does not know yet that it has ended."""
        row = None if seat.is_leaving else self.seats.remove(seat)
        seat.is_leaving = False
        if seat.request.may_continue:  # the last token is never stored
            self.pages.publish((*seat.request.tokens, *seat.tokens[:-1]), seat.pages)
        self._drop_pages(seat)
        del self._ids[seat.request.id]
        self.ready.append(seat.completion(seat.finish or "length", self.version))
        return [row] if live and row is not None else []

    def _enqueue(self, seat: RequestState) -> None:
        """Behind those of its priority; one that lost its row stays in front of all."""
        at = len(self.queue)
        while at and self.queue[at - 1].request.priority < seat.request.priority and self.queue[at - 1].admitted < 0:
            at -= 1
        self.queue.insert(at, seat)


def _kv_token_bytes(model: Decoder, quantised: bool) -> int:
    arch = model.arch
    each = (1, FP8_SCALE_BYTES) if quantised else (model.embedding.weight.element_size(), 0)
    return kv_token_bytes(arch.num_layers, arch.num_kv_heads, arch.head_dim, *each)
