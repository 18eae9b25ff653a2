"""What a chat template writes between an answer and the next one, found by rendering short conversations.

A transition goes from an answer, over the messages that follow it, to the opening of the next assistant turn. It appends if the template writes
the same text before the answer as the model has read, and all of the answer. Otherwise it rewrites: Qwen3 drops the reasoning of earlier turns,
Mistral moves the tools to the last user message. Both depend on shapes alone (`chat_shapes.py`), so each is found once and cached.

The wording of new messages is put into slots of the cached text. Where a template changes the wording (it strips spaces, or writes the id of a
call), a short conversation with the real new messages is rendered instead. The history is never rendered here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Message
from burnish.environments.chat_images import STAND_INS, as_blocks
from burnish.environments.chat_shapes import ANSWER, FILLER, SYSTEM_WORD, Shape, stand_in, stand_ins
from burnish.models.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]

SAID, THOUGHT, CALLED = "AnswerOfTheModel", "ThoughtOfTheModel", "ArgumentOfTheCall"
"""Words of the answer in rendered stand-ins, which are found again in the text."""
PROBE_ID, PROBE_NAME = "probe0000", "ProbeName"
THINK_END = "</think>"
PLAIN_FIELDS = {
    "tool": frozenset({"role", "content", "tool_call_id", "name"}),
    "assistant": frozenset({"role", "content", "reasoning_content"}),
}
"""Fields of messages that may be put into slots: the template writes the content, and not the others."""


class Renderings:
    """Renders messages with the template of a run, and counts the work."""

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self.tokenizer, self.variables = tokenizer, dict(variables)
        self.text_arguments = False
        """Whether the template needs the arguments of calls as JSON text (DeepSeek's does)."""
        self.num_renderings = self.num_messages = 0

    def __call__(self, messages: Sequence[Message], tools: Tools | None = None, opens: bool = True) -> str:
        """Return the text of messages. `opens`: it ends with the opening of an assistant turn."""
        self.num_renderings += 1
        self.num_messages += len(messages)
        given = [as_blocks(m) for m in messages]
        if self.text_arguments:
            given = [_with_text_arguments(m) for m in given]
        variables = {**self.variables, "tools": list(tools)} if tools else self.variables
        return self.tokenizer.chat_text(given, add_generation_prompt=opens, **variables)


def _with_text_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": {**call["function"]}} for call in message["tool_calls"]]
    for call in calls:
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls}


@dataclass(frozen=True)
class Slots:
    """The text after an answer, with slots for the contents of the new messages."""

    pieces: tuple[str, ...]
    """One more than there are slots."""
    is_json: tuple[bool, ...]
    """Whether the template writes the content as a JSON string (Llama 3.1 does with results of tools)."""
    keeps_spaces: bool

    def fill(self, messages: Sequence[Message], tokenizer: Tokenizer) -> str | None:
        """Return the text with these contents; None if the template may change one of them."""
        parts = [self.pieces[0]]
        for message, is_json, piece in zip(messages, self.is_json, self.pieces[1:], strict=True):
            content = message["content"]
            if (not self.keeps_spaces and content != content.strip()) or STAND_INS.search(content):
                return None
            literal = tokenizer.literal(content)
            parts += [json.dumps(literal, ensure_ascii=False) if is_json else literal, piece]
        return "".join(parts)


@dataclass
class Transition:
    """What the template does with an answer of one shape when messages of given shapes follow it."""

    appends: bool
    has_end_token: bool
    """Whether the template ends an answer with a control token."""
    render: Renderings
    history: tuple[Message, ...]
    answer: Message | None
    """The stand-in for the answer; None if the template does not write answers, so that nothing can be put behind one."""
    num_calls: int = 0
    """Calls in the stand-in. The text after it then begins at the first control token behind the last call."""
    tools: Tools | None = None
    """What to render the stand-ins with; None if the text behind the answer does not depend on the tools."""
    new: tuple[Shape, ...] = ()

    @functools.cached_property
    def slots(self) -> Slots | None:
        """The text behind the answer with slots; None if the template writes more of the messages than their contents."""
        if any(shape.role == "assistant" for shape in self.new):
            return None
        return find_slots(self.rendered_after, self.new, self.render.tokenizer)

    def text_after(self, messages: Sequence[Message], system: str | None = None) -> str:
        """Return what the template writes behind the answer, from the end of its turn to the opening of the next one.

        `system` is the system message of the conversation, with control tokens marked.
        """
        text = self._text_after(messages)
        return text if system is None else text.replace(SYSTEM_WORD, system)

    def _text_after(self, messages: Sequence[Message]) -> str:
        if self.slots is not None and all(_has_plain_fields(message) for message in messages):
            filled = self.slots.fill(messages, self.render.tokenizer)
            if filled is not None:
                return filled
        return self.rendered_after(messages)

    def rendered_after(self, messages: Sequence[Message], tools: Tools | None = None) -> str:
        """Return the same by rendering a short conversation."""
        if self.answer is None:
            raise UserError(
                "the chat template does not write the answers of earlier turns, so nothing can be appended behind the sampled tokens; set "
                "environment.history=as_template, or give the model's directory a chat template that writes them"
            )
        rendered = self.render([*self.history, self.answer, *messages], self.tools if tools is None else tools)
        found = text_behind(rendered, self.num_calls, self.render.tokenizer)
        if found is None:
            raise UserError("the chat template writes another text than before for messages of the same kind")
        return found


