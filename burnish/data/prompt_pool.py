"""The prompts of one data source by index, with over-long ones handled by `data.overlong_prompts`.

A training file is rendered once when it is opened, so that over-long prompts are reported before the first step. Only the indices of
over-long rows are kept. A generated task is endless; its prompts are checked as they are drawn.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from burnish.config.data import Data, Source
from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan
from burnish.core.random_keys import fold, uniform_from_key
from burnish.data.images import content_digest
from burnish.data.row import Row
from burnish.data.row_formats import read_rows, source_name
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import GrowingTask, Task
from burnish.data.template import RenderedPrompt, render, template_kind, with_suffix
from burnish.models.compatibility import digest_parts
from burnish.models.tokenizer import Tokenizer

MAX_SKIPPED_PROMPTS = 1000  # over-long prompts in a row before an endless task is an error
MAX_NAMED_ROWS = 5
MAX_PROBED_PROMPTS = 256  # prompts of an endless task that are examined before a run starts
ReadRows = Callable[[Source, Path | None], list[Row]]


@dataclass(frozen=True)
class Prompt:
    """A row with the text and the tokens of its prompt."""

    row: Row
    text: str
    tokens: list[int]
    budget: int | None = None
    """The length in tokens that the prompt asks for (`data.budget`)."""
    is_chat: bool = False
    """Whether the tokenizer's chat template rendered the text."""
    value: float | None = None
    """The value of the prompt, if one was estimated before training (A*-PO)."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images of the prompt, in order; their placeholders are among `tokens`."""

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the prompt that its trajectories have in their metadata."""
        found = {"budget": self.budget, "prompt_value": self.value}
        return {name: value for name, value in found.items() if value is not None}

    @cached_property
    def start(self) -> tuple[int, ...]:
        """The tokens as one object for all samples of the prompt, so that engines see by identity that they share it."""
        return tuple(self.tokens)


class PromptPool:
    """The prompts of one source by index. `size` is None for an endless task."""

    def __init__(
        self,
        source: Source,
        tokenizer: Tokenizer,
        data: Data,
        rows: Sequence[Row] | Task,
        split: str,
        seed: int,
    ) -> None:
        self.name = source_name(source)
        self.num_overlong = 0
        self.first_overlong: list[str] = []
        """Ids of the first over-long rows."""
        self._skip: set[int] = set()
        self._values: Mapping[str, float] = {}
        self._longest = 0
        self._source, self._tokenizer, self._data, self._rows, self._split = source, tokenizer, data, rows, split
        self._seed = seed
        self.size: int | None = len(rows) if isinstance(rows, Sequence) else source.limit

    @cached_property
    def digest(self) -> str | None:
        """A digest of all columns of the rows; None for a task, whose rows follow from the seed."""
        if not isinstance(self._rows, Sequence):
            return None
        columns = ((row.prompt, row.answer, row.extra) for row in self._rows)
        return digest_parts(json.dumps(c, skipkeys=True, default=content_digest).encode() for c in columns)

    @property
    def growing_task(self) -> GrowingTask | None:
        """The task, if its rows depend on what earlier steps made."""
        return self._rows if isinstance(self._rows, GrowingTask) else None

    def scan(self) -> None:
        """Render every prompt of a finite source, so that over-long prompts are found before the first step."""
        if self.size is not None:
            num_left = sum(self.prompt(index) is not None for index in range(self.size))
            if num_left == 0:
                raise self.all_overlong()

    def rows(self) -> Iterator[Row]:
        """The rows that are used; for an endless task, its first ones."""
        fitting = (i for i in range(MAX_SKIPPED_PROMPTS if self.size is None else self.size) if i not in self._skip)
        return (self.row(i) for i in itertools.islice(fitting, MAX_PROBED_PROMPTS if self.size is None else None))

    def indices(self) -> list[int]:
        """The indices of the prompts that are used, in order, for a finite source."""
        return [i for i in range(self.size or 0) if i not in self._skip]

    @property
    def is_empty(self) -> bool:
        """Whether every prompt of a finite source is left out."""
        return self.size is not None and len(self._skip) >= self.size

    def longest(self) -> int:
        """Length of the longest prompt that is used; for an endless task, among its first ones. Prompts of a growing task may reach the limit."""
        if self.growing_task is not None:
            return self._data.max_prompt_tokens
        if self.size is not None:
            return self._longest
        lengths = (len(self._rendered(self.row(index)).tokens) for index in range(MAX_SKIPPED_PROMPTS))
        fitting = (length for length in lengths if length <= self._data.max_prompt_tokens)
        longest = max(itertools.islice(fitting, MAX_PROBED_PROMPTS), default=None)
        if longest is None:
            raise self.all_overlong()
        return longest

    def row(self, index: int) -> Row:
        """The index-th row. With `data.budget`, its prompt ends with the sentence that asks for a length."""
        row = self._plain_row(index)
        num_tokens = self._budget_of(row.id)
        if self._data.budget is None:
            return row
        suffix = self._data.budget.text.replace("{n}", str(num_tokens))
        return replace(row, prompt=with_suffix(row.prompt, suffix, f"row {row.id}"))

    def prompt(self, index: int) -> Prompt | None:
        """The index-th prompt; None if it is over-long and `data.overlong_prompts` is filter."""
        if index in self._skip:
            return None
        row = self.row(index)
        text, tokens, pictures = self._rendered(row)
        if len(tokens) <= self._data.max_prompt_tokens:
            self._longest = max(self._longest, len(tokens))
            is_chat = template_kind(self._tokenizer, self._data.template) == "chat"
            return Prompt(row, text, tokens, self._budget_of(row.id), is_chat, self._values.get(row.id), pictures)
        if self._data.overlong_prompts == "error":
            raise UserError(
                f"row {row.id}: its prompt has {len(tokens)} tokens, more than data.max_prompt_tokens="
                f"{self._data.max_prompt_tokens}; raise that, or set data.overlong_prompts=filter"
            )
        self.num_overlong += 1
        if len(self.first_overlong) < MAX_NAMED_ROWS:
            self.first_overlong.append(row.id)
        if self.size is not None:  # an endless task hardly ever draws an index again
            self._skip.add(index)
        return None

    def use_values(self, values: Mapping[str, float]) -> None:
        """Give prompts their values by the id of their row, and leave out the prompts without one. The source must be finite."""
        self._values = values
        self._skip |= {index for index in self.indices() if self._plain_row(index).id not in values}

    def all_overlong(self) -> UserError:
        """The error for a source without any usable prompt."""
        which = f"all {self.size}" if self.size is not None else f"{MAX_SKIPPED_PROMPTS} in a row"
        return UserError(
            f"{self.name}: {which} prompts are longer than data.max_prompt_tokens={self._data.max_prompt_tokens}"
        )

    def _rendered(self, row: Row) -> RenderedPrompt:
        try:
            rendered = render(row, self._tokenizer, self._data.template)
        except UserError as error:
            raise UserError(f"row {row.id}: {error}") from error
        if not rendered.tokens:
            raise UserError(f"row {row.id}: its prompt has no tokens")
        return rendered

    def _plain_row(self, index: int) -> Row:
        if isinstance(self._rows, Sequence):
            return self._rows[index]
        row = self._rows.row(self._split, index)
        if self._source.name is None:
            return row
        return replace(row, id=f"{self.name}/{self._split}/{index}", data_source=self.name)

    def _budget_of(self, row_id: str) -> int | None:
        """The length a row asks for. It stays the same for the whole run, so that the prompt's length is known."""
        budget = self._data.budget
        if budget is None:
            return None
        low, high = budget.low, budget.high
        return low + int(uniform_from_key(fold(self._seed, "budget", row_id)) * (high - low + 1))


def make_pools(
    sources: list[Source],
    tokenizer: Tokenizer,
    data: Data,
    seed: int,
    default_split: str,
    base: Path | None,
    read: ReadRows = read_rows,
) -> list[PromptPool]:
    """Make a pool for each source. Two sources of one name are an error, because their rows would share ids and randomness.

    `read` reads the rows of a file or a plug-in.
    """
    counts = Counter(source_name(source) for source in sources)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise UserError(f"two data sources are called {twice[0]!r}; give each its own `name`")
    if not sources:
        raise UserError("no data source: give a file, a task or a plug-in")
    pools = []
    for source in sources:
        split = source.split or default_split
        rows = make_task(source.task, source.options, seed) if source.task is not None else read(source, base)
        pools.append(PromptPool(source, tokenizer, data, rows, split, seed))
    return pools


def overlong_report(pools: list[PromptPool]) -> str | None:
    """A note on the over-long prompts that were left out; None if there were none."""
    total = sum(pool.num_overlong for pool in pools)
    if total == 0:
        return None
    ids = [name for pool in pools for name in pool.first_overlong][:MAX_NAMED_ROWS]
    return f"{total} over-long prompts left out: {', '.join(ids)}{', ...' if total > len(ids) else ''}"
