"""`TagEnvironment`: tools that are called with tags in the text, as published systems do (`PRESETS`).

The model writes `<search>query</search>`; generation stops there; the result is appended inside the same assistant turn, such as
`<information>...</information>`; and the model goes on. Its tokens are never changed. Text that it wrote behind the closing tag stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

from burnish.config.errors import UserError, did_you_mean, unknown_name_error
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn, filled
from burnish.environments.tools.episode_tools import EpisodeTools, OnError, Outcome, RewardSource, ToolLimits
from burnish.environments.tools.tool_handles import ToolHandle, tool_name

_FENCED = re.compile(r"\s*```[\w+-]*\n(.*?)\n?```\s*", re.DOTALL)
_TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class ActionTag:
    """A pair of tags whose content is the argument of a tool."""

    open: str
    close: str
    tool: str
    argument: str
    is_fenced: bool = False
    """Whether a fence of code inside the tags is removed."""


@dataclass(frozen=True)
class TagOptions:
    """The conventions of one system."""

    actions: tuple[ActionTag, ...]
    observation: str
    """The text behind an action; `{result}` is the result."""
    answer: tuple[str, str] | None = ("<answer>", "</answer>")
    """The tags of the final answer, which ends the episode. None: an answer without an action ends it."""
    answer_mark: str | None = None
    """Without tags of the answer: a text that shows a final answer. An answer without it and without an action is a void turn."""
    trigger: str | None = None
    """A text that ends an answer whose last action is to be taken. None: the first action or answer counts, and its closing tag stops."""
    invalid_text: str | None = None
    """The text behind an answer with neither action nor final answer. None: such an answer ends the episode."""
    max_turns: int | None = None
    """Answers whose actions are taken; invalid ones count too."""
    is_last_turn_free: bool = False
    """Whether the model writes once more after `max_turns`, without an action. Otherwise the action of the last turn is not taken."""
    max_calls: int | None = None
    """Calls of tools."""
    spent_text: str | None = None
    """The text behind an action when all calls are spent. None: such an action ends the episode."""
    shows_last_line_of_errors: bool = False
    """Whether only the last line of a Python traceback is shown."""
    max_observation_tokens: int | None = None
    """Tokens of a result, for the function `cut` that the caller makes."""

    def __post_init__(self) -> None:
        if not self.actions:
            raise UserError("actions is empty: an environment with tags needs at least one action")
        if "{result}" not in self.observation:
            raise UserError(
                f"observation {self.observation!r} has no {{result}}, so the model would not see any result"
            )
        for name in ("max_turns", "max_calls", "max_observation_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}: expected 1 or more")
        if self.is_last_turn_free and self.max_turns is None:
            raise UserError("is_last_turn_free needs max_turns, after which the last turn comes")
        if self.answer is not None and self.answer_mark is not None:
            raise UserError("answer_mark has no effect with tags of the answer: leave it out, or set answer to null")
        if self.spent_text is not None and self.max_calls is None:
            raise UserError("spent_text needs max_calls, after which it is shown")

    @property
    def stop(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        if self.trigger is not None:
            return (self.trigger,)
        return (*(action.close for action in self.actions), *([self.answer[1]] if self.answer else []))


_SEARCH = ActionTag("<search>", "</search>", "search", "query")

PRESETS: Mapping[str, TagOptions] = {
    # Search-R1 (2503.09516): top 3 passages, two turns with a search and one without.
    "search_r1": TagOptions(
        actions=(_SEARCH,),
        observation="\n\n<information>{result}</information>\n\n",
        invalid_text=(
            "\nThat was no valid action. A query must stand between <search> and </search>, and the final answer between <answer> and "
            "</answer>. Let me try again.\n"
        ),
        max_turns=2,
        is_last_turn_free=True,
        max_observation_tokens=500,
    ),
    # ReSearch (2503.19470): top 5 passages, the answer has \boxed{} inside.
    "research": TagOptions(actions=(_SEARCH,), observation="\n<result>\n{result}\n</result>\n"),
    # ReTool (2504.11536): code in a fence inside the tags; errors are shown as they are.
    "retool": TagOptions(
        actions=(ActionTag("<code>", "</code>", "python", "code", is_fenced=True),),
        observation="\n<interpreter>\n{result}\n</interpreter>\n",
    ),
    # ToRL (2503.23383): the model opens the block of output itself; one call, and no tag for the answer.
    "torl": TagOptions(
        actions=(ActionTag("```python", "```", "python", "code"),),
        observation="\n{result}\n```\n",
        answer=None,
        answer_mark="\\boxed{",
        trigger="```output",
        max_calls=1,
        spent_text="\nNo further code is run. The rest has to be done without it.\n```\n",
        shows_last_line_of_errors=True,
    ),
}
"""The conventions of published systems, by name."""
PRESET_SUMMARIES: Mapping[str, str] = {
    "search_r1": "Search-R1 (2503.09516): searches between <search> tags, passages between <information> tags.",
    "research": "ReSearch (2503.19470): searches between <search> tags, passages between <result> tags.",
    "retool": "ReTool (2504.11536): Python between <code> tags, its output between <interpreter> tags.",
    "torl": "ToRL (2503.23383): one fence of Python, whose output follows in a fence.",
}
"""What each of them is, in one sentence."""


def tag_options(system: str | None = None, changes: Mapping[str, Any] | None = None) -> TagOptions:
    """The conventions of a system with some changes, as a recipe writes them; without a system the changes are everything."""
    changed = dict(changes or {})
    known = [f.name for f in fields(TagOptions)]
    for name in changed:
        if name not in known:
            raise UserError(f"unknown option {name!r} of an environment with tags{did_you_mean(name, known)}")
    if "actions" in changed:
        try:
            changed["actions"] = tuple(
                action if isinstance(action, ActionTag) else ActionTag(**action) for action in changed["actions"]
            )
        except TypeError as error:
            wanted = ", ".join(f.name for f in fields(ActionTag))
            raise UserError(f"actions should be a list of records with {wanted}: {error}") from error
    if changed.get("answer") is not None:
        changed["answer"] = tuple(changed["answer"])
        if len(changed["answer"]) != 2:
            raise UserError(f"answer should be two tags, got {len(changed['answer'])}")
    if system is None:
        for name in ("actions", "observation"):
            if name not in changed:
                raise UserError(f"an environment with tags needs {name}, or system: one of {', '.join(PRESETS)}")
        return TagOptions(**changed)
    if system not in PRESETS:
        raise unknown_name_error("system", system, PRESETS)
    return replace(PRESETS[system], **changed)


class TagEnvironment(Environment):
    """The model calls tools with tags in its text, and goes on behind the results."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(
        self,
        tools: Sequence[ToolHandle],
        options: TagOptions,
        *,
        max_result_chars: int = ToolLimits.max_result_chars,
        deadline_s: float = ToolLimits.deadline_s,
        on_error: OnError = "observe",
        rewards: RewardSource = "configured",
        cut: Callable[[str], str] | None = None,
    ) -> None:
        """Set up the tools. `cut` shortens a result, such as to `options.max_observation_tokens`."""
        names = [tool_name(tool) for tool in tools]
        for action in options.actions:
            if action.tool not in names:
                raise UserError(
                    f"the tag {action.open} calls the tool {action.tool!r}, which is not in environment.tools"
                    f"{did_you_mean(action.tool, names)} ({', '.join(names) or 'there are none'})"
                )
        self.options = options
        limits = ToolLimits(None, len(options.actions), max_result_chars, deadline_s)
        self.tools = EpisodeTools(tools, limits, on_error, rewards, cut)
        self._num_turns = 0

    async def start(self, episode: Episode) -> Observation:
        self._num_turns = 0
        self.tools.start(episode)
        return Observation(stop=self.options.stop)

    async def step(self, answer: Answer) -> Observation | End:
        options = self.options
        self._num_turns += 1
        found = find_action(answer.text, options)
        is_final = found == "answer" or (found is None and options.invalid_text is None)
        void = {"void_turns": 1.0} if found is None and is_void(answer.text, options) else {}
        if is_final or self._is_last():
            return End(reward=await self.tools.end(), metrics=void)
        if found is None:
            assert options.invalid_text is not None
            return Observation(text=options.invalid_text, metrics={"invalid_actions": 1, **void})
        assert not isinstance(found, str)
        if options.max_calls is not None and self.tools.num_calls >= options.max_calls:
            if options.spent_text is None:
                return End(reward=await self.tools.end())
            return Observation(text=options.spent_text, metrics={"tool_calls_refused": 1})
        action, content = found
        outcome = await self.tools.call(action.tool, {action.argument: content})
        return self._observed(outcome)

    def _is_last(self) -> bool:
        """Whether the action of this turn is not taken."""
        if self.options.max_turns is None:
            return False
        last = self.options.max_turns + (1 if self.options.is_last_turn_free else 0)
        return self._num_turns >= last

    def _observed(self, outcome: Outcome) -> Observation:
        text = last_line_of_error(outcome.text) if self.options.shows_last_line_of_errors else outcome.text
        metrics: Counter[str] = Counter({"tool_calls": 1, "tool_errors": 0})
        metrics.update(outcome.metrics)
        shown, bodies = filled(self.options.observation, text)
        return Observation(
            text=shown,
            reward=outcome.reward,
            bodies=tuple(bodies),
            metrics=dict(metrics),
            events=tuple(outcome.events),
        )

    async def end(self, reason: Literal["turns", "length"]) -> End:
        return End(reward=await self.tools.end())

    async def close(self) -> None:
        await self.tools.close()


