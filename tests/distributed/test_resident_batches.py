"""What ranks keep of a batch is not sent again, and what they make of it is what they would have been sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.dispatch import dispatch
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.segments import offsets_from_lengths
from burnish.distributed.resident_batches import ResidentShardRef
from burnish.distributed.worker_group import WorkerGroup
from tests.distributed.in_process_backend import HereBackend

SAMPLES, LENGTH = 24, 200


class Rank:
    """Tells everything it was given."""

    def __init__(self, rank: int) -> None:
        self.seen: list[Batch] = []

    @dispatch("sequences", "sequences")
    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """Two columns."""
        self.seen.append(batch)
        return {"logp": batch.tokens * 0.5, "count": batch.lengths}

    @dispatch("sequences", "sequences")
    def update(self, batch: Batch, also: Batch | None = None) -> dict[str, Tensor]:
        """All columns, added up."""
        self.seen.append(batch)
        total = batch.tokens.double()
        for column in batch.token.values():
            total = total + column
        for column in [c for name, c in batch.sequence.items() if name != "place"]:
            total = total + column[batch.sequence_ids]
        return {"sum": total}


def expected(batch: Batch) -> Tensor:
    return Rank(0).update(batch)["sum"]


def batch_of(samples: int = SAMPLES, length: int = LENGTH, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (samples,), generator=generator)
    tokens = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    mask = torch.rand(len(tokens), generator=generator) < 0.7
    return Batch(
        tokens,
        offsets_from_lengths(lengths),
        {"action_mask": mask, "loss_mask": mask.clone()},
        {"group_ids": torch.arange(samples) // 2},
    )


def group_of(size: int, mini_batches: int = 1) -> tuple[WorkerGroup, HereBackend]:
    backend = HereBackend(Rank, size)
    return WorkerGroup("actor", Rank, backend, 5.0, mini_batches=mini_batches), backend


def bytes_of(backend: HereBackend) -> int:
    return backend.traffic.take().bytes_out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_batch_travels_once_and_its_mini_batches_are_named(size: int) -> None:
    group, backend = group_of(size, mini_batches=2)
    batch = batch_of()
    old = group.outputs(batch)
    everything = bytes_of(backend)
    masks = 2 * -(-batch.num_tokens // 8)  # a bit a token
    assert 0 <= everything - 4 * batch.num_tokens - masks <= 8 * (3 * batch.num_sequences + 2 * size)
    reference = group.outputs(batch)
    assert bytes_of(backend) < 100
    batch = batch.with_token(old_logp=old["logp"], ref_logp=reference["logp"]).with_sequence(counted=old["count"])
    for k in range(2):
        mini = batch.select(torch.arange(k * 12, k * 12 + 12))
        mini = mini.with_sequence(advantages=torch.arange(12).double())
        assert torch.equal(group.update(mini)["sum"], expected(mini))
        # Numbers of sequences, their places and advantages: nothing of any token.
        assert bytes_of(backend) == 3 * 8 * 12
    assert torch.equal(torch.cat([w.seen[0].tokens for w in backend.workers]).sort()[0], batch.tokens.sort()[0])


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_any_selection_of_selections_gives_what_sending_it_would(
    data: st.DataObject, size: int, mini_batches: int
) -> None:
    group, _ = group_of(size, mini_batches)
    batch = batch_of(8, 12)
    batch = batch.with_token(old_logp=group.outputs(batch)["logp"])
    for _ in range(data.draw(st.integers(1, 3))):
        chosen = data.draw(st.lists(st.integers(0, batch.num_sequences - 1), min_size=1, max_size=12))
        batch = batch.select(torch.tensor(chosen))
        if data.draw(st.booleans()):
            batch = batch.with_token(weight=torch.rand(batch.num_tokens))
        if data.draw(st.booleans()):
            batch = batch.with_token(old_logp=batch.token["old_logp"] * 2)
    assert torch.equal(group.update(batch)["sum"], expected(batch))


@pytest.mark.parametrize("what", ["the whole", "a selection", "neighbours"])
def test_a_column_that_was_changed_in_place_is_sent(what: str) -> None:
    group, backend = group_of(2)
    batch = batch_of()
    batch = batch.with_token(old_logp=group.outputs(batch)["logp"])
    index = torch.arange(12) if what == "neighbours" else torch.arange(0, 24, 2)
    if what == "the whole":
        batch.token["old_logp"].mul_(3)
    mini = batch.select(index)
    if what != "the whole":
        mini.token["old_logp"].mul_(3)
    bytes_of(backend)
    assert torch.equal(group.update(mini)["sum"], expected(mini))
    assert bytes_of(backend) > mini.num_tokens * 4


def test_a_mask_that_is_no_longer_a_copy_is_sent() -> None:
    group, backend = group_of(2)
    batch = batch_of()
    group.outputs(batch)
    bytes_of(backend)
    mini = batch.with_token(loss_mask=batch.loss_mask & (batch.positions > 3))
    assert torch.equal(group.update(mini)["sum"], expected(mini))
    assert batch.num_tokens / 8 <= bytes_of(backend) < batch.num_tokens / 8 + 1000


def test_a_second_batch_of_a_call_does_not_displace_the_first() -> None:
    group, backend = group_of(2)
    batch, also = batch_of(), batch_of(seed=1)
    group.outputs(batch)
    group.update(batch, also)
    bytes_of(backend)
    assert torch.equal(group.update(batch, also)["sum"], expected(batch))
    assert 4 * also.num_tokens < bytes_of(backend) < 8 * also.num_tokens
    other = batch_of(seed=2)
    assert torch.equal(group.update(other)["sum"], expected(other))
    assert torch.equal(group.update(batch)["sum"], expected(batch))  # which nobody has any more


def test_a_selection_that_would_leave_ranks_without_work_is_sent_anew() -> None:
    group, backend = group_of(2)
    batch = batch_of(length=50)
    group.outputs(batch)
    base = group._resident
    assert base is not None
    mine = torch.tensor([i for a, b in base.plan.sequences[0] for i in range(a, b)])
    mini = batch.select(mine)
    assert torch.equal(group.update(mini)["sum"], expected(mini))
    work = [worker.seen[-1].num_tokens for worker in backend.workers]
    assert max(work) < 1.3 * min(work)


def test_a_rank_that_does_not_have_a_batch_says_so() -> None:
    group, backend = group_of(1)
    batch = batch_of()
    group.outputs(batch)
    keeper: Any = backend.keepers[0]
    with pytest.raises(RuntimeError, match="this rank has batch 1 and was asked for 7"):
        keeper.open(replace(ResidentShardRef(1, 1), key=7))


@pytest.mark.parametrize("size", [1, 2])
def test_images_travel_with_the_batch_and_not_again_with_its_mini_batches(size: int) -> None:
    group, backend = group_of(size)
    pixels = [np.full((1, 32, 32, 3), k, dtype=np.uint8) for k in range(SAMPLES // 2)]
    spans = [(PictureSpan(3, Picture(pixels[k // 2], (1, 4, 4))),) for k in range(SAMPLES)]
    batch = batch_of().with_pictures(spans)
    group.outputs(batch)
    assert bytes_of(backend) > sum(p.nbytes for p in pixels)
    chosen = batch.select(torch.arange(0, SAMPLES, 2))
    group.update(chosen)
    assert bytes_of(backend) < pixels[0].nbytes
    seen = [span.picture.pixels for rank in backend.workers for own in rank.seen[-1].picture_spans() for span in own]
    assert sorted(int(p[0, 0, 0, 0]) for p in seen) == list(range(SAMPLES // 2))
