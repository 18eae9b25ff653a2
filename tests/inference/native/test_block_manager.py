"""Blocks under any sequence of events: none leaks, none is allocated twice, cached prefixes have the right content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from burnish.core.engine import Completion
from burnish.inference.native.block_manager import BlockManager
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder

SIZE, TOTAL = 3, 9


class Accounts(RuleBasedStateMachine):
    """Rows are admitted, share, grow and end; a plain model keeps the same accounts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(TOTAL + 1, SIZE)
        self.rows: list[tuple[tuple[int, ...], list[int]]] = []  # context and the blocks held
        self.written: dict[int, tuple[int, ...]] = {}  # of a full block: all tokens up to its end

    def held(self) -> Counter[int]:
        return Counter(block for _, blocks in self.rows for block in blocks)

    def take(self, number: int) -> list[int]:
        before = self.held()
        taken = self.blocks.allocate(number)
        assert len(set(taken)) == number
        assert not set(taken) & set(before), "a block that is in use"
        assert 0 not in taken
        for block in taken:
            self.written.pop(block, None)
        return taken

    @rule(context=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), publish=st.booleans())
    def admit(self, context: tuple[int, ...], publish: bool) -> None:
        found = self.blocks.match_prefix(context)
        assert len(found) <= (len(context) - 1) // SIZE, "the last token is always computed"
        for k, block in enumerate(found):
            assert self.written[block] == context[: (k + 1) * SIZE]
        fresh = self.blocks.num_blocks_for(len(context)) - len(found)
        assert self.blocks.num_blocks_for(len(context)) == (len(context) + SIZE - 1) // SIZE
        if fresh + sum(block in self.blocks.evictable for block in found) > self.blocks.num_available:
            return
        self.blocks.acquire(found)
        self.rows.append((context, [*found]))
        mine = self.rows[-1][1]
        mine += self.take(fresh)
        for k, block in enumerate(mine[: len(context) // SIZE]):
            self.written[block] = context[: (k + 1) * SIZE]
        if publish:
            self.blocks.cache_prefix(context, mine)
            assert len(self.blocks.match_prefix((*context, 0))) == len(context) // SIZE

    @precondition(lambda self: self.rows and self.blocks.num_available)
    @rule(which=st.integers(0, 99))
    def join(self, which: int) -> None:
        """A sample of a context that is being computed: its full blocks are shared, the partial one is not."""
        context, blocks = self.rows[which % len(self.rows)]
        shared = blocks[: len(context) // SIZE]
        self.blocks.acquire(shared)
        self.rows.append((context, [*shared]))
        self.rows[-1][1].extend(self.take(1))

    @precondition(lambda self: self.rows and self.blocks.num_available)
    @rule(which=st.integers(0, 99), number=st.integers(1, 3))
    def grow(self, which: int, number: int) -> None:
        more = self.take(min(number, self.blocks.num_available))
        self.rows[which % len(self.rows)][1].extend(more)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        _, blocks = self.rows.pop(which % len(self.rows))
        self.blocks.release(blocks)

    @rule()
    def forget(self) -> None:
        self.blocks.clear_prefix_cache()
        assert all(not self.blocks.match_prefix((*context, 0)) for context, _ in self.rows)

    @invariant()
    def accounts_agree(self) -> None:
        held, blocks = self.held(), self.blocks
        assert blocks.ref_counts == [held[block] for block in range(TOTAL + 1)]
        assert sorted([*blocks.free, *blocks.evictable, *held]) == list(range(1, TOTAL + 1))
        assert blocks.num_available == TOTAL - len(held)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_releasing_a_block_too_often_is_an_error() -> None:
    blocks = BlockManager(4, SIZE)
    taken = blocks.allocate(2)
    blocks.release(taken)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(taken)


def test_the_least_recently_used_prompt_is_evicted_first_and_its_end_before_its_beginning() -> None:
    blocks = BlockManager(1 + 6, 1)
    contexts = [(0, 1, 2), (3, 4, 5)]
    for context in contexts:
        mine = blocks.allocate(3)
        blocks.cache_prefix(context, mine)
        blocks.release(mine)
    blocks.acquire(blocks.match_prefix((0, 1, 2, 9)))
    blocks.release(blocks.match_prefix((0, 1, 2, 9)))  # used again: now the other one is the least recently used
    left = []
    for _ in range(6):
        blocks.allocate(1)
        left.append(tuple(len(blocks.match_prefix((*context, 9))) for context in contexts))
    assert left == [(3, 2), (3, 1), (3, 0), (2, 0), (1, 0), (0, 0)]


# --- the engine --------------------------------------------------------------------------------------------------------------

SUBMIT = st.tuples(st.just("submit"), st.lists(st.integers(0, 69), min_size=2, max_size=9))
OTHERS = [
    st.tuples(st.just("stream"), st.integers(1, 4)),
    st.tuples(st.just("take"), st.just(1)),
    st.tuples(st.sampled_from(["keep", "drop"]), st.sets(st.integers(0, 12), min_size=1, max_size=4)),
    st.tuples(st.just("rest"), st.none()),
]
ACTIONS = st.builds(
    lambda first, then: [first, *then], SUBMIT, st.lists(st.one_of(SUBMIT, SUBMIT, *OTHERS), min_size=4, max_size=14)
)
ENGINES = st.fixed_dictionaries(
    {"max_rows": st.integers(1, 6), "num_blocks": st.integers(9, 20), "steps_per_launch": st.sampled_from([1, 2, 5, 8])}
)


@pytest.fixture(scope="module")
def model(tools: Any) -> Iterator[Decoder]:
    """A small decoder with blocks of 4 tokens: short requests cross many borders, and blocks often run out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burnish.inference.native.paged_engine.BLOCK_SIZE", 4)
        yield tools.decoder(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_size=16)


@pytest.fixture(scope="module")
def whole(tools: Any, native: Any, model: Decoder) -> dict[str, Completion]:
    """Every request of the pool, by the dense engine without interruptions."""
    found = tools.run(DenseEngine(model), native.pool())
    native.agree(tools, model, found, native.pool())
    return found


@settings(max_examples=30, deadline=None)
@given(options=ENGINES, actions=ACTIONS)
def test_whatever_happens_every_request_is_answered_and_no_block_leaks(
    native: Any, model: Decoder, whole: dict[str, Completion], options: dict[str, int], actions: list[tuple[str, Any]]
) -> None:
    native.play(PagedEngine(model, **options), actions, whole)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(options=ENGINES, actions=ACTIONS)
def test_ten_thousand_sequences_leave_no_block_and_no_request(
    native: Any, model: Decoder, whole: dict[str, Completion], options: dict[str, int], actions: list[tuple[str, Any]]
) -> None:
    native.play(PagedEngine(model, **options), actions, whole)