def _has_plain_fields(message: Message) -> bool:
    return len(message) == 2 or message.keys() <= PLAIN_FIELDS.get(message["role"], frozenset())


def text_behind(rendered: str, num_calls: int, tokenizer: Tokenizer) -> str | None:
    """Return the text behind the stand-in of an answer; None if the answer is not in it."""
    at, word = 0, CALLED if num_calls else SAID
    for _ in range(num_calls or 1):
        found = rendered.find(word, at)
        if found < 0:
            return None
        at = found + len(word)
    tail = rendered[at:]
    if not num_calls:
        return tail
    control = tokenizer.find_control(tail)
    return None if control is None else tail[control:]


@dataclass
class TransitionTable:
    """All transitions of one template and one list of tools, made when they are first asked for."""

    render: Renderings
    tools: Tools | None = None
    _made: dict[tuple[tuple[Shape, ...], Shape, tuple[Shape, ...]], Transition] = field(default_factory=dict)
    _beginnings: dict[tuple[Shape, ...], tuple[str, str]] = field(default_factory=dict)
    _continuations: dict[tuple[tuple[Shape, ...], tuple[Shape, ...]], Slots | None] = field(default_factory=dict)

    def find(self, history: tuple[Shape, ...], answer: Shape, new: tuple[Shape, ...]) -> Transition:
        """Return the transition. Raises `UserError` if the template refuses such a conversation."""
        key = (history, answer, new)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(history, answer, new)
        return made

    def continued(
        self,
        shapes: tuple[Shape, ...],
        messages: Sequence[Message],
        new: tuple[Shape, ...],
        system: str | None = None,
    ) -> tuple[str, str] | None:
        """Return what the template writes for messages behind a conversation of these shapes, and the opening of the next turn.

        None if it would change the conversation before them, or if the text must be tokenised together with what stands before it.
        """
        found = self._beginnings.get(shapes)
        if found is None:
            closed, opened = (self.render(stand_ins(shapes), self.tools, opens=opens) for opens in (False, True))
            opening = opened[len(closed) :] if opened.startswith(closed) else opened
            found = self._beginnings[shapes] = (closed, opening)
        beginning, opening = found

        def rendered(messages: Sequence[Message]) -> str:
            whole = self.render([*stand_ins(shapes), *messages], self.tools)
            if not whole.startswith(beginning) or not whole.endswith(opening):
                return FILLER
            return whole[len(beginning) : len(whole) - len(opening)]

        if (shapes, new) not in self._continuations:
            self._continuations[shapes, new] = find_slots(rendered, new, self.render.tokenizer)
        slots = self._continuations[shapes, new]
        is_plain = slots is not None and all(_has_plain_fields(message) for message in messages)
        added = slots.fill(messages, self.render.tokenizer) if slots is not None and is_plain else None
        if added is None:
            added = rendered(messages)
        if FILLER in added:
            return None
        added = added if system is None else added.replace(SYSTEM_WORD, system)
        if not added or not self._may_split(beginning, added) or not self._may_split(added, opening):
            return None
        return added, opening

    def _may_split(self, left: str, right: str) -> bool:
        """Return whether two texts have the same tokens apart as together, because a control token stands between them."""
        tokenizer = self.render.tokenizer
        return not right or tokenizer.find_control(right) == 0 or tokenizer.ends_with_control(left)

    def _make(self, history: tuple[Shape, ...], answer: Shape, new: tuple[Shape, ...]) -> Transition:
        render, tools = self.render, self.tools
        messages = stand_ins(history)
        said = stand_in(answer, SAID, THOUGHT, CALLED)
        following = [stand_in(shape, f"New{index}") for index, shape in enumerate(new)]
        before, after = render(messages, tools), render([*messages, said, *following], tools)
        appends = _appends(before, after, answer, render.tokenizer)
        stand, num_calls = self._stand_in_for(messages, said, answer, following, after)
        behind = max(after.rfind(SAID), after.rfind(CALLED), len(before) if appends else 0)
        if behind and FILLER in after[behind:]:
            appends, stand = False, None  # it repeats the text of earlier messages there, which stand-ins do not have
        has_end_token = self._ends(messages, stand, num_calls)
        made = Transition(appends, has_end_token, render, tuple(messages), stand, num_calls, tools, new)
        if tools and stand is not None and self._is_same_without_tools(made, following):
            made.tools = None
        return made

    def _stand_in_for(
        self, messages: list[Message], said: Message, answer: Shape, following: list[Message], after: str
    ) -> tuple[Message | None, int]:
        """Return the answer to render when the text behind it is wanted, and its number of calls.

        An answer without calls is simplest. It serves for one with calls if the same text stands behind both.
        """
        tokenizer = self.render.tokenizer
        plain = said if not answer.num_calls and not answer.is_empty else stand_in(ANSWER, SAID)
        try:
            rendered = after if plain is said else self.render([*messages, plain, *following], self.tools)
            tail = text_behind(rendered, 0, tokenizer)
        except UserError:  # results of tools without a call may be refused
            tail = None
        if not answer.num_calls or (tail is not None and after.endswith(tail)):
            return (None if tail is None else plain), 0
        if text_behind(after, answer.num_calls, tokenizer) is not None:
            return said, answer.num_calls
        return (None if tail is None else plain), 0

    def _ends(self, messages: list[Message], stand: Message | None, num_calls: int) -> bool:
        tokenizer = self.render.tokenizer
        if stand is None:
            return False
        try:
            tail = text_behind(self.render([*messages, stand], self.tools, opens=False), num_calls, tokenizer)
        except UserError:  # a template may demand that a user speaks last
            return False
        return bool(tail and tail.strip()) and tokenizer.find_control(str(tail).lstrip()) == 0

    def _is_same_without_tools(self, made: Transition, following: list[Message]) -> bool:
        try:
            return made.rendered_after(following) == made.rendered_after(following, tools=())
        except UserError:
            return False


