"""Prompts for rollouts: a seeded, resumable stream for training and a fixed list for validation.

The order is a function of the seed and the data alone, or with a curriculum also of the step and of how prompts were
answered, so it is the same on any machine; the stream's state is a handful of counters, with a curriculum also the
statistics of the prompts seen, and restoring it continues as if the stream had never stopped.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.algorithms.curriculum.spec import NoCurriculum, PrioritisedCurriculum
from burnish.config.data import Data, Source
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import is_plugin, load_plugin
from burnish.config.records import Slot
from burnish.core.random_keys import fold, permutation, uniform_from_key
from burnish.core.trajectory import Trajectory, with_accuracy
from burnish.data.curriculum import Curriculum, PromptStatistics, make_curriculum, visit_accuracies
from burnish.data.prompt_pool import MAX_SKIPPED_PROMPTS, Prompt, PromptPool, ReadRows, make_pools, overlong_report
from burnish.data.row import Row
from burnish.data.row_formats import read_rows, refuse_weights
from burnish.models.tokenizer import Tokenizer

SAMPLERS = ("shuffle", "sequential")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptSample:
    """A prompt taken from the stream; `visit` counts how often this run drew it before."""

    prompt: Prompt
    visit: int
    source: str = ""
    """The data source it came from,"""
    index: int = -1
    """and its place there: what `PromptStream.recall` finds it by."""
    step: int = 0
    """The training step it was drawn for, counted from 1; 0 outside of training."""


class PromptStream:
    """Draws prompts for ever, from one source or several by weight."""

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
                f"a curriculum chooses the prompts, so data.sampler={data.sampler} has no place: use shuffle"
            )
        ema = {"ema": record.ema} if isinstance(record, PrioritisedCurriculum) else {}
        self._statistics = PromptStatistics(**ema)
        pools = make_pools(sources, tokenizer, data, seed, default_split, base, read)
        for pool in pools:
            pool.scan()
        self._lanes = [
            _SourceCursor(pool, sampler, seed, make_curriculum(record, pool, self._statistics, seed)) for pool in pools
        ]
        self._weights = [source.weight for source in sources]
        self._seed = seed
        self._num_draws = 0
        self._step = 1

    def at(self, step: int) -> None:
        """Draws from now on are those of a step, counted from 1; only a curriculum takes note."""
        self._step = step

    def draw(self, k: int) -> list[PromptSample]:
        """The next k prompts."""
        return [self._next() for _ in range(k)]

    def recall(self, source: str, index: int, visit: int, step: int = 0) -> PromptSample:
        """A draw made before, by its place; the stream stays where it is."""
        lane = next((lane for lane in self._lanes if lane.pool.name == source), None)
        prompt = None if lane is None else lane.pool.prompt(index)
        if prompt is None:
            raise UserError(f"cannot resume: prompt {index} of {source}, which was drawn before, is not there any more")
        return PromptSample(prompt, visit, source, index, step)

    def observe(self, trajectories: Iterable[Trajectory]) -> None:
        """Learn how prompts were answered, from all samples of a step; kept where the curriculum chooses by it."""
        if "accuracy" not in self._record.needs:
            return
        scored = [t for t in trajectories if t.reward is not None]
        if any(t.accuracy is None for t in scored) and not with_accuracy(scored):
            raise UserError(
                "the curriculum chooses prompts by how often they are answered right, but no part of the reward says right or wrong: "
                "set correct_at of a part to the value from which an answer is right, or set the curriculum to none"
            )
        for prompt_id, right, total in visit_accuracies(scored):
            self._statistics.observe(prompt_id, right, total)

    def state(self) -> dict[str, Any]:
        """Where the stream is, as plain JSON values."""
        return {
            "num_draws": self._num_draws,
            "step": self._step,
            "statistics": self._statistics.state(),
            "sources": {lane.pool.name: lane.state() for lane in self._lanes},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state()` was taken; the sources must be the same."""
        names = [lane.pool.name for lane in self._lanes]
        if sorted(state["sources"]) != sorted(names):
            raise UserError(
                f"cannot resume: the run drew from {', '.join(state['sources'])}, the config now names {', '.join(names)}"
            )
        for lane in self._lanes:
            lane.restore(state["sources"][lane.pool.name])
        self._statistics.restore(state["statistics"])
        self._num_draws, self._step = state["num_draws"], state["step"]

    def report(self) -> str | None:
        """How many over-long prompts were left out so far, and the first of them; None if there were none."""
        return overlong_report([lane.pool for lane in self._lanes])

    def rows(self) -> Iterator[Row]:
        """Every row of the sources that have an end, the first ones of those that have none."""
        return itertools.chain.from_iterable(lane.pool.rows() for lane in self._lanes)

    def longest(self) -> int:
        """Tokens of the longest prompt, of an endless task among its first ones."""
        return max(lane.pool.longest() for lane in self._lanes)

    def _next(self) -> PromptSample:
        # The source depends on the draw's number only, never on what the sources gave before; one that the curriculum
        # leaves empty has no share.
        lanes = zip(self._lanes, self._weights, strict=True)
        shares = list(itertools.accumulate(0.0 if lane.is_empty(self._step) else weight for lane, weight in lanes))
        if shares[-1] == 0:
            raise UserError(
                f"step {self._step}: not one prompt was hard enough for the curriculum hard_only (right answers below its "
                "`below`) when its turn came; raise `below`, or start it earlier"
            )
        point = uniform_from_key(fold(self._seed, "mix", self._num_draws)) * shares[-1]
        lane = self._lanes[bisect.bisect_right(shares, point)]
        self._num_draws += 1
        return lane.next(self._step)


