"""Every mark on every backend: who is called with what, and how the results come together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.dispatch import Dispatch, WorkerLost, dispatch
from burnish.core.segments import offsets_from_lengths
from burnish.core.serialization import batch_from_arrays
from burnish.distributed.batch_dispatch import (
    MAX_BALANCED_PARTS,
    collect_results,
    greedy_partition,
    plan_shards,
    shard_batch,
)
from burnish.distributed.resident_batches import ResidentShard
from burnish.distributed.worker_group import LocalBackend, WorkerGone, WorkerGroup
from burnish.training.learner import Update
from tests.distributed.in_process_backend import HereBackend, Sent


class Worker:
    """Says what it was called with."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.told: list[Any] = []

    @dispatch("sequences", "sequences")
    def columns(self, batch: Batch, factor: float, also: tuple[Batch, str] | None = None) -> dict[str, Tensor]:
        """Columns of the batch."""
        seen = 0 if also is None else also[0].num_sequences
        return {
            "token": batch.tokens * factor,
            "sequence": batch.lengths,
            "also": torch.full((batch.num_tokens,), seen),
        }

    @dispatch("sequences", "sequences")
    def update(self, batch: Batch) -> Update:
        """One step."""
        return Update({"loss": 1.5, "rank": float(self.rank)}, batch.tokens.double(), None)

    @dispatch("broadcast", "list")
    def everyone(self, value: Any, more: int = 0) -> tuple[int, Any, int]:
        """The same for all."""
        return self.rank, value, more

    @dispatch("broadcast", "first")
    def one_answer(self) -> int:
        """Only the first one's answer."""
        return self.rank

    @dispatch("each", "list")
    def own(self, value: int, more: int = 0) -> tuple[int, int, int]:
        """An argument of one's own."""
        return self.rank, value, more

    @dispatch("first", "first")
    def first_alone(self) -> int:
        """Nobody else is asked."""
        self.told.append("asked")
        return self.rank

    @dispatch("broadcast", "nothing")
    def tell(self, what: str) -> None:
        """Be told something."""
        if what == "bad":
            raise UserError(f"rank {self.rank} does not like it")
        self.told.append(what)

    @dispatch("broadcast", "list", lane="side")
    def aside(self) -> int:
        """Not in the way of work."""
        return self.rank

    def unmarked(self) -> None:
        """No method of a group."""


def batch_of(lengths: list[int], groups: list[int] | None = None) -> Batch:
    tokens = torch.arange(sum(lengths))
    bounds = offsets_from_lengths(torch.tensor(lengths, dtype=torch.long))
    sequence = {"number": torch.arange(len(lengths)) * 10}
    if groups is not None:
        sequence["group_ids"] = torch.tensor(groups)
    ragged = {
        "parts": Ragged(torch.repeat_interleave(torch.arange(len(lengths)), 2), torch.arange(len(lengths) + 1) * 2)
    }
    mask = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(tokens, bounds, {"action_mask": mask, "twice": tokens * 2}, sequence, ragged)


def group_of(size: int, shares: list[int] | None = None) -> tuple[WorkerGroup, HereBackend]:
    backend = HereBackend(Worker, size)
    return WorkerGroup("worker", Worker, backend, deadline_s=0.2, shares=shares), backend


# --- marks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_columns_come_back_in_the_order_of_the_batch(size: int) -> None:
    group, backend = group_of(size)
    batch = batch_of([3, 1, 4, 1, 5], [0, 1, 0, 2, 2])
    found = group.columns(batch, 2.0)
    assert torch.equal(found["token"], batch.tokens * 2.0)
    assert torch.equal(found["sequence"], batch.lengths)
    sent = [decode_batch(call.parcel) for call in backend.sent]
    assert sum(part.num_sequences for part in sent) == 5
    assert max(part.num_sequences for part in sent) < 5 or size == 1  # each gets only its part


def decode_batch(parcel: Any) -> Batch:
    found: Batch = ResidentShard().open(parcel[0][0])
    return found


def test_of_a_record_columns_are_joined_and_the_rest_is_the_first_ranks() -> None:
    group, _ = group_of(2)
    batch = batch_of([3, 1, 4])
    update = group.update(batch)
    assert torch.equal(update.logp, batch.tokens.double())
    assert (update.stats, update.skipped, update.entropy) == ({"loss": 1.5, "rank": 0.0}, None, None)


def test_every_batch_among_the_arguments_is_divided() -> None:
    group, _ = group_of(2)
    found = group.columns(batch_of([2, 2]), 1.0, also=(batch_of([1, 1, 1, 1, 1, 1]), "text"))
    assert found["also"].tolist() == [3, 3, 3, 3]


def test_a_call_without_a_batch_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match="no argument of this call of worker is a batch"):
        group_of(2)[0].columns(3, 1.0)


def test_peers_of_a_share_get_copies_and_one_of_them_is_heard() -> None:
    group, backend = group_of(4, shares=[0, 0, 1, 1])
    batch = batch_of([3, 1, 4, 1])
    assert torch.equal(group.columns(batch, 1.0)["token"], batch.tokens.double())
    parts = [decode_batch(call.parcel).tokens.tolist() for call in backend.sent]
    assert parts[0] == parts[1] != parts[2] == parts[3]


