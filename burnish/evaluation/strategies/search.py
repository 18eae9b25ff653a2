"""`Search`: what a strategy may do with one question, and how it waits for the engine and the verifier.

A strategy is a coroutine `async def strategy(search, options) -> Choice`. It awaits `search.sample` and `search.score`, which name nodes; it
never touches an engine. `SearchProgram` (`search_program.py`) turns what it waits for into requests, so that one implementation runs under `burnish eval`
(thousands of questions over one engine), in `burnish solve` and in the server. `gather` advances several coroutines of one search in lock
step. So the order of completions changes nothing: a search is a function of its seed, its question and the weights.

A `Question` has no expected answer. What chooses cannot see the key.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from burnish.config.errors import UserError
from burnish.core.engine import SamplingOptions
from burnish.core.pictures import PictureSpan, shifted
from burnish.core.random_keys import fold, sample_key
from burnish.data.row import Message
from burnish.environments.dialogue import ChatRenderer, Conversation
from burnish.evaluation.answers import read_answer
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.models.tokenizer import REPLACEMENT_CHARACTER, Tokenizer

DECODE_WINDOW = 16
"""Tokens before a node that its text is decoded with."""
STREAM = "eval"
"""Random stream of searches. The k-th answer to a question is the k-th sample of `burnish eval`, token for token."""


class SearchFailed(Exception):
    """Raised by a strategy that cannot choose, such as when the verifier failed for every candidate."""


@dataclass(frozen=True)
class Question:
    """A question as a strategy sees it: without the expected answer and without the row's other columns."""

    id: str
    prompt: str | list[Message]
    """As the row has it, for verifiers and follow-up turns."""
    tokens: tuple[int, ...]
    """The rendered prompt."""
    kind: str
    """Name of the verifier that says where a completion has its answer, such as `number`; votes compare these answers."""
    data_source: str = ""
    visit: int = 0
    pictures: tuple[PictureSpan, ...] = ()
    chat: ChatRenderer | None = None
    """Writes the next turns of a conversation, for strategies that ask again; None for a model without a chat template."""


