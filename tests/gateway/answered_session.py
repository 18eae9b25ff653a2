"""A token tree with an engine that answers with given texts, and the messages that tests send it."""

from __future__ import annotations

import functools
from typing import Any

from burnish.data.row import Message
from burnish.environments.tools.call_formats import ParsedCall, call_format
from burnish.gateway.session_calls import CallPrompt
from burnish.gateway.token_tree import SessionTree
from burnish.models.tokenizer import Tokenizer
from tests.environments.chat_templates import small_tokenizer
from tests.gateway.random_sessions import session_renderer

shared_renderer = functools.cache(session_renderer)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def hermes(*values: int) -> str:
    return call_format("hermes").write([ParsedCall("add", {"a": value}) for value in values])


def result(message: Message, place: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": message["tool_calls"][place]["id"], "content": text}


class Session:
    """A tree with an engine that answers with given texts."""

    def __init__(self, name: str = "qwen2.5", history: Any = "keep") -> None:
        self.tokenizer: Tokenizer = small_tokenizer(name)
        self.tree = SessionTree(shared_renderer(name, self.tokenizer, history))
        self.num_answers = 0

    def record(self, prompt: CallPrompt, text: str, **options: Any) -> Message:
        tokens = [*self.tokenizer.encode(text), self.tokenizer.eos_ids[0]]
        self.num_answers += 1
        name = options.pop("response_id", f"r{self.num_answers - 1}")
        return self.tree.record(prompt, tokens, [-0.5] * len(tokens), self.num_answers, "stop", name, **options)

    def call(self, messages: list[Message], text: str, tools: Any = None) -> tuple[CallPrompt, Message]:
        prompt = self.tree.place(messages, tools)
        return prompt, self.record(prompt, text)

    def shown(self, prompt: CallPrompt) -> str:
        return self.tokenizer.decode(prompt.tokens, skip_special=False)
