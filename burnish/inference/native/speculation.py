"""Speculative decoding in the paged engine: drafts from earlier text, verified by one forward pass of several tokens per row.

A token is drawn by inversion of the cumulative distribution with one uniform number from (key of the sample, position). So a
verification step needs no acceptance test. It feeds a row's last token and k draft tokens, draws a token after each of them with the
number of that position, and keeps the drawn tokens up to the first one that differs from the draft. These are the tokens that k + 1
plain steps would draw.

Each token of such a chunk is a row of its own for attention and sampling (`ChunkRows`): it has the block table, key and options of its
request, and the next position. Drafts come from a search for the longest earlier occurrence of the last tokens of a row (prompt
lookup), in its own text and in earlier answers to its prompt. Everything runs on the device without the host, in fixed shapes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from burnish.config.rollout import Speculation
from burnish.inference.native.device_state import (
    DRAWN,
    KEY,
    LAST_TOKEN,
    LIMIT,
    LIVE,
    POSITION,
    PRODUCED,
    RING_SIZE,
    DeviceRows,
    SamplerFlags,
)
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.draft_lookup import MAX_MATCH, longest_match

ANSWER_COLUMNS = 8192
"""Most tokens of earlier answers that a row is compared with."""
MAX_STORED_TOKENS = 1 << 22
"""Tokens of all prompts and answers in an `AnswerStore`; the prompts that were used least recently leave first."""
MAX_ANSWERS = 16
"""Answers of one prompt in an `AnswerStore`."""
SEPARATOR = -1
"""Between answers, and where a row has no text. It matches no token."""


class AnswerStore:
    """The last answers to each prompt, on the host."""

    def __init__(self, max_tokens: int = MAX_STORED_TOKENS) -> None:
        self.max_tokens, self.num_tokens = max_tokens, 0
        self._answers: OrderedDict[tuple[int, ...], deque[np.ndarray]] = OrderedDict()

    def add(self, prompt: tuple[int, ...], answer: Sequence[int]) -> None:
        """Add an answer. The prompt becomes the most recently used one."""
        known = self._answers.get(prompt)
        if known is None:
            known = self._answers[prompt] = deque()
            self.num_tokens += len(prompt)
        self._answers.move_to_end(prompt)
        known.append(np.array(answer, dtype=np.int32))
        self.num_tokens += len(answer)
        if len(known) > MAX_ANSWERS:
            self.num_tokens -= len(known.popleft())
        while self.num_tokens > self.max_tokens:
            oldest, answers = self._answers.popitem(last=False)
            self.num_tokens -= len(oldest) + sum(map(len, answers))

    def answers(self, prompt: tuple[int, ...]) -> list[np.ndarray]:
        """The answers to a prompt, the oldest first."""
        return list(self._answers.get(prompt, ()))

    def text(self, prompt: tuple[int, ...], size: int) -> np.ndarray:
        """The answers to a prompt, the newest last, at most `size` tokens. Before each stands the end of the prompt, after it a separator."""
        start = np.array(prompt[-MAX_MATCH:], dtype=np.int32)
        parts: list[np.ndarray] = []
        for answer in reversed(self.answers(prompt)):
            part = np.concatenate([start, answer, np.array([SEPARATOR], dtype=np.int32)])
            size -= len(part)
            if size < 0:
                break
            parts.append(part)
        return np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int32)


class ChunkRows:
    """The chunks of a verification step for up to `num_rows` rows of at most `longest` tokens, and the texts that drafts come from.

    `rows` is the state of `num_rows * width` rows, one for each token of a chunk: the last token of a row and its drafts.
    """

    def __init__(self, options: Speculation, rows: DeviceRows, num_rows: int, longest: int) -> None:
        self.rows, self.num_rows, self.width, device = rows, num_rows, options.draft + 1, rows.device
        # At least one separator stands before the row's own text, so that no match reaches beyond its beginning.
        self.start = 1 if options.source == "context" else min(ANSWER_COLUMNS, MAX_ANSWERS * longest)
        self.has_context = options.source != "answers"
        columns = self.start + longest + self.width
        self.texts = torch.full((num_rows, columns), SEPARATOR, dtype=torch.int32, device=device)
        """Earlier answers, then from column `start` on the row's own tokens: token p is in column `start + p`."""
        self.offset = torch.arange(self.width, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        """Draft tokens fed, and those accepted."""

    def write(self, rows: Sequence[int], answers: Sequence[np.ndarray], tokens: Sequence[np.ndarray]) -> None:
        """Write earlier answers and all tokens of rows, including the last one drawn."""
        texts = np.full((len(rows), self.start + max(map(len, tokens))), SEPARATOR, dtype=np.int32)
        for text, earlier, own in zip(texts, answers, tokens, strict=True):
            text[: len(earlier)] = earlier
            text[self.start : self.start + len(own)] = own
        index = to_device(np.array(rows, dtype=np.int64), self.texts.device)
        self.texts[:, : texts.shape[1]].index_copy_(0, index, to_device(texts, self.texts.device))

    def propose(self, state: DeviceRows, num_rows: int) -> Tensor:
        """Draft tokens [num_rows, width - 1]: what follows the longest earlier occurrence of a row's last tokens; -1 where there is none.

        Text that ends before the draft does is continued with its own period.
        """
        texts, end = self.texts[:num_rows], self.start + state.ints[POSITION, :num_rows].clamp(min=0)
        searched = end if self.has_context else end.clamp(max=self.start)
        found = longest_match(texts, end, searched)
        period = (end - found)[:, None]
        column = found.clamp(min=0)[:, None] + 1 + self.offset[:-1] % period
        draft = texts.gather(1, column).long().masked_fill_(found[:, None] < 0, SEPARATOR)
        return torch.where(draft.cummin(1).values >= 0, draft, SEPARATOR)

    def expand(self, state: DeviceRows, draft: Tensor, flags: SamplerFlags) -> Tensor:
        """Write the state of a chunk's rows; return which of them [num_rows, width] are computed.

        A token is computed if there is a draft for it and the row's limit allows to draw another one after it.
        """
        if use_triton(state.ints):
            return self._expand_with_triton(state, draft, flags)
        num_rows, width = len(draft), self.width
        ints, offset = state.ints[:, :num_rows, None], self.offset
        produced = ints[PRODUCED] + offset
        is_fed = (ints[LIVE] != 0) & (produced < ints[LIMIT])
        is_fed[:, 1:] &= draft >= 0
        into = self._view(self.rows.ints, num_rows)
        into[LIVE] = is_fed
        into[PRODUCED] = produced
        into[LAST_TOKEN, :, :1] = ints[LAST_TOKEN]
        into[LAST_TOKEN, :, 1:] = draft.clamp(min=0)
        into[POSITION] = torch.where(is_fed, ints[POSITION] + offset, -1)
        into[LIMIT], into[KEY] = ints[LIMIT], ints[KEY]
        into[DRAWN] = ints[DRAWN] + offset
        for ours, theirs in ((self.rows.counts, state.counts), (self.rows.thresholds, state.thresholds)):
            self._view(ours, num_rows).copy_(theirs[:, :num_rows, None])
        tables = [(self.rows.stop, state.stop), (self.rows.block_table, state.block_table)]
        if flags.biased:
            tables += [(self.rows.bias_token, state.bias_token), (self.rows.bias_value, state.bias_value)]
        for ours, theirs in tables:
            ours[: num_rows * width].view(num_rows, width, -1).copy_(theirs[:num_rows, None])
        vectors = [(self.rows.temperature, state.temperature)]
        if self.rows.rotation_delta is not None and state.rotation_delta is not None:
            vectors.append((self.rows.rotation_delta, state.rotation_delta))
        for ours, theirs in vectors:
            ours[: num_rows * width].view(num_rows, width).copy_(theirs[:num_rows, None])
        return is_fed

    def accept(self, state: DeviceRows, draft: Tensor, is_fed: Tensor, flags: SamplerFlags) -> None:
        """Keep the drawn tokens of each chunk up to the first that ends the row or differs from the draft, and advance the rows."""
        if use_triton(state.ints):
            self._accept_with_triton(state, draft, is_fed, flags)
            return
        num_rows, offset = len(draft), self.offset
        after, before = self._view(self.rows.ints, num_rows), state.ints[:, :num_rows, None]
        drawn = after[LAST_TOKEN]
        agrees = is_fed[:, 1:] & (after[LIVE, :, :-1] != 0) & (drawn[:, :-1] == draft)
        num_accepted = agrees.long().cumprod(1).sum(1)
        is_kept = is_fed & (offset <= num_accepted[:, None])
        slot = (before[PRODUCED] + offset) % RING_SIZE
        rings = [(state.ring_token, self.rows.ring_token), (state.ring_logp, self.rows.ring_logp)]
        if flags.raw:
            rings.append((state.ring_raw, self.rows.ring_raw))
        for ring, drawn_ring in rings:
            new = drawn_ring[: drawn.numel()].view(num_rows, self.width, -1).gather(2, slot[:, :, None])[:, :, 0]
            _write_where(is_kept, ring[:num_rows], slot, new)
        column = self.start + 1 + before[POSITION].clamp(min=0) + offset
        _write_where(is_kept, self.texts[:num_rows], column, drawn.int())
        self.counts[0] += is_fed[:, 1:].sum()
        self.counts[1] += num_accepted.sum()
        last = num_accepted.expand(len(after), num_rows)[:, :, None]
        state.ints[:, :num_rows] = after.gather(2, last)[:, :, 0]

    def _expand_with_triton(self, state: DeviceRows, draft: Tensor, flags: SamplerFlags) -> Tensor:
        from burnish.models.kernels.triton import chunk_rows

        own = self.rows
        biases = [(state.bias_token, own.bias_token), (state.bias_value, own.bias_value)] if flags.biased else []
        deltas = None
        if state.rotation_delta is not None and own.rotation_delta is not None:
            deltas = state.rotation_delta, own.rotation_delta
        return chunk_rows.expand(
            state.ints,
            own.ints,
            draft,
            (state.temperature, own.temperature),
            (state.counts, own.counts),
            (state.thresholds, own.thresholds),
            (state.stop, own.stop),
            (state.block_table, own.block_table),
            biases,
            deltas,
        )

    def _accept_with_triton(self, state: DeviceRows, draft: Tensor, is_fed: Tensor, flags: SamplerFlags) -> None:
        from burnish.models.kernels.triton import chunk_rows

        own = self.rows
        raw = (state.ring_raw, own.ring_raw) if flags.raw else None
        rings = (state.ring_token, own.ring_token), (state.ring_logp, own.ring_logp), raw
        chunk_rows.accept(state.ints, own.ints, draft, is_fed, self.texts, self.start, self.counts, *rings)

    def _view(self, x: Tensor, num_rows: int) -> Tensor:
        """The part of a state tensor [n, rows] that the chunks of the first rows use, as [n, num_rows, width]."""
        return x[:, : num_rows * self.width].unflatten(1, (num_rows, self.width))


def _write_where(mask: Tensor, into: Tensor, columns: Tensor, values: Tensor) -> None:
    """`into[i, columns[i, j]] = values[i, j]` where the mask is true. The columns of a row differ."""
    into.scatter_(1, columns, torch.where(mask, values, into.gather(1, columns)))
