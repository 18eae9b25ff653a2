"""Random sessions of an agent, and a simple model of what the token tree must do with them.

The agent goes on from any earlier conversation, repeats calls, edits answers, changes the system message, compacts its context, drops reasoning,
renames ids, reorders results and makes calls in parallel. The engine draws the answers. The model is a table from conversations to the exact
tokens behind which they went on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.core.trajectory import Trajectory
from burnish.data.row import Message
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.tools.call_formats import ParsedCall, call_format
from burnish.gateway.session_calls import CallPrompt
from burnish.gateway.session_renderer import SessionRenderer
from burnish.gateway.token_tree import SessionTree
from burnish.models.tokenizer import Tokenizer
from tests.environments.test_dialogue import TOOLS, completion

FORMATS = {"llama3.1": "llama3", "mistral": "mistral", "gemma": "gemma3"}
TEXTS = ["two", "a the in", "No, 17 is too low.", "é ü", "x < 3\n\ny", 'say "no"', "yes <b>"]
APPENDING = ("qwen2.5", "llama3", "gemma")
"""Templates that never rewrite what they have written."""
Words = tuple[str, ...]
Choose = Callable[[int], int]
"""Returns a number below the given one."""


def session_renderer(name: str, tokenizer: Tokenizer, history: Any = "keep") -> SessionRenderer:
    return SessionRenderer(tokenizer, history=history, call_format=call_format(FORMATS.get(name, "hermes")))


@dataclass
class Drawn:
    """What the engine drew for one call."""

    prompt: CallPrompt
    tokens: list[int]
    logp: list[float]
    version: list[int]
    response_id: str


@dataclass
class Conversation:
    """Messages with their full text, as the agent knows them."""

    messages: list[Message]
    tools: list[Any] | None


@dataclass
class RandomSession:
    """An agent with its engine. `is_canonical`: answers are tokenised as the tokenizer does it."""

    name: str
    renderer: SessionRenderer
    choose: Choose
    is_canonical: bool
    oracle: ChatRenderer
    tree: SessionTree = field(init=False)
    drawn: list[Drawn] = field(default_factory=list)
    conversations: list[Conversation] = field(default_factory=list)
    waiting: list[tuple[CallPrompt, Conversation, list[Message]]] = field(default_factory=list)
    known: dict[Words, list[tuple[tuple[int, ...], list[Message]]]] = field(default_factory=dict)
    """For each conversation that ends with an answer: the tokens up to there, and the messages as the template reads them."""
    num_ids: int = 0

    def __post_init__(self) -> None:
        self.tree = SessionTree(self.renderer)
        self.drops_reasoning = bool(self.choose(2))

    # --- the agent -------------------------------------------------------------------------------------------------------

    def call(self) -> None:
        """Make one call, and let the engine answer some of the waiting ones."""
        conversation = self._next()
        sent = [self._as_sent(message) for message in conversation.messages]
        prompt = self.tree.place(self._renamed(sent), conversation.tools)
        self.waiting.append((prompt, conversation, self._check_prompt(prompt, conversation)))
        while self.waiting and self.choose(4):
            self._answer(*self.waiting.pop(self.choose(len(self.waiting))))

    def finish(self) -> None:
        while self.waiting:
            self._answer(*self.waiting.pop())

    def _next(self) -> Conversation:
        action = self.choose(10) if self.conversations else 9
        if action == 9:
            system = [{"role": "system", "content": self._text()}] * self.choose(2)
            return Conversation([*system, self._user()], TOOLS if self._has_tools and self.choose(2) else None)
        if action < 6:
            found = self.conversations[-1 - self.choose(min(3, len(self.conversations)))]
        else:
            found = self.conversations[self.choose(len(self.conversations))]
        messages = list(found.messages)
        if action == 6 and messages[-1]["role"] == "assistant":  # edit an answer
            messages[-1] = {"role": "assistant", "content": f"{self._text()} edited"}
        elif action == 7 and messages[0]["role"] == "system":  # compact, or change the system message
            messages[0] = {"role": "system", "content": self._text()} if self.choose(2) else messages[0]
            messages = (
                messages if self.choose(2) else [messages[0], {"role": "user", "content": f"so far: {self._text()}"}]
            )
        if messages[-1]["role"] != "assistant":
            return Conversation(messages, found.tools)  # the same call again, or a compacted one
        calls = messages[-1].get("tool_calls", [])
        results: list[Message] = [
            {"role": "tool", "tool_call_id": call["id"], "content": self._text()} for call in calls
        ]
        results = results[::-1] if self.choose(2) else results
        return Conversation([*messages, *(results or [self._user()])], found.tools)

    def _as_sent(self, message: Message) -> dict[str, Any]:
        """A message in one of the forms in which clients send it."""
        sent: dict[str, Any] = {**message, "refusal": None} if self.choose(2) else dict(message)
        if self.choose(3) == 0:
            sent["content"] = [{"type": "text", "text": sent["content"]}] if sent["content"] else None
        if self.drops_reasoning:
            sent.pop("reasoning_content", None)
        if sent.get("tool_calls"):
            indent = self.choose(2) or None
            calls = [(call["id"], call["function"]) for call in sent["tool_calls"]]
            sent["tool_calls"] = [
                {
                    "id": identity,
                    "type": "function",
                    "function": {**f, "arguments": json.dumps(json.loads(f["arguments"]), indent=indent)},
                }
                for identity, f in calls
            ]
        return sent

    def _renamed(self, sent: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same messages with other ids of calls, as some frameworks make their own."""
        if self.name == "mistral" or self.choose(3):
            return sent
        renamed = json.loads(json.dumps(sent))
        for message in renamed:
            for call in message.get("tool_calls") or ():
                call["id"] += "-mine"
            if "tool_call_id" in message:
                message["tool_call_id"] += "-mine"
        return list(renamed)

    @property
    def _has_tools(self) -> bool:
        return self.name in ("qwen2.5", "qwen3", "mistral")

    def _text(self) -> str:
        return TEXTS[self.choose(len(TEXTS))]

    def _user(self) -> Message:
        return {"role": "user", "content": self._text()}

    # --- the engine ------------------------------------------------------------------------------------------------------

    def _answer(self, prompt: CallPrompt, conversation: Conversation, read: list[Message]) -> None:
        for _ in range(2 if self.choose(8) == 0 else 1):  # n = 2
            tokens = self._sample(conversation)
            number = len(self.drawn)
            drawn = Drawn(prompt, tokens, [-(number + 1) - k / 64 for k in range(len(tokens))], [], f"r{number}")
            drawn.version = [number + k % 2 for k in range(len(tokens))]
            message = self.tree.record(
                prompt, tokens, drawn.logp, drawn.version, "stop", drawn.response_id, is_cut=self.choose(16) == 0
            )
            self.drawn.append(drawn)
            messages = [*conversation.messages, message]
            self.conversations.append(Conversation(messages, conversation.tools))
            paths = self.known.setdefault(_words(messages, conversation.tools), [])
            paths.append(((*prompt.tokens, *tokens), [*read, _parsed(message)]))

    def _sample(self, conversation: Conversation) -> list[int]:
        tokenizer = self.renderer.tokenizer
        if not self.is_canonical and self.choose(2):
            return [self.choose(tokenizer.vocab_size) for _ in range(self.choose(5))]
        answer: Message = {"role": "assistant", "content": self._text()}
        if self.name == "qwen3" and self.choose(2):
            answer["reasoning_content"] = self._text()
        if not conversation.tools or self.choose(2):
            return completion(self.name, tokenizer, answer)
        answer["content"] = ""
        calls = [ParsedCall("add", {"a": self.choose(9), "b": 2.5}) for _ in range(1 + self.choose(2))]
        if self.name == "mistral":
            self.num_ids += 1
            function = {"name": calls[0].name, "arguments": calls[0].arguments}
            answer["tool_calls"] = [{"id": f"m{self.num_ids:08d}", "type": "function", "function": function}]
            return completion(self.name, tokenizer, answer)
        start = completion(self.name, tokenizer, answer)[:-1]
        return [*start, *tokenizer.encode(call_format("hermes").write(calls)), tokenizer.eos_ids[0]]

    # --- the model -------------------------------------------------------------------------------------------------------

    def _check_prompt(self, prompt: CallPrompt, conversation: Conversation) -> list[Message]:
        """The prompt goes on behind the exact tokens of the longest known beginning, or is what the template writes.

        Returns the messages as the template reads them: with the reasoning of answers that were sampled here.
        """
        assert prompt.tokens == self.tree.tree.tokens_to(self.tree.tree.nodes[prompt.parent])
        messages, tools = conversation.messages, conversation.tools
        new = [_parsed(message) for message in messages]
        if self.drops_reasoning:
            new = [{name: value for name, value in m.items() if name != "reasoning_content"} for m in new]
        words = _words(messages, tools)
        sizes = range(len(messages) - 1, 0, -1)
        paths = next((p for size in sizes if (p := self.known.get(words[: size + 1]))), [((), [])])
        if self.renderer.history == "keep":
            paths = [(path, read) for path, read in paths if prompt.tokens[: len(path)] == path]
            assert paths, "it does not continue the tokens of the answer before it"
            assert not paths[0][0] or prompt.kind in ("continued", "fork", "retry")
        candidates = [[*read, *new[len(read) :]] for _, read in paths]
        if self.is_canonical and (self.renderer.history == "as_template" or self.name in APPENDING):
            decode = self.renderer.tokenizer.decode
            candidates = [c for c in candidates if self.oracle.open(c, tools).tokens == prompt.tokens]
            assert candidates, f"the template writes something else than {decode(prompt.tokens, skip_special=False)}"
        return candidates[-1]

    def check(self) -> None:
        """Everything that was drawn is in the tree and in the export once, as it was drawn."""
        self.finish()
        by_id = {answer.response_id: answer for answer in self.tree.answers}
        assert len(by_id) == len(self.drawn) == len(self.tree.answers)
        for drawn in self.drawn:
            node = by_id[drawn.response_id].node
            assert node.parent is not None
            assert node.parent.number == drawn.prompt.parent
            assert node.tokens.tolist() == drawn.tokens
            assert self.tree.tree.tokens_to(node) == (*drawn.prompt.tokens, *drawn.tokens)
        self._check_export()

    def _check_export(self) -> None:
        export = self.tree.export()
        sampled = [drawn for drawn in self.drawn if drawn.tokens]
        assert export.response_ids == [drawn.response_id for drawn in sampled]
        found = Trajectory("p", 0, 0, export.nodes, "stop", "", turns=export.turns)
        assert sum(s.num_actions for s in found.sequences) == sum(len(drawn.tokens) for drawn in sampled)
        assert found.num_actions == sum(len(drawn.tokens) for drawn in sampled)
        for drawn, place, link in zip(sampled, found.turn_places, export.links, strict=True):
            sequence = found.sequences[place.sequence]
            span = slice(place.start, place.start + len(drawn.tokens))
            assert (*sequence.tokens[: span.stop].tolist(),) == (*drawn.prompt.tokens, *drawn.tokens)
            assert sequence.action_mask[span].all()
            np.testing.assert_array_equal(sequence.behaviour_logp[span], np.array(drawn.logp, dtype=np.float32))
            assert sequence.version[span].tolist() == drawn.version
            assert link < export.response_ids.index(drawn.response_id)
        trained = sum(node.is_trained for node in export.nodes if node.is_sampled)
        assert trained + sum(export.not_trained.values()) == len(sampled)
        assert self.tree.metrics["branches"] == len([p for p in found.paths if export.turns])
        kinds = ("roots", "continued", "forks", "retries", "relinked", "compactions")
        assert sum(self.tree.metrics[kind] for kind in kinds) == self.tree.metrics["calls"] == len(self.tree.calls)


def _words(messages: list[Message], tools: list[Any] | None) -> Words:
    """A conversation without what clients change: ids and reasoning. The words of its beginning are the beginning of its words."""
    said: list[str] = [str(bool(tools))]
    ids: list[str] = []
    for message in messages:
        calls = message.get("tool_calls", [])
        ids = [call["id"] for call in calls] if message["role"] == "assistant" else ids
        place = ids.index(message["tool_call_id"]) if message.get("tool_call_id") in ids else None
        functions = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
        said.append(f"{message['role']} {place} {message['content']!r} {functions}")
    return tuple(said)


def _parsed(message: Message) -> Message:
    """A message with the arguments of its calls as values."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**c, "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}
