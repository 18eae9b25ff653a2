"""Native engine with a dense KV cache: continuous batching on the learner's own weights, made for a CPU.

Each iteration admits waiting requests into free rows, decodes one token for every running row, and removes finished rows. A
prompt is prefilled once for all of its samples. The model is the module that the learner trains, so new weights need no
transfer. The tokens of a request depend on its key and on the weights, and on other requests only by rounding.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from burnish.core.engine import Completion, Request
from burnish.core.pictures import distinct_tokens
from burnish.core.random_keys import uniforms
from burnish.core.segments import offsets_from_lengths
from burnish.inference.engine_common import (
    EngineStats,
    StopStrings,
    check_native_request,
    check_requests,
    copy_weights,
    empty_completion,
    enqueue_by_priority,
)
from burnish.inference.native.dense_cache import DenseDecodeAttention, DenseKVCache, DensePrefillAttention, RunningRows
from burnish.inference.native.sampler import add_bias, sample
from burnish.inference.picture_requests import drop_stale_features, rotation_delta_of
from burnish.models.cached_forward import CDecodeStep, c_decode_step, decode_step_of
from burnish.models.decoder import Decoder
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.cpu.c_library import c_kernels
from burnish.models.kernels.cpu.cpu_ops import draw
from burnish.models.kernels.exact import log_softmax_at_temperature
from burnish.models.kernels.picture_attention import both_ways, piece_blocks
from burnish.models.kernels.shared_prefix import Attend
from burnish.models.vision.pieces import Piece, piece_pass

PREFILL_CHUNK_TOKENS = 8192
"""Maximum number of prompt tokens in one prefill forward. A longer prompt is computed alone."""
MAX_STEPS_AT_ONCE, PRODUCTS_AT_ONCE = 32, 1 << 31
"""Most decode steps of one call, and most multiplications: some hundredths of a second, in which the engine cannot be interrupted. A
limit in seconds would make the steps of a call, and so what an interrupted rollout has, differ from run to run."""
PromptKey = tuple[int, ...]
"""A prompt's tokens, with a number of its own for every token of a picture."""


def _key(request: Request) -> PromptKey:
    return tuple(distinct_tokens(request.tokens, request.pictures))


@dataclass
class PrefilledPrompt:
    """A prompt with its keys and values, kept until all of its samples are admitted."""

    keys: Tensor  # [layers, length, kv_heads, head_dim]
    values: Tensor
    logits: Tensor  # [vocab], for the first new token


