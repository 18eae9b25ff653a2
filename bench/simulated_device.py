"""A paged engine whose device is a clock: the host code of the real one, without a GPU.

The scheduler, block manager and readers of tokens are the engine's own. Only the model runner is replaced. It draws random tokens at once
and tells when an H200 would have them; a wait for the device sleeps until then, without Python's lock, as a wait for CUDA does. So the CPU
time of a server around it is that of a server around the real engine, but for the launches of prefills.

The times are those of the 1.5B shape in bfloat16, solved from the works R1 and R2 of bench/rollout.py: 256 rows give 86,400 tokens a second,
1,024 rows give 107,100, with prefills of 3.09 GFLOP a token at 600 TFLOP/s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.device_state import RING_SIZE, NewRow, RingSnapshot, SamplerFlags
from burnish.inference.native.model_runner import ModelRunner, PrefillChunk
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.native.scheduler import Scheduler
from burnish.memory_plan.kv_cache import BLOCK_SIZE, CachePlan, graph_batch_size

STEP_S, ROW_S, PREFILL_TOKEN_S = 763e-6, 6.04e-6, 5.15e-6
REPLAY_S = 50e-6
"""The launch of one CUDA graph, in which torch gives up Python's lock."""
MEAN_SENTENCES, LONGEST_SCRIPT = 8, 2048
"""Of answers that are made of sentences: their mean number, and the most tokens of an answer."""


