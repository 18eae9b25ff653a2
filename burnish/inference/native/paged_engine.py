"""Native engine with a paged KV cache: continuous batching on the learner's own weights, made for a GPU.

The host launches several decode steps at a time. While they run it admits waiting requests and reads the tokens of the
previous launch, so no step waits for the host. A row that reaches its limit is reassigned at the next launch. The host notices
a row that stops earlier one launch later; until then the row idles.

Prompts with a common beginning share its blocks, and a request that continues another one finds the blocks of that one. When
blocks run out, the most recently admitted rows are preempted: they keep their tokens, and their keys and values are computed
again later. On a CPU the same code runs without CUDA graphs.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from operator import or_
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.rollout import Speculation
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.inference.engine_common import EngineStats, StopStrings, check_native_request, check_requests, copy_weights
from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.device_state import RING_SIZE, SamplerFlags
from burnish.inference.native.model_runner import ModelRunner, token_bytes_of
from burnish.inference.native.scheduler import InFlightSteps, RequestState, Scheduler, admit, sampler_flags
from burnish.inference.native.speculation import AnswerStore
from burnish.inference.picture_requests import drop_stale_features, longest_position, rotation_delta_of
from burnish.memory_plan.kv_cache import BLOCK_SIZE, CachePlan, num_row_programs, plan_cache
from burnish.models.decoder import Decoder
from burnish.models.kernels.device import use_triton
from burnish.models.key_rounding import eight_bit_layers
from burnish.models.layer_products import Fp8Products, products_of

STEPS_PER_LAUNCH = 8
"""Decode steps that the host launches at once."""


class PagedEngine:
    """Samples from a decoder.

    `listener(request_id, token)` is called with every token, one launch late, and `on_cache` with the plan of every new cache.
    `cache_bytes` fixes the size of the cache; `quantised` keeps it in 8 bits, but for layers that would suffer. With `weights` fp8 the engine multiplies by 8-bit copies of the
    model's matrices, which `load` writes again. With `speculation` steps of few rows verify drafts (`speculation.py`).
    """

    def __init__(
        self,
        model: Decoder,
        max_rows: int = 256,
        decode: Callable[[list[int]], str] | None = None,
        listener: Callable[[str, int], None] | None = None,
        num_blocks: int | None = None,
        steps_per_launch: int = STEPS_PER_LAUNCH,
        exact: bool = False,
        cache_bytes: int | None = None,
        on_cache: Callable[[CachePlan], None] | None = None,
        quantised: bool = False,
        weights: Literal["model", "fp8"] = "model",
        speculation: Speculation | None = None,
    ) -> None:
        if not 0 < steps_per_launch < RING_SIZE:
            raise ValueError(
                f"steps_per_launch={steps_per_launch}: expected 1 to {RING_SIZE - 1}, what the ring of a row holds"
            )
        self.model, self.max_rows, self.listener = model, max_rows, listener
        self.stop_strings = None if decode is None else StopStrings(decode)
        self.steps_per_launch, self.exact, self.on_cache = steps_per_launch, exact, on_cache
        self.in_8_bits = self._layers_in_8_bits() if quantised else ()
        """For each layer of an 8-bit cache, whether its keys and values are stored in 8 bits."""
        self.speculation = speculation
        self.products = products_of(model, exact, weights)
        self.answers = None if speculation is None or speculation.source == "context" else AnswerStore()
        """Earlier answers that drafts come from."""
        self.quick_rows = 0
        """While at most so many rows run, half as many steps are launched at once: a new request waits less for its first token."""
        self.num_contexts = 0
        """Episodes of several turns whose blocks the cache keeps between turns, if the memory allows it. Set before the first request."""
        self.token_bytes = self._token_bytes()
        self.cache_bytes = num_blocks * BLOCK_SIZE * self.token_bytes if num_blocks is not None else cache_bytes
        self.waiting: deque[RequestState] = deque()
        """Preempted requests first, then by priority and arrival."""
        self.in_flight: deque[InFlightSteps] = deque()
        self.ready: deque[Completion] = deque()
        """Finished completions that `stream` has not yielded yet."""
        self.version = 0
        self.stats = EngineStats()
        self._states: dict[str, RequestState] = {}
        self._runner: ModelRunner | None = None
        self._interrupted = False
        self._taken_counts = (0, 0)
        self._texts: dict[int, int] = {}
        """Rows whose texts the device has, with the admissions of their requests."""
        self.block_manager = BlockManager(1, BLOCK_SIZE)
        self.scheduler = Scheduler(0, 0)

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        undelivered = {completion.id for completion in self.ready}
        known = self._states, undelivered
        check_requests(
            requests, known, partial(check_native_request, model=self.model, has_text=self.stop_strings is not None)
        )
        if self.exact and (biased := [r.id for r in requests if r.sampling.logit_bias]):
            raise UserError(
                f"request {biased[0]}: logit_bias in exact mode: the engine would report log-probs of the biased distribution, and "
                "the learner's are of the model's own"
            )
        if requests:
            self._ensure_cache(requests)
            self.wake()
        for request in requests:
            state = RequestState(request, rotation_delta_of(request, self.model))
            self._states[request.id] = state
            self._enqueue(state)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self._states and not self._interrupted):
            if not self.ready:
                with torch.inference_mode():
                    self._step()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = dict.fromkeys(ids)
        ended = {completion.id for completion in self.ready}
        unknown = [i for i in wanted if i not in self._states and i not in ended]
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        with torch.inference_mode():
            self._read_all()
            kept = [c for c in self.ready if c.id in wanted]
            self.ready = deque(c for c in self.ready if c.id not in wanted)
            for state in [self._states[i] for i in wanted if i in self._states]:
                if state.row is None:
                    self.waiting.remove(state)
                else:
                    self._stop_row(state)
                del self._states[state.request.id]
                kept.append(state.completion("aborted", self.version))
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        begun = sum(state.admission >= 0 for state in self._states.values())
        if begun:
            raise RuntimeError(
                f"new weights while {begun} rows are running: their cache would be stale; finish or abort first"
            )
        copy_weights(self.model, named_tensors)
        if isinstance(self.products, Fp8Products):
            self.products.refresh()
        self.version = version
        self.block_manager.clear_prefix_cache()
        drop_stale_features(self.model)

    def sleep(self) -> None:
        if self._states:
            raise RuntimeError(f"the engine cannot sleep with {len(self._states)} requests unfinished")
        if self._runner is not None and not self._runner.sleep():
            self._runner = None  # without an arena the memory is freed with the runner
        self.block_manager.clear_prefix_cache()

    def wake(self) -> None:
        if self._runner is not None:
            with torch.inference_mode():
                self._runner.wake()

    # --- the cache ---------------------------------------------------------------------------------------------------

    def plan(self, longest: int) -> CachePlan:
        """Plan the cache for requests of up to `longest` tokens, from the memory that is free now."""
        has_splits = use_triton(self.model.embedding.weight) and not self.exact
        return plan_cache(
            token_bytes=self.token_bytes,
            max_rows=self.max_rows,
            longest=longest,
            free_bytes=self._free_bytes(),
            cache_bytes=self.cache_bytes,
            block_size=BLOCK_SIZE,
            kv_heads=num_row_programs(self.model.arch) if has_splits else None,
            num_contexts=self.num_contexts,
            wide_layers=tuple(k for k, is_small in enumerate(self.in_8_bits) if not is_small),
        )

    def _token_bytes(self) -> int:
        """Bytes of a token in the cache of this process."""
        return token_bytes_of(self.model, self.in_8_bits, self.exact)

    def _layers_in_8_bits(self) -> tuple[bool, ...]:
        return eight_bit_layers(self.model)

    def _free_bytes(self) -> int | None:
        """GPU memory that a new cache may take, with that of the present one; None on a CPU."""
        return free_device_bytes(self.model.embedding.weight.device, self._runner)

    def reserve(self, longest: int, rows: int = 1) -> None:
        """Make the cache for requests of up to `longest` tokens, and kernels for `rows` rows, before the first request."""
        plan = self.plan(longest)
        plan.require_one("the KV cache")
        self._make_cache(plan, rows, SamplerFlags())

    def prepare(self, longest: int, rows: int, sampling: SamplingOptions) -> None:
        """Make the cache, and capture the CUDA graphs of all batch sizes for rows of similar length.

        Without this call they are made while requests run.
        """
        flags = sampler_flags(Request("", (), sampling, 0))
        plan = self.plan(longest)
        plan.require_one("the KV cache")
        rows = min(rows, self.max_rows)
        self._make_cache(plan, rows, flags)
        with torch.inference_mode():
            self.runner.capture(rows, flags)

    def _ensure_cache(self, requests: Sequence[Request]) -> None:
        """Make a new cache if the longest of the requests does not fit into the present one. Running rows are preempted."""
        longest = max(longest_position(r, self.model) for r in requests)
        if self._runner is not None and -(-longest // BLOCK_SIZE) <= self.scheduler.max_blocks:
            return
        longest = max(longest, self.scheduler.max_blocks * BLOCK_SIZE)
        plan = self.plan(longest)
        # Longer requests will continue these. A new cache for each length would lose the blocks kept for them.
        if any(r.may_continue for r in requests):
            roomy = self.plan(min(2 * longest, self.model.arch.max_positions))
            plan = roomy if roomy.rows >= plan.rows else plan
        if plan.rows < 1:
            worst = max(requests, key=lambda r: len(r.tokens) + r.sampling.max_tokens)
            raise UserError(
                f"request {worst.id}: {len(worst.tokens)} prompt tokens + {worst.sampling.max_tokens} new ones need "
                f"{plan.blocks_per_row} blocks of {BLOCK_SIZE} tokens, and the cache has {max(0, plan.num_blocks - 1)}; "
                "lower max_tokens or free memory"
            )
        before = self.stats.plan if self._states else None
        if before is not None:
            with torch.inference_mode():
                self._preempt_all()
        rows, flags = min(len(requests), self.max_rows), reduce(or_, {sampler_flags(r) for r in requests})
        try:
            self._make_cache(plan, rows, flags)
        except UserError:
            if before is not None:  # the unfinished requests continue in a cache of the old size
                self._make_cache(before, rows, flags)
            raise

    def _make_cache(self, plan: CachePlan, rows: int, flags: SamplerFlags) -> None:
        self._runner = None  # free its memory first
        self._texts = {}
        self.block_manager = BlockManager(plan.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.max_rows, plan.blocks_per_row)
        with torch.inference_mode():
            self._runner = self._make_runner(plan)
            self._runner.compile(self._runner.batch_size(rows), flags)
        self.stats.plan = plan
        if self.on_cache is not None:
            self.on_cache(plan)

    def _make_runner(self, plan: CachePlan) -> ModelRunner:
        return ModelRunner(self.model, plan, self.stats, self.products, self.exact, self.in_8_bits, self.speculation)

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "made when the first request is submitted"
        return self._runner

    # --- one iteration -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Admit requests, launch decode steps, then read the tokens of the previous launch."""
        if admit(self):
            self._snapshot()  # first tokens reach the host while the next steps run
        is_launched = self._launch()
        while self.in_flight and (len(self.in_flight) > 1 or not is_launched):
            self._read()

    def _launch(self) -> bool:
        """Launch decode steps if a row has some left."""
        runner, scheduler = self.runner, self.scheduler
        width = self._prepare_speculation()
        left = [state.num_unlaunched for state in scheduler.running()]
        steps = min(self._steps_per_launch(width), max(left, default=0))
        if steps <= 0:
            return False
        if not self._allocate(steps * width):
            return True  # rows ended or were preempted: plan again before decoding
        if width == 1:
            self._compact()
        rows = runner.batch_size(scheduler.row_span)
        scheduler.send_block_table(runner.rows, rows)
        running = scheduler.running()
        for state in running:
            state.launch(steps, width)
        lengths = [len(state.context) + state.max_launched for state in running]
        if width > 1:
            runner.verify(rows, steps, scheduler.flags, lengths)
        else:
            runner.decode(rows, steps, scheduler.flags, lengths)
            self._texts.clear()  # they lack the tokens of these steps
        self.stats.decode_steps += steps
        self.stats.row_steps += steps * scheduler.num_running
        self._snapshot(steps, width)
        return True

    def _steps_per_launch(self, width: int) -> int:
        """Return the steps of the next launch: half as many where the host should soon see first tokens, or the ends of rows with stop strings.

        The device does not know stop strings. A row draws on, in vain, until the host has read the launch in which it ended and the next.
        """
        most, scheduler = min(self.steps_per_launch, (RING_SIZE - 1) // width), self.scheduler
        is_quick = scheduler.num_running <= self.quick_rows or any(s.request.sampling.stop for s in scheduler.running())
        return max(1, most // 2) if is_quick else most

    def _snapshot(self, steps: int = 0, width: int = 1) -> None:
        """Start the copy of drawn tokens to the host, and free the rows that draw no more."""
        rows, chunks = self.scheduler.row_span, self.runner.chunks
        drafts = chunks.counts if chunks is not None and width > 1 else None
        after = self.runner.rows.snapshot(rows, self.scheduler.flags, drafts)
        self.in_flight.append(InFlightSteps(self.scheduler.rows[:rows], after, steps, width))
        for state in self.scheduler.running():
            if state.num_unlaunched <= 0:
                self.scheduler.remove(state)
                state.is_draining = True
                if not state.request.may_continue:  # else its blocks are cached once its tokens are known
                    self._release_blocks(state)

    def _allocate(self, tokens: int) -> bool:
        """Allocate blocks for the next tokens of each row. False if rows had to be read or preempted instead."""
        missing = {state: state.num_missing_blocks(tokens, self.block_manager) for state in self.scheduler.running()}
        if sum(missing.values()) > self.block_manager.num_available:
            if self.in_flight:
                self._read_all()
            else:
                self._preempt(max(self.scheduler.running(), key=lambda state: state.admission))
            return False
        for state, num_blocks in missing.items():
            if num_blocks:
                self.scheduler.append_blocks(state, self.block_manager.allocate(num_blocks))
        return True

    def _preempt(self, state: RequestState) -> None:
        """Move a running request to the front of the waiting queue. It keeps its tokens."""
        self._stop_row(state)
        self.waiting.appendleft(state)
        self.stats.preemptions += 1

    def _preempt_all(self) -> None:
        self._read_all()
        for state in sorted(self.scheduler.running(), key=lambda s: -s.admission):
            self._preempt(state)

    def _stop_row(self, state: RequestState) -> None:
        self.runner.rows.stop_rows([self.scheduler.remove(state)])
        self._release_blocks(state)

    def _release_blocks(self, state: RequestState) -> None:
        if self.runner.recorder is not None and state.block_table:
            state.experts = self.runner.recorder.read(state.block_table)  # before another request writes there
        self.block_manager.release(state.block_table)
        state.block_table = []

    def _compact(self) -> None:
        """Move the rows together if that makes the batch smaller and no request waits for the free rows."""
        if not self.waiting and self._has_gaps():
            self.runner.rows.reorder(self.scheduler.compact())

    def _has_gaps(self) -> bool:
        """Whether the batch would be smaller without the free rows between running ones."""
        scheduler, runner = self.scheduler, self.runner
        return runner.batch_size(scheduler.num_running) < runner.batch_size(scheduler.row_span)

    # --- drafts ------------------------------------------------------------------------------------------------------

    def _prepare_speculation(self) -> int:
        """Return how many tokens the rows may draw in each of the next steps, more than one if they verify drafts.

        Verification needs few rows, which are then moved together, and the texts of all rows on the device. It draws more tokens in a
        launch than admission has reserved blocks for, so without free blocks the next launch is a plain one, which needs fewer.
        """
        scheduler, options = self.scheduler, self.speculation
        if options is None or not 0 < scheduler.num_running <= options.rows:
            return 1
        width = options.draft + 1
        tokens = self._steps_per_launch(width) * width
        missing = sum(state.num_missing_blocks(tokens, self.block_manager) for state in scheduler.running())
        if missing > self.block_manager.num_available:
            return 1
        if self._has_gaps() or self._rows_without_text():
            self._read_all()  # the texts need all tokens drawn
            if self._has_gaps():
                self.runner.rows.reorder(scheduler.compact())
                self._texts.clear()
            self._write_texts(self._rows_without_text())
        return width

    def _rows_without_text(self) -> list[RequestState]:
        rows = enumerate(self.scheduler.rows)
        return [state for row, state in rows if state is not None and self._texts.get(row) != state.admission]

    def _write_texts(self, states: list[RequestState]) -> None:
        chunks, answers = self.runner.chunks, self.answers
        assert chunks is not None, "the engine has speculation"
        if not states:
            return
        none = np.empty(0, dtype=np.int32)
        earlier = [none if answers is None else answers.text(s.request.tokens, chunks.start - 1) for s in states]
        own = [np.array([*s.request.tokens, *s.tokens], dtype=np.int32) for s in states]
        rows = [state.row for state in states if state.row is not None]
        self.runner.write_texts(rows, earlier, own)
        self._texts.update((row, state.admission) for row, state in zip(rows, states, strict=True))

    def take_draft_counts(self) -> tuple[int, int]:
        """Return how many draft tokens were verified and how many of them drawn since the last call."""
        counts = self.stats.drafted_tokens, self.stats.accepted_tokens
        drafted, accepted = (now - before for now, before in zip(counts, self._taken_counts, strict=True))
        self._taken_counts = counts
        return drafted, accepted

    def _store_answer(self, ended: RequestState) -> None:
        """Keep an answer for drafts. Rows with the same prompt get their texts again."""
        if self.answers is not None:
            self.answers.add(ended.request.tokens, ended.tokens)
            for row in list(self._texts):
                state = self.scheduler.rows[row]
                if state is not None and state.request.tokens == ended.request.tokens:
                    del self._texts[row]

    # --- drawn tokens ------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while self.in_flight:
            self._read()

    def _read(self) -> None:
        """Read the tokens of the oldest launch. It is popped last, so that a raising listener drops no request."""
        steps = self.in_flight[0]
        started = time.perf_counter()
        steps.wait()
        self.stats.waited_s += time.perf_counter() - started
        ended_rows: list[int] = []
        try:
            for state, tokens, logp, raw, is_live in steps.new_tokens():
                cut = state.append(tokens, logp, raw, self.stop_strings)
                self.stats.tokens += len(tokens) - cut
                if state.finish is not None or not is_live:
                    ended_rows += self._end(state, is_live)
                if self.listener is not None:
                    for token in tokens[: len(tokens) - cut]:
                        self.listener(state.request.id, token)
        finally:
            if ended_rows:
                self.runner.rows.stop_rows(ended_rows)
        self.in_flight.popleft()
        if steps.after.drafts is not None:
            drafted, accepted = steps.after.drafts.tolist()
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += accepted
            # How many tokens these steps drew is known now. Only later launches leave a range.
            for each in steps.rows:
                if each is not None and each.row is not None:
                    each.num_launched = each.max_launched = each.num_read
                    for later in self.in_flight:
                        if each in later.rows:
                            each.launch(later.steps, later.width)

    def _end(self, state: RequestState, is_live: bool) -> list[int]:
        """Complete a request and release its blocks. Return its row if the device still runs it."""
        row = None if state.is_draining else self.scheduler.remove(state)
        state.is_draining = False
        if state.request.may_continue:  # the last token is never stored
            self.block_manager.cache_prefix((*state.distinct_prompt, *state.tokens[:-1]), state.block_table)
        self._release_blocks(state)
        del self._states[state.request.id]
        self._store_answer(state)
        self.ready.append(state.completion(state.finish or "length", self.version))
        return [row] if is_live and row is not None else []

    def _enqueue(self, state: RequestState) -> None:
        """Insert a request behind those of its priority, and behind all preempted ones."""
        at = bisect_right(self.waiting, _queue_order(state), key=_queue_order)
        self.waiting.insert(at, state)


def _queue_order(state: RequestState) -> tuple[bool, int]:
    """Sort key of the waiting queue: preempted requests first, then by priority."""
    is_new = state.admission < 0
    return is_new, -state.request.priority if is_new else 0


def free_device_bytes(device: torch.device, runner: ModelRunner | None) -> int | None:
    """Free memory of a GPU, with what the runner's cache takes, which is freed before a new one is made; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # torch's cached memory is free as well
    free, _ = torch.cuda.mem_get_info(device)
    return free + (0 if runner is None else runner.held_bytes)