def test_broadcast_each_first_and_nothing() -> None:
    group, backend = group_of(3)
    assert group.everyone("x", more=2) == [(0, "x", 2), (1, "x", 2), (2, "x", 2)]
    assert group.one_answer() == 0
    assert group.own([5, 6, 7], more=[1, 2, 3]) == [(0, 5, 1), (1, 6, 2), (2, 7, 3)]
    assert group.first_alone() == 0
    assert [bool(worker.told) for worker in backend.workers] == [True, False, False]
    assert group.tell("news") is None
    group.one_answer()
    assert [worker.told[-1] for worker in backend.workers] == ["news"] * 3
    assert group.aside() == [0, 1, 2]
    assert {call.lane for call in backend.sent if call.method == "aside"} == {"side"}
    with pytest.raises(ValueError, match="3 ranks: every argument is a list"):
        group.own([5, 6])


def test_every_call_can_be_begun_and_waited_for_later() -> None:
    group, backend = group_of(2)
    batch = batch_of([3, 1])
    pending = [
        group.columns.later(batch, 2.0),
        group.everyone.later(1),
        group.own.later([1, 2]),
        group.first_alone.later(),
    ]
    assert len(backend.sent) == 7
    found = [one.result() for one in pending]
    assert torch.equal(found[0]["token"], batch.tokens * 2.0)
    assert found[1:] == [[(0, 1, 0), (1, 1, 0)], [(0, 1, 0), (1, 2, 0)], 0]


def test_a_call_is_sent_with_what_another_group_has_yet_to_give() -> None:
    (givers, giving), (takers, taking) = group_of(2), group_of(3)
    pending = givers.one_answer.later()
    assert pending.promise() is giving.sent[0]
    calls = takers.send_same([0, 2], "everyone", pending, 7)
    assert [takers.result(call) for call in calls] == [(0, 0, 7), (2, 0, 7)]
    assert giving.traffic.bytes_in == 0
    assert pending.result() == 0
    assert pending.promise() is None  # it is there
    assert takers.result(takers.send(1, "everyone", pending)) == (1, 0, 0)
    giving.dead.add(0)
    lost = givers.one_answer.later()
    call = takers.send(1, "everyone", lost)
    with pytest.raises(WorkerLost, match="rank 0 of 2 has ended in `one_answer`"):
        lost.result()
    with pytest.raises(WorkerLost):
        takers.result(call)
    assert len(taking.sent) == 4


def test_the_error_of_a_call_nobody_waited_for_is_raised_by_the_next() -> None:
    group, _ = group_of(2)
    group.tell("bad")
    with pytest.raises(UserError, match="rank 0 does not like it"):
        group.one_answer()
    group.tell("good")
    assert group.one_answer() == 0


def test_marks_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'sequences'"):
        Dispatch("sequence")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not divided by"):
        dispatch("broadcast", "sequences")
    with pytest.raises(ValueError, match="no list"):
        dispatch("first", "list")
    with pytest.raises(AttributeError, match="'unmarked' that is marked"):
        group_of(1)[0].unmarked()
    with pytest.raises(AttributeError, match="did you mean 'columns'"):
        group_of(1)[0].column()


def test_in_this_process_a_call_is_a_call() -> None:
    worker = Worker(0)
    group = WorkerGroup("local", Worker, LocalBackend(worker), deadline_s=1)
    thing, batch = object(), batch_of([2, 3])
    assert group.everyone(thing)[0][1] is thing
    assert torch.equal(group.columns(batch, 3.0)["token"], batch.tokens * 3.0)
    group.tell("it")
    assert worker.told == ["it"]
    group.tell("bad")
    with pytest.raises(UserError, match="does not like it"):
        group.one_answer()


# --- who is lost ---------------------------------------------------------------------------------------------------------


def test_a_worker_that_ended_is_named_with_its_call_and_its_last_words() -> None:
    group, backend = group_of(3)
    backend.dead.add(1)
    with pytest.raises(
        WorkerLost, match=r"worker rank 1 of 3 has ended in `update` \(One step\): killed\nlast words of 1"
    ) as it:
        group.update(batch_of([1, 1, 1]))
    assert it.value.rank == 1


def test_a_worker_whose_end_another_one_noticed_is_named_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    group, backend = group_of(3)

    def value(token: Sent) -> Any:
        raise WorkerGone(f"killed (rank {token.rank} failed with it: connection closed)", 2)

    monkeypatch.setattr(backend, "value", value)
    words = (
        r"worker rank 2 of 3 has ended in `update` \(One step\): killed \(rank 0 failed with it: .*\)\nlast words of 2"
    )
    with pytest.raises(WorkerLost, match=words) as it:
        group.update(batch_of([1, 1, 1]))
    assert it.value.rank == 2


