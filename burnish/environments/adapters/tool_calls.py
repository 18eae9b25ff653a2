"""The turn of a model that calls tools, for the conventions of TRL and verl: answers are parsed, the calls run in order, the results go back.

A call that fails is an observation: the model reads why and may try again. An answer without a call ends the episode.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message
from burnish.environments.base import Answer, Event, Observation
from burnish.environments.image_values import content_with_images
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.call_formats import MalformedCall, render_tool_prompt
from burnish.environments.tools.call_formats import call_format as format_named


@dataclass(frozen=True)
class ModelCall:
    """One call in an answer. `error` says why the text between the call tags is no call."""

    name: str
    arguments: dict[str, Any]
    error: str | None = None


@dataclass(frozen=True)
class CallableTool:
    """A tool of the episode: its JSON schema, and the function that takes the arguments of a call."""

    schema: dict[str, Any]
    call: Callable[[dict[str, Any]], Awaitable[ToolResult]]
    is_concurrent: bool = False
    """Whether consecutive calls of such tools in one answer run together."""


@dataclass(frozen=True)
class CallRound:
    """The results of all calls of one answer, in the order of the calls."""

    messages: tuple[Message, ...]
    reward: float | None
    """Sum of the rewards of the calls; None if no call gave one."""
    metrics: dict[str, float]
    events: tuple[Event, ...]


@dataclass
class CallLimits:
    """Limits on calls. A call past a limit is not run, and the model reads that it was not."""

    max_calls: int | None = None
    """Most calls in an episode."""
    max_parallel_calls: int | None = None
    """Most calls in one answer."""
    num_calls: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        for name in ("max_calls", "max_parallel_calls"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} should be at least 1, got {value}")

    def refusal(self, index: int) -> str | None:
        """Why the call at this index of the answer may not run, or None; then it counts."""
        if self.max_parallel_calls is not None and index >= self.max_parallel_calls:
            return f"not run: at most {self.max_parallel_calls} call(s) in one answer"
        if self.max_calls is not None and self.num_calls >= self.max_calls:
            return f"not run: the limit of {self.max_calls} call(s) is reached"
        self.num_calls += 1
        return None


def parse_calls(call_format: str, answer: Answer, tools: Mapping[str, CallableTool]) -> list[ModelCall]:
    """The calls of an answer in the format of the model's family. A malformed block is a call with an error."""
    parsed = format_named(call_format).parse(answer.raw_text, [tool.schema for tool in tools.values()])
    return [
        ModelCall("", {}, call.problem) if isinstance(call, MalformedCall) else ModelCall(call.name, call.arguments)
        for call in parsed.calls
    ]


def opening_with_tools(call_format: str, messages: list[Message], tools: Mapping[str, CallableTool]) -> Observation:
    """The first observation of an episode with tools. A chat template that cannot list tools gets a system message that does."""
    schemas = tuple(tool.schema for tool in tools.values())
    if not schemas or format_named(call_format).is_in_template:
        return Observation(messages=tuple(messages), tools=schemas or None)
    prompt = render_tool_prompt(call_format, schemas)
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{prompt}"}
        return Observation(messages=(first, *messages[1:]))
    return Observation(messages=({"role": "system", "content": prompt}, *messages))


def _result_messages(call_format: str, results: list[tuple[str, ToolResult]]) -> tuple[Message, ...]:
    """Names and results as messages of the role `tool`, or in one user message where the template has no such role."""
    chosen = format_named(call_format)
    if chosen.is_in_template:
        contents = [content_with_images(result.text, result.images) for _, result in results]
        return tuple(
            {"role": "tool", "name": name, "content": content}
            for (name, _), content in zip(results, contents, strict=True)
        )
    texts = [chosen.result_text.replace("{result}", result.text) for _, result in results]
    images = [image for _, result in results for image in result.images]
    return ({"role": "user", "content": content_with_images("\n".join(texts), images)},)


ErrorText = Callable[[str, str], str]
"""Builds what the model reads from the name of the tool and the reason."""


async def run_calls(
    calls: list[ModelCall],
    tools: Mapping[str, CallableTool],
    limits: CallLimits,
    error_text: ErrorText,
    call_format: str = "hermes",
) -> CallRound:
    """Run the calls of one answer and return their results in the order of the calls."""
    refusals = [limits.refusal(index) for index in range(len(calls))]
    outcomes: list[tuple[ToolResult, Event | None]] = []
    index = 0
    while index < len(calls):
        end = index + 1
        while end < len(calls) and _is_concurrent(calls[index], tools) and _is_concurrent(calls[end], tools):
            end += 1
        group = (_run_call(calls[k], tools, refusals[k], error_text) for k in range(index, end))
        outcomes += await asyncio.gather(*group)
        index = end
    metrics: dict[str, float] = {}
    for result, _ in outcomes:
        for key, value in result.metrics.items():
            metrics[key] = metrics.get(key, 0.0) + value
    rewards = [result.reward for result, _ in outcomes if result.reward is not None]
    return CallRound(
        messages=_result_messages(
            call_format, [(call.name, result) for call, (result, _) in zip(calls, outcomes, strict=True)]
        ),
        reward=sum(rewards) if rewards else None,
        metrics=metrics,
        events=tuple(event for _, event in outcomes if event is not None),
    )


def _is_concurrent(call: ModelCall, tools: Mapping[str, CallableTool]) -> bool:
    return call.name in tools and tools[call.name].is_concurrent


async def _run_call(
    call: ModelCall, tools: Mapping[str, CallableTool], refusal: str | None, error_text: ErrorText
) -> tuple[ToolResult, Event | None]:
    def failed(kind: str, message: str, trace: str = "") -> tuple[ToolResult, Event]:
        return ToolResult(error_text(call.name, message)), Event(kind, call.name, message, trace)

    if call.error is not None:
        return failed("tool_malformed", call.error)
    if refusal is not None:
        return failed("tool_refused", refusal)
    if call.name not in tools:
        return failed("tool_unknown", f"Tool {call.name} not found{did_you_mean(call.name, tools)}")
    try:
        return await tools[call.name].call(call.arguments), None
    except UserError:
        raise  # a mistake in the set-up, which no answer of the model can change
    except Exception as error:  # noqa: BLE001 (the model's arguments may raise anything in a tool; the model reads it)
        return failed("tool_raised", str(error), traceback.format_exc())
