"""Token-exact dialogues: messages become tokens, and sampled tokens are never tokenised again on their path.

`ChatRenderer.open` gives the prompt of a conversation. `Conversation.extend` takes the tokens of an answer and the messages that follow it. If the
template only appends, it returns the tokens to append: the end of the assistant's turn, the messages, and the opening of the next turn. If the
template would rewrite what was read (Qwen3 drops the reasoning of earlier turns), it depends on `history`:

- `as_template`: the whole conversation is rendered again, as inference engines will do later. The result is a branch with a root of its own.
- `keep`: what the template writes between two turns is appended behind the sampled tokens. The model keeps reading all of its reasoning.

The template is rendered for a short conversation of the same shape, once for each shape (`chat_transitions.py`). An appending turn costs the
tokenisation of the new text and some microseconds, whatever the length of the history.

Messages may have images (`chat_images.py`). In a branch they are where they were, with the same pixels.

An answer that was cut off gets the end of turn that the template writes. If another end token was sampled than the template's (`<|endoftext|>`
instead of `<|im_end|>`), it stays and none is added: the sampled token is an action, and a turn does not end twice.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.core.pictures import PictureSpan
from burnish.data.row import Message, Row
from burnish.data.template import as_messages, render, template_kind, with_system
from burnish.environments.base import Body
from burnish.environments.chat_images import STAND_INS, expansion_of, flattened, literal_text, place_images
from burnish.environments.chat_shapes import ANSWER, SYSTEM, TOOL, USER, Shape, Shaper, compressed, stand_in
from burnish.environments.chat_traits import Parse, answer_message, as_user, find_traits
from burnish.environments.chat_transitions import THINK_END, Renderings, Tools, Transition, TransitionTable
from burnish.environments.observed_tokens import mark_bodies, observed_tokens, text_bodies
from burnish.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from burnish.data.images import Media
    from burnish.models.vision.interfaces import Expansion

History = Literal["as_template", "keep"]
MAX_CACHED_PROMPTS = 1024
MAX_CACHED_PIXELS = 256 << 20
"""Bytes of pixels of cached prompts."""
MAX_OVERLAP = 8
"""Tokens at the end of an answer that may also stand at the start of what the template writes behind it."""
UNREAD: Message = {"role": "assistant", "content": ""}
"""Stands for an answer that was not decoded."""
PROBE_TOOLS: Tools = (
    {
        "type": "function",
        "function": {"name": "probe", "description": "probe", "parameters": {"type": "object", "properties": {}}},
    },
)


@dataclass(frozen=True)
class Extension:
    """What follows an answer: tokens to append, or for a branch the whole new context from its root."""

    tokens: tuple[int, ...]
    is_branch: bool = False
    observed: np.ndarray | None = field(default=None, compare=False)
    """[n] which tokens are bodies of messages, by the number of the role, if the renderer marks them. In a branch only those of the new messages."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images among the tokens, in order."""


@dataclass(frozen=True)
class TemplateCheck:
    """What the template of a run does with dialogues, in words for a note at the start of the run."""

    description: str
    rewrites: tuple[str, ...]
    """Which turns rewrite what the model has read."""
    notes: tuple[str, ...]
    """How messages are changed to fit the template."""


