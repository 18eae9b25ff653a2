"""What a chat template accepts: roles, tool calls, reasoning. Messages that it cannot take are fitted to it.

- A template without a role for tools gets each result as a user message `<tool_response>`.
- A template whose roles must alternate gets consecutive user messages as one, with a blank line between them.
- A template without a system role gets the system message at the start of the first user message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Message
from burnish.environments.chat_shapes import CALL_ID, call_id, tool_call
from burnish.environments.chat_transitions import Renderings

REASONING_VARIABLES = ("reasoning_content", "thinking", "reasoning")
WORD = "FirstWord"
JOINT = "\n\n"
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")

Parse = Callable[[str], tuple[str, str | None, Sequence[Any]] | None]
"""Splits the text of an answer into content, reasoning and tool calls; None if the text is content alone. A call is a mapping with `name`,
`arguments` and perhaps `id`, or OpenAI's form with `function`, or an object with these attributes."""


@dataclass(frozen=True)
class Traits:
    """What a template accepts."""

    has_system: bool
    has_tool_role: bool
    alternates: bool
    """User and assistant must take turns."""
    takes_calls: bool
    """It writes `tool_calls` of messages. Otherwise the text of a call is content."""
    takes_reasoning: bool
    """It reads the reasoning of a message apart from its content."""
    needs_short_ids: bool = False
    """Ids of calls must have nine letters and digits (Mistral's). Others are replaced."""

    def notes(self) -> list[str]:
        """Say how messages are changed for this template."""
        notes = []
        if not self.has_system:
            notes.append("it has no system role: the system message is put in front of the first user message")
        if not self.has_tool_role:
            notes.append("it has no role for tools: each result is a user message in <tool_response> tags")
        if self.alternates:
            notes.append("its roles must alternate: consecutive user messages are joined with a blank line")
        return notes

    def fitted(self, messages: Sequence[Message], previous: Message | None = None) -> list[Message]:
        """Return messages that the template accepts behind `previous`, the last message before them."""
        found: list[Message] = []
        system = ""
        calls = list((previous or {}).get("tool_calls") or ())
        after_calls = bool(calls)
        num_results = 0
        for message in messages:
            role = message["role"]
            if role == "assistant":
                calls = list(message.get("tool_calls") or ())
                after_calls, num_results = bool(calls), 0
            elif role == "tool":
                if not self.has_tool_role or (self.alternates and not after_calls):
                    message = as_user(message)
                else:
                    message = self._with_call(message, calls, num_results)
                num_results += 1
            elif role == "system" and not self.has_system:
                if previous is None and not found:
                    system = f"{system}{message['content']}{JOINT}"
                    continue
                message = {"role": "user", "content": message["content"]}
            if system and message["role"] == "user":
                message, system = {**message, "content": system + message["content"]}, ""
            last = found[-1] if found else previous
            if (
                self.alternates
                and message["role"] == "user"
                and last is not None
                and last["role"] in ("user", "tool")
                and found
            ):
                found[-1] = {**last, "content": f"{last['content']}{JOINT}{message['content']}"}
            else:
                found.append(message)
        if system:
            found.append({"role": "user", "content": system.strip()})
        return found

    def _with_call(self, message: Message, calls: Sequence[Mapping[str, Any]], index: int) -> Message:
        """Return the result of a tool with the id and the name of its call: the call of its id, or the call in the same place."""
        if not calls:
            return {**message, "tool_call_id": self.valid_id(message.get("tool_call_id"), index)}
        own = [call for call in calls if call["id"] == message.get("tool_call_id")]
        call = own[0] if own else calls[min(index, len(calls) - 1)]
        return {"name": call["function"]["name"], **message, "tool_call_id": call["id"]}

    def valid_id(self, identity: Any, index: int) -> str:
        """Return an id that the template accepts: the given one if possible, else one made of an index."""
        is_valid = bool(identity) and (not self.needs_short_ids or SHORT_ID.fullmatch(str(identity)) is not None)
        return str(identity) if is_valid else call_id(index)


def as_user(message: Message) -> Message:
    """Return the result of a tool as a user message."""
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def find_traits(render: Renderings) -> Traits:
    """Find out what a template accepts, by rendering short conversations. Sets `render.text_arguments`."""
    mentions = render.tokenizer.chat_template_mentions
    user, again = {"role": "user", "content": "SecondWord"}, {"role": "user", "content": "ThirdWord"}
    said = {"role": "assistant", "content": "FourthWord"}
    has_system = _writes(render, [{"role": "system", "content": WORD}, user])
    takes_calls = mentions("tool_calls")
    called = {"role": "assistant", "content": "", "tool_calls": [tool_call("name", {"value": WORD})]}
    if takes_calls and not _writes(render, [user, called, again]) and not _writes(render, [user, called]):
        render.text_arguments = True
        takes_calls = _writes(render, [user, called, again]) or _writes(render, [user, called])
        render.text_arguments = takes_calls
    result = {"role": "tool", "content": WORD, "tool_call_id": CALL_ID, "name": "name"}
    before = {**called, "tool_calls": [tool_call("name", {"value": "x"})]} if takes_calls else said
    # A template that writes any role as it is (Llama 3, SmolLM2) has a role for tools only if it mentions them.
    has_tool_role = (mentions("tool") or mentions("ipython")) and _writes(render, [user, before, result])
    alternates = not _writes(render, [user, {**again, "content": WORD}])
    long = {**called, "tool_calls": [tool_call("name", {"value": WORD}, "a-longer-identity")]}
    needs_short_ids = takes_calls and not _writes(render, [user, long]) and not _writes(render, [user, long, again])
    takes_reasoning = any(mentions(name) for name in REASONING_VARIABLES)
    return Traits(has_system, has_tool_role, alternates, takes_calls, takes_reasoning, needs_short_ids)


def _writes(render: Renderings, messages: list[Message]) -> bool:
    """Return whether the template accepts messages and writes the word that one of them holds."""
    try:
        return WORD in render(messages)
    except UserError:  # the template refuses them, which is the answer to the question
        return False


def answer_message(text: str, clean: str, parse: Parse | None, traits: Traits, num_calls: int) -> Message:
    """Return the message of an answer.

    `text` has control tokens, `clean` has none. `num_calls` calls came before in the conversation; calls without an id are numbered after them.
    """
    parsed = parse(text) if parse is not None else None
    content, reasoning, given = parsed if parsed is not None else (*split_reasoning(clean), ())
    calls = [_call(call, num_calls + index, traits) for index, call in enumerate(given)]
    if calls and not traits.takes_calls:
        return {"role": "assistant", "content": clean}
    if reasoning is not None and not traits.takes_reasoning:
        if not calls:
            return {"role": "assistant", "content": clean}
        content, reasoning = f"<think>\n{reasoning}\n</think>\n\n{content}", None
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def split_reasoning(text: str) -> tuple[str, str | None]:
    """Split `<think>reasoning</think>content`. The opening tag may stand in the prompt. Without a closing tag all is content."""
    thought, found, content = text.partition("</think>")
    if not found:
        return text, None
    return content.lstrip("\n"), thought.lstrip().removeprefix("<think>").strip("\n")


def _call(call: Any, index: int, traits: Traits) -> dict[str, Any]:
    """Return a call of any accepted form as templates read it."""

    def get(source: Any, key: str) -> Any:
        return source.get(key) if isinstance(source, Mapping) else getattr(source, key, None)

    inner = get(call, "function") or call
    identity = traits.valid_id(get(call, "id"), index)
    return tool_call(str(get(inner, "name")), get(inner, "arguments") or {}, identity)