def _appends(before: str, after: str, answer: Shape, tokenizer: Tokenizer) -> bool:
    """Return whether a text continues what the model has read, and contains all of its answer."""
    if not after.startswith(before):
        return False
    written = after[len(before) :]
    words = [] if answer.is_empty else [SAID]
    words += [THOUGHT] if answer.reasoning == "some" or (answer.inside and not answer.is_empty) else []
    words += [CALLED] if answer.num_calls else []
    if any(word not in written for word in words) or (answer.num_calls > 1 and written.count(CALLED) < 2):
        return False
    ahead = written.partition(SAID)[0] if SAID in words else written
    if answer.reasoning == "empty":
        return THINK_END in ahead
    if answer.reasoning or answer.inside or answer.num_calls or answer.is_empty or not ahead.strip():
        return True
    # An answer without reasoning must not get a block of reasoning in front. Models write control tokens there (gpt-oss names a channel).
    return tokenizer.find_control(ahead.lstrip()) == 0


def find_slots(
    rendered: Callable[[Sequence[Message]], str], shapes: tuple[Shape, ...], tokenizer: Tokenizer
) -> Slots | None:
    """Return the slots for the contents of messages in a text; None if the template writes more of the messages than their contents.

    `rendered` returns the text for given messages.
    """
    if any(shape != Shape(shape.role, reasoning=shape.reasoning) for shape in shapes):
        return None

    def messages(form: str) -> list[Message]:
        found = [stand_in(shape, form % index, THOUGHT) for index, shape in enumerate(shapes)]
        ids = {"tool_call_id": PROBE_ID, "name": PROBE_NAME}
        return [message | ids if message["role"] == "tool" else message for message in found]

    try:
        probes = messages('New%d\u00e9"\\\n.')
        text = rendered(probes)
        if any(word in text for word in (PROBE_ID, PROBE_NAME, THOUGHT)):
            return None
        pieces, kinds = [], []
        for message in probes:
            content = message["content"]
            quoted = json.dumps(content, ensure_ascii=False)
            written = content if content in text else quoted
            piece, found, text = text.partition(written)
            if not found:
                return None
            pieces.append(piece)
            kinds.append(written is quoted)
        slots = Slots((*pieces, text), tuple(kinds), keeps_spaces=True)
        spaced = messages(" \n New%d\n ")
        if slots.fill(spaced, tokenizer) != rendered(spaced):
            slots = Slots(slots.pieces, slots.is_json, keeps_spaces=False)
        other = messages("Other <%d> text, of two\n\nlines")
        is_exact = slots.fill(other, tokenizer) == rendered(other)
    except UserError:
        return None
    return slots if is_exact else None