class ChatRenderer:
    """Renders all conversations of a run, and caches what the template writes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template | None = None,
        history: History = "as_template",
        parse: Parse | None = None,
        marks_bodies: bool = False,
    ) -> None:
        """`marks_bodies`: extensions say which tokens are the bodies of messages."""
        self.tokenizer, self.template, self.history, self.parse = tokenizer, template or Template(), history, parse
        self.marks_bodies = marks_bodies
        self.is_chat = template_kind(tokenizer, self.template) == "chat"
        self.num_turns = self.num_rewrites = 0
        """Turns of all conversations, and how many of them the template would rewrite."""
        self._ends = frozenset(tokenizer.eos_ids)
        self._prompts: dict[str, OpenedPrompt] = {}
        self._num_prompt_bytes = 0
        """Pixels of the cached prompts."""
        self._tables: dict[str, TransitionTable] = {}
        self._openings: dict[str, list[int]] = {}
        self._grown: dict[tuple[tuple[Shape, ...], Shape, tuple[Shape, ...]], tuple[Shape, ...]] = {}
        if self.is_chat:
            self.render = Renderings(tokenizer, self.template.kwargs)
            self.traits = find_traits(self.render)
            self.shaper = Shaper(tokenizer.chat_template_searches())

    # --- Opening a conversation ------------------------------------------------------------------------------------------

    def open(self, messages: Sequence[Message] | str, tools: Sequence[dict[str, Any]] | None = None) -> Conversation:
        """Begin a conversation with the messages up to the model's first turn. Equal prompts share one tuple of tokens."""
        flat, media = ([], []) if isinstance(messages, str) else flattened(messages)
        given = messages if isinstance(messages, str) else flat
        key = json.dumps([given, tools, [item.digest for item in media]], ensure_ascii=False, default=repr)
        cached = self._prompts.get(key)
        if cached is None:
            cached = self._opened(given, media, messages, tools)
            self._num_prompt_bytes += cached.num_bytes
            while self._prompts and (
                len(self._prompts) >= MAX_CACHED_PROMPTS or self._num_prompt_bytes > MAX_CACHED_PIXELS
            ):
                self._num_prompt_bytes -= self._prompts.pop(next(iter(self._prompts))).num_bytes
            self._prompts[key] = cached
        return Conversation(self, cached, tools or None)

    def _opened(
        self,
        flat: str | list[Message],
        media: Sequence[Media],
        messages: Sequence[Message] | str,
        tools: Tools | None,
    ) -> OpenedPrompt:
        if not self.is_chat:
            prompt = messages if isinstance(messages, str) else list(messages)
            rendered = render(Row("", prompt, "", None), self.tokenizer, self.template)
            return OpenedPrompt(tuple(rendered.tokens), rendered.pictures, [], (), ())
        expansions = tuple([expansion_of(item, self.tokenizer) for item in media])
        history = self.traits.fitted(with_system(as_messages(flat, "user"), self.template))
        tokens = tuple(self.tokenizer.encode(self.render(history, tools)))
        placed = place_images(tokens, expansions, self.tokenizer)
        shapes = compressed([self.shaper.shape(message) for message in history])
        return OpenedPrompt(placed.tokens, placed.pictures, history, shapes, expansions)

    # --- What the template does ------------------------------------------------------------------------------------------

    def transition(
        self, history: tuple[Shape, ...], answer: Shape, new: tuple[Shape, ...], tools: Tools | None = None
    ) -> Transition:
        """Return what the template writes between an answer and the next one."""
        return self._table(tools).find(history, answer, new)

    def _table(self, tools: Tools | None) -> TransitionTable:
        key = json.dumps(tools) if tools else ""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = TransitionTable(self.render, tools)
        return table

    def grown(self, history: tuple[Shape, ...], answer: Shape, new: tuple[Shape, ...]) -> tuple[Shape, ...]:
        """Return the shape of a conversation after an answer and new messages."""
        key = (history, answer, new)
        found = self._grown.get(key)
        if found is None:
            found = self._grown[key] = compressed([*history, answer, *new])
        return found

    @functools.cached_property
    def ignores_answers(self) -> bool:
        """Whether every turn appends the same text whatever the answer contains, so that answers need not be decoded."""
        if self.traits.alternates and self.traits.has_tool_role:
            return False  # whether a result of a tool is accepted depends on the calls before it
        for history in ((USER,), (USER, ANSWER, USER)):
            for tools in (None, PROBE_TOOLS):
                for new in self._probed_roles():
                    message = stand_in(new)
                    try:
                        found = [self.transition(history, answer, (new,), tools) for answer in self._probed_answers()]
                        texts = {one.rendered_after([message]) for one in found if one.appends}
                    except UserError:
                        return False
                    # Ids of calls must not matter either, because those of an answer that is not decoded are unknown.
                    if len(texts) > 1 or not all(one.appends for one in found) or found[0].slots is None:
                        return False
        return True

    def _probed_roles(self) -> list[Shape]:
        return [USER, TOOL] if self.traits.has_tool_role else [USER]

    def _probed_answers(self) -> list[Shape]:
        answers = [ANSWER, Shape("assistant", is_empty=True)]
        answers += [Shape("assistant", inside=(text,)) for text in self.tokenizer.chat_template_searches()]
        if self.traits.takes_reasoning:
            answers += [Shape("assistant", reasoning=kind) for kind in ("some", "empty")]
        if self.traits.takes_calls:
            answers += [Shape("assistant", num_calls=1), Shape("assistant", is_empty=True, num_calls=1)]
        if self.traits.takes_calls and self.traits.takes_reasoning:
            answers.append(Shape("assistant", reasoning="some", num_calls=1))
        return answers

    def check(self) -> TemplateCheck:
        """Say which turns the template rewrites, and how messages are changed for it."""
        if not self.is_chat:
            return TemplateCheck("plain text: messages are appended as they are", (), ())
        turns = self._probed_turns()
        rewrites = [words for words, found in turns if found is not None and not found.appends]
        if any(words in rewrites for words in ("a user message", "a user message behind reasoning")):
            rewrites = [words for words in rewrites if " where " not in words]
        refused = [words for words, found in turns if found is None]
        does = "only appends" if not rewrites else f"rewrites earlier text after {'; '.join(rewrites)}"
        follows = {
            "as_template": "each such turn is a branch: the conversation as the template renders it anew",
            "keep": "such turns are appended behind the sampled tokens all the same",
        }[self.history]
        notes = self.traits.notes() + [f"it refuses {words}" for words in refused]
        return TemplateCheck(
            f"the chat template {does}" + (f"; {follows}" if rewrites else ""), tuple(rewrites), tuple(notes)
        )

    def _probed_turns(self) -> list[tuple[str, Transition | None]]:
        """The usual turns in words, each with its transition; None where the template refuses it."""
        thinks = Shape("assistant", reasoning="some")
        if not self.traits.takes_reasoning:
            inside = tuple(text for text in self.tokenizer.chat_template_searches() if text == THINK_END)
            thinks = Shape("assistant", inside=inside)
        calls = Shape("assistant", is_empty=True, num_calls=1)
        turns: list[tuple[str, tuple[Shape, ...], Shape, tuple[Shape, ...], Tools | None]] = []
        # Where the template itself opens the reasoning, an answer without it is only one that was cut off.
        usual = thinks if self.render([{"role": "user", "content": "?"}]).rstrip().endswith("<think>") else ANSWER
        if usual == ANSWER:
            turns.append(("a user message", (USER,), ANSWER, (USER,), None))
        if thinks != ANSWER:
            turns.append(("a user message behind reasoning", (USER,), thinks, (USER,), None))
        if self.traits.has_system:
            turns.append(("a user message where a system message is", (SYSTEM, USER), usual, (USER,), None))
        turns.append(("a user message where tools are", (USER,), usual, (USER,), PROBE_TOOLS))
        if self.traits.has_tool_role and self.traits.takes_calls:
            turns.append(("a result of a tool", (USER,), calls, (TOOL,), PROBE_TOOLS))
            if self.traits.takes_reasoning:
                both = Shape("assistant", is_empty=True, reasoning="some", num_calls=1)
                turns.append(("a result of a tool behind reasoning", (USER,), both, (TOOL,), PROBE_TOOLS))
                turns.append(
                    ("a user message after results of tools", (USER, both, TOOL), thinks, (USER,), PROBE_TOOLS)
                )
        found: list[tuple[str, Transition | None]] = []
        for words, history, answer, new, tools in turns:
            try:
                found.append((words, self.transition(history, answer, new, tools)))
            except UserError:
                found.append((words, None))
        return found

    # --- Tokens ----------------------------------------------------------------------------------------------------------

    def tokens_after(self, completion: Sequence[int], text: str, has_end_token: bool) -> tuple[int, ...]:
        """Return the tokens of a text behind an answer, without what the answer already ends with."""
        has_ended = bool(completion) and completion[-1] in self._ends
        if has_ended:
            text = text.lstrip() if self.tokenizer.find_control(text.lstrip()) == 0 else text
        tokens = self.tokenizer.encode(text)
        if not completion or not tokens or not self.tokenizer.is_control(tokens[0]):
            return tuple(tokens)
        for num in range(min(MAX_OVERLAP, len(completion), len(tokens)), 0, -1):
            if list(completion[-num:]) == tokens[:num]:
                return tuple(tokens[num:])
        return tuple(tokens[1:] if has_ended and has_end_token else tokens)

    def opening_tokens(self, text: str) -> list[int]:
        """Return the tokens of the text that opens an assistant turn. There are few such texts."""
        found = self._openings.get(text)
        if found is None:
            found = self._openings[text] = self.tokenizer.encode(text)
        return found

    def answer(self, tokens: Sequence[int], num_calls: int) -> Message:
        """Return the message of an answer, decoded and split into content, reasoning and calls."""
        own = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
        clean = self.tokenizer.decode(own)
        text = self.tokenizer.decode(own, skip_special=False) if self.parse is not None else clean
        return answer_message(text, clean, self.parse, self.traits, num_calls)

    def plain_answer(self, tokens: Sequence[int]) -> Message:
        """Return the message of an answer with all of its text as content."""
        return {"role": "assistant", "content": self.tokenizer.decode(tokens)}


