"""The paged engine on several ranks, each with a part of the model (`parallel_decoder.py`).

Rank 0 is the leader: it has the requests, the scheduler and the block manager, samples, and is an `Engine`. Before each operation on
the device it sends the operation to the other ranks, the followers, which run it on their part of the model and of the cache. All
ranks then meet in the collectives of the forward pass. After each draw the leader sends the state of the rows, so that a token is
sampled once. A command is for a whole launch of several decode steps, and goes over gloo while the GPUs compute.

On GPUs a decode step with its NCCL collectives is one CUDA graph on every rank, captured at the same command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.rollout import Speculation
from burnish.inference.engine_common import EngineStats
from burnish.inference.native.device_state import DeviceRows, NewRow, SamplerFlags
from burnish.inference.native.model_runner import ModelRunner, PrefillChunk, row_options
from burnish.inference.native.paged_engine import PagedEngine, free_device_bytes
from burnish.inference.native.parallel_decoder import EngineRanks, ParallelDecoder
from burnish.memory_plan.kv_cache import CachePlan
from burnish.models.layer_products import products_of
from burnish.models.tensor_shards import ENGINE_KEY

Send = Callable[..., None]
"""`send(operation, *arguments)`: a command of the leader to all followers."""


class ParallelRows(DeviceRows):
    """Rows whose state is the same on all ranks. On the leader, changes are sent to the followers first."""

    def __init__(self, ranks: EngineRanks, send: Send, *args: Any) -> None:
        super().__init__(*args)
        self.ranks, self.send = ranks, send

    def start(self, rows: Sequence[NewRow]) -> None:
        self.send("start", rows)
        super().start(rows)

    def stop_rows(self, rows: Sequence[int]) -> None:
        self.send("stop_rows", rows)
        super().stop_rows(rows)

    def reorder(self, order: Sequence[int]) -> None:
        self.send("reorder", order)
        super().reorder(order)

    def set_block_table(self, table: np.ndarray) -> None:
        self.send("set_block_table", table)
        super().set_block_table(table)

    def draw(self, logits: Tensor, source: Tensor, row: Tensor, flags: SamplerFlags) -> None:
        """Draw on the leader, then give its state of the rows to all. It is part of a decode step, which has its own command."""
        if self.ranks.is_leader:
            super().draw(logits, source, row, flags)
        self.ranks.broadcast(self.ints)


def cache_ranks_of(model: ParallelDecoder) -> EngineRanks | None:
    """The ranks that divide the cache of a model with latent attention. Other caches are divided by their heads."""
    return model.ranks if model.arch.latent is not None and model.ranks.num > 1 else None


class ParallelRunner(ModelRunner):
    """A rank's part of a model and of its cache. On the leader, operations are sent to the followers first."""

    capture_error_mode = "thread_local"  # NCCL's watchdog thread asks for the state of events meanwhile

    def __init__(
        self,
        model: ParallelDecoder,
        plan: CachePlan,
        stats: EngineStats,
        in_8_bits: Sequence[bool],
        speculation: Speculation | None,
        send: Send,
    ) -> None:
        self.ranks, self.send = model.ranks, send
        self.cache_ranks = cache_ranks_of(model)
        products = products_of(model, False, "model")
        super().__init__(model, plan, stats, products, in_8_bits=in_8_bits, speculation=speculation)

    def compile(self, rows: int, flags: SamplerFlags) -> None:
        self.send("compile", rows, flags)
        with self.ranks.muted():  # kernels compile in threads, in another order on each rank
            super().compile(rows, flags)

    def capture(self, rows: int, flags: SamplerFlags) -> None:
        self.send("capture", rows, flags)
        super().capture(rows, flags)

    def prefill(self, chunks: Sequence[PrefillChunk], wanted: Sequence[bool]) -> Tensor:
        self.send("prefill", chunks, wanted)
        return super().prefill(chunks, wanted)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.send("copy_blocks", sources, targets)
        super().copy_blocks(sources, targets)

    def draw(self, logits: Tensor, source: Sequence[int], rows: Sequence[int], flags: SamplerFlags) -> None:
        self.send("draw", source, rows, flags)
        super().draw(logits, source, rows, flags)

    def decode(self, rows: int, steps: int, flags: SamplerFlags, lengths: Sequence[int]) -> None:
        self.send("decode", rows, steps, flags, lengths)
        super().decode(rows, steps, flags, lengths)

    def write_texts(self, rows: Sequence[int], answers: Sequence[np.ndarray], tokens: Sequence[np.ndarray]) -> None:
        self.send("write_texts", rows, answers, tokens)
        super().write_texts(rows, answers, tokens)

    def verify(self, rows: int, steps: int, flags: SamplerFlags, lengths: Sequence[int]) -> None:
        self.send("verify", rows, steps, flags, lengths)
        super().verify(rows, steps, flags, lengths)

    def _make_rows(self, size: int, max_blocks: int) -> ParallelRows:
        return ParallelRows(self.ranks, self.send, size, max_blocks, self.device, *row_options(self.model))


