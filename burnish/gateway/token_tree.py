"""`SessionTree`: the token tree of one session. It decides which tokens the engine reads for a call, and records what was sampled.

An agent sends the whole conversation with each call. `place` finds the longest beginning of it that ends with an answer sampled in this session
(`message_keys.py`). The prompt is then the exact tokens up to that answer, followed by the rendering of only the new messages. Sampled tokens are
never tokenised again. `record` adds what was sampled behind the prompt.

Where the chat template would rewrite the history, the policy decides: `keep` goes on behind the sampled tokens; `as_template` takes the
template's own rendering, which is a branch. A call that continues no answer is rendered as a whole. It still shares the nodes in which its
tokens agree with the tree (`token_nodes.py`).

`session_calls.py` names the kinds of calls, and `session_export.py` says what is trained.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.config.errors import UserError, did_you_mean
from burnish.data.row import Message
from burnish.environments.dialogue import ChatRenderer, Conversation
from burnish.gateway.message_keys import (
    CallRefused,
    answer_key,
    calls_of,
    chain_digests,
    head_digest,
    message_keys,
    normal_message,
    num_leading_system,
    reasoning_of,
    role_of,
)
from burnish.gateway.session_calls import (
    COUNTERS,
    Answer,
    Call,
    CallPrompt,
    Kind,
    echoes,
    has_reasoning_of,
    has_reasoning_up_to,
)
from burnish.gateway.session_export import SessionExport, TrainedCalls, export_session
from burnish.gateway.session_renderer import SessionRenderer, Tools
from burnish.gateway.token_nodes import Node, NodeTree

MIN_UNMATCHED = 3
"""Calls with foreign answers after which `note` says that nothing matches."""
HEADLESS = head_digest(None, None)
"""Beginning of the chains without leading system messages and tools."""


class SessionTree:
    """All calls of one session. It is used from one thread."""

    def __init__(self, renderer: SessionRenderer) -> None:
        self.renderer = renderer
        self.tree = NodeTree()
        self.calls: list[Call] = []
        self.answers: list[Answer] = []
        """In the order in which they were recorded."""
        self.counts: Counter[str] = Counter()
        self._num_call_ids = 0
        self._answers_of_chain: dict[bytes, list[Answer]] = {}
        self._answers_of_headless: dict[bytes, list[Answer]] = {}
        self._calls_of_chain: dict[bytes, list[Call]] = {}
        self._calls_of_end: dict[int, list[Call]] = {}
        self._last_of_family: dict[bytes, Answer] = {}
        self._answer_of_node: dict[int, Answer] = {}
        self._answers_of_response: dict[str, list[Answer]] = {}
        self._text_roots: list[Answer] = []

    # --- placing calls -----------------------------------------------------------------------------------------------------

    def place(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Tools | None = None,
        template_variables: Mapping[str, Any] | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> CallPrompt:
        """Place a call with messages. Raises `CallRefused` if the model cannot read them.

        If the client also gives the token ids of its prompt, they decide what the engine reads and where the call is in the tree.
        """
        if not messages:
            raise CallRefused("messages: expected at least one message, got none")
        keys = message_keys(messages)
        if role_of(messages[-1], len(messages) - 1) == "assistant":
            raise CallRefused(
                "the last message is of the assistant: an answer cannot be continued in a session, because the given text would be "
                "tokenised again; end the messages with one of the user or of a tool",
                code="prefill_not_supported",
            )
        tools = tools or None
        renderer = self.renderer.renderer(template_variables)
        chain = chain_digests(head_digest(tools, template_variables), keys)
        if token_ids is not None:
            call = self._placed_tokens(tuple(token_ids))
            path = {node.number for node in call.end.path()}
            call.extends, start = self._answer_before(messages, chain, path)
            call.messages = list(messages)  # rendered only if a later call has no token ids
        else:
            before, start = self._answer_before(messages, chain)
            call = (
                self._repeated(messages, chain, before)
                or (before and self._continued(renderer, messages, start, before, tools))
                or self._opened(renderer, messages, chain, tools)
            )
        call.renderer, call.tools = renderer, tools
        self._index(call, messages, keys, chain, start)
        return self._counted(call)

    def place_tokens(self, token_ids: Sequence[int]) -> CallPrompt:
        """Place a call with the token ids of its prompt."""
        return self._counted(self._placed_tokens(tuple(token_ids)))

    def place_text(self, text: str) -> CallPrompt:
        """Place a call with a text. If it begins with a prompt and its answer, their tokens are kept and only the rest is tokenised."""
        encode = self.renderer.tokenizer.encode
        before, at = self._text_before(text)
        if before is None:
            call = self._placed_tokens(tuple(encode(text, special=True)))
        else:
            new = encode(text[at:])
            call = self._placed_at(self.tree.insert(before.node, new), self._context_behind(before, new))
            call.extends = before
        call.text = text[at:]
        return self._counted(call)

    def _placed_tokens(self, tokens: tuple[int, ...]) -> Call:
        processor = self.renderer.tokenizer.image_processor
        if processor is not None and not processor.placeholder_tokens.isdisjoint(tokens):
            raise CallRefused(
                "the token ids have placeholders of images, whose pixels they do not tell; leave the token ids out and send messages",
                param="prompt",
                code="unsupported_content",
            )
        return self._placed_at(self.tree.insert(self.tree.root, tokens), tokens)

    def _placed_at(self, end: Node, context: tuple[int, ...]) -> Call:
        """Return a call whose prompt alone tells how it is linked."""
        if earlier := self._calls_of_end.get(end.number):
            self._mark_retried(earlier)
            return self._call("retry", end, context, link=earlier[-1].link)
        kind, link = self._linked_by_tokens(end)
        return self._call(kind, end, context, link=link)

    def _linked_by_tokens(self, end: Node) -> tuple[Kind, Answer | None]:
        if (answer := self._sampled_above(end)) is not None:
            return self._continuing(answer), answer
        for node in end.path():
            if node is not end and (calls := self._calls_of_end.get(node.number)):
                return "fork", calls[-1].answers[-1] if calls[-1].answers else None
        return "root", None

    def _sampled_above(self, end: Node) -> Answer | None:
        """Return the last answer whose tokens are in a prompt."""
        found = (self._answer_of_node.get(node.number) for node in end.path())
        return next((answer for answer in found if answer is not None), None)

    def _repeated(
        self, messages: Sequence[Mapping[str, Any]], chain: list[bytes], before: Answer | None
    ) -> Call | None:
        """Return a call with the prompt of an earlier call that had the same messages; None if there is none."""
        same = [
            call
            for call in self._calls_of_chain.get(chain[-1], ())
            if call.extends is before and has_reasoning_up_to(messages, call)
        ]
        if not same:
            return None
        self._mark_retried(same)
        first = same[-1]
        call = self._call("retry", first.end, first.context or self.tree.tokens_to(first.end), link=first.link)
        call.extends, call.conversation, call.messages = before, first.conversation, first.messages
        return call

    def _continued(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Mapping[str, Any]],
        start: int,
        before: Answer,
        tools: Tools | None,
    ) -> Call:
        """Place messages of which those from `start` on follow an answer."""
        new = [normal_message(message, start + index) for index, message in enumerate(messages[start:])]
        new = _with_known_ids(new, messages[start - 1], before.message)
        conversation = self._conversation_of(before.call).fork()
        num_rewrites = conversation.num_rewrites
        read, bodies = self.renderer.read_bodies(renderer, new, tools)
        try:
            found = conversation.extend(before.node.tokens.tolist(), read, before.for_template, bodies)
        except UserError as error:
            raise CallRefused(
                f"the chat template does not take these messages behind the last answer: {error}"
            ) from error
        self.counts["rewritten"] += conversation.num_rewrites - num_rewrites
        if found.is_branch:
            end, context = self.tree.insert(self.tree.root, found.tokens, found.pictures), found.tokens
        else:
            end = self.tree.insert(before.node, found.tokens, found.pictures)
            context = self._context_behind(before, found.tokens)
        if found.observed is not None:
            end.mark(found.observed)
        call = self._call(self._continuing(before), end, context, link=before)
        call.extends, call.conversation = before, conversation
        return call

    def _opened(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Mapping[str, Any]],
        chain: list[bytes],
        tools: Tools | None,
    ) -> Call:
        """Place messages that continue no answer of the session."""
        conversation = self.renderer.open(renderer, messages, tools)
        end = self.tree.insert(self.tree.root, conversation.tokens, conversation.pictures)
        link = self._sampled_above(end)
        if link is not None:  # written otherwise, but with the same tokens
            kind: Kind = self._continuing(link)
        else:
            kind, link = self._linked_by_messages(messages, chain, tools)
            self.counts["unmatched"] += any(role_of(message, k) == "assistant" for k, message in enumerate(messages))
        call = self._call(kind, end, conversation.tokens, link=link)
        call.conversation = conversation
        return call

    def _linked_by_messages(
        self, messages: Sequence[Mapping[str, Any]], chain: list[bytes], tools: Tools | None
    ) -> tuple[Kind, Answer | None]:
        for digest in reversed(chain[:-1]):
            calls = [call for call in self._calls_of_chain.get(digest, ()) if has_reasoning_up_to(messages, call)]
            if calls:
                return "fork", calls[-1].answers[-1] if calls[-1].answers else None
        num_system = num_leading_system(messages)
        headless = chain_digests(HEADLESS, message_keys(messages)[num_system:])
        for digest in reversed(headless[:-1]):
            if answers := self._answers_of_headless.get(digest):
                answers[-1].is_continued = True
                return "relinked", answers[-1]
        family = _family(messages, chain, tools)
        found = self._last_of_family.get(family)
        return ("root", None) if found is None else ("compacted", found)

    # --- looking up --------------------------------------------------------------------------------------------------------

    def _answer_before(
        self, messages: Sequence[Mapping[str, Any]], chain: list[bytes], path: set[int] | None = None
    ) -> tuple[Answer | None, int]:
        """Return the answer behind which the messages go on, and the number of messages up to it.

        Of several answers with equal messages, the one whose ids the client sends back is taken, else one that is equal to the letter,
        else the latest. `path` restricts
        answers to those nodes.
        """
        for size in range(len(messages) - 1, 0, -1):
            found = [
                answer
                for answer in self._answers_of_chain.get(chain[size - 1], ())
                if (path is None or answer.node.number in path) and has_reasoning_of(messages, answer)
            ]
            if len(found) > 1:
                found.sort(key=lambda answer: (*echoes(messages, answer), answer.number))
            if found:
                return found[-1], size
        return None, 0

    def _text_before(self, text: str) -> tuple[Answer | None, int]:
        """Return the answer whose prompt and text the given text begins with, the longest of them, and the length of both."""
        best: tuple[Answer | None, int] = (None, 0)
        pending = [(answer, 0) for answer in self._text_roots]
        while pending:
            answer, at = pending.pop()
            piece = f"{answer.call.text}{answer.message['content']}"
            if text.startswith(piece, at):
                at += len(piece)
                if best[0] is None or (at, answer.number) > (best[1], best[0].number):
                    best = answer, at
                pending += [(child, at) for child in answer.text_children]
        return best

    def _conversation_of(self, call: Call) -> Conversation:
        if call.conversation is None:
            assert call.renderer is not None, "only calls with messages are found by messages"
            call.conversation = self.renderer.open(call.renderer, call.messages, call.tools)
        return call.conversation

    def _context_behind(self, answer: Answer, new: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens up to the end of an answer, and new ones. The call's own copy is dropped: this one is longer."""
        call = answer.call
        context = self.tree.tokens_to(call.end) if call.context is None else call.context
        if call.link is not None:  # the tokens of a first prompt are shared by all samples of it
            call.context = None
        rest = (*answer.node.tokens.tolist(), *new)
        return context + rest  # one copy of pointers, which unpacking both would not be

    # --- bookkeeping -------------------------------------------------------------------------------------------------------

    def _call(self, kind: Kind, end: Node, context: tuple[int, ...], link: Answer | None) -> Call:
        return Call(len(self.calls), kind, end, context, link=link)

    def _counted(self, call: Call) -> CallPrompt:
        """Add a call to the session."""
        self.calls.append(call)
        self._calls_of_end.setdefault(call.end.number, []).append(call)
        self.counts["calls"] += 1
        self.counts[COUNTERS[call.kind]] += 1
        assert call.context is not None
        return CallPrompt(call.context, call.end.number, call.kind, call.number, self.tree.pictures_to(call.end))

    def _index(
        self,
        call: Call,
        messages: Sequence[Mapping[str, Any]],
        keys: list[bytes],
        chain: list[bytes],
        start: int,
    ) -> None:
        call.num_messages, call.chain = len(messages), chain[-1]
        if call.extends is not None:
            call.headless, call.family = (
                chain_digests(call.extends.headless, keys[start:])[-1],
                call.extends.call.family,
            )
        else:
            num_system = num_leading_system(messages)
            call.headless = (chain_digests(HEADLESS, keys[num_system:]) or [HEADLESS])[-1]
            call.family = _family(messages, chain, call.tools)
        call.foreign_reasoning = tuple(
            (index, reasoning_of(messages[index]))
            for index in range(start, len(messages))
            if role_of(messages[index], index) == "assistant"
        )
        self._calls_of_chain.setdefault(call.chain, []).append(call)

    def _continuing(self, answer: Answer) -> Kind:
        kind: Kind = "fork" if answer.is_continued else "continued"
        answer.is_continued = True
        return kind

    def _mark_retried(self, calls: Sequence[Call]) -> None:
        for call in calls:
            for answer in call.answers:
                answer.is_retried = True

    # --- recording -----------------------------------------------------------------------------------------------------------

    def record(
        self,
        prompt: CallPrompt,
        tokens: Sequence[int],
        logp: Sequence[float],
        version: int | Sequence[int],
        finish: str,
        response_id: str,
        is_cut: bool = False,
        stops: Sequence[str] = (),
        stop_tokens: Collection[int] = (),
        agent: str | None = None,
    ) -> Message:
        """Record what the engine sampled for a call. Returns the message that the client gets, in OpenAI's form.

        Call it n times for a call that asked for n choices. `version` is of all tokens or of each. `stops` and `stop_tokens` are
        of the request: the client does not get them. `is_cut`: the client left before the end. `agent`: the sub-agent that called.
        """
        call = self.calls[prompt.call]
        if len(tokens) != len(logp):
            raise ValueError(f"{response_id}: {len(tokens)} tokens were sampled but there are {len(logp)} log-probs")
        versions = np.broadcast_to(np.array(version, dtype=np.int32), (len(tokens),)).copy()
        node = self.tree.add_sampled(
            call.end, np.array(tokens, dtype=np.int64), np.array(logp, dtype=np.float32), versions
        )
        has_end = len(tokens) > 0 and (tokens[-1] in self.renderer.tokenizer.eos_ids or tokens[-1] in stop_tokens)
        shown = list(tokens[:-1] if has_end else tokens)
        answer = self._answer(call, node, shown, stops, response_id, finish, is_cut)
        answer.agent = agent
        call.answers.append(answer)
        self.answers.append(answer)
        self._answer_of_node[node.number] = answer
        self._answers_of_response.setdefault(response_id, []).append(answer)
        if call.text is not None:
            (self._text_roots if call.extends is None else call.extends.text_children).append(answer)
        if call.renderer is not None:
            self._answers_of_chain.setdefault(answer.chain, []).append(answer)
            self._answers_of_headless.setdefault(answer.headless, []).append(answer)
            if call.family and call.link is not None:
                self._last_of_family[call.family] = answer
        return copy.deepcopy(answer.message)  # the caller may change its own

    def _answer(
        self,
        call: Call,
        node: Node,
        shown: list[int],
        stops: Sequence[str],
        response_id: str,
        finish: str,
        is_cut: bool,
    ) -> Answer:
        """Return the answer of a node. `shown` are its tokens without the one that ended it."""
        number = len(self.answers)
        if call.renderer is None:
            message: Message = {"role": "assistant", "content": self.renderer.text(shown, stops=stops)}
            return Answer(number, call, node, response_id, finish, is_cut, message, message)
        read = self.renderer.read_answer(call.renderer, shown, call.tools, self._num_call_ids, stops)
        calls = calls_of(read.for_client, call.num_messages)
        self._num_call_ids += len(calls)
        key = answer_key(read.for_client["content"], [(name, arguments) for _, name, arguments in calls])
        answer = Answer(number, call, node, response_id, finish, is_cut, *read)
        answer.chain, answer.headless = chain_digests(call.chain, [key])[0], chain_digests(call.headless, [key])[0]
        return answer

    def reward(self, response_id: str, value: float) -> None:
        """Set the reward of a response: of all its choices, if there are several. A second value replaces the first."""
        found = self._answers_of_response.get(response_id)
        if found is None:
            raise UserError(
                f"no response of this session has the id {response_id!r}{did_you_mean(response_id, self._answers_of_response)}"
            )
        if not math.isfinite(value):
            raise UserError(f"the reward of {response_id!r} is {value}; expected a finite number")
        if not any(len(answer.node.tokens) for answer in found):
            raise UserError(f"the response {response_id!r} has no tokens, so it cannot have a reward")
        for answer in found:
            answer.reward = float(value)

    # --- results -------------------------------------------------------------------------------------------------------------

    def export(
        self, train: TrainedCalls = "all", n_leaves: bool = False, cut: bool = False, retried: bool = False
    ) -> SessionExport:
        """Return the nodes and turns of the session for a `Trajectory` (`session_export.py` says what is trained)."""
        return export_session(self.tree, self.answers, train, n_leaves, cut, retried)

    @property
    def metrics(self) -> dict[str, int]:
        """Counts of calls by kind, of turns that the template would rewrite, of calls with foreign answers, and of branches."""
        inner = {
            above.number
            for answer in self.answers
            if len(answer.node.tokens)
            for above in answer.node.path()
            if above is not answer.node
        }
        branches = sum(1 for a in self.answers if len(a.node.tokens) and a.node.number not in inner)
        names = ("calls", *COUNTERS.values(), "rewritten", "unmatched")
        return {name: self.counts[name] for name in names} | {"branches": branches}

    def note(self) -> str | None:
        """Say that no call continues an answer although most contain some; None if there is nothing to say."""
        if self.counts["unmatched"] < MIN_UNMATCHED or self.counts["continued"]:
            return None
        return (
            f"{self.counts['unmatched']} calls of this session contain answers of the assistant, and none of them is as it was sampled: the "
            "agent writes tool rounds back as other text (smolagents does), so each step is a branch of its own and is computed anew; "
            "have the agent send back the messages that it got"
        )


def _with_known_ids(new: list[Message], sent: Mapping[str, Any], answer: Message) -> list[Message]:
    """Return new messages in which results name the calls of an answer by their own ids. The client may have renamed the calls."""
    given = [identity for identity, _, _ in calls_of(sent, 0)]
    own = [identity for identity, _, _ in calls_of(answer, 0)]
    known = {name: identity for name, identity in zip(given, own, strict=True) if name}
    found = list(new)
    for index, message in enumerate(new):
        if message["role"] == "assistant":
            break
        if (identity := message.get("tool_call_id")) in known:
            found[index] = {**message, "tool_call_id": known[identity]}
    return found


def _family(messages: Sequence[Mapping[str, Any]], chain: list[bytes], tools: Tools | None) -> bytes:
    """Return a hash of the tools and the leading system messages; empty if there are neither."""
    num_system = num_leading_system(messages)
    if num_system:
        return chain[num_system - 1]
    return head_digest(tools, None) if tools else b""