def find_action(text: str, options: TagOptions) -> tuple[ActionTag, str] | Literal["answer"] | None:
    """The action of an answer with its argument, `answer` for a final answer, or None.

    The first complete pair of tags counts. With a `trigger` it is the last one, and only if the answer ends with the trigger.
    """
    found: list[tuple[int, ActionTag | None, str]] = []
    if options.trigger is not None:
        before, trigger, _ = text.rpartition(options.trigger)
        if not trigger:
            return _final_answer(text, options)
        text = before
    for action in options.actions:
        found += [(at, action, content) for at, content in pairs(text, action.open, action.close)]
    if options.answer is not None:
        found += [(at, None, content) for at, content in pairs(text, *options.answer)]
    if not found:
        return None
    choose = min if options.trigger is None else max
    _, chosen, content = choose(found, key=lambda item: item[0])
    if chosen is None:
        return "answer"
    fenced = _FENCED.fullmatch(content) if chosen.is_fenced else None
    return chosen, (fenced[1] if fenced else content).strip("\n" if chosen.is_fenced else None)


def is_void(text: str, options: TagOptions) -> bool:
    """Whether an answer without an action has no complete block of code and no final answer either. SimpleTIR (2509.02479)."""
    if options.answer is not None:
        return True  # its tags would have been found
    has_block = any(pairs(text, action.open, action.close) for action in options.actions)
    return not has_block and options.answer_mark is not None and options.answer_mark not in text


def _final_answer(text: str, options: TagOptions) -> Literal["answer"] | None:
    return "answer" if options.answer is not None and pairs(text, *options.answer) else None


def pairs(text: str, opening: str, closing: str) -> list[tuple[int, str]]:
    """Position and content of each complete pair of tags, from left to right."""
    found = []
    at = text.find(opening)
    while at >= 0:
        inside = at + len(opening)
        end = text.find(closing, inside)
        if end < 0:
            break
        found.append((at, text[inside:end]))
        at = text.find(opening, end + len(closing))
    return found


def last_line_of_error(text: str) -> str:
    """The last line of a Python traceback; any other text as it is."""
    if _TRACEBACK not in text:
        return text
    return text.rstrip().rsplit("\n", 1)[-1]
