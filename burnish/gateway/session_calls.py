"""The calls of a session and their answers, and how they are linked.

Kinds of calls:

- `continued`: it continues an answer that no call had continued.
- `fork`: it continues an answer that another call has continued, or it begins with all messages of an earlier call but not with its answer.
- `retry`: the same messages again, which is a new sample. Answers that the agent had got for them and did not continue count as retried.
- `relinked`: it would continue an answer if its leading system messages and tools were those of then. The link is for people and rewards; tokens differ.
- `compacted`: it begins with the system messages and the tools of an earlier dialogue, and with none of its answers.
- `root`: anything else that continues nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from burnish.core.pictures import PictureSpan
from burnish.data.row import Message
from burnish.environments.dialogue import ChatRenderer, Conversation
from burnish.gateway.message_keys import calls_of, reasoning_of, text_of
from burnish.gateway.session_renderer import Tools
from burnish.gateway.token_nodes import Node

Kind = Literal["root", "continued", "fork", "retry", "relinked", "compacted"]
COUNTERS: dict[Kind, str] = {
    "root": "roots",
    "continued": "continued",
    "fork": "forks",
    "retry": "retries",
    "relinked": "relinked",
    "compacted": "compactions",
}


@dataclass(frozen=True)
class CallPrompt:
    """Where a call is in the tree."""

    tokens: tuple[int, ...]
    """What the engine reads."""
    parent: int
    """Number of the node behind which the sampled tokens go; -1 for an empty prompt."""
    kind: Kind
    """How the call is linked to those before it."""
    call: int
    """Number of the call in its session."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images among the tokens, in order."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of the agent."""

    number: int
    kind: Kind
    end: Node
    """The last node of its prompt."""
    context: tuple[int, ...] | None = None
    """The tokens of its prompt. They are dropped when a later call holds a longer prompt, and read from the nodes if needed."""
    renderer: ChatRenderer | None = None
    """None for calls without messages."""
    tools: Tools | None = None
    conversation: Conversation | None = None
    """The state of the rendering before the answer; None if it was not needed yet."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Only if `conversation` may have to be made later."""
    num_messages: int = 0
    chain: bytes = b""
    """Running hash of its messages; empty without messages."""
    headless: bytes = b""
    """The same without tools and leading system messages."""
    family: bytes = b""
    """Hash of its tools and leading system messages; empty if it has neither."""
    foreign_reasoning: tuple[tuple[int, str], ...] = ()
    """Place and reasoning of each new message of the assistant that was not sampled here."""
    extends: Answer | None = None
    """The answer that its messages continue."""
    link: Answer | None = None
    """The answer before it: `extends`, or one that is known from tokens or for people alone."""
    text: str | None = None
    """Only for calls with a text: what follows the text of `extends`."""
    answers: list[Answer] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Answer:
    """What was sampled for a call: one of n if the call asked for several."""

    number: int
    call: Call
    node: Node
    response_id: str
    finish: str
    is_cut: bool
    """The client left before the end of the stream."""
    message: Message
    """As the client got it."""
    for_template: Message
    agent: str | None = None
    """The sub-agent that called, if the client names it."""
    chain: bytes = b""
    headless: bytes = b""
    is_continued: bool = False
    is_retried: bool = False
    """The same call came again after this answer."""
    reward: float = 0.0
    text_children: list[Answer] = field(default_factory=list)


def has_reasoning_of(messages: Sequence[Mapping[str, Any]], answer: Answer) -> bool:
    """Return whether reasoning that the messages carry is that of an answer and of the path to it. Dropped reasoning agrees."""
    sent = reasoning_of(messages[answer.call.num_messages])
    if sent and sent.strip() != reasoning_of(answer.message).strip():
        return False
    return has_reasoning_up_to(messages, answer.call)


def has_reasoning_up_to(messages: Sequence[Mapping[str, Any]], call: Call) -> bool:
    while True:
        foreign = call.foreign_reasoning
        if foreign and any(reasoning_of(messages[index]) != text for index, text in foreign):
            return False
        before = call.extends
        if before is None:
            return True
        sent = reasoning_of(messages[before.call.num_messages])
        if sent and sent.strip() != reasoning_of(before.message).strip():
            return False
        call = before.call


def echoes(messages: Sequence[Mapping[str, Any]], answer: Answer) -> tuple[int, int]:
    """Return how many answers of the path the client has sent back with their response id or ids of calls, and how many to the letter."""
    with_ids, exact, current = 0, 0, answer
    while True:
        place = current.call.num_messages
        given = messages[place]
        ids = {identity for identity, _, _ in calls_of(given, place) if identity}
        own = {identity for identity, _, _ in calls_of(current.message, place)}
        with_ids += given.get("id") == current.response_id or bool(ids & own)
        exact += text_of(given.get("content"), place) == current.message["content"]
        if current.call.extends is None:
            return with_ids, exact
        current = current.call.extends
