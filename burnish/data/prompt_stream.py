"""Prompts for rollouts: a seeded, resumable stream for training and a fixed list for validation.

The order depends only on the seed and the data and, with a curriculum, on the step and on how prompts were answered. It is the same on any
machine. The stream's state is a few counters, and with a curriculum also the statistics of the prompts seen. A restored stream continues
as if it had never stopped.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.algorithms.curriculum.spec import NoCurriculum, PrioritisedCurriculum
from burnish.config.data import Data, Source
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import is_plugin, load_plugin
from burnish.config.records import Slot
from burnish.core.random_keys import fold, permutation, uniform_from_key
from burnish.core.trajectory import RECORD, Trajectory, with_accuracy
from burnish.data.curriculum import Curriculum, PromptStatistics, make_curriculum, visit_accuracies
from burnish.data.prompt_pool import MAX_SKIPPED_PROMPTS, Prompt, PromptPool, ReadRows, make_pools, overlong_report
from burnish.data.row import Row
from burnish.data.row_formats import read_rows, refuse_weights
from burnish.data.tasks.task import GrowingTask
from burnish.models.tokenizer import Tokenizer

SAMPLERS = ("shuffle", "sequential")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSample:
    """A prompt drawn from the stream. `visit` is how often this run had drawn it before."""

    prompt: Prompt
    visit: int
    source: str = ""
    """The data source it came from."""
    index: int = -1
    """Its index in the source. `PromptStream.recall` finds it by source and index."""
    step: int = 0
    """The training step, counted from 1; 0 outside of training."""


class PromptStream:
    """An endless stream of prompts, from one source or from several by weight."""

    def __init__(
        self,
        sources: list[Source],
        tokenizer: Tokenizer,
        data: Data,
        seed: int,
        default_split: str = "train",
        base: Path | None = None,
        curriculum: Slot | None = None,
        read: ReadRows = read_rows,
    ) -> None:
        if data.sampler not in SAMPLERS and not is_plugin(data.sampler):
            raise unknown_name_error("sampler", data.sampler, SAMPLERS)
        sampler = load_plugin(data.sampler, base) if is_plugin(data.sampler) else data.sampler
        if is_plugin(data.sampler) and not callable(sampler):
            raise UserError(f"sampler {data.sampler!r} is not a function")
        self._record = record = curriculum or NoCurriculum()
        if data.sampler != "shuffle" and not isinstance(record, NoCurriculum):
            raise UserError(
                f"the curriculum chooses the prompts, so data.sampler={data.sampler} would have no effect: use shuffle"
            )
        ema = {"ema": record.ema} if isinstance(record, PrioritisedCurriculum) else {}
        self._statistics = PromptStatistics(**ema)
        pools = make_pools(sources, tokenizer, data, seed, default_split, base, read)
        for pool in pools:
            pool.scan()
        self._cursors = [
            _SourceCursor(pool, sampler, seed, make_curriculum(record, pool, self._statistics, seed)) for pool in pools
        ]
        self._weights = [source.weight for source in sources]
        growing = [pool.growing_task for pool in pools if pool.growing_task is not None]
        if len(growing) > 1:
            raise UserError(
                "two data sources make tasks themselves, but a run has one buffer of tasks: leave one of them"
            )
        self._growing: GrowingTask | None = growing[0] if growing else None
        self._seed = seed
        self._num_draws = 0
        self._step = 1

    def at(self, step: int) -> None:
        """Set the step, counted from 1, that the next draws are for. Only a curriculum uses it."""
        self._step = step

    def draw(self, k: int) -> list[PromptSample]:
        """Draw the next k prompts."""
        return [self._next() for _ in range(k)]

    def recall(self, source: str, index: int, visit: int, step: int = 0) -> PromptSample:
        """Repeat an earlier draw by its source and index. The stream does not advance."""
        cursor = next((cursor for cursor in self._cursors if cursor.pool.name == source), None)
        prompt = None if cursor is None else cursor.pool.prompt(index)
        if prompt is None:
            raise UserError(f"cannot resume: prompt {index} of {source}, which was drawn before, no longer exists")
        return PromptSample(prompt, visit, source, index, step)

    def observe(self, trajectories: Iterable[Trajectory]) -> None:
        """Record how prompts were answered, from all samples of a step, if the curriculum uses it, and the tasks that they made."""
        trajectories = list(trajectories)
        if self._growing is not None:
            self._growing.observe(
                self._step,
                [(t.id, t.metadata[RECORD]) for t in trajectories if RECORD in t.metadata and t.error is None],
            )
        if "accuracy" not in self._record.needs:
            return
        scored = [t for t in trajectories if t.reward is not None]
        if any(t.accuracy is None for t in scored) and not with_accuracy(scored):
            raise UserError(
                "the curriculum chooses prompts by how often they are answered right, but no part of the reward tells right from wrong: "
                "set correct_at of a part to the lowest value of a right answer, or set the curriculum to none"
            )
        for prompt_id, right, total in visit_accuracies(scored):
            self._statistics.observe(prompt_id, right, total)

    def open_journal(self, path: Path, step: int) -> None:
        """Keep the tasks that the run makes in a file, if it makes any, and go on after `step`."""
        if self._growing is not None:
            self._growing.open_journal(path, step)

    def metrics(self) -> dict[str, float]:
        """The metrics `tasks/...` of a run that makes tasks; else none."""
        return {} if self._growing is None else {f"tasks/{k}": v for k, v in self._growing.metrics().items()}

    def state(self) -> dict[str, Any]:
        """The state of the stream, as plain JSON values."""
        made = {} if self._growing is None else {"made": self._growing.state()}
        return made | {
            "num_draws": self._num_draws,
            "step": self._step,
            "statistics": self._statistics.state(),
            "sources": {cursor.pool.name: cursor.state() for cursor in self._cursors},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state()` was taken. The sources must be the same."""
        names = [cursor.pool.name for cursor in self._cursors]
        if sorted(state["sources"]) != sorted(names):
            raise UserError(
                f"cannot resume: the run drew from {', '.join(state['sources'])}, the config now names {', '.join(names)}"
            )
        for cursor in self._cursors:
            cursor.restore(state["sources"][cursor.pool.name])
        self._statistics.restore(state["statistics"])
        if self._growing is not None:
            self._growing.restore(state["made"])
        self._num_draws, self._step = state["num_draws"], state["step"]

    def report(self) -> str | None:
        """A note on the over-long prompts that were left out so far; None if there were none."""
        return overlong_report([cursor.pool for cursor in self._cursors])

    def check_is_finite(self) -> None:
        """Refuse endless tasks, for a value pass."""
        for cursor in self._cursors:
            if cursor.pool.size is None:
                raise UserError(
                    f"{cursor.pool.name} is an endless generated task, and the value pass before training samples every prompt: set the "
                    "source's limit"
                )

    def prompts(self) -> list[Prompt]:
        """Every prompt that is used. All sources must be finite."""
        return list(itertools.chain.from_iterable(_in_order(cursor.pool) for cursor in self._cursors))

    def use_values(self, values: Mapping[str, float]) -> None:
        """Give prompts their values by the id of their row. Prompts without a value are left out, and so are sources without any."""
        for cursor in self._cursors:
            cursor.pool.use_values(values)

    def rows(self) -> Iterator[Row]:
        """Every row of finite sources, and the first rows of endless tasks."""
        return itertools.chain.from_iterable(cursor.pool.rows() for cursor in self._cursors)

    def longest(self) -> int:
        """Length of the longest prompt; for an endless task, among its first ones."""
        return max(cursor.pool.longest() for cursor in self._cursors)

    def _next(self) -> PromptSample:
        # The choice of the source depends only on the number of the draw. A source that the curriculum leaves empty gets no weight.
        cursors = zip(self._cursors, self._weights, strict=True)
        shares = list(
            itertools.accumulate(0.0 if cursor.is_empty(self._step) else weight for cursor, weight in cursors)
        )
        if shares[-1] == 0:
            raise UserError(
                f"step {self._step}: no prompt was hard enough for the curriculum hard_only (share of right answers below its "
                "`below`) when it started; raise `below`, or start it earlier"
            )
        point = uniform_from_key(fold(self._seed, "mix", self._num_draws)) * shares[-1]
        cursor = self._cursors[bisect.bisect_right(shares, point)]
        self._num_draws += 1
        return cursor.next(self._step)


