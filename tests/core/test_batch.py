"""The ragged batch: its verbs against plain Python lists of rows, and what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.batch import Batch, Ragged, from_padded, to_padded
from burnish.core.segments import offsets_from_lengths, segment_max, segment_mean, segment_sum


def make(lengths: list[int], inner: list[int]) -> Batch:
    """Every element of every column is different, so that nothing can be mistaken for anything else."""
    n, s, m = sum(lengths), len(lengths), sum(inner)
    return Batch(
        tokens=torch.arange(n) + 1000,
        offsets=offsets_from_lengths(torch.tensor(lengths, dtype=torch.int64)),
        token={
            "action_mask": torch.arange(n) % 3 != 0,
            "logp": -torch.arange(n, dtype=torch.float64) / 7,
            "wide": torch.arange(2 * n).view(n, 2),
        },
        sequence={"group_ids": torch.arange(s) // 2, "reward": torch.arange(s, dtype=torch.float64) / 3},
        ragged={"images": Ragged(torch.arange(m) + 5000, offsets_from_lengths(torch.tensor(inner, dtype=torch.int64)))},
    )


def rows(batch: Batch) -> list[dict[str, Any]]:
    """The batch as Python lists, one dictionary a sequence, cut by hand at the boundaries."""
    bounds = batch.offsets.tolist()
    result = []
    for i, (a, b) in enumerate(pairwise(bounds)):
        row: dict[str, Any] = {"tokens": batch.tokens.tolist()[a:b]}
        row |= {f"token/{k}": v.tolist()[a:b] for k, v in batch.token.items()}
        row |= {f"sequence/{k}": v.tolist()[i] for k, v in batch.sequence.items()}
        for name, ragged in batch.ragged.items():
            start, end = ragged.offsets.tolist()[i : i + 2]
            row[f"ragged/{name}"] = ragged.values.tolist()[start:end]
        result.append(row)
    return result


@st.composite
def batches(draw: st.DrawFn, min_size: int = 1) -> Batch:
    lengths = draw(st.lists(st.integers(0, 5), min_size=min_size, max_size=7))
    inner = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    return make(lengths, inner)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[Batch, list[Tensor]]:
    """A batch and its sequences shuffled into parts, empty ones among them."""
    batch = draw(batches())
    order = draw(st.permutations(range(batch.num_sequences)))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
    bounds = [0, *cuts, len(order)]
    return batch, [torch.tensor(order[a:b], dtype=torch.int64) for a, b in pairwise(bounds)]


@settings(max_examples=100, deadline=None)
@given(partitions())
def test_split_then_merge_is_the_identity_for_any_partition(case: tuple[Batch, list[Tensor]]) -> None:
    batch, parts = case
    merged = Batch.merge(list(batch.split(parts)))
    restored = merged.select(torch.cat(parts).argsort())
    assert rows(restored) == rows(batch)
    for kind in ("token", "sequence"):
        for name, column in getattr(batch, kind).items():
            assert getattr(restored, kind)[name].dtype == column.dtype, name


@settings(max_examples=100, deadline=None)
@given(batches(), st.data())
def test_select_takes_the_named_sequences_in_order_and_as_often_as_named(batch: Batch, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, batch.num_sequences - 1), max_size=10))
    before = rows(batch)
    assert rows(batch.select(torch.tensor(index, dtype=torch.int64))) == [before[i] for i in index]
    assert rows(batch) == before


def test_select_with_repeats_pinned() -> None:
    batch = make([2, 0, 3], [1, 2, 0]).select(torch.tensor([2, 0, 2]))
    assert batch.tokens.tolist() == [1002, 1003, 1004, 1000, 1001, 1002, 1003, 1004]
    assert batch.offsets.tolist() == [0, 3, 5, 8]
    assert batch.ragged["images"].values.tolist() == [5000]
    assert batch.ragged["images"].offsets.tolist() == [0, 0, 1, 1]


@settings(max_examples=50, deadline=None)
@given(st.lists(batches(min_size=0), min_size=1, max_size=4))
def test_merge_is_concatenation_of_rows(parts: list[Batch]) -> None:
    assert rows(Batch.merge(parts)) == [row for part in parts for row in rows(part)]


def test_derived_columns() -> None:
    batch = make([2, 0, 3], [0, 0, 0])
    assert (batch.num_tokens, batch.num_sequences) == (5, 3)
    assert batch.lengths.tolist() == [2, 0, 3]
    assert batch.sequence_ids.tolist() == [0, 0, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.action_mask is batch.token["action_mask"]


def test_adding_a_column_leaves_the_old_batch_alone() -> None:
    batch = make([2, 1], [1, 1])
    more = batch.with_token(logp=torch.zeros(3), loss_mask=torch.ones(3, dtype=torch.bool)).with_sequence(
        advantages=torch.tensor([1.0, 2.0])
    )
    assert more.token["logp"].tolist() == [0, 0, 0]
    assert more.loss_mask.tolist() == [True] * 3
    assert more.sequence["advantages"].tolist() == [1, 2]
    assert batch.token["logp"].tolist() == [0, -1 / 7, -2 / 7]
    assert "loss_mask" not in batch.token
    assert "advantages" not in batch.sequence


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))],
)
def test_moving_keeps_every_column(device: str) -> None:
    batch = make([2, 0, 3], [1, 2, 0])
    moved = batch.to(device)
    columns = [moved.tokens, moved.offsets, *moved.token.values(), *moved.sequence.values()]
    columns += [t for r in moved.ragged.values() for t in (r.values, r.offsets)]
    assert {c.device.type for c in columns} == {device}
    assert rows(moved) == rows(batch)


@settings(max_examples=100, deadline=None)
@given(batches(), st.integers(0, 3))
def test_padded_and_ragged_agree(batch: Batch, extra: int) -> None:
    values, lengths, ids, s = batch.token["logp"], batch.lengths, batch.sequence_ids, batch.num_sequences
    padded = to_padded(values, batch.offsets, fill=torch.nan)
    assert padded.shape == (s, int(lengths.max()))
    assert [row[:n] for row, n in zip(padded.tolist(), lengths.tolist(), strict=True)] == [
        row["token/logp"] for row in rows(batch)
    ]
    assert int(padded.isnan().sum()) == padded.numel() - batch.num_tokens
    torch.testing.assert_close(padded.nansum(1), segment_sum(values, ids, s))
    nonempty = lengths > 0
    torch.testing.assert_close(padded.nanmean(1)[nonempty], segment_mean(values, ids, s)[nonempty])
    if padded.shape[1]:
        highest = padded.nan_to_num(nan=-torch.inf).amax(1)
        assert torch.equal(highest, segment_max(values, ids, s))
    wider = torch.nn.functional.pad(padded, (0, extra), value=torch.nan)
    packed, offsets = from_padded(wider, lengths)
    assert torch.equal(packed, values)
    assert torch.equal(offsets, batch.offsets)


def test_padding_pinned() -> None:
    padded = to_padded(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1, 3]), fill=-1)
    assert padded.tolist() == [[1, -1], [-1, -1], [2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 2, 4])}, r"offsets run from 0 to 4, but there are 3 tokens"),
        ({"offsets": torch.tensor([1, 2, 3])}, r"offsets run from 1 to 3"),
        ({"token": {"logp": torch.zeros(2)}}, r"token column 'logp' has \(2,\), expected 3 rows"),
        ({"sequence": {"reward": torch.zeros(3)}}, r"sequence column 'reward' has \(3,\), expected 2 rows"),
        (
            {"ragged": {"images": Ragged(torch.zeros(1), torch.tensor([0, 1]))}},
            r"ragged column 'images' has 1 sequences, expected 2",
        ),
    ],
)
def test_columns_of_the_wrong_size_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"tokens": torch.arange(3), "offsets": torch.tensor([0, 2, 3])}
    Batch(**good)
    with pytest.raises(ValueError, match=message):
        Batch(**(good | change))


@pytest.mark.parametrize("kind", ["token", "sequence", "ragged"])
def test_merging_batches_with_different_columns_names_the_column(kind: str) -> None:
    plain = Batch(torch.arange(1), torch.tensor([0, 1]))
    column: Any = Ragged(torch.zeros(1), torch.tensor([0, 1])) if kind == "ragged" else torch.zeros(1)
    other = Batch(torch.arange(1), torch.tensor([0, 1]), **{kind: {"extra": column}})
    with pytest.raises(ValueError, match=rf"differ in {kind} columns: \['extra'\]"):
        Batch.merge([plain, other])


def test_neighbours_are_not_copied_and_a_selection_knows_where_it_is_from() -> None:
    lengths = torch.tensor([2, 3, 1, 4])
    mask = torch.arange(10) % 2 == 0
    batch = Batch(torch.arange(10), offsets_from_lengths(lengths), {"mask": mask}, {"number": torch.arange(4)})
    assert batch.select(torch.arange(4)) is batch
    for index, shared in ((torch.tensor([1, 2]), True), (torch.tensor([2, 1]), False), (torch.tensor([1, 1]), False)):
        part = batch.select(index)
        assert (part.token["mask"].untyped_storage().data_ptr() == mask.untyped_storage().data_ptr()) is shared
        assert part.sequence["number"].tolist() == index.tolist()
        assert part.offsets.tolist() == [0, *torch.cumsum(lengths[index], 0).tolist()]
        assert part.origin is not None
        assert part.origin.batch is batch
        assert part.origin.index.tolist() == index.tolist()
        changed = part.with_token(mask=~part.token["mask"])
        assert changed.origin is part.origin
        assert changed.token["mask"] is not part.origin.token["mask"]
    assert batch.select(torch.arange(0)).num_sequences == 0
