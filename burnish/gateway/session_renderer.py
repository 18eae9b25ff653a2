"""`SessionRenderer`: what the sessions of a run have in common. It opens conversations and reads answers.

A request may set variables of the chat template (`enable_thinking`) and brings tools of its own. Where the template has no place for tools, a
system text lists them, and their results are messages of the user, as in environments with tools.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.data.row import Message
from burnish.environments.base import Body, filled
from burnish.environments.chat_traits import answer_message
from burnish.environments.dialogue import ChatRenderer, Conversation, History
from burnish.environments.image_values import content_with_images, split_parts
from burnish.environments.observed_tokens import default_bodies
from burnish.environments.tools.call_formats import CallFormat, ParsedCall, render_tool_prompt
from burnish.environments.tools.tool_environment import with_system_text
from burnish.gateway.message_keys import CallRefused, normal_message
from burnish.models.tokenizer import Tokenizer

MAX_RENDERERS = 32
"""Renderers that are kept, one for each set of template variables."""
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
Tools = Sequence[Mapping[str, Any]]


class ReadAnswer(NamedTuple):
    """An answer as a message, in two forms."""

    for_client: Message
    """In OpenAI's form: `content`, perhaps `reasoning_content`, and `tool_calls` with arguments as JSON text."""
    for_template: Message
    """As the chat template reads it. If the template does not write calls, their text is content."""


