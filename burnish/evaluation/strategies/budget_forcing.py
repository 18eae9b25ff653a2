"""Budget forcing: the model thinks for at least, or at most, as long as it is told (s1, 2501.19393).

Where the model ends its thinking too early, what ended it is dropped and "Wait" is written in its place. Where it thinks too long, the
thinking is cut, and a text is written that makes the answer follow. The length of a thinking counts the tokens in the context, sampled
and written. The cost counts sampled tokens alone, including the dropped ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import BudgetForcing
from burnish.evaluation.strategies.votes import elect


async def budget_forcing(search: Search, options: BudgetForcing) -> Choice:
    """Sample `n` answers with forced thinking and take the most frequent one. Each has an equal share of the budget."""
    share = None if search.tokens_left is None else search.tokens_left // options.n
    chains = [ForcedChain(search, options, share) for _ in range(options.n)]
    found = await search.gather(*(chain.run() for chain in chains))
    choice = elect(search, [node for node in found if node is not None])
    return Choice(
        choice.node,
        choice.votes,
        {
            "waits": float(sum(chain.num_waits for chain in chains)),
            "cuts": float(sum(chain.is_cut for chain in chains)),
            "thinking_tokens": float(sum(chain.num_thinking for chain in chains)),
            "written_tokens": float(sum(chain.num_written for chain in chains)),
        },
    )


@dataclass
class ForcedChain:
    """One answer with forced thinking."""

    search: Search
    options: BudgetForcing
    share: int | None
    """Tokens that it may sample; None without a budget."""
    num_sampled: int = 0
    num_written: int = 0
    num_waits: int = 0
    num_thinking: int = 0
    """Tokens of the thinking in the context, without the marker that ends it."""
    is_cut: bool = False

    def __post_init__(self) -> None:
        search, options = self.search, self.options
        marker = search.tokenizer.encode(options.think_end) if options.think_end else []
        has_control = bool(marker) and search.tokenizer.is_control(marker[0])
        self.stop_tokens = tuple(marker[:1]) if has_control else ()
        self.stop = (options.think_end,) if options.think_end and not has_control else ()
        self.closing = (options.think_end or "") + options.answer_prompt
        kept = len(search.tokenizer.encode(self.closing)) + options.answer_tokens
        self.most = search.room(search.root) - kept
        if search.sampling.max_tokens <= kept:
            raise UserError(
                f"budget_forcing keeps {kept} tokens for the answer (answer_tokens={options.answer_tokens} and the text before them), and "
                f"an answer has at most {search.sampling.max_tokens} in all: raise the limit of tokens, or lower answer_tokens"
            )
        if options.max_thinking is not None:
            self.most = min(self.most, options.max_thinking)

    async def run(self) -> SearchNode | None:
        """Return the end of the answer; None if the budget holds no token of it."""
        node = self.search.root
        while (left := self._thinking_left()) > 0:
            found = await self._sample(node, left, self.stop, self.stop_tokens)
            if found is None:
                break
            node = found
            num_end = self.search.num_end_tokens(node)
            self.num_thinking = node.num_answer_tokens - num_end
            if num_end == 0:
                break
            if not self._shall_wait():
                return await self._answer_behind(node)
            node = self._write(self.search.reopen(node), self.options.wait)
            self.num_thinking = node.num_answer_tokens
            self.num_waits += 1
        self.is_cut = True
        return await self._sample(self._write(node, self.closing), self.options.answer_tokens)

    def _thinking_left(self) -> int:
        """Return how many tokens may be sampled until the thinking is cut."""
        left = self.most - self.num_thinking
        return left if self.share is None else min(left, self.share - self.num_sampled - self.options.answer_tokens)

    def _shall_wait(self) -> bool:
        """Whether the end of the thinking is suppressed. Behind the written text there must be a token left to think."""
        options, num_wait = self.options, len(self.search.tokenizer.encode(self.options.wait))
        is_due = self.num_waits < options.waits or self.num_thinking < (options.min_thinking or 0)
        has_room = self.num_thinking + num_wait < self.most
        return is_due and has_room and self._thinking_left() > 0

    async def _answer_behind(self, node: SearchNode) -> SearchNode:
        """Return the end of the answer behind a thinking that the model has ended; the thinking itself if the answer ended with it."""
        if not node.is_open:
            return node
        return await self._sample(node, self.search.room(node)) or node

    async def _sample(
        self, parent: SearchNode, limit: int, stop: tuple[str, ...] = (), stop_tokens: tuple[int, ...] = ()
    ) -> SearchNode | None:
        limit = limit if self.share is None else min(limit, self.share - self.num_sampled)
        if limit < 1:
            return None
        found = await self.search.sample(parent, stop=stop, stop_tokens=stop_tokens, max_tokens=limit)
        self.num_sampled += sum(len(node.tokens) for node in found)
        return found[0] if found else None

    def _write(self, parent: SearchNode, text: str) -> SearchNode:
        node = self.search.write(parent, text, has_control=True)
        self.num_written += len(node.tokens)
        return node