class ParallelEngine(PagedEngine):
    """The leader: an engine that samples from a model whose parts are on several ranks. `close` ends the followers."""

    model: ParallelDecoder

    def __init__(self, model: ParallelDecoder, *args: Any, **options: Any) -> None:
        """Takes the arguments of `PagedEngine`, without exact mode."""
        if options.get("exact"):
            raise UserError(
                f"{ENGINE_KEY} sums over ranks in another order than one process, so rollout.exact cannot hold: use one rank"
            )
        assert model.ranks.is_leader, "the other ranks follow"
        super().__init__(model, *args, **options)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load full tensors, which are sent to all ranks, or use the parameters as they are.

        Each rank's parameters may have been written before. A follower then waits at this command until its own are.
        """
        super().load(version, ())
        self._send("load", version)
        for name, tensor in named_tensors:
            whole = tensor.detach().to(self.model.embedding.weight.device).contiguous()
            self._send("tensor", name, whole.shape, whole.dtype)
            self.model.load_full([(name, self.model.ranks.broadcast(whole))])

    def sleep(self) -> None:
        super().sleep()  # raises if requests are unfinished
        self._send("sleep")

    def wake(self) -> None:
        if self._runner is not None:
            self._send("wake")
        super().wake()

    def close(self) -> None:
        """End the followers."""
        self._send("close")

    def _token_bytes(self) -> int:
        ranks = cache_ranks_of(self.model)
        return -(-super()._token_bytes() // (1 if ranks is None else ranks.num))

    def _layers_in_8_bits(self) -> tuple[bool, ...]:
        return (
            True,
        ) * self.model.arch.num_layers  # models whose keys have a bias are refused (`distributed/engine_builder.py`)

    def _free_bytes(self) -> int | None:
        """The smallest free memory of all ranks: they have caches of the same size."""
        self._send("measure")
        own = super()._free_bytes()
        found = self.model.ranks.minimum(-1 if own is None else own)
        return None if own is None else found

    def _make_runner(self, plan: CachePlan) -> ParallelRunner:
        options = self.in_8_bits, self.speculation
        self._send("make_runner", plan, *options)
        return ParallelRunner(self.model, plan, self.stats, *options, self._send)

    def _send(self, operation: str, *arguments: Any) -> None:
        self.model.ranks.share((operation, arguments))


@dataclass
class ParallelFollower:
    """A rank that is not the leader. `run` obeys commands until the leader closes the engine.

    `on_load(version)` is called when the leader has new weights; it must write this rank's before it returns.
    """

    model: ParallelDecoder
    on_load: Callable[[int], None]
    runner: ParallelRunner | None = None

    def run(self) -> None:
        ranks = self.model.ranks
        while True:
            operation, arguments = ranks.share(None)
            if operation == "close":
                return
            with torch.inference_mode():
                self._obey(operation, arguments)

    def _obey(self, operation: str, arguments: tuple[Any, ...]) -> None:
        runner, device = self.runner, self.model.embedding.weight.device
        if operation == "load":
            self.on_load(*arguments)
        elif operation == "tensor":
            name, shape, dtype = arguments
            whole = torch.empty(shape, dtype=dtype, device=device)
            self.model.load_full([(name, self.model.ranks.broadcast(whole))])
        elif operation == "measure":
            free = free_device_bytes(device, runner)
            self.model.ranks.minimum(-1 if free is None else free)
        elif operation == "make_runner":
            self.runner = runner = None  # free its memory first
            plan, in_8_bits, speculation = arguments
            self.runner = ParallelRunner(self.model, plan, EngineStats(), in_8_bits, speculation, _send_nothing)
        elif operation == "sleep":
            if runner is not None and not runner.sleep():
                self.runner = None
        else:
            assert runner is not None, f"{operation} before make_runner"
            if operation == "draw":
                runner.draw(torch.empty(0, device=device), *arguments)
            elif operation in ("start", "stop_rows", "reorder", "set_block_table"):
                getattr(runner.rows, operation)(*arguments)
            else:
                getattr(runner, operation)(*arguments)


def _send_nothing(operation: str, *arguments: Any) -> None:
    """A follower has no followers."""
