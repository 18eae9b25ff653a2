"""Scheduling of the paged engine on the host: request states, rows with their block tables, and admission.

A request waits in the engine's queue, runs in a row of the batch, and leaves with a completion. The device runs ahead of the
host, so a request whose last steps are launched can give up its row before its last tokens are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from operator import or_
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from burnish.core.engine import Completion, CompletionFinish, Request
from burnish.core.pictures import distinct_tokens
from burnish.core.routed_experts import padded_record
from burnish.inference.engine_common import StopStrings
from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.device_state import RING_SIZE, DeviceRows, NewRow, RingSnapshot, SamplerFlags
from burnish.inference.native.model_runner import PrefillChunk
from burnish.memory_plan.kv_cache import MAX_PREFILL_TOKENS

if TYPE_CHECKING:
    from burnish.inference.native.paged_engine import PagedEngine

ADMIT_FRACTION = 16
"""Requests are admitted when at least 1/16 of the rows is free: prefills are larger and fewer."""

_admissions = count()


def sampler_flags(request: Request) -> SamplerFlags:
    """The sampling features that a request uses."""
    s = request.sampling
    return SamplerFlags(s.top_k > 0 or s.top_p < 1 or s.min_p > 0, bool(s.logit_bias), s.raw_logprobs)


@dataclass(eq=False)
class RequestState:
    """A request that is waiting (`row` is None), running, or draining.

    A draining request has no row: its row is reassigned, and its last tokens have not reached the host yet.
    """

    request: Request
    rotation_delta: int = 0
    """Rotation position minus position of the tokens after its pictures."""
    # Typed arrays, not lists: a thousand completions built from lists take as long as four decode steps.
    tokens: array[int] = field(default_factory=lambda: array("q"))
    logp: array[float] = field(default_factory=lambda: array("f"))
    raw_logp: array[float] = field(default_factory=lambda: array("f"))
    finish: CompletionFinish | None = None
    row: int | None = None
    is_draining: bool = False
    block_table: list[int] = field(default_factory=list)
    admission: int = -1
    """Serial number of the last admission; -1 before the first."""
    context: tuple[int, ...] = ()
    """Prompt and tokens that the request had when it was admitted."""
    limit: int = 0
    """Maximum number of tokens to draw since the admission."""
    distinct_prompt: tuple[int, ...] = field(init=False)
    """The prompt with a number of its own for every token of a picture: what caches of prefixes compare."""
    num_read: int = 0
    """Tokens drawn since the admission that the host has read."""
    num_launched: int = 0
    """Tokens drawn since the admission once all launched steps have run; the fewest, if they verify drafts."""
    max_launched: int = 0
    """As `num_launched`, if all drafts are accepted."""
    experts: Tensor | None = None
    """[tokens, layers, k] experts of the blocks that were released last, if they are recorded."""
    flags: SamplerFlags = field(init=False)

    def __post_init__(self) -> None:
        self.flags = sampler_flags(self.request)
        self.distinct_prompt = tuple(distinct_tokens(self.request.tokens, self.request.pictures))

    @property
    def num_unlaunched(self) -> int:
        """Tokens that may still be drawn after all launched steps."""
        return self.limit - self.num_launched

    def num_missing_blocks(self, tokens: int, blocks: BlockManager) -> int:
        """Blocks that the next tokens need and the request does not have. The last token drawn is never stored."""
        stored = len(self.context) + min(self.max_launched + tokens, self.limit) - 1
        return max(0, blocks.num_blocks_for(stored) - len(self.block_table))

    def launch(self, steps: int, width: int) -> None:
        """Note that steps are launched which draw up to `width` tokens each."""
        self.num_launched = min(self.num_launched + steps, self.limit)
        self.max_launched = min(self.max_launched + steps * width, self.limit)

    def start(self, row: int, block_table: list[int], admission: int) -> NewRow:
        """Assign a row and the blocks of the context; return the state for the device."""
        self.row, self.block_table, self.admission, self.num_read = row, block_table, admission, 0
        self.num_launched = self.max_launched = 1
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
            rotation_delta=self.rotation_delta,
        )

    def append(self, tokens: list[int], logp: list[float], raw: list[float], stop_strings: StopStrings | None) -> int:
        """Append drawn tokens up to the end of the request; return how many after it were cut off."""
        options = self.request.sampling
        self.num_read += len(tokens)
        before = len(self.tokens)
        self.tokens.extend(tokens)
        self.logp.extend(logp)
        self.raw_logp.extend(raw)
        if options.stop_tokens or options.stop:
            for k in self._possible_ends(tokens, stop_strings):
                end = before + k + 1
                if tokens[k] in options.stop_tokens or self._has_stop_string(end, stop_strings):
                    self.finish = "stop"
                    for numbers in (self.tokens, self.logp, self.raw_logp):
                        del numbers[end:]
                    return len(tokens) - k - 1
        if len(self.tokens) >= options.max_tokens:
            self.finish = "length"
        return 0

    def _possible_ends(self, tokens: list[int], stop_strings: StopStrings | None) -> list[int]:
        """Return the places of stop tokens, and of tokens that may complete a stop string."""
        options = self.request.sampling
        if not options.stop:
            return [k for k, token in enumerate(tokens) if token in options.stop_tokens]
        assert stop_strings is not None, "checked when the request was submitted"
        may_complete = stop_strings.table(options.stop)
        return [k for k, token in enumerate(tokens) if may_complete[token] or token in options.stop_tokens]

    def _has_stop_string(self, end: int, stop_strings: StopStrings | None) -> bool:
        """Whether the tokens before `end` complete a stop string."""
        tokens, stop = self.tokens, self.request.sampling.stop
        if not stop or stop_strings is None:
            return False
        return stop_strings.are_complete(stop, tokens[end - 1], lambda size: tokens[max(0, end - size) : end].tolist())

    def completion(self, finish: CompletionFinish, version: int) -> Completion:
        return Completion(
            self.request.id,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.logp, dtype=np.float32),
            finish,
            version,
            raw_logp=np.array(self.raw_logp, dtype=np.float32) if self.request.sampling.raw_logprobs else None,
            experts=self._experts(),
        )

    def _experts(self) -> np.ndarray | None:
        """The experts of prompt and tokens. The last token drawn is never computed, and blocks may be larger than their tokens."""
        if self.experts is None:
            return None
        num_tokens = len(self.request.tokens) + len(self.tokens)
        return padded_record(self.experts[: max(0, num_tokens - 1)].cpu().numpy(), num_tokens)


@dataclass(frozen=True)
class InFlightSteps:
    """Launched steps that the host has not read: the requests of the rows, and the rings after the steps."""

    rows: list[RequestState | None]
    after: RingSnapshot
    steps: int = 0
    width: int = 1
    """Most tokens that a row draws in a step: more than one if the steps verify drafts."""

    def wait(self) -> None:
        """Wait until the steps have run and the rings are copied."""
        if self.after.ready is not None:
            self.after.ready.synchronize()

    def new_tokens(self) -> Iterator[tuple[RequestState, list[int], list[float], list[float], bool]]:
        """Yield (request, new tokens, log-probs, raw log-probs if asked for, whether the row is live) of each request."""
        live, produced = self.after.ints.tolist()
        # Skip requests that ended or were preempted since the launch: the row no longer holds their tokens.
        found = [
            (row, state, produced[row] - state.num_read)
            for row, state in enumerate(self.rows)
            if state is not None
            and (state.row is not None or state.is_draining)
            and not (live[row] and produced[row] <= state.num_read)
        ]
        # Only what is new becomes Python numbers: whole rings have four times as many, and a thousand rows take milliseconds.
        rows = np.array([row for row, _, _ in found], dtype=np.int64)[:, None]
        first = np.array([state.num_read for _, state, _ in found], dtype=np.int64)[:, None]
        slots = (first + np.arange(max((num_new for _, _, num_new in found), default=0))) % RING_SIZE
        after = self.after
        tokens, logp = (ring.numpy()[rows, slots].tolist() for ring in (after.tokens, after.logp))
        raw = [] if after.raw is None else after.raw.numpy()[rows, slots].tolist()
        for i, (row, state, num_new) in enumerate(found):
            own = raw[i][:num_new] if raw and state.request.sampling.raw_logprobs else []
            yield state, tokens[i][:num_new], logp[i][:num_new], own, bool(live[row])


class Scheduler:
    """The rows of the batch and their block table, `max_blocks` entries wide."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.rows: list[RequestState | None] = [None] * num_rows
        self.num_running = 0
        self.block_table = np.zeros((num_rows, max_blocks), dtype=np.int32)
        self.is_table_changed = False

    def running(self) -> list[RequestState]:
        """The running requests, in the order of their rows."""
        return [state for state in self.rows if state is not None]

    @property
    def row_span(self) -> int:
        """Number of rows up to the last one in use."""
        return max((i + 1 for i, state in enumerate(self.rows) if state is not None), default=0)

    @property
    def flags(self) -> SamplerFlags:
        """The sampling features that any of the rows uses."""
        return reduce(or_, {state.flags for state in self.running()}, SamplerFlags())

    def free_rows(self) -> list[int]:
        return [i for i, state in enumerate(self.rows) if state is None]

    def assign(self, state: RequestState, row: int, blocks: list[int]) -> None:
        """Give a row and its blocks to a request."""
        self.rows[row] = state
        self.num_running += 1
        self._write(row, blocks)

    def append_blocks(self, state: RequestState, blocks: list[int]) -> None:
        """Extend the block table of a running request."""
        assert state.row is not None
        state.block_table = state.block_table + blocks
        self._write(state.row, state.block_table)

    def remove(self, state: RequestState) -> int:
        """Take a request out of its row; return the row."""
        row, state.row = state.row, None
        assert row is not None
        self.rows[row] = None
        self.num_running -= 1
        return row

    def compact(self) -> list[int]:
        """Move the running requests to the first rows; return the row that each came from."""
        order = [i for i, state in enumerate(self.rows) if state is not None]
        states = self.running()
        self.rows = [*states, *[None] * (len(self.rows) - len(states))]
        for row, state in enumerate(states):
            state.row = row
            self._write(row, state.block_table)
        return order

    def send_block_table(self, device_rows: DeviceRows, num_rows: int) -> None:
        """Copy the block table of the first rows to the device, if it has changed."""
        if self.is_table_changed:
            width = max((len(state.block_table) for state in self.running()), default=0)
            device_rows.set_block_table(self.block_table[:num_rows, :width].copy())
            self.is_table_changed = False

    def _write(self, row: int, blocks: list[int]) -> None:
        self.block_table[row, : len(blocks)] = blocks
        self.is_table_changed = True