@dataclass(frozen=True)
class Choice:
    """What a strategy returns."""

    node: SearchNode
    """The end of the chosen answer."""
    votes: Mapping[str, float] = field(default_factory=dict)
    """Votes of each answer, by its normalised text; empty for strategies that do not vote."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """What the strategy reports of itself, such as `stopped_after`."""


@dataclass
class Cost:
    """What a search has spent."""

    tokens: int = 0
    """Tokens sampled, in all branches."""
    requests: int = 0
    context_tokens: int = 0
    """Tokens of the contexts of all requests. An engine reuses those that it has in its cache."""
    whole_answers: int = 0
    """Answers to the question that one request sampled to their ends, as a single sample would be."""
    whole_tokens: int = 0
    """Their tokens."""
    scores: int = 0
    """Paths that the verifier scored."""
    failed_scores: int = 0
    score_tokens: int | None = 0
    """Tokens that the verifier read and wrote; None once it has not said so of a score."""


class Ask(list[SearchNode]):
    """The nodes that a coroutine waits for. Open nodes without tokens are sampled, all others are scored."""

    def __init__(self, nodes: Sequence[SearchNode], is_score: bool) -> None:
        super().__init__(nodes)
        self.is_score = is_score


class _Pause(Awaitable[None]):
    """Suspends a strategy until its asks are answered."""

    def __init__(self, asks: Sequence[Ask]) -> None:
        self.asks = asks

    def __await__(self) -> Generator[Sequence[Ask], None, None]:
        yield self.asks


class Search:
    """One question with the tree of its answers."""

    def __init__(
        self,
        question: Question,
        tokenizer: Tokenizer,
        sampling: SamplingOptions,
        seed: int = 0,
        number: int = 0,
        budget: int | None = None,
        max_positions: int | None = None,
        log_scores: bool = False,
        max_nodes: int | None = None,
        priority: int = 0,
    ) -> None:
        """`sampling.max_tokens` limits one answer, `budget` the tokens of the whole search, and `max_positions` a context.

        A search that needs more than `max_nodes` nodes fails. `number` tells several searches for one question apart. `log_scores`: scores
        are log-probs, so votes weigh them by exp. `priority` is that of its requests.
        """
        self.question, self.tokenizer, self.sampling = question, tokenizer, sampling
        self.budget, self.max_positions, self.log_scores = budget, max_positions, log_scores
        self.max_nodes, self.priority = max_nodes, priority
        self.cost = Cost()
        self.step_token: int | None = None
        """The special token that ends a step, in a strategy whose steps end so."""
        self.nodes: list[SearchNode] = []
        self._seed, self._number = seed, number
        self._texts: dict[SearchNode, str] = {}
        self._answers: dict[SearchNode, str | None] = {}
        self._conversations: dict[SearchNode, Conversation] = {}
        self._reusable: deque[SearchNode] = deque()
        key = fold(seed, "search", question.id, question.visit, number, "root")
        self.root = self._add_root(key, question.tokens, question.pictures)

    @property
    def name(self) -> str:
        """The name of the search among all others of an evaluation."""
        return f"{self.question.id}#{self.question.visit}.{self._number}"

    # --- What a strategy may do --------------------------------------------------------------------------------------------

    async def sample(
        self,
        parents: SearchNode | Sequence[SearchNode],
        n: int = 1,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        max_tokens: int | None = None,
        temperature: float | None = None,
        may_continue: bool = False,
    ) -> list[SearchNode]:
        """Sample `n` children of each parent, in order. A child ends at an end token, at one of `stop`, or after `max_tokens`.

        A child is `open` if one of `stop`, `stop_tokens` or `max_tokens` ended it and the answer's limit leaves room. When the budget is
        spent, the children that could not be sampled are left out, so the result may be shorter, or empty. `may_continue`: the strategy goes on
        behind children that have ended.
        """
        chosen = [parents] if isinstance(parents, SearchNode) else list(parents)
        if closed := [node for node in chosen if not node.is_open]:
            raise ValueError(
                f"{self.question.id}: node {closed[0].index} has ended ({closed[0].end}) and has no children"
            )
        are_whole = not stop and not stop_tokens and max_tokens is None and temperature is None
        children = []
        for parent in (parent for parent in chosen for _ in range(n)):
            if are_whole and parent is self.root and self._reusable:
                children.append(self._reusable.popleft())
                continue
            child = self._add(parent, max_tokens or self.sampling.max_tokens, tuple(stop), temperature)
            child.stop_tokens, child.may_continue = tuple(stop_tokens), may_continue
            children.append(child)
        await _Pause([Ask([child for child in children if not child.is_sampled], is_score=False)])
        return [child for child in children if child.is_sampled]

    def reuse(self, answers: Iterable[SearchNode]) -> None:
        """Let the next calls of `sample` return these answers first, where they ask for whole answers to the question.

        So a strategy that begins after others have sampled counts their answers among its own, and samples none of them twice.
        """
        self._reusable.extend(answers)

    async def score(self, nodes: Sequence[SearchNode]) -> list[float | None]:
        """Return the verifier's score of the path to each node; None where it failed. A node that has a score keeps it."""
        await _Pause([Ask([node for node in dict.fromkeys(nodes) if node.score is None], is_score=True)])
        return [node.score for node in nodes]

    async def gather(self, *programs: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run several coroutines of this search together and return their results. They advance in lock step."""
        results: list[Any] = [None] * len(programs)
        asks: dict[int, Sequence[Ask]] = {}

        def advance(number: int) -> None:
            try:
                asks[number] = programs[number].send(None)
            except StopIteration as stop:
                asks.pop(number, None)
                results[number] = stop.value

        try:
            for number in range(len(programs)):
                advance(number)
            while asks:
                await _Pause([ask for each in asks.values() for ask in each])
                for number in list(asks):
                    advance(number)
        finally:
            for program in programs:
                program.close()
        return results

    def write(self, parent: SearchNode, text: str, has_control: bool = False) -> SearchNode:
        """Append a text of the strategy to a path, such as "Wait". It is not counted as sampled.

        With `has_control`, names of control tokens in the text become these tokens: for texts from a config, never from a model.
        """
        node = self._add(parent, 0, (), None)
        node.tokens = tuple(self.tokenizer.encode(text if has_control else self.tokenizer.literal(text)))
        return node

    def reply(self, node: SearchNode, text: str) -> SearchNode:
        """Write a user message behind an answer, and return the root of the model's next turn.

        The root has the whole conversation. So `text`, `answer` and `room` of the nodes behind it are of the next answer alone. What was
        read and sampled stays token for token. Only if the chat template rewrites it (Qwen3 drops earlier reasoning), the root
        has the conversation as the template renders it.
        """
        chat, path = self.question.chat, node.path()
        if chat is None:
            raise no_chat_error()
        conversation = (self._conversations.get(path[0]) or chat.open(self.question.prompt)).fork()
        said = [token for one in path[1:] for token in one.tokens]
        added = conversation.extend(said, [{"role": "user", "content": text}])
        tokens, pictures = added.tokens, added.pictures
        if not added.is_branch:
            pictures = (*path[0].pictures, *shifted(pictures, len(node.context)))
            tokens = (*node.context, *tokens)
        root = self._add_root(fold(node.key, "reply", node.num_children), tokens, pictures)
        node.num_children += 1
        root.notes["follows"] = node.index
        self._conversations[root] = conversation
        return root

    def reopen(self, node: SearchNode) -> SearchNode:
        """Return a sibling of a node without what ended it, so that it can go on.

        That is an end token, or the text that stopped it. If that text begins inside a token, the whole token is left out.
        """
        keep = len(node.tokens) - self.num_end_tokens(node)
        twin = replace(
            node,
            index=len(self.nodes),
            tokens=node.tokens[:keep],
            logp=None if node.logp is None else node.logp[:keep],
            end="open",
            score=None,
            num_children=0,
            notes={"reopens": node.index},
        )
        self.nodes.append(twin)
        return twin

    def num_end_tokens(self, node: SearchNode) -> int:
        """Return how many of a node's last tokens are what ended it: an end token, or the text that stopped it; 0 if a limit did."""
        if node.tokens and node.tokens[-1] in (*self.sampling.stop_tokens, *node.stop_tokens):
            return 1
        pieces = self.tokenizer.pieces(node.tokens)
        found = ["".join(pieces).find(stop) for stop in (*self.sampling.stop, *node.stop)]
        at = min((place for place in found if place >= 0), default=None)
        if at is None:
            return 0
        lengths = [0, *accumulate(map(len, pieces))]
        # The first of equal lengths: tokens without a text of their own begin a character that the next token completes.
        return len(node.tokens) - lengths.index(max(length for length in lengths if length <= at))

    def split(self, node: SearchNode, lengths: Sequence[int]) -> list[SearchNode]:
        """Divide a sampled node without children into a chain of nodes with these numbers of tokens, so that the path can branch between.

        The node becomes the first of the chain. The last one has its end and its score.
        """
        if node.num_children or node.logp is None or sum(lengths) != len(node.tokens):
            raise ValueError(f"{self.name}: node {node.index} cannot be divided into {list(lengths)} tokens")
        tokens, logp, end, score = node.tokens, node.logp, node.end, node.score
        chain = [node]
        for _ in lengths[1:]:
            chain.append(self._add(chain[-1], 0, (), node.temperature))
        start, first = 0, node.num_before
        for one, length in zip(chain, lengths, strict=True):
            one.num_before = first + start
            one.tokens, one.logp = tokens[start : start + length], logp[start : start + length]
            one.version, one.end, one.score = node.version, "open", None
            start += length
        chain[-1].end, chain[-1].score = end, score
        node.forget_totals()
        self._texts.pop(node, None)
        self._answers.pop(node, None)
        return chain

    def part(self, parent: SearchNode, source: SearchNode, start: int, end: int) -> SearchNode:
        """Append a run of tokens of a sampled node to a path, so that they need not be sampled again.

        The tokens before `start` must be on the path already, behind the parent of `source`. The last part ends as `source` does. Costs
        count these tokens once.
        """
        assert source.logp is not None, "only sampled nodes have parts"
        node = self._add(parent, end - start, source.stop, source.temperature)
        node.tokens, node.logp, node.version = source.tokens[start:end], source.logp[start:end], source.version
        node.notes["part_of"] = source.index
        if end == len(source.tokens):
            node.end, node.score = source.end, source.score
        return node

    def text(self, node: SearchNode) -> str:
        """Return the text behind the root, up to the end of a node."""
        if node.is_root:
            return ""
        if node not in self._texts:
            missing = [node]
            while (above := missing[-1].parent) is not None and not above.is_root and above not in self._texts:
                missing.append(above)
            for one in reversed(missing):
                self._texts[one] = self._text_behind(one)
        return self._texts[node]

    def added_text(self, node: SearchNode) -> str:
        """Return what a node adds to the text of its parent; of a root its own text."""
        if node.parent is None:
            return self.tokenizer.decode(node.tokens)
        before, text = self.text(node.parent), self.text(node)
        # A character whose bytes two nodes share is in the later one.
        shared = next((k for k, (a, b) in enumerate(zip(before, text, strict=False)) if a != b), len(before))
        return text[shared:]

    def text_with_steps(self, node: SearchNode) -> str:
        """Return what a node adds to the text of its parent, with the name of the special token that ends a step."""
        count = 0 if self.step_token is None else node.tokens.count(self.step_token)
        if not count:
            return self.added_text(node)
        pieces = self.tokenizer.pieces(node.tokens, skip_special=False)
        if count == 1 and node.tokens[-1] == self.step_token:
            return self.added_text(node) + pieces[-1]
        is_shown = (token == self.step_token or not self.tokenizer.is_special(token) for token in node.tokens)
        return "".join(piece for piece, shown in zip(pieces, is_shown, strict=True) if shown)

    def _text_behind(self, node: SearchNode) -> str:
        """Return the text up to the end of a node, from that of its parent and the last tokens before the node.

        The whole path is decoded only if the parent ends inside a character, so that the cost of a step does not grow with its depth.
        """
        above = node.parent
        assert above is not None
        if above.is_root:
            return self.tokenizer.decode(node.tokens)
        before = self._texts[above]
        tail = self._last_tokens(above)
        known, text = self.tokenizer.decode(tail), self.tokenizer.decode([*tail, *node.tokens])
        if (
            known
            and not before.endswith(REPLACEMENT_CHARACTER)
            and text.startswith(known)
            and before.endswith(known.lstrip())
        ):
            return before + text[len(known) :]
        return self.tokenizer.decode([token for one in node.path()[1:] for token in one.tokens])

    def _last_tokens(self, node: SearchNode) -> list[int]:
        """Return the last tokens behind the root, up to the end of a node: enough for what a decoder does at the start of a text."""
        found: list[int] = []
        for one in node.upwards():
            if one.is_root or len(found) >= DECODE_WINDOW:
                break
            found = [*one.tokens[-DECODE_WINDOW:], *found]
        return found[-DECODE_WINDOW:]

    def answer(self, node: SearchNode) -> str | None:
        """Return the normalised answer of a completion, which votes are counted by; None if it has none."""
        if node not in self._answers:
            self._answers[node] = read_answer(self.question.kind, self.text(node)).text
        return self._answers[node]

    @property
    def tokens_left(self) -> int | None:
        """Tokens of the budget that are not spent; None without a budget."""
        return None if self.budget is None else max(0, self.budget - self.cost.tokens)

    def room(self, node: SearchNode) -> int:
        """Return how many tokens an answer may have behind a node."""
        left = self.sampling.max_tokens - node.num_answer_tokens
        return left if self.max_positions is None else min(left, self.max_positions - len(node.context))

    def is_whole(self, node: SearchNode) -> bool:
        """Whether a request may sample a whole answer to the question as this node, as a single sample would be."""
        is_plain = not node.stop and not node.stop_tokens and node.parent is self.root
        return is_plain and node.limit == self.room(self.root)

    # --- The tree ----------------------------------------------------------------------------------------------------------

    def _add_root(self, key: int, tokens: tuple[int, ...], pictures: tuple[PictureSpan, ...]) -> SearchNode:
        root = SearchNode(None, key, len(self.nodes), tokens, pictures=pictures)
        self.nodes.append(root)
        return root

    def _add(self, parent: SearchNode, limit: int, stop: tuple[str, ...], temperature: float | None) -> SearchNode:
        if self.max_nodes is not None and len(self.nodes) >= self.max_nodes:
            raise SearchFailed(f"the search needs more than {self.max_nodes} nodes, which is the limit here")
        node = SearchNode(parent, self._child_key(parent), len(self.nodes), limit=limit, stop=stop)
        node.temperature, node.num_before = temperature, parent.num_answer_tokens
        self.nodes.append(node)
        return node

    def _child_key(self, parent: SearchNode) -> int:
        number = parent.num_children
        parent.num_children += 1
        if parent is not self.nodes[0]:
            return fold(parent.key, "child", number)
        key = sample_key(self._seed, STREAM, self.question.id, self.question.visit, number)
        return key if self._number == 0 else fold(key, self._number)


def no_chat_error() -> UserError:
    """Return the error of a strategy that asks again, for a model that has no turns."""
    return UserError(
        "the strategy asks the model about its own answers, which needs a chat template, and prompts of this model have none "
        "(template.kind is plain, or the tokenizer has no template): use an instruction-tuned model, or a strategy without turns such as "
        "budget_forcing or majority"
    )