def test_a_wait_ends_at_its_deadline_and_says_who_was_waited_for_and_why() -> None:
    group, backend = group_of(3)
    backend.mute = {1, 2}
    words = r"worker ranks 1, 2 of 3 did not answer `everyone` \(The same for all\) in 0.2 s.*placement.timeout_s: \[1, 2\] sleep in everyone"
    with pytest.raises(WorkerLost, match=words):
        group.everyone(0)


def test_one_rank_can_be_asked_alone_and_replaced() -> None:
    group, backend = group_of(2)
    handle = group.send(1, "everyone", "x")
    assert group.ready([handle], 1.0) == [handle]
    assert (handle.rank, group.result(handle)) == (1, (1, "x", 0))
    backend.dead.add(1)
    with pytest.raises(WorkerLost):
        group.result(group.send(1, "everyone", "x"))
    group.restart(1)
    assert group.result(group.send(1, "everyone", "x")) == (1, "x", 0)


# --- dividing ------------------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 9), min_size=0, max_size=12)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_division_has_every_sequence_once_and_joins_to_the_whole(
    lengths: list[int], parts: int, num_mini_batches: int, groups: int, random: Any
) -> None:
    batch = batch_of(lengths, [random.randrange(groups) for _ in lengths])
    sent = shard_batch(batch, plan_shards(batch, parts, num_mini_batches))
    plan, pieces = sent.plan, [batch_from_arrays(part.arrays) for part in sent.parts]
    places = torch.cat([piece.sequence["place"] for piece in pieces])
    assert sorted(places.tolist()) == list(range(len(lengths)))
    for piece in pieces:
        expected = batch.select(piece.sequence["place"])
        assert torch.equal(piece.tokens, expected.tokens)
        assert torch.equal(piece.offsets, expected.offsets)
        assert torch.equal(piece.token["twice"], expected.token["twice"])
        assert torch.equal(piece.sequence["number"], expected.sequence["number"])
        assert torch.equal(piece.ragged["parts"].values, expected.ragged["parts"].values)
        assert torch.equal(piece.ragged["parts"].offsets, expected.ragged["parts"].offsets)
    assert torch.equal(collect_results([piece.tokens for piece in pieces], plan), batch.tokens)
    assert torch.equal(collect_results([piece.sequence["number"] for piece in pieces], plan), batch.sequence["number"])
    members = [set(piece.sequence["group_ids"].tolist()) for piece in pieces]
    assert sum(len(one) for one in members) == len(set().union(*members))  # no group is in two parts


def test_a_prompt_counts_once_for_the_samples_that_share_it() -> None:
    lengths, groups = [100, 100, 100, 100, 60, 60, 60], [0, 0, 0, 0, 1, 2, 3]
    batch = batch_of(lengths, groups)
    positions = batch.positions
    shared = batch.with_token(action_mask=(positions >= 90) | (batch.sequence_ids >= 4))
    # Without sharing the group costs 400 tokens, which no part of the others can match; with it 130.
    for parts, expected in ((2, [180, 400]), (3, [60, 120, 400])):
        plan = plan_shards(shared, parts, attention_cost=0.0)
        assert sorted(sum(b - a for a, b in plan.token_ranges(k)) for k in range(parts)) == expected


def test_columns_of_no_known_length_are_refused() -> None:
    batch = batch_of([2, 3])
    with pytest.raises(ValueError, match="neither one row per token nor one per sequence"):
        collect_results([torch.zeros(7), torch.zeros(1)], plan_shards(batch, 2))


def test_a_part_without_sequences_does_not_decide_the_type() -> None:
    plan = plan_shards(batch_of([2, 3], [0, 0]), 2)
    sizes = [sum(b - a for a, b in plan.token_ranges(part)) for part in range(2)]
    assert sorted(sizes) == [0, 5]
    parts = [torch.zeros(size, dtype=torch.float64 if size else torch.float32) for size in sizes]
    assert collect_results(parts, plan).dtype == torch.float64


def test_every_stretch_of_groups_is_divided_evenly_and_so_is_the_whole() -> None:
    lengths = [3, 9, 2, 8, 5, 5, 7, 3, 4, 6, 1, 9]
    plan = plan_shards(batch_of(lengths), 2, num_mini_batches=3, attention_cost=0.0)
    for k in range(3):
        inside = [[i for a, b in runs for i in range(a, b) if k * 4 <= i < k * 4 + 4] for runs in plan.sequences]
        sums = [sum(lengths[i] for i in part) for part in inside]
        assert abs(sums[0] - sums[1]) <= 2
    totals = [sum(b - a for a, b in plan.token_ranges(part)) for part in range(2)]
    assert abs(totals[0] - totals[1]) <= 2


@given(st.lists(st.floats(1, 50), min_size=1, max_size=300))
def test_many_parts_differ_by_no_more_than_one_item(costs: list[float]) -> None:
    parts = greedy_partition(costs, MAX_BALANCED_PARTS + 1)
    assert sorted(item for part in parts for item in part) == list(range(len(costs)))
    sums = np.array([sum(costs[item] for item in part) for part in parts])
    assert sums.max() - sums.min() <= max(costs) + 1e-9