# --- admission: match prefixes, prefill the rest, draw first tokens ------------------------------------------------------


@dataclass
class PrefillBatch:
    """Requests that are admitted together."""

    chunks: list[PrefillChunk] = field(default_factory=list)
    leaders: dict[tuple[int, ...], tuple[int, RequestState]] = field(default_factory=dict)
    """By context, with distinct numbers for pictures: the row of its logits, and the request that computes it."""
    sources: list[int] = field(default_factory=list)
    """The row of the logits that each request draws its first token from."""
    rows: list[NewRow] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target) blocks: each sample of a context has its own copy of the last, partly filled block."""
    tokens: int = 0
    reserve: int = 0
    """Blocks that the running rows will need soon."""


def admit(engine: PagedEngine) -> bool:
    """Fill free rows from the waiting queue while blocks last; return whether there are new rows.

    Each forward is launched as soon as it is planned, so the device computes it while the next one is planned.
    """
    free = len(engine.scheduler.rows) - engine.scheduler.num_running
    enough = min(len(engine.waiting), max(1, engine.max_rows // ADMIT_FRACTION))
    if engine.scheduler.num_running and free < enough:
        return False
    before = free
    while engine.waiting and free:
        batch = _plan_prefill(engine)
        if not batch.rows:
            break
        _prefill(engine, batch)
        free -= len(batch.rows)
    return free < before


def _plan_prefill(engine: PagedEngine) -> PrefillBatch:
    """Assign rows to the first waiting requests, as many as one forward can compute. Samples of a context stay together."""
    blocks, soon = engine.block_manager, max(engine.steps_per_launch, engine.block_manager.block_size)
    batch = PrefillBatch(reserve=sum(state.num_missing_blocks(soon, blocks) for state in engine.scheduler.running()))
    for row in engine.scheduler.free_rows():
        if not engine.waiting:
            break
        state = engine.waiting[0]
        state.context = state.request.tokens + tuple(state.tokens)
        state.limit = state.request.sampling.max_tokens - len(state.tokens)
        distinct = state.distinct_prompt + tuple(state.tokens)
        leader = batch.leaders.get(distinct)
        if leader is None and batch.tokens >= MAX_PREFILL_TOKENS:
            break
        if leader is None:
            shared = blocks.match_prefix(distinct)
        else:
            shared = leader[1].block_table[: len(state.context) // blocks.block_size]
        block_table = _allocate(blocks, state, shared, soon, batch.reserve)
        if block_table is None:
            break
        engine.waiting.popleft()
        engine.scheduler.assign(state, row, block_table)
        batch.rows.append(state.start(row, block_table, next(_admissions)))
        batch.reserve += state.num_missing_blocks(soon, blocks)
        if leader is None:
            blocks.cache_prefix(distinct, block_table)
            start = len(shared) * blocks.block_size
            batch.leaders[distinct] = (len(batch.chunks), state)
            batch.sources.append(len(batch.chunks))
            batch.chunks.append(PrefillChunk(row, state.context, start, state.request.pictures))
            batch.tokens += len(state.context) - start
        else:
            batch.sources.append(leader[0])
            if len(state.context) % blocks.block_size:
                batch.copies.append((leader[1].block_table[-1], block_table[-1]))
    return batch


def _allocate(
    blocks: BlockManager, state: RequestState, shared: list[int], soon: int, reserve: int
) -> list[int] | None:
    """Allocate the blocks of a context beyond the shared ones; None if too few would be left.

    The running rows and this one must be able to run `soon` more steps. Otherwise the next launch would preempt the request
    again, without end. A row at its limit needs no more blocks, so rows that all fit at their longest never wait for blocks.
    """
    new = blocks.num_blocks_for(len(state.context)) - len(shared)
    longest = len(state.request.tokens) + state.request.sampling.max_tokens - 1  # the last token is never stored
    growth = blocks.num_blocks_for(min(len(state.context) + soon, longest)) - blocks.num_blocks_for(len(state.context))
    revived = sum(block in blocks.evictable for block in shared)
    if new + growth + revived + reserve > blocks.num_available:
        return None
    blocks.acquire(shared)
    return [*shared, *blocks.allocate(new)]


def _prefill(engine: PagedEngine, batch: PrefillBatch) -> None:
    runner = engine.runner
    engine.scheduler.send_block_table(runner.rows, len(engine.scheduler.rows))
    logits = []
    for forward in _split_into_forwards(batch.chunks):
        logits.append(runner.prefill([chunk for chunk, _ in forward], [is_last for _, is_last in forward]))
        engine.stats.prefilled_tokens += sum(len(chunk.tokens) - chunk.start for chunk, _ in forward)
    if batch.copies:
        runner.copy_blocks(*zip(*batch.copies, strict=True))
    runner.rows.start(batch.rows)
    runner.draw(torch.cat(logits), batch.sources, [row.row for row in batch.rows], engine.scheduler.flags)


def _split_into_forwards(chunks: list[PrefillChunk]) -> list[list[tuple[PrefillChunk, bool]]]:
    """Split chunks so that no forward has more than MAX_PREFILL_TOKENS, between pictures if possible. True marks a chunk's last part."""
    forwards: list[list[tuple[PrefillChunk, bool]]] = [[]]
    budget = MAX_PREFILL_TOKENS
    for chunk in chunks:
        start, end = chunk.start, len(chunk.tokens)
        while start < end:
            stop = _before_picture(chunk, start, min(end, start + budget))
            if stop == start and budget < MAX_PREFILL_TOKENS:  # the picture fits into a forward of its own
                forwards.append([])
                budget = MAX_PREFILL_TOKENS
                continue
            stop = stop if stop > start else min(end, start + budget)
            forwards[-1].append((replace(chunk, tokens=chunk.tokens[:stop], start=start), stop == end))
            budget -= stop - start
            start = stop
            if budget == 0:
                forwards.append([])
                budget = MAX_PREFILL_TOKENS
    return [forward for forward in forwards if forward]


def _before_picture(chunk: PrefillChunk, start: int, stop: int) -> int:
    """The end of a forward that begins at `start` of a chunk: `stop`, or before the picture that it would cut."""
    cut = next((span for span in chunk.pictures if span.start < stop < span.end), None)
    return stop if cut is None else max(start, cut.start)