class DeviceClock:
    """The time at which the device will have done all that was launched."""

    def __init__(self) -> None:
        self.busy_until = 0.0
        self.busy_s = 0.0

    def launch(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds
        self.busy_s += seconds


class Ready:
    """Stands for a CUDA event."""

    def __init__(self, at: float) -> None:
        self.at = at

    def synchronize(self) -> None:
        left = self.at - time.perf_counter()
        time.sleep(max(0.0, left))


class SimulatedRows:
    """The state of the rows, which `DeviceRows` has on the device."""

    def __init__(self, size: int, vocab: int, clock: DeviceClock) -> None:
        self.size, self.vocab, self.clock = size, vocab, clock
        self.live, self.produced, self.limit = (np.zeros(size, dtype=np.int64) for _ in range(3))
        self.ring_token = np.zeros((size, RING_SIZE), dtype=np.int32)
        self.ring_logp = np.zeros((size, RING_SIZE), dtype=np.float32)
        self.random = np.random.default_rng(0)

    def start(self, rows: Sequence[NewRow]) -> None:
        index = [row.row for row in rows]
        self.live[index], self.produced[index], self.limit[index] = 1, 0, [row.limit for row in rows]

    def stop_rows(self, rows: Sequence[int]) -> None:
        self.live[list(rows)] = 0

    def reorder(self, order: Sequence[int]) -> None:
        for array in (self.live, self.produced, self.limit, self.ring_token, self.ring_logp):
            array[: len(order)] = array[list(order)]
        self.live[len(order) :] = 0

    def set_block_table(self, table: np.ndarray) -> None:
        """Nothing reads it."""

    def draw(self, rows: np.ndarray, steps: int) -> None:
        """Draw up to `steps` tokens for each live row."""
        rows = rows[self.live[rows] == 1]
        slots = (self.produced[rows, None] + np.arange(steps)) % RING_SIZE
        shape = (len(rows), steps)
        self.ring_token[rows[:, None], slots] = self.new_tokens(rows, steps)
        self.ring_logp[rows[:, None], slots] = np.log(self.random.random(shape, dtype=np.float32) + 1e-6) * 3
        self.produced[rows] = np.minimum(self.produced[rows] + steps, self.limit[rows])
        self.live[rows] = self.produced[rows] < self.limit[rows]

    def new_tokens(self, rows: np.ndarray, steps: int) -> np.ndarray:
        """Return the next tokens of rows."""
        return self.random.integers(0, self.vocab, (len(rows), steps), dtype=np.int32)

    def snapshot(self, rows: int, flags: SamplerFlags, drafts: torch.Tensor | None) -> RingSnapshot:
        ints = torch.from_numpy(np.stack([self.live[:rows], self.produced[:rows]]))
        rings = (torch.from_numpy(ring[:rows].copy()) for ring in (self.ring_token, self.ring_logp))
        return RingSnapshot(ints, *rings, None, cast(Any, Ready(self.clock.busy_until)))


class SentenceRows(SimulatedRows):
    """Rows that write sentences of a pool in random order. After each of them the answer ends with probability 1 / MEAN_SENTENCES."""

    def __init__(self, size: int, vocab: int, clock: DeviceClock, sentences: Sequence[Sequence[int]], end: int) -> None:
        super().__init__(size, vocab, clock)
        self.sentences, self.end = [np.array(one, dtype=np.int32) for one in sentences], end
        self.script = np.zeros((size, LONGEST_SCRIPT), dtype=np.int32)

    def start(self, rows: Sequence[NewRow]) -> None:
        super().start(rows)
        for row in rows:
            random = np.random.default_rng(abs(row.key))
            chosen = random.integers(len(self.sentences), size=random.geometric(1 / MEAN_SENTENCES))
            text = np.concatenate([*(self.sentences[k] for k in chosen), [self.end]])[: min(row.limit, LONGEST_SCRIPT)]
            self.script[row.row, : len(text)] = text
            self.limit[row.row] = len(text)

    def reorder(self, order: Sequence[int]) -> None:
        super().reorder(order)
        self.script[: len(order)] = self.script[list(order)]

    def new_tokens(self, rows: np.ndarray, steps: int) -> np.ndarray:
        places = np.minimum(self.produced[rows, None] + np.arange(steps), LONGEST_SCRIPT - 1)
        return self.script[rows[:, None], places]


class SimulatedRunner:
    """The methods of `ModelRunner` that the engine calls."""

    def __init__(self, rows: SimulatedRows) -> None:
        self.clock, self.rows = rows.clock, rows
        self.held_bytes = 0
        self.recorder = self.chunks = None

    def batch_size(self, rows: int) -> int:
        return graph_batch_size(rows, self.rows.size)

    def prefill(self, chunks: Sequence[PrefillChunk], wanted: Sequence[bool]) -> torch.Tensor:
        self.clock.launch(PREFILL_TOKEN_S * sum(len(chunk.tokens) - chunk.start for chunk in chunks))
        return torch.empty(sum(wanted), 1)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """There are no blocks."""

    def draw(self, logits: torch.Tensor, source: Sequence[int], rows: Sequence[int], flags: SamplerFlags) -> None:
        self.rows.draw(np.array(rows), 1)

    def decode(self, rows: int, steps: int, flags: SamplerFlags, lengths: Sequence[int]) -> None:
        self.rows.draw(np.arange(rows), steps)
        for _ in range(steps):
            time.sleep(REPLAY_S)
            self.clock.launch(STEP_S + ROW_S * rows)

    def sleep(self) -> bool:
        return True

    def wake(self) -> None:
        """Nothing was freed."""


class SimulatedEngine(PagedEngine):
    """A paged engine on a `SimulatedRunner`. Its rows write random tokens, or `sentences`, which the token `end` ends."""

    sentences: Sequence[Sequence[int]] = ()
    end = 0

    def _make_cache(self, plan: CachePlan, rows: int, flags: SamplerFlags) -> None:
        self.block_manager = BlockManager(plan.num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.max_rows, plan.blocks_per_row)
        size = self.max_rows, self.model.arch.vocab_size, DeviceClock()
        made = SentenceRows(*size, self.sentences, self.end) if self.sentences else SimulatedRows(*size)
        self._runner = cast(ModelRunner, SimulatedRunner(made))
        self.stats.plan = plan
