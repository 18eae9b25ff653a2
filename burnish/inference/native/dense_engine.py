"""The native engine: continuous batching on the learner's own weights.

One loop: admit waiting requests into free rows (each distinct prompt is prefilled once, whatever the number of its
samples), decode one token for every running row, take finished rows out at once. The model handed in is the module
the learner trains; nothing is copied, so new weights need no transfer. What a request yields depends on its key and
on the weights, not on its neighbours (to rounding; exactly so in float64 for any practical purpose).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.core.engine import Completion, Request
from burnish.core.random_keys import uniforms
from burnish.core.segments import offsets_from_lengths
from burnish.inference.native.dense_cache import DenseDecodeAttention, DenseKVCache, DensePrefillAttention, RunningRows
from burnish.inference.native.engine_common import EngineStats, add_bias, check_requests, copy_weights, sample
from burnish.models.cached_forward import CDecodeStep, c_decode_step, decode_step_of
from burnish.models.decoder import Decoder
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.cpu.c_library import c_kernels
from burnish.models.kernels.cpu.cpu_ops import draw
from burnish.models.kernels.exact import log_softmax_at_temperature

PREFILL_CHUNK_TOKENS = 8192  # prompts packed into one forward, at most (a longer prompt goes alone)


@dataclass
class PrefilledPrompt:
    """A prompt whose keys and values are known and whose samples are not all admitted yet."""

    keys: Tensor  # [layers, length, kv_heads, head_dim]
    values: Tensor
    logits: Tensor  # [vocab], of the first new token


class DenseEngine:
    """Samples from a decoder. `listener(request_id, token)` hears every token as it is drawn."""

    def __init__(
        self,
        model: Decoder,
        max_rows: int = 256,
        decode: Callable[[list[int]], str] | None = None,
        listener: Callable[[str, int], None] | None = None,
    ) -> None:
        weight = model.embedding.weight
        self.model, self.decode, self.listener = model, decode, listener
        self.device = weight.device
        self.max_rows = max_rows
        self.cache = DenseKVCache(model.arch, weight.dtype, weight.device)
        self.rows = RunningRows(max_rows)
        self.queue: deque[Request] = deque()
        self.waiting: Counter[tuple[int, ...]] = Counter()  # requests in the queue, by prompt
        self.prefilled: dict[tuple[int, ...], PrefilledPrompt] = {}
        self.version = 0
        self.stats = EngineStats()
        self.ready: deque[Completion] = deque()  # finished, not handed over yet
        self._ids: set[str] = set()
        self._step = decode_step_of(model)
        self._fused: CDecodeStep | None = None
        self._interrupted = False

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._ids | {completion.id for completion in self.ready}
        fresh = check_requests(requests, known, self.model, self.decode)
        self.waiting.update(request.tokens for request in requests)
        self.queue = deque(sorted([*self.queue, *requests], key=lambda r: -r.priority))
        self._ids |= fresh

    def stream(self) -> Iterator[Completion]:
        self._step = decode_step_of(self.model)
        if self._fused is None or not self._fused.is_current:
            self._fused = c_decode_step(self.model)
        while self.ready or ((self.queue or len(self.rows)) and not self._interrupted):
            if not self.ready:
                with torch.inference_mode():
                    finished = self._admit() if self.queue and len(self.rows) < self.max_rows else []
                    if not finished and len(self.rows):
                        finished = self._decode_step()
                self.ready.extend(finished)
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        wanted = set(ids)
        unknown = wanted - self._ids - {completion.id for completion in self.ready}
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        running = [i for i, request in enumerate(self.rows.requests) if request.id in wanted]
        with torch.inference_mode():  # the cache was made in it, and may only be written in it
            kept = [self._take(i, "aborted") for i in reversed(running)]
        kept += [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        for request in [r for r in self.queue if r.id in wanted]:
            self.queue.remove(request)
            self._ids.discard(request.id)
            self._forget(request)
            raw = _no_logp() if request.sampling.raw_logprobs else None
            kept.append(Completion(request.id, _no_tokens(), _no_logp(), "aborted", self.version, raw_logp=raw))
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if len(self.rows) or self.prefilled:
            raise RuntimeError(
                f"new weights while {len(self.rows)} rows are running: their cache would be stale; finish or abort first"
            )
        copy_weights(self.model, named_tensors)
        self.version, self._fused = version, None

    def sleep(self) -> None:
        if self.queue or len(self.rows):
            raise RuntimeError(f"the engine cannot sleep with {len(self.queue) + len(self.rows)} requests unfinished")
        self.cache.release()
        self._fused = None

    def wake(self) -> None:
        """Nothing to do: the cache grows back with the first requests."""

    # --- one iteration -----------------------------------------------------------------------------------------------

    def _admit(self) -> list[Completion]:
        """Fill free rows from the queue; prefill the prompts that are new; draw each new row's first token."""
        first = len(self.rows)
        admitted = [self.queue.popleft() for _ in range(min(self.max_rows - first, len(self.queue)))]
        self._prefill([r.tokens for r in admitted])
        self.cache.reserve(
            self.max_rows if len(self.queue) else len(self.rows) + len(admitted),
            max(len(r.tokens) for r in admitted) + 1,
            running=first,
        )
        logits = []
        start = first
        while start < first + len(admitted):
            request = admitted[start - first]
            stop = start
            while stop < first + len(admitted) and admitted[stop - first].tokens == request.tokens:
                self.rows.add(admitted[stop - first], self.version)
                stop += 1
            prompt = self.prefilled[request.tokens]
            self.cache.put_prompt(slice(start, stop), prompt.keys, prompt.values)
            logits.append(prompt.logits.expand(stop - start, -1))
            for k in range(start, stop):
                self._forget(admitted[k - first])
            start = stop
        return self._draw(slice(first, len(self.rows)), torch.cat(logits))

    def _prefill(self, prompts: Sequence[tuple[int, ...]]) -> None:
        new = [p for p in dict.fromkeys(prompts) if p not in self.prefilled]
        chunk: list[tuple[int, ...]] = []
        size = 0
        for prompt in new:
            if chunk and size + len(prompt) > PREFILL_CHUNK_TOKENS:
                self._prefill_chunk(chunk)
                chunk, size = [], 0
            chunk.append(prompt)
            size += len(prompt)
        if chunk:
            self._prefill_chunk(chunk)

    def _prefill_chunk(self, prompts: list[tuple[int, ...]]) -> None:
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        offsets = offsets_from_lengths(lengths)
        tokens = torch.tensor([t for p in prompts for t in p], device=self.device)
        positions = torch.arange(tokens.shape[0], device=self.device) - torch.repeat_interleave(offsets[:-1], lengths)
        attend = DensePrefillAttention(PackedAttention(offsets, self.model.arch.windows), self.model.arch.num_layers)
        hidden = self.model(tokens, positions, attend, max(len(p) for p in prompts))
        logits = self.model.logits(hidden[offsets[1:] - 1])
        keys, values = torch.stack(attend.keys), torch.stack(attend.values)
        bounds = offsets.tolist()
        for i, prompt in enumerate(prompts):
            part = slice(bounds[i], bounds[i + 1])
            self.prefilled[prompt] = PrefilledPrompt(keys[:, part], values[:, part], logits[i])
        self.stats.prefilled_tokens += tokens.shape[0]

    def _forget(self, request: Request) -> None:
        """One sample fewer waits for this prompt; the last one lets it go."""
        self.waiting[request.tokens] -= 1
        if self.waiting[request.tokens] == 0:
            del self.waiting[request.tokens]
            self.prefilled.pop(request.tokens, None)

    def _decode_step(self) -> list[Completion]:
        n = len(self.rows)
        positions = self.rows.positions[:n]
        shortest, longest = int(self.rows.position[:n].min()), int(self.rows.position[:n].max())
        self.cache.reserve(n, longest + 2, running=n)
        self.stats.decode_steps += 1
        self.stats.row_steps += n
        tokens, cache = self.rows.tokens_in[:n], self.cache
        if self._fused is not None:
            return self._draw(slice(0, n), self._fused(tokens, positions, cache.keys, cache.values, longest))
        attend = DenseDecodeAttention(cache, positions, longest, shortest)
        hidden = self._step(tokens, positions, attend, longest + 1)
        return self._draw(slice(0, n), self.model.logits(hidden))

    def _draw(self, rows: slice, logits: Tensor) -> list[Completion]:
        """Sample one token for each of the rows; returns the completions that this ended."""
        state, wants = self.rows, self.rows.wants
        biases = [request.sampling.logit_bias for request in state.requests[rows]] if wants.bias else []

        def column(wanted: bool, values: np.ndarray) -> Tensor | None:
            return torch.from_numpy(values[rows]) if wanted else None

        biased = add_bias(logits, biases) if any(biases) else logits
        uniform = uniforms(torch.from_numpy(state.key[rows]), torch.from_numpy(state.drawn[rows]))
        temperature = column(wants.temperature, state.temperature)
        library = None if wants.top_k or wants.top_p or wants.min_p else c_kernels(biased)
        if library is not None:
            tokens, logp = draw(library, biased, uniform, temperature)
        else:
            tails = column(wants.top_k, state.top_k), column(wants.top_p, state.top_p), column(wants.min_p, state.min_p)
            tokens, logp = sample(biased, uniform, temperature, *tails)
        raw = (
            log_softmax_at_temperature(logits, 1.0).gather(1, tokens[:, None])[:, 0].numpy()
            if wants.raw_logprobs
            else None
        )
        drawn = tokens.numpy()
        state.record(rows, drawn, logp.numpy(), raw)
        self.stats.tokens += drawn.shape[0]
        if self.listener is not None:
            for request, token in zip(state.requests[rows], drawn.tolist(), strict=True):
                self.listener(request.id, token)
        # From the last row down, so that a row that moves into a hole has been looked at already.
        return [self._take(row, finish) for row, finish in reversed(self._ended(rows))][::-1]

    def _ended(self, rows: slice) -> list[tuple[int, str]]:
        """Which of the rows their last token ended, and how."""
        state = self.rows
        full = state.produced[rows] >= state.limit[rows]
        if not state.wants.stops:
            return [(rows.start + int(k), "length") for k in full.nonzero()[0]]
        ended = []
        drawn = state.last_token[rows].tolist()
        for k, request in enumerate(state.requests[rows]):
            options = request.sampling
            if drawn[k] in options.stop_tokens or (options.stop and self._hits_stop(rows.start + k)):
                ended.append((rows.start + k, "stop"))
            elif full[k]:
                ended.append((rows.start + k, "length"))
        return ended

    def _hits_stop(self, row: int) -> bool:
        stop, count = self.rows.requests[row].sampling.stop, int(self.rows.produced[row])
        # A string of k bytes spans at most k tokens that show text, and a few that show none.
        tail = max(len(s.encode()) for s in stop) + 8
        assert self.decode is not None
        text = self.decode(self.rows.tokens[row, max(0, count - tail) : count].tolist())
        return any(s in text for s in stop)

    def _take(self, row: int, finish: str) -> Completion:
        completion = self.rows.completion(row, finish)
        self._ids.discard(completion.id)
        if self.rows.is_nan(row):
            self.cache.clear(row)
        last = self.rows.remove(row)
        if last != row:
            self.cache.move(last, row, int(self.rows.position[row]))
            if self.rows.is_nan(row):
                self.cache.clear(last)
        return completion


def _no_tokens() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


def _no_logp() -> np.ndarray:
    return np.empty(0, dtype=np.float32)
