"""`ToolEnvironment`: the model answers, or calls tools and reads their results, until an answer has no call.

The calls of an answer run in parallel. Their results come back in the order of the calls, as messages of role `tool`. A malformed call,
an unknown tool and a tool that fails are answered with an error text, so that the model can try again. The configured reward scores the
episode, unless `rewards: tools` says that the tools do.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from burnish.data.row import Message
from burnish.environments.base import Answer, Body, End, Environment, Episode, Event, Observation, RunsIn, filled
from burnish.environments.image_values import content_with_images
from burnish.environments.tools.call_formats import Call, CallFormat, MalformedCall, call_format, render_tool_prompt
from burnish.environments.tools.episode_tools import (
    EpisodeTools,
    OnError,
    Outcome,
    RewardSource,
    ToolLimits,
    failed,
)
from burnish.environments.tools.tool_handles import ToolHandle


class ToolEnvironment(Environment):
    """The model calls tools in its own format, until an answer has no call."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(
        self,
        tools: Sequence[ToolHandle],
        format: str | CallFormat,
        *,
        max_calls: int | None = None,
        max_parallel_calls: int = ToolLimits.max_parallel_calls,
        max_result_chars: int = ToolLimits.max_result_chars,
        deadline_s: float = ToolLimits.deadline_s,
        on_error: OnError = "observe",
        rewards: RewardSource = "configured",
        tools_in_template: bool | None = None,
        cut: Callable[[str], str] | None = None,
    ) -> None:
        """Set up the tools.

        `tools_in_template`: whether the chat template lists tools and has a role for results. Otherwise a system text lists them, and
        results are messages of the user. None: what is usual for the format. `cut` shortens a result further, such as to a number of tokens.
        """
        self.format = call_format(format) if isinstance(format, str) else format
        self.tools_in_template = self.format.is_in_template if tools_in_template is None else tools_in_template
        limits = ToolLimits(max_calls, max_parallel_calls, max_result_chars, deadline_s)
        self.tools = EpisodeTools(tools, limits, on_error, rewards, cut)
        self._num_ids = 0

    async def start(self, episode: Episode) -> Observation:
        self._num_ids = 0
        self.tools.start(episode)
        schemas = self.tools.schemas
        if not schemas:
            return Observation()
        if self.tools_in_template:
            return Observation(tools=schemas)
        return Observation(messages=with_system_text(episode.prompt, render_tool_prompt(self.format.name, schemas)))

    async def step(self, answer: Answer) -> Observation | End:
        calls = self.format.parse(answer.raw_text, self.tools.schemas).calls
        if not calls:
            void = {} if answer.text.strip() else {"void_turns": 1.0}
            return End(reward=await self.tools.end(), metrics=void)
        done = await asyncio.gather(*(self._answered(call, k) for k, call in enumerate(calls)), return_exceptions=True)
        outcomes: list[Outcome] = []
        for outcome in done:
            if isinstance(outcome, BaseException):  # all calls have ended by now
                raise outcome
            outcomes.append(outcome)
        metrics: Counter[str] = Counter({"tool_calls": len(calls), "tool_errors": 0})
        if all(isinstance(call, MalformedCall) for call in calls):
            metrics["void_turns"] += 1
        for outcome in outcomes:
            metrics.update(outcome.metrics)
        messages, bodies = self._messages(calls, outcomes)
        return Observation(
            messages=messages,
            bodies=bodies,
            reward=sum(outcome.reward for outcome in outcomes),
            metrics=dict(metrics),
            events=tuple(event for outcome in outcomes for event in outcome.events),
        )

    async def _answered(self, call: Call, index: int) -> Outcome:
        if isinstance(call, MalformedCall):
            event = Event("tool_malformed", self.format.name, f"{call.problem}: {call.text[:500]}")
            return failed("malformed", f"this is not a valid tool call: {call.problem}", event)
        return await self.tools.call(call.name, call.arguments, index)

    def _messages(
        self, calls: Sequence[Call], outcomes: Sequence[Outcome]
    ) -> tuple[tuple[Message, ...], tuple[Body, ...] | None]:
        """The results for the model: a message for each call, or one message of the user with all of them. And their bodies."""
        if not self.tools_in_template:
            # One message, since templates without tools often demand that roles alternate.
            content, bodies, images = "", list[Body](), list[Any]()
            for index, outcome in enumerate(outcomes):
                content += "\n" if index else ""
                text, found = filled(self.format.result_text, outcome.text, at=len(content))
                content, bodies = content + text, bodies + found
                images += outcome.images
            return ({"role": "user", "content": content_with_images(content, images)},), tuple(bodies)
        messages: list[Message] = []
        for call, outcome in zip(calls, outcomes, strict=True):
            # Nine letters and digits: the template of Mistral refuses any other id.
            message: dict[str, Any] = {
                "role": "tool",
                "tool_call_id": f"call{self._num_ids:05d}",
                "content": content_with_images(outcome.text, outcome.images),
            }
            self._num_ids += 1
            if not isinstance(call, MalformedCall):
                message["name"] = call.name
            messages.append(message)
        return tuple(messages), None

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=await self.tools.end())

    async def close(self) -> None:
        await self.tools.close()


def with_system_text(prompt: str | list[Message], text: str) -> tuple[Message, ...]:
    """A prompt as messages with a text at the end of its system message, or with a system message of its own."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return (first, *messages[1:])
    return ({"role": "system", "content": text}, *messages)