class _SourceCursor:
    """One source's place in its own order: which epoch, and how far into it."""

    def __init__(self, pool: PromptPool, sampler: Any, seed: int, curriculum: Curriculum | None) -> None:
        self.pool = pool
        self._sampler, self._seed, self._curriculum = sampler, seed, curriculum
        self._visits: dict[int, int] = {}  # where an index may come twice in an epoch: plug-in samplers, curricula
        self._start(epoch=0, position=0)

    def is_empty(self, step: int) -> bool:
        """Whether the curriculum leaves nothing to draw here."""
        return self._curriculum is not None and self._curriculum.is_empty(step)

    def next(self, step: int) -> PromptSample:
        """The next prompt that fits; where an index may come twice visits are counted, otherwise a visit is an epoch."""
        # Two epochs may meet with nearly all of both to be skipped, so one epoch's length is not a bound.
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
                f"cannot resume: {self.pool.name} had {state['size']} rows when the run was saved, now {self.pool.size}; "
                "restore the data, or start a new run"
            )
        if state.get("digest") not in (None, self.pool.digest):
            raise UserError(
                f"cannot resume: the rows of {self.pool.name} are not those of when the run was saved (a prompt, an answer or another "
                "column has changed); restore the data, or start a new run"
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
                raise UserError(f"the sampler gave no index at all for epoch {self._epoch} of {self.pool.name}")
            self._start(self._epoch + 1, 0)
            return self._next_index()
        self._position += 1
        size = self.pool.size
        index = operator.index(given) if hasattr(given, "__index__") else -1
        if index < 0 or (size is not None and index >= size):
            limit = "whole numbers from 0" if size is None else f"whole numbers in 0..{size - 1}"
            raise UserError(f"the sampler gave index {given!r} for {self.pool.name}; expected {limit}")
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
    """A fixed list, source after source in their own order; a limit is shared out equally between sources.

    A source too small for its share leaves the rest to the others. Prompts left out as over-long are logged, because
    they change what is measured.
    """
    refuse_weights(sources, "validation, which shares out equally")
    pools = make_pools(sources, tokenizer, data, seed, "test", base, read)
    for pool in pools:
        if pool.size is None and limit is None:
            raise UserError(f"{pool.name} is a generated task without end: set validation.limit or the source's limit")
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
