"""Pages under any sequence of events: none leaks, none is given out twice, what is found is what was written."""

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
    """Rows that come, share, grow and leave, beside accounts kept the plain way."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = BlockManager(TOTAL + 1, SIZE)
        self.rows: list[tuple[tuple[int, ...], list[int]]] = []  # context and the pages held
        self.written: dict[int, tuple[int, ...]] = {}  # of a full page: all tokens up to its end

    def held(self) -> Counter[int]:
        return Counter(page for _, pages in self.rows for page in pages)

    def take(self, number: int) -> list[int]:
        before = self.held()
        taken = self.pages.take(number)
        assert len(set(taken)) == number
        assert not set(taken) & set(before), "a page that somebody holds"
        assert 0 not in taken
        for page in taken:
            self.written.pop(page, None)
        return taken

    @rule(context=st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple), publish=st.booleans())
    def admit(self, context: tuple[int, ...], publish: bool) -> None:
        found = self.pages.match(context)
        assert len(found) <= (len(context) - 1) // SIZE, "the last token is always computed"
        for k, page in enumerate(found):
            assert self.written[page] == context[: (k + 1) * SIZE]
        fresh = self.pages.needed(len(context)) - len(found)
        assert self.pages.needed(len(context)) == (len(context) + SIZE - 1) // SIZE
        if fresh + sum(page in self.pages.idle for page in found) > self.pages.available:
            return
        self.pages.hold(found)
        self.rows.append((context, [*found]))
        mine = self.rows[-1][1]
        mine += self.take(fresh)
        for k, page in enumerate(mine[: len(context) // SIZE]):
            self.written[page] = context[: (k + 1) * SIZE]
        if publish:
            self.pages.publish(context, mine)
            assert len(self.pages.match((*context, 0))) == len(context) // SIZE

    @precondition(lambda self: self.rows and self.pages.available)
    @rule(which=st.integers(0, 99))
    def join(self, which: int) -> None:
        """A sample of a context that is being computed: its full pages are shared, the partial one is not."""
        context, pages = self.rows[which % len(self.rows)]
        shared = pages[: len(context) // SIZE]
        self.pages.hold(shared)
        self.rows.append((context, [*shared]))
        self.rows[-1][1].extend(self.take(1))

    @precondition(lambda self: self.rows and self.pages.available)
    @rule(which=st.integers(0, 99), number=st.integers(1, 3))
    def grow(self, which: int, number: int) -> None:
        more = self.take(min(number, self.pages.available))
        self.rows[which % len(self.rows)][1].extend(more)

    @precondition(lambda self: self.rows)
    @rule(which=st.integers(0, 99))
    def leave(self, which: int) -> None:
        _, pages = self.rows.pop(which % len(self.rows))
        self.pages.drop(pages)

    @rule()
    def forget(self) -> None:
        self.pages.forget()
        assert all(not self.pages.match((*context, 0)) for context, _ in self.rows)

    @invariant()
    def accounts_agree(self) -> None:
        held, pages = self.held(), self.pages
        assert pages.holders == [held[page] for page in range(TOTAL + 1)]
        assert sorted([*pages.free, *pages.idle, *held]) == list(range(1, TOTAL + 1))
        assert pages.available == TOTAL - len(held)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_page_dropped_more_often_than_held_is_a_mistake() -> None:
    pages = BlockManager(4, SIZE)
    taken = pages.take(2)
    pages.drop(taken)
    with pytest.raises(AssertionError, match="dropped more often"):
        pages.drop(taken)


def test_the_longest_unused_prompt_loses_its_pages_first_and_its_end_before_its_beginning() -> None:
    pages = BlockManager(1 + 6, 1)
    contexts = [(0, 1, 2), (3, 4, 5)]
    for context in contexts:
        mine = pages.take(3)
        pages.publish(context, mine)
        pages.drop(mine)
    pages.hold(pages.match((0, 1, 2, 9)))
    pages.drop(pages.match((0, 1, 2, 9)))  # used again: now the other is the oldest
    left = []
    for _ in range(6):
        pages.take(1)
        left.append(tuple(len(pages.match((*context, 9))) for context in contexts))
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
    {"max_rows": st.integers(1, 6), "num_pages": st.integers(9, 20), "window": st.sampled_from([1, 2, 5, 8])}
)


@pytest.fixture(scope="module")
def model(tools: Any) -> Iterator[Decoder]:
    """A small one, in pages of 4 tokens: short requests cross many borders, and rows run out of pages often."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("burnish.inference.native.paged_engine.BLOCK_SIZE", 4)
        yield tools.decoder(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_size=16)


@pytest.fixture(scope="module")
def whole(tools: Any, native: Any, model: Decoder) -> dict[str, Completion]:
    """Every request of the pool, undisturbed, by the other engine."""
    found = tools.run(DenseEngine(model), native.pool())
    native.agree(tools, model, found, native.pool())
    return found


@settings(max_examples=60, deadline=None)
@given(options=ENGINES, actions=ACTIONS)
def test_whatever_happens_every_request_is_answered_and_no_page_leaks(
    native: Any, model: Decoder, whole: dict[str, Completion], options: dict[str, int], actions: list[tuple[str, Any]]
) -> None:
    native.play(PagedEngine(model, **options), actions, whole)


@pytest.mark.slow
@settings(max_examples=10_000, deadline=None)
@given(options=ENGINES, actions=ACTIONS)
def test_ten_thousand_sequences_leave_no_page_and_no_request(
    native: Any, model: Decoder, whole: dict[str, Completion], options: dict[str, int], actions: list[tuple[str, Any]]
) -> None:
    native.play(PagedEngine(model, **options), actions, whole)
