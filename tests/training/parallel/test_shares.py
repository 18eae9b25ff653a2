"""Shares of a mini-batch: each sequence once, groups whole, work even."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.config.placement import Parallel
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.training.parallel.ranks import SOLO, shares

LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 40)), max_size=24)


def make_batch(shapes: list[tuple[int, int]], shared: int = 0, grouped: bool = True) -> Batch:
    """(group, length) of each sequence; the first `shared` tokens of a group are the same."""
    lengths = torch.tensor([length for _, length in shapes], dtype=torch.long)
    tokens = [group if k < shared else 100 + i for i, (group, length) in enumerate(shapes) for k in range(length)]
    groups = {"group_ids": torch.tensor([group for group, _ in shapes], dtype=torch.long)} if grouped else {}
    return Batch(torch.tensor(tokens, dtype=torch.long), offsets_from_lengths(lengths), sequence=groups)


@given(shapes=LENGTHS, num_ranks=st.integers(1, 9), grouped=st.booleans())
def test_every_sequence_is_in_one_share_and_no_group_in_two(
    shapes: list[tuple[int, int]], num_ranks: int, grouped: bool
) -> None:
    found = shares(make_batch(shapes, grouped=grouped), num_ranks)
    assert len(found) == num_ranks
    assert sorted(i for share in found for i in share.tolist()) == list(range(len(shapes)))
    assert all(share.tolist() == sorted(share.tolist()) for share in found)
    if grouped:
        owners = [{shapes[i][0] for i in share.tolist()} for share in found]
        assert sum(map(len, owners)) == len({group for group, _ in shapes})


def test_work_is_even_although_lengths_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 2000, (64,), generator=generator).tolist()
    found = shares(make_batch(list(enumerate(lengths))), 4, attention_cost=1e-3)
    costs = [sum(lengths[i] + 1e-3 * lengths[i] ** 2 for i in share.tolist()) for share in found]
    assert max(costs) < 1.01 * min(costs)


def test_attention_counts_in_the_balance() -> None:
    batch = make_batch([(0, 100), (1, 60), (2, 60), (3, 20)])
    by_length, by_square = (shares(batch, 2, attention_cost) for attention_cost in (0.0, 1e6))
    assert sorted(share.tolist() for share in by_length) == [[0, 3], [1, 2]]
    assert sorted(share.tolist() for share in by_square) == [[0], [1, 2, 3]]


def test_a_shared_prompt_counts_once() -> None:
    shapes = [(0, 100), (0, 100), (0, 100), (1, 100), (2, 60), (3, 110)]
    alike, apart = (shares(make_batch(shapes, shared), 2, attention_cost=0.0) for shared in (90, 0))
    assert {tuple(share.tolist()) for share in apart} == {(0, 1, 2), (3, 4, 5)}  # 300 and 270
    assert {tuple(share.tolist()) for share in alike} == {(0, 1, 2, 4), (3, 5)}  # 90 + 30 + 60 and 210


def test_fewer_groups_than_ranks_leave_shares_empty() -> None:
    found = shares(make_batch([(4, 3), (4, 9)]), 3)
    assert sorted(share.tolist() for share in found) == [[], [], [0, 1]]
    assert all(share.dtype == torch.long for share in found)


def test_one_process_alone_keeps_the_batch_and_adds_nothing() -> None:
    batch = make_batch([(0, 3), (1, 2)])
    assert SOLO.share(batch) is batch
    assert SOLO.total({"a": 1.5}) == {"a": 1.5}
    assert SOLO.most(3) == 3
    assert SOLO.anyone(True)
    assert not SOLO.anyone(False)
    whole = SOLO.whole(batch, {"logp": torch.zeros(5)})
    assert whole.batch is batch
    assert torch.equal(torch.arange(5)[whole.mine], torch.arange(5))


def test_sizes_must_make_the_number_of_processes() -> None:
    assert Parallel().sizes(8) == (1, 8, 1, 1)
    assert Parallel(replicate=2, tensor=2).sizes(8) == (2, 2, 1, 2)
    assert Parallel(sequence=4, shard=2).sizes(8) == (1, 2, 4, 1)
    for wrong in (Parallel(tensor=3), Parallel(shard=4), Parallel(replicate=16)):
        with pytest.raises(UserError, match="does not make 8 processes"):
            wrong.sizes(8)
