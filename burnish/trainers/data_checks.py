"""What can be wrong with the rows of an RL run, found before its model is loaded; and how often a run draws each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from burnish.config.data import Source
from burnish.config.environment import SINGLE_TURN
from burnish.config.schema import TrainConfig
from burnish.data.columns import NO_ENVIRONMENT, refuse_tools
from burnish.data.rows import Row, read_rows, source_name
from burnish.rewards.rewards import Rewards

MANY_TIMES = 20
"""A run that draws each row more often says so: it can learn the rows by heart."""


@dataclass
class ReadOnce:
    """The rows of the files and plug-ins of a run, which are read once and handed on to the prompts that are made of them."""

    sizes: list[int | None] = field(default_factory=list)
    """Rows of each source of `data.train`; None of a task without end."""
    _rows: dict[int, list[Row]] = field(default_factory=dict)
    """By the identity of their source in the config."""

    def read(self, source: Source, base: Path | None) -> list[Row]:
        """The rows of a source, kept until they are taken."""
        self._rows[id(source)] = read_rows(source, base)
        return self._rows[id(source)]

    def take(self, source: Source, base: Path | None) -> list[Row]:
        """The rows of a source, which are not kept here any longer."""
        return self._rows.pop(id(source)) if id(source) in self._rows else read_rows(source, base)


def read_checked(config: TrainConfig, base: Path | None, rewards: Rewards) -> ReadOnce:
    """All rows of files and plug-ins; the error for one that the run could not score, or would read only in part."""
    found = ReadOnce()
    for section, sources in (("train", config.data.train), ("validation", config.data.validation)):
        for index, source in enumerate(sources):
            size = source.limit
            if source.task is None:
                rows = found.read(source, base)
                size = len(rows)
                place = f".{index}" if len(sources) > 1 else ""
                check_rows(config, rows, rewards, f"data.{section}{place}.answer_key=")
            if section == "train":
                found.sizes.append(size)
    return found


def check_rows(config: TrainConfig, rows: list[Row], rewards: Rewards, answer_key: str) -> None:
    """Refuse a row that its reward cannot score or that asks for tools. An environment of several turns may give both itself."""
    if config.environment.name != SINGLE_TURN:
        return
    for row in rows:
        refuse_tools(row.extra, row.place, NO_ENVIRONMENT)
    rewards.check(rows, answer_key)


# --- how often rows come back ------------------------------------------------------------------------------------------------


def draws_text(config: TrainConfig, sizes: list[int | None]) -> list[str]:
    """How often a run draws each row of its sources that have an end, one line a source."""
    return [line for line, _ in _draws(config, sizes)]


def repeated(config: TrainConfig, sizes: list[int | None]) -> list[str]:
    """Those lines for sources of few rows, which a run draws so often that it can learn them by heart."""
    return [line for line, times in _draws(config, sizes) if times > MANY_TIMES]


def _draws(config: TrainConfig, sizes: list[int | None]) -> list[tuple[str, float]]:
    steps, rollout = config.training.steps, config.rollout
    changing = (
        [rollout.at(step).prompts for step in range(1, steps + 1)] if rollout.stages else [rollout.prompts] * steps
    )
    draws = sum(changing)
    weights = [source.weight for source in config.data.train]
    found = []
    for source, weight, size in zip(config.data.train, weights, sizes, strict=True):
        if size is None:
            continue
        share = draws * weight / sum(weights)
        times = share / size
        text = f"data: {source_name(source)} has {size:,} rows; {steps:,} steps draw {share:,.0f} prompts of it"
        if times >= 1:
            epoch = steps / times
            text += f", each row {_times(times)} (an epoch is {epoch:,.1f} steps)"
        else:
            text += f", {times:.0%} of the rows"
        found.append((text, times))
    return found


def _times(times: float) -> str:
    return "once" if times == 1 else f"{times:,.0f} times" if times >= 10 else f"{times:,.1f} times"