@dataclass(frozen=True)
class OpenedPrompt:
    """The first prompt of a conversation."""

    tokens: tuple[int, ...]
    pictures: tuple[PictureSpan, ...]
    messages: list[Message]
    """With texts as contents (`chat_images.py`); none without a chat template."""
    shapes: tuple[Shape, ...]
    expansions: tuple[Expansion, ...]

    @property
    def num_bytes(self) -> int:
        return sum(span.picture.pixels.nbytes for span in self.pictures)


class Conversation:
    """One conversation of an episode."""

    def __init__(self, renderer: ChatRenderer, opened: OpenedPrompt, tools: Tools | None) -> None:
        messages, shapes = opened.messages, opened.shapes
        self.tokens = opened.tokens
        """The tokens of the opening prompt."""
        self.pictures = opened.pictures
        """Its images."""
        self.num_rewrites = 0
        """Turns at which the template would rewrite what was read: branches, or where `keep` differs from the template."""
        self._renderer, self._shapes, self._tools = renderer, shapes, tools
        self._table = renderer._table(tools) if renderer.is_chat else None
        self._messages: list[Message] = list(messages)
        self._num_messages = len(messages)
        """How many of `_messages` are its own. A fork shares the list, and whichever grows second copies its own part."""
        first = messages[0] if messages else {}
        self._system = renderer.tokenizer.literal(first["content"]) if first.get("role") == "system" else None
        if self._system is not None and STAND_INS.search(self._system):
            raise UserError("the system message of a dialogue has an image; put the image into the first user message")
        self._expansions = opened.expansions
        """Those of all images so far, for branches, which render all messages again."""
        self._answers: dict[int, tuple[int, ...]] = {}
        """The tokens of the answers, by their places in `_messages`. Answers are decoded only where the template depends on their text."""
        self._root: Root | None = Root((), shapes, len(messages))
        """None once the template has changed the text of a root: then all of the conversation is rendered for each branch."""
        self._unfinished: tuple[int, ...] = ()
        """Tokens of the assistant's turn before the next completion, where `append_text` continued it."""
        self._num_calls = 0

    def fork(self) -> Conversation:
        """Return a conversation with the same past that grows on its own. It costs nothing until both have grown."""
        other = copy.copy(self)
        if self._root is not None:  # one of the two keeps the tokens; the other renders them again if it must
            self._root = Root((), self._root.shapes, self._root.num_messages)
        return other

    def extend(
        self,
        completion: Sequence[int],
        messages: Sequence[Message],
        answer: Message | None = None,
        bodies: Sequence[Body] | None = None,
    ) -> Extension:
        """Return what follows an answer: these messages and the opening of the assistant's next turn.

        The completion holds its end token if one was sampled. `answer` is its message, if the caller has parsed it. `bodies` says what
        is no markup in the messages; by default all of each content is a body.
        """
        renderer, tokenizer = self._renderer, self._renderer.tokenizer
        renderer.num_turns += 1
        messages, media = flattened(messages)
        expansions = tuple([expansion_of(item, tokenizer) for item in media])
        marked = mark_bodies(messages, bodies) if renderer.marks_bodies else None
        if self._table is None:
            texts = ([literal_text(str(m["content"]), tokenizer) for m in one] for one in (messages, marked or ()))
            text, shown = ("\n".join(one) for one in texts)
            tokens = tuple(tokenizer.encode(text))
            return self._extension(tokens, False, self._observed(tokens, text, shown), expansions)
        said = (*self._unfinished, *completion)
        self._unfinished = ()
        if renderer.ignores_answers:
            answer = None
        elif answer is None:
            answer = renderer.answer(said, self._num_calls)
            self._num_calls += len(answer.get("tool_calls") or ())
        self._own_messages()
        new = renderer.traits.fitted(messages, answer or {"role": "assistant"})
        try:
            transition, shapes = self._transition(answer, new)
        except UserError:
            # The template refuses these calls (Llama 3.1 takes one a turn) or results: all becomes plain text.
            answer, new = (
                renderer.plain_answer(said),
                renderer.traits.fitted(_without_tools(messages), {"role": "assistant"}),
            )
            transition, shapes = self._transition(answer, new)
            marked = None if marked is None else _without_tools(marked)
        self._expansions += expansions
        self._answers[len(self._messages)] = said
        self._messages += [UNREAD if answer is None else answer, *new]
        self._num_messages = len(self._messages)
        self._shapes = shapes
        if not transition.appends:
            self.num_rewrites += 1
            renderer.num_rewrites += 1
            if renderer.history == "as_template":
                tokens = self._rendered()
                observed = self._observed_after(tokens, transition, new, marked, answer)
                return self._extension(tokens, True, observed, self._expansions)
        text = transition.text_after(new, self._system)
        tokens = renderer.tokens_after(completion, text, transition.has_end_token)
        observed = self._observed_after(tokens, transition, new, marked, answer)
        return self._extension(tokens, False, observed, expansions)

    def _extension(
        self, tokens: tuple[int, ...], is_branch: bool, observed: np.ndarray | None, expansions: Sequence[Expansion]
    ) -> Extension:
        placed = place_images(tokens, expansions, self._renderer.tokenizer, observed)
        return Extension(placed.tokens, is_branch, placed.observed, placed.pictures)

    def _observed_after(
        self,
        tokens: tuple[int, ...],
        transition: Transition,
        new: Sequence[Message],
        marked: Sequence[Message] | None,
        answer: Message | None,
    ) -> np.ndarray | None:
        """Return the marks of new messages in tokens that end with what the template writes for them behind an answer."""
        if not marked or transition.answer is None:
            return None
        fitted = self._renderer.traits.fitted(marked, answer or {"role": "assistant"})
        text, shown = (transition.text_after(one, self._system) for one in (new, fitted))
        return self._observed(tokens, text, shown)

    def _observed(self, tokens: tuple[int, ...], text: str, marked: str) -> np.ndarray | None:
        renderer = self._renderer
        return observed_tokens(tokens, text, marked, renderer.tokenizer) if renderer.marks_bodies and marked else None

    def append_text(self, completion: Sequence[int], text: str, bodies: Sequence[Body] | None = None) -> Extension:
        """Return the tokens of a text inside the assistant's turn, as `<information>` of Search-R1 is. `bodies` says what is no markup in it.

        A stop string normally ends such an answer, so that no end token was sampled. If one was, it stays where it is, and the text
        follows it: the path holds what was sampled.
        """
        literal = self._renderer.tokenizer.literal
        tokens, marked = tuple(self._renderer.tokenizer.encode(literal(text))), ""
        self._unfinished = (*self._unfinished, *completion, *tokens)
        if self._renderer.marks_bodies:
            given = text_bodies(text) if bodies is None else bodies
            marked = mark_bodies([{"role": "tool", "content": text}], given)[0]["content"]
        return Extension(tokens, observed=self._observed(tokens, literal(text), literal(marked)))

    def _own_messages(self) -> None:
        """Copy what is shared with a fork that has grown."""
        if len(self._messages) > self._num_messages:
            self._messages = self._messages[: self._num_messages]
            self._answers = {index: said for index, said in self._answers.items() if index < self._num_messages}

    def _transition(self, answer: Message | None, new: list[Message]) -> tuple[Transition, tuple[Shape, ...]]:
        assert self._table is not None
        shaper = self._renderer.shaper
        said = ANSWER if answer is None else shaper.shape(answer)
        shapes = tuple([shaper.shape(message) for message in new])
        return self._table.find(self._shapes, said, shapes), self._renderer.grown(self._shapes, said, shapes)

    def _rendered(self) -> tuple[int, ...]:
        """Return the tokens of the whole conversation as the template writes it, from the root of a branch.

        Where the template keeps the text of the last root, only the messages since then are rendered and tokenised.
        """
        assert self._table is not None
        renderer, root = self._renderer, self._root
        encode = renderer.tokenizer.encode
        if renderer.ignores_answers:
            for index, tokens in self._answers.items():
                if self._messages[index] is UNREAD:
                    self._messages[index] = renderer.answer(tokens, 0)
        try:
            added = None
            if root is not None:
                pending = self._messages[root.num_messages :]
                shapes = tuple([renderer.shaper.shape(message) for message in pending])
                added = self._table.continued(root.shapes, pending, shapes, self._system)
            if root and added:
                if not root.tokens:
                    opening = renderer.render(self._messages[: root.num_messages], self._tools, opens=False)
                    root = Root(tuple(encode(opening)), root.shapes, root.num_messages)
                self._root = Root((*root.tokens, *encode(added[0])), self._shapes, len(self._messages))
                return (*self._root.tokens, *renderer.opening_tokens(added[1]))
            self._root = None
            return tuple(encode(renderer.render(self._messages, self._tools)))
        except UserError:  # the template refuses something in a message, such as a number as the name of a tool
            answers = {index: renderer.plain_answer(tokens) for index, tokens in self._answers.items()}
            plain = [answers.get(index, message) for index, message in enumerate(self._messages)]
            fitted = renderer.traits.fitted(_without_tools(plain))
            return tuple(encode(renderer.render(fitted, self._tools)))


@dataclass(frozen=True)
class Root:
    """The beginning of the last branch, which the template keeps: its tokens without the opening of the assistant's turn."""

    tokens: tuple[int, ...]
    shapes: tuple[Shape, ...]
    num_messages: int


def _without_tools(messages: Sequence[Message]) -> list[Message]:
    return [as_user(message) if message["role"] == "tool" else message for message in messages]