class SessionRenderer:
    """Renders the conversations of all sessions of a run and reads the answers. Used from one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template | None = None,
        history: History = "keep",
        call_format: CallFormat | None = None,
        marks_bodies: bool = False,
    ) -> None:
        """Set up the renderer. Without a `call_format` answers are text, and calls with tools are refused. `marks_bodies`: see `ChatRenderer`."""
        self.tokenizer, self.template, self.history = tokenizer, template or Template(), history
        self.call_format, self.marks_bodies = call_format, marks_bodies
        self._renderers: dict[str, ChatRenderer] = {}
        self._lists_tools = tokenizer.has_chat_template and tokenizer.chat_template_mentions("tools")
        self._shown_ids = tokenizer.special_ids(call_format.control_tokens if call_format is not None else ())
        self.renderer(None)  # a template that cannot be used is an error at the start of the run

    def renderer(self, variables: Mapping[str, Any] | None) -> ChatRenderer:
        """Return the renderer for some variables of the chat template, which go before those of the run."""
        key = json.dumps(dict(variables or {}), sort_keys=True, default=repr)
        found = self._renderers.pop(key, None)
        if found is None:
            found = self._made(variables or {})
        self._renderers[key] = found  # the last one is the latest used
        while len(self._renderers) > MAX_RENDERERS:
            del self._renderers[next(iter(self._renderers))]
        return found

    def _made(self, variables: Mapping[str, Any]) -> ChatRenderer:
        if not variables:
            return ChatRenderer(self.tokenizer, self.template, self.history, marks_bodies=self.marks_bodies)
        if reserved := sorted(RESERVED_VARIABLES & variables.keys()):
            raise CallRefused(f"chat_template_kwargs.{reserved[0]} cannot be set", param="chat_template_kwargs")
        template = self.template.model_copy(update={"kwargs": {**self.template.kwargs, **variables}})
        try:
            return ChatRenderer(self.tokenizer, template, self.history, marks_bodies=self.marks_bodies)
        except UserError as error:
            words = str(error).replace("template.kwargs", "chat_template_kwargs")
            raise CallRefused(words, param="chat_template_kwargs") from error

    def open(self, renderer: ChatRenderer, messages: Sequence[Mapping[str, Any]], tools: Tools | None) -> Conversation:
        """Render the messages of a request up to the model's turn."""
        given = [normal_message(message, index) for index, message in enumerate(messages)]
        try:
            return renderer.open(*self._with_tools(self.as_read(renderer, given, tools), tools))
        except UserError as error:
            raise CallRefused(f"the chat template does not take these messages: {error}") from error

    def as_read(self, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools | None) -> list[Message]:
        """Return messages with the results of tools as the model's format has them, if the template has no role for them."""
        return self.read_bodies(renderer, messages, tools)[0]

    def read_bodies(
        self, renderer: ChatRenderer, messages: Sequence[Message], tools: Tools | None
    ) -> tuple[list[Message], list[Body] | None]:
        """Return messages as `as_read` does, and the bodies in them; None if each content is one."""
        if not tools or self.call_format is None or not renderer.is_chat or renderer.traits.has_tool_role:
            return list(messages), None
        found = list(messages)
        bodies = [body for body in default_bodies(messages) if body.role != "tool"]
        for index, message in enumerate(messages):
            if message["role"] == "tool":
                content = message["content"]
                result, images = (content, ()) if isinstance(content, str) else split_parts(content, "the result")
                text, inside = filled(self.call_format.result_text, result, message=index)
                found[index] = {"role": "user", "content": content_with_images(text, images)}
                bodies += inside
        return found, bodies

    def _with_tools(self, messages: list[Message], tools: Tools | None) -> tuple[list[Message], list[Any] | None]:
        if not tools:
            return messages, None
        if self.call_format is None:
            raise CallRefused(
                "tools: the format in which this model writes tool calls is not known; set environment.call_format, or leave the tools out",
                param="tools",
            )
        if self._lists_tools:
            return messages, list(tools)
        return list(with_system_text(messages, render_tool_prompt(self.call_format.name, list(tools)))), None

    # --- answers ---------------------------------------------------------------------------------------------------------

    def read_answer(
        self,
        renderer: ChatRenderer,
        tokens: Sequence[int],
        tools: Tools | None,
        num_calls: int = 0,
        stops: Sequence[str] = (),
    ) -> ReadAnswer:
        """Return the message of sampled tokens, given without the token that ended them.

        Calls are looked for only if the request had tools. If one of them cannot be read, all of the answer is text. The ids of calls
        count from `num_calls`. The text ends before the stop string that is complete first.
        """
        clean = self.text(tokens, stops=stops)
        if not renderer.is_chat:
            message: Message = {"role": "assistant", "content": clean}
            return ReadAnswer(message, message)
        written = self.text(tokens, self._shown_ids, stops) if self._shown_ids else clean
        parsed = self._parsed(written, tools)
        for_template = answer_message(clean, clean, lambda text: parsed, renderer.traits, num_calls)
        if parsed is None or not parsed[2] or renderer.traits.takes_calls:
            return ReadAnswer(_for_client(for_template), for_template)
        # The template does not write calls: it gets their text, and the client gets the calls.
        traits = replace(renderer.traits, takes_calls=True)
        for_client = answer_message(clean, clean, lambda text: parsed, traits, num_calls)
        return ReadAnswer(_for_client(for_client), for_template)

    def _parsed(self, text: str, tools: Tools | None) -> tuple[str, str | None, Sequence[Any]] | None:
        """Return content, reasoning and calls of an answer; None if it has no calls and no markup around its text."""
        if self.call_format is None or not (tools or self.call_format.is_framed):
            return None
        found = self.call_format.parse(text, list(tools or ()))
        is_readable = all(isinstance(call, ParsedCall) for call in found.calls)
        if tools and found.calls and is_readable:
            return found.content, found.reasoning, found.calls
        return (found.content, found.reasoning, ()) if self.call_format.is_framed and not found.calls else None

    def text(self, tokens: Sequence[int], shown_ids: frozenset[int] = frozenset(), stops: Sequence[str] = ()) -> str:
        """Return the text of sampled tokens, without special tokens except `shown_ids`, up to the first stop string."""
        shown = [token for token in tokens if not self.tokenizer.is_special(token) or token in shown_ids]
        text = self.tokenizer.decode(shown, skip_special=False)
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        return text[: min(found)[1]] if found else text


def _for_client(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {"name": function["name"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