class DenseEngine:
    """Samples from a decoder. `listener(request_id, token)` is called with every token when it is drawn."""

    def __init__(
        self,
        model: Decoder,
        max_rows: int = 256,
        decode: Callable[[list[int]], str] | None = None,
        listener: Callable[[str, int], None] | None = None,
    ) -> None:
        weight = model.embedding.weight
        self.model, self.listener = model, listener
        self.stop_strings = None if decode is None else StopStrings(decode)
        self.device = weight.device
        self.max_rows = max_rows
        self.cache = DenseKVCache(model.arch, weight.dtype, weight.device)
        self.rows = RunningRows(max_rows)
        self.waiting: deque[Request] = deque()
        self.waiting_by_prompt: Counter[PromptKey] = Counter()  # number of waiting requests
        self.prefilled: dict[PromptKey, PrefilledPrompt] = {}
        self.version = 0
        self.stats = EngineStats()
        self.ready: deque[Completion] = deque()
        """Finished completions that `stream` has not yielded yet."""
        self._ids: set[str] = set()
        self._step = decode_step_of(model)
        self._c_step: CDecodeStep | None = None
        self._num_weights = sum(p.numel() for p in model.parameters())
        self._interrupted = False
        vision = model.arch.vision
        self._has_rotations = vision is not None and vision.rotation is not None
        self._never = None if vision is None else torch.tensor(sorted(vision.placeholder_tokens))

    # --- the Engine protocol -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        known = self._ids, {completion.id for completion in self.ready}
        fresh = check_requests(
            requests, known, partial(check_native_request, model=self.model, has_text=self.stop_strings is not None)
        )
        self.waiting_by_prompt.update(map(_key, requests))
        enqueue_by_priority(self.waiting, requests)
        self._ids |= fresh

    def stream(self) -> Iterator[Completion]:
        self._step = decode_step_of(self.model)
        if self._c_step is None or not self._c_step.is_current:
            self._c_step = c_decode_step(self.model)
        while self.ready or ((self.waiting or len(self.rows)) and not self._interrupted):
            if not self.ready:
                with torch.inference_mode():
                    finished = self._admit() if self.waiting and len(self.rows) < self.max_rows else []
                    if not finished and len(self.rows):
                        finished = self._decode()
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
        with torch.inference_mode():  # the cache is an inference tensor, which only this mode may write
            kept = [self._remove(i, "aborted") for i in reversed(running)]
        kept += [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        for request in [r for r in self.waiting if r.id in wanted]:
            self.waiting.remove(request)
            self._ids.discard(request.id)
            self._release_prompt(request)
            kept.append(empty_completion(request, self.version))
        return kept if keep else []

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        if len(self.rows) or self.prefilled:
            raise RuntimeError(
                f"new weights while {len(self.rows)} rows are running: their cache would be stale; finish or abort first"
            )
        copy_weights(self.model, named_tensors)
        self.version, self._c_step = version, None
        drop_stale_features(self.model)

    def sleep(self) -> None:
        if self.waiting or len(self.rows):
            raise RuntimeError(f"the engine cannot sleep with {len(self.waiting) + len(self.rows)} requests unfinished")
        self.cache.release()
        self._c_step = None

    def wake(self) -> None:
        """Nothing to do: the cache grows with the first requests."""

    # --- one iteration -----------------------------------------------------------------------------------------------

    def _admit(self) -> list[Completion]:
        """Fill free rows from the waiting queue, prefill new prompts, and draw the first token of each new row."""
        first = len(self.rows)
        admitted = [self.waiting.popleft() for _ in range(min(self.max_rows - first, len(self.waiting)))]
        self._prefill(admitted)
        self.cache.reserve(
            self.max_rows if len(self.waiting) else len(self.rows) + len(admitted),
            max(len(r.tokens) for r in admitted) + 1,
            running=first,
        )
        logits = []
        start = first
        while start < first + len(admitted):
            request = admitted[start - first]
            key, delta = _key(request), rotation_delta_of(request, self.model)
            stop = start
            while stop < first + len(admitted) and _key(admitted[stop - first]) == key:
                self.rows.add(admitted[stop - first], self.version, delta)
                stop += 1
            prompt = self.prefilled[key]
            self.cache.put_prompt(slice(start, stop), prompt.keys, prompt.values)
            logits.append(prompt.logits.expand(stop - start, -1))
            for k in range(start, stop):
                self._release_prompt(admitted[k - first])
            start = stop
        return self._draw(slice(first, len(self.rows)), torch.cat(logits))

    def _prefill(self, requests: Sequence[Request]) -> None:
        new = {key: request for request in requests if (key := _key(request)) not in self.prefilled}
        chunk: dict[PromptKey, Request] = {}
        size = 0
        for key, request in new.items():
            if chunk and size + len(key) > PREFILL_CHUNK_TOKENS:
                self._prefill_chunk(chunk)
                chunk, size = {}, 0
            chunk[key] = request
            size += len(key)
        if chunk:
            self._prefill_chunk(chunk)

    def _prefill_chunk(self, prompts: dict[PromptKey, Request]) -> None:
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        offsets = offsets_from_lengths(lengths)
        tokens = torch.tensor([t for request in prompts.values() for t in request.tokens], device=self.device)
        positions = torch.arange(tokens.shape[0], device=self.device) - torch.repeat_interleave(offsets[:-1], lengths)
        arch = self.model.arch
        packed: Attend = PackedAttention(offsets, arch.windows, softcap=arch.score_softcap)
        pieces = [Piece(0, len(request.tokens), request.pictures) for request in prompts.values()]
        pictures = None if arch.vision is None else piece_pass(pieces, arch.vision, self.device)
        if pictures is not None and arch.attends_both_ways:
            packed = both_ways(packed, piece_blocks(pieces), arch.windows, self.device)
        attend = DensePrefillAttention(packed, arch.num_layers)
        with self.model.with_pictures(pictures):
            hidden = self.model(tokens, positions, attend, max(len(p) for p in prompts))
        logits = self.model.logits(hidden[offsets[1:] - 1])
        keys, values = torch.stack(attend.keys), torch.stack(attend.values)
        bounds = offsets.tolist()
        for i, prompt in enumerate(prompts):
            part = slice(bounds[i], bounds[i + 1])
            self.prefilled[prompt] = PrefilledPrompt(keys[:, part], values[:, part], logits[i])
        self.stats.prefilled_tokens += tokens.shape[0]

    def _release_prompt(self, request: Request) -> None:
        """Decrement the number of waiting samples of the prompt; drop the prefilled prompt when it reaches 0."""
        key = _key(request)
        self.waiting_by_prompt[key] -= 1
        if self.waiting_by_prompt[key] == 0:
            del self.waiting_by_prompt[key]
            self.prefilled.pop(key, None)

    def _steps_at_once(self) -> int:
        """Decode steps of the next call of the C kernel; 1 if something is to be done between two of them."""
        n, in_use = len(self.rows), self.rows.options_in_use
        if self.listener is not None or self._has_rotations:
            return 1
        if in_use.shared_stops is None or not in_use.only_temperature:
            return 1
        remaining = self.rows.limit[:n] - self.rows.produced[:n]
        if self.waiting:  # a row that ends is filled at once
            until_free = 1 if in_use.shared_stops else int(remaining.min())
        else:
            until_free = int(remaining.max())
        return max(1, min(until_free, MAX_STEPS_AT_ONCE, PRODUCTS_AT_ONCE // (n * self._num_weights)))

    def _decode(self) -> list[Completion]:
        """Draw one token for every row, or several; return the completions that ended."""
        if self._c_step is not None and (steps := self._steps_at_once()) > 1:
            return self._decode_steps(steps, self._c_step)
        return self._decode_step()

    def _decode_steps(self, steps: int, c_step: CDecodeStep) -> list[Completion]:
        n, state = len(self.rows), self.rows
        remaining = state.limit[:n] - state.produced[:n]
        last = int((state.position[:n] + np.minimum(steps, remaining)).max()) - 1
        self.cache.reserve(n, last + 2, running=n)
        drawn = torch.from_numpy(state.drawn[:n, None] + np.arange(steps))
        found = c_step.sample(
            state.tokens_in[:n], state.positions[:n], self.cache.keys, self.cache.values, last,
            uniforms(torch.from_numpy(state.key[:n, None]), drawn),
            torch.from_numpy(state.temperature[:n]) if state.options_in_use.temperature else None,
            torch.from_numpy(remaining), torch.tensor(state.options_in_use.shared_stops, dtype=torch.long), self._never,
        )  # fmt: skip
        counts = found.counts.numpy()
        state.record_many(found.tokens.numpy(), found.logp.numpy(), counts)
        self.stats.decode_steps += int(counts.max())
        num_tokens = int(counts.sum())
        self.stats.row_steps += num_tokens
        self.stats.tokens += num_tokens
        # Rows end in the order of steps taken one by one: completions and the rows that are left are in the same order.
        taken = {request.id: count for request, count in zip(state.requests, counts.tolist(), strict=True)}
        finished: list[Completion] = []
        for step in sorted(set(taken.values())):
            ended = self._ended(slice(0, len(state)))
            finished += self._remove_all([end for end in ended if taken[state.requests[end[0]].id] == step])
        return finished

    def _decode_step(self) -> list[Completion]:
        n = len(self.rows)
        positions = self.rows.positions[:n]
        shortest, longest = int(self.rows.position[:n].min()), int(self.rows.position[:n].max())
        self.cache.reserve(n, longest + 2, running=n)
        self.stats.decode_steps += 1
        self.stats.row_steps += n
        tokens, cache = self.rows.tokens_in[:n], self.cache
        rotation = self.rows.rotation(n) if self._has_rotations else positions
        last = longest if rotation is positions else max(longest, int(rotation.max()))
        if self._c_step is not None:
            return self._draw(slice(0, n), self._c_step(tokens, positions, cache.keys, cache.values, last, rotation))
        attend = DenseDecodeAttention(cache, positions, longest, shortest)
        hidden = self._step(tokens, rotation, attend, last + 1)
        return self._draw(slice(0, n), self.model.logits(hidden))

    def _draw(self, rows: slice, logits: Tensor) -> list[Completion]:
        """Draw one token for each of the rows; return the completions that ended."""
        state, in_use = self.rows, self.rows.options_in_use
        biases = [request.sampling.logit_bias for request in state.requests[rows]] if in_use.bias else []

        def column(is_used: bool, values: np.ndarray) -> Tensor | None:
            return torch.from_numpy(values[rows]) if is_used else None

        biased = add_bias(logits, biases) if any(biases) else logits
        uniform = uniforms(torch.from_numpy(state.key[rows]), torch.from_numpy(state.drawn[rows]))
        temperature = column(in_use.temperature, state.temperature)
        library = None if in_use.top_k or in_use.top_p or in_use.min_p else c_kernels(biased)
        if library is not None:
            tokens, logp = draw(library, biased, uniform, temperature, self._never)
        else:
            truncation = (
                column(in_use.top_k, state.top_k),
                column(in_use.top_p, state.top_p),
                column(in_use.min_p, state.min_p),
            )
            tokens, logp = sample(biased, uniform, temperature, *truncation, self._never)
        raw = (
            log_softmax_at_temperature(logits, 1.0).gather(1, tokens[:, None])[:, 0].numpy()
            if in_use.raw_logprobs
            else None
        )
        drawn = tokens.numpy()
        state.record(rows, drawn, logp.numpy(), raw)
        self.stats.tokens += drawn.shape[0]
        if self.listener is not None:
            for request, token in zip(state.requests[rows], drawn.tolist(), strict=True):
                self.listener(request.id, token)
        return self._remove_all(self._ended(rows))

    def _remove_all(self, ended: list[tuple[int, str]]) -> list[Completion]:
        """Remove rows that ended, given in ascending order with their finish reasons."""
        # From the last row down: removing a row moves the last one, which must have been checked before.
        return [self._remove(row, finish) for row, finish in reversed(ended)][::-1]

    def _ended(self, rows: slice) -> list[tuple[int, str]]:
        """The rows that ended with their last token, with the finish reason."""
        state = self.rows
        is_full = state.produced[rows] >= state.limit[rows]
        if not state.options_in_use.stops:
            return [(rows.start + int(k), "length") for k in is_full.nonzero()[0]]
        ended = []
        drawn = state.last_token[rows].tolist()
        for k, request in enumerate(state.requests[rows]):
            options = request.sampling
            if drawn[k] in options.stop_tokens or (options.stop and self._has_stop_string(rows.start + k, drawn[k])):
                ended.append((rows.start + k, "stop"))
            elif is_full[k]:
                ended.append((rows.start + k, "length"))
        return ended

    def _has_stop_string(self, row: int, token: int) -> bool:
        """Whether the tokens of a row, of which `token` is the last, complete a stop string."""
        assert self.stop_strings is not None, "checked when the request was submitted"
        stop, count, tokens = self.rows.requests[row].sampling.stop, int(self.rows.produced[row]), self.rows.tokens
        return self.stop_strings.are_complete(
            stop, token, lambda size: tokens[row, max(0, count - size) : count].tolist()
        )

    def _remove(self, row: int, finish: str) -> Completion:
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
