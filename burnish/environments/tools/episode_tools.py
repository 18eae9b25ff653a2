"""`EpisodeTools` calls the tools of one episode, and turns everything that goes wrong into text for the model or a failed episode.

What the model causes, and what a tool raises, is text that the model reads and an `Event` that is counted. With `on_error="fail"` a tool
that raises fails the episode. What leaves the episode in an unknown state fails it always: a stateful tool whose process died, a tool
that cannot start, a reward that is no number.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.config.errors import UserError, did_you_mean
from burnish.environments.base import Episode, EpisodeFailed, Event
from burnish.environments.tools.tool_handles import ToolFailed, ToolHandle, ToolSession, as_result, tool_name
from burnish.environments.tools.values import cut_middle

OnError = Literal["observe", "fail"]
RewardSource = Literal["configured", "tools"]
EVENT_KINDS = {"raised": "tool_raised", "timed_out": "tool_timed_out", "died": "worker_died", "bad_reply": "bad_reply"}
"""The kind of event for each kind of failed call."""


@dataclass(frozen=True)
class ToolLimits:
    """Limits of the tool calls of one episode."""

    max_calls: int | None = None
    """Calls of an episode. A further call is answered with an error text."""
    max_parallel_calls: int = 8
    """Calls of one answer. Further ones are answered with an error text."""
    max_result_chars: int = 16_384
    """Characters of a result. The middle of a longer one is left out."""
    deadline_s: float = 30.0
    """Time of one call."""
    max_result_images: int = 8
    """Images of a result. Further ones are left out."""

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_parallel_calls", "max_result_chars"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected 1 or more")
        if not self.deadline_s > 0:
            raise UserError(f"deadline_s={self.deadline_s}: expected more than 0")


@dataclass
class Outcome:
    """What came of one call."""

    text: str
    """What the model reads."""
    reward: float = 0.0
    metrics: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    images: tuple[Any, ...] = ()
    """What the model sees behind the text."""


def failed(kind: str, text: str, event: Event | None = None) -> Outcome:
    """The outcome of a call that the model reads an error for. It counts as `tool_errors` and `tool_errors/<kind>`."""
    counts = Counter({"tool_errors": 1, f"tool_errors/{kind}": 1})
    return Outcome(f"Error: {text}", metrics=counts, events=[] if event is None else [event])


class EpisodeTools:
    """The tools of one episode, with their sessions."""

    def __init__(
        self,
        tools: Sequence[ToolHandle],
        limits: ToolLimits,
        on_error: OnError = "observe",
        rewards: RewardSource = "configured",
        cut: Callable[[str], str] | None = None,
    ) -> None:
        self.all = {tool_name(tool): tool for tool in tools}
        if len(self.all) < len(tools):
            twice = next(name for name, num in Counter(map(tool_name, tools)).items() if num > 1)
            raise UserError(f"two tools have the name {twice!r}: give one of them another name")
        for option, value, allowed in (
            ("on_error", on_error, ("observe", "fail")),
            ("rewards", rewards, ("configured", "tools")),
        ):
            if value not in allowed:
                raise UserError(f"{option}={value!r}: expected {' or '.join(allowed)}")
        self.limits, self.on_error, self.rewards, self.cut = limits, on_error, rewards, cut
        self.offered: dict[str, ToolHandle] = {}
        self.num_calls = 0
        self._episode: Episode | None = None
        self._arguments: dict[str, dict[str, Any]] = {}
        self._sessions: dict[str, ToolSession] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def start(self, episode: Episode) -> None:
        """Take the tools that a row selects (`tools`, `tool_selection`) and its arguments for them (`tools_kwargs`)."""
        self._episode, self.num_calls = episode, 0
        names = selected_tools(episode, list(self.all))
        self.offered = {name: self.all[name] for name in names}
        self._arguments = {name: create_arguments(episode, name, self.all) for name in names}
        self._locks = {name: asyncio.Lock() for name in names}

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The schemas of the offered tools."""
        return tuple(tool.schema for tool in self.offered.values())

    async def call(self, name: str, arguments: dict[str, Any], index: int = 0) -> Outcome:
        """Make a call, the `index`-th one of its answer. Raises `EpisodeFailed`, or `UserError` to end the run."""
        limits = self.limits
        if name not in self.offered:
            known = f" (tools: {', '.join(self.offered)})" if self.offered else " (there are no tools)"
            text = f"there is no tool {name[:80]!r}{did_you_mean(name[:80], self.offered)}{known}"
            return failed("unknown", text, Event("tool_unknown", name[:80], text))
        if index >= limits.max_parallel_calls:
            return failed(
                "refused", f"only {limits.max_parallel_calls} calls are allowed at once; this one was not made"
            )
        if limits.max_calls is not None and self.num_calls >= limits.max_calls:
            return failed("refused", f"all {limits.max_calls} calls are spent; this one was not made. Answer now")
        self.num_calls += 1
        tool = self.offered[name]
        if not tool.is_stateful:
            return await self._call(name, arguments)
        async with self._locks[name]:  # in the order of the calls, since each may depend on the one before
            return await self._call(name, arguments)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Outcome:
        session = await self._session(name)
        try:
            value = await session.call(arguments, self.limits.deadline_s)
        except ToolFailed as error:
            kind = EVENT_KINDS[error.kind]
            if error.kind == "died" or self.on_error == "fail":
                raise EpisodeFailed(kind, f"tool {name!r}: {error.message}", error.traceback) from error
            is_late = error.kind == "timed_out"
            text = f"{name} timed out after {self.limits.deadline_s:g} s" if is_late else error.message
            return failed(error.kind, self._shortened(text)[0], Event(kind, name, error.message, error.traceback))
        result = as_result(value)
        text, is_cut = self._shortened(result.text)
        metrics = Counter({str(key): _number(value, f"metric {key!r}", name) for key, value in result.metrics.items()})
        events = []
        if is_cut:
            metrics["tool_results_cut"] += 1
            message = f"a result of {len(result.text):,} characters was shortened to {len(text):,}"
            events.append(Event("tool_cut", name, message))
        if len(result.images) > self.limits.max_result_images:
            message = f"a result of {len(result.images)} images was cut to {self.limits.max_result_images}"
            metrics["tool_results_cut"] += 1
            events.append(Event("tool_cut", name, message))
        images = result.images[: self.limits.max_result_images]
        return Outcome(text, self._reward(result.reward, name), metrics, events, images)

    async def _session(self, name: str) -> ToolSession:
        if name not in self._sessions:
            assert self._episode is not None, "`start` comes before the first call"
            try:
                opened = await self.offered[name].open(self._episode, self._arguments[name], self.limits.deadline_s)
            except ToolFailed as error:
                kind = "worker_died" if error.kind == "died" else "reset_failed"
                raise EpisodeFailed(kind, f"tool {name!r} could not start: {error.message}", error.traceback) from error
            # Two calls of a stateless tool may open it at once; its sessions hold nothing.
            self._sessions[name] = opened
        return self._sessions[name]

    def _shortened(self, text: str) -> tuple[str, bool]:
        """A result within the limits, and whether something was left out."""
        short = cut_middle(text, self.limits.max_result_chars)
        short = short if self.cut is None else self.cut(short)
        return short, short != text

    def _reward(self, reward: Any, name: str) -> float:
        """The reward of a call. One that would be ignored is an error, because the user expects it to count."""
        value = 0.0 if reward is None else _number(reward, "reward", name)
        if value and self.rewards == "configured":
            raise UserError(
                f"tool {name!r} gave a reward of {value:g}, but the configured reward scores the episodes: set rewards: tools in the "
                "options of the environment to train on the rewards of tools, or let the tool give none"
            )
        return value

    async def end(self) -> float | None:
        """The rewards of stateful tools for the whole episode; None if the configured reward scores it."""
        total = 0.0
        for name, session in self._sessions.items():
            try:
                total += self._reward(await session.end(self.limits.deadline_s), name)
            except ToolFailed as error:
                text = f"tool {name!r} gave no reward at the end: {error.message}"
                raise EpisodeFailed(EVENT_KINDS[error.kind], text, error.traceback) from error
        return total if self.rewards == "tools" else None

    async def close(self) -> None:
        """Close all sessions; raise the first failure after all were closed."""
        sessions, self._sessions = list(self._sessions.values()), {}
        for problem in await asyncio.gather(*(session.close() for session in sessions), return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem


def _number(value: Any, what: str, name: str) -> float:
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    raise EpisodeFailed("bad_reply", f"tool {name!r} gave the {what} {value!r:.80}; expected a finite number")


# --- what a row says about tools ----------------------------------------------------------------------------------------


def selected_tools(episode: Episode, known: Sequence[str]) -> list[str]:
    """The names of the tools that a row selects; all of them without a selection. Schemas count as their names."""
    key = next((key for key in ("tools", "tool_selection") if episode.extra.get(key) is not None), None)
    if key is None:
        return list(known)
    chosen = episode.extra[key]
    where = f"row of episode {episode.id}: {key}"
    if not isinstance(chosen, list | tuple):
        raise UserError(f"{where} should be a list of names of tools, got {type(chosen).__name__}")
    names: list[str] = []
    for item in chosen:
        inner = item.get("function", item) if isinstance(item, Mapping) else item
        name = inner.get("name") if isinstance(inner, Mapping) else inner
        if name not in known:
            hint = did_you_mean(str(name), known)
            raise UserError(f"{where} names {name!r}, which is not in environment.tools{hint} ({', '.join(known)})")
        names.append(str(name))
    return list(dict.fromkeys(names))


def create_arguments(episode: Episode, name: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a row gives a tool at its start: `tools_kwargs.<tool>.create_kwargs`, as in verl's rows."""
    given = episode.extra.get("tools_kwargs") or {}
    where = f"row of episode {episode.id}: tools_kwargs"
    if not isinstance(given, Mapping):
        raise UserError(f"{where} should be a mapping of tools, got {type(given).__name__}")
    for other, value in given.items():
        if value is not None and other not in known:
            raise UserError(
                f"{where} names {other!r}, which is not in environment.tools{did_you_mean(str(other), known)}"
            )
    mine = given.get(name) or {}
    arguments = (mine.get("create_kwargs") or {}) if isinstance(mine, Mapping) else None
    if not isinstance(arguments, Mapping):
        raise UserError(f"{where}.{name} should be of the form {{create_kwargs: {{...}}}}, got {mine!r:.120}")
    return dict(arguments)