class _SourceCursor:
    """The position in one source: the epoch, and how far into it."""

    def __init__(self, pool: PromptPool, sampler: Any, seed: int, curriculum: Curriculum | None) -> None:
        self.pool = pool
        self._sampler, self._seed, self._curriculum = sampler, seed, curriculum
        self._visits: dict[int, int] = {}  # only if an index may come twice in an epoch: plug-in samplers, curricula
        self._start(epoch=0, position=0)

    def is_empty(self, step: int) -> bool:
        """Whether the curriculum or a value pass leaves nothing to draw from this source."""
        if self._curriculum is None:
            return self.pool.is_empty
        return self._curriculum.is_empty(step)

    def next(self, step: int) -> PromptSample:
        """The next prompt that is not over-long. Visits are counted if an index may come twice; otherwise the visit is the epoch."""
        # The search may cross into the next epoch and skip nearly all of both, so the bound is two epochs.
        for _ in range(2 * (self.pool.size or 0) + MAX_SKIPPED_PROMPTS):
            chosen = None if self._curriculum is None else self._curriculum.next(step)
            index = self._next_index() if chosen is None else chosen
            prompt = self.pool.prompt(index)
            if prompt is None:
                continue
            if self._curriculum is None and not callable(self._sampler):
                return PromptSample(prompt, self._epoch, self.pool.name, index, step)
            visit = self._visits.get(index, 0)
            self._visits[index] = visit + 1
            return PromptSample(prompt, visit, self.pool.name, index, step)
        raise self.pool.all_overlong()

    def state(self) -> dict[str, Any]:
        visits = {str(index): count for index, count in self._visits.items()}
        return {
            "epoch": self._epoch,
            "position": self._position,
            "size": self.pool.size,
            "digest": self.pool.digest,
            "visits": visits,
            "curriculum": {} if self._curriculum is None else self._curriculum.state(),
            "num_overlong": self.pool.num_overlong,
            "first_overlong": list(self.pool.first_overlong),
        }

    def restore(self, state: dict[str, Any]) -> None:
        if state["size"] != self.pool.size:
            raise UserError(
                f"cannot resume: {self.pool.name} had {state['size']} rows when the run was saved, and has {self.pool.size} now; "
                "restore the data, or start a new run"
            )
        if state.get("digest") not in (None, self.pool.digest):
            raise UserError(
                f"cannot resume: the rows of {self.pool.name} have changed since the run was saved (a prompt, an answer or another "
                "column); restore the data, or start a new run"
            )
        self._visits = {int(index): count for index, count in state["visits"].items()}
        self.pool.num_overlong = state["num_overlong"]
        self.pool.first_overlong = list(state["first_overlong"])
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])
        self._start(state["epoch"], state["position"])

    def _start(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order: Iterator[Any] = itertools.islice(iter(self._order_of(epoch)), position, None)

    def _next_index(self) -> int:
        given = next(self._order, None)
        if given is None:
            if self._position == 0:
                raise UserError(f"the sampler returned no index for epoch {self._epoch} of {self.pool.name}")
            self._start(self._epoch + 1, 0)
            return self._next_index()
        self._position += 1
        size = self.pool.size
        index = operator.index(given) if hasattr(given, "__index__") else -1
        if index < 0 or (size is not None and index >= size):
            limit = "whole numbers from 0" if size is None else f"whole numbers in 0..{size - 1}"
            raise UserError(f"the sampler returned index {given!r} for {self.pool.name}; expected {limit}")
        return index

    def _order_of(self, epoch: int) -> Iterable[int]:
        size = self.pool.size
        if callable(self._sampler):
            order: Iterable[int] = self._sampler(size, self._seed, epoch)
            return order
        if size is None:
            return itertools.count()
        if self._sampler == "sequential":
            return range(size)
        return permutation(size, self._seed, self.pool.name, epoch)


def validation_prompts(
    sources: list[Source],
    tokenizer: Tokenizer,
    data: Data,
    seed: int,
    limit: int | None = None,
    base: Path | None = None,
    read: ReadRows = read_rows,
) -> list[Prompt]:
    """The fixed list of validation prompts, source after source, each in its own order. A limit is divided equally among sources.

    A source that is too small for its share leaves the rest to the others. Prompts left out as over-long are logged, because they change
    what is measured.
    """
    refuse_weights(sources, "validation, which takes equally from all sources")
    pools = make_pools(sources, tokenizer, data, seed, "test", base, read)
    for pool in pools:
        if pool.size is None and limit is None:
            raise UserError(f"{pool.name} is an endless generated task: set validation.limit or the source's limit")
    waiting = {pool.name: _in_order(pool) for pool in pools}
    taken: dict[str, list[Prompt]] = {pool.name: [] for pool in pools}
    num_taken = 0
    while waiting and (limit is None or num_taken < limit):
        for name in list(waiting):
            prompt = next(waiting[name], None)
            if prompt is None:
                del waiting[name]
            elif limit is None or num_taken < limit:
                taken[name].append(prompt)
                num_taken += 1
    for pool in pools:
        if not taken[pool.name] and pool.num_overlong:
            raise pool.all_overlong()
    report = overlong_report(pools)
    if report is not None:
        log.warning("validation: %s", report)
    return [prompt for pool in pools for prompt in taken[pool.name]]


def _in_order(pool: PromptPool) -> Iterator[Prompt]:
    num_skipped = 0
    for index in itertools.count() if pool.size is None else range(pool.size):
        prompt = pool.prompt(index)
        if prompt is not None:
            num_skipped = 0
            yield prompt
        elif pool.size is None and (num_skipped := num_skipped + 1) >= MAX_SKIPPED_PROMPTS:
            raise pool.all_overlong()
