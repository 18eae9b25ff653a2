"""Images in trajectories and batches: positions, one copy of each, and what compares as equal."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from burnish.core.batch import Batch
from burnish.core.pictures import Picture, PictureSpan, distinct_tokens
from burnish.core.serialization import batch_from_arrays, batch_to_arrays
from burnish.core.trajectory import TokenNode, Trajectory, chain_nodes, pack
from burnish.distributed.batch_dispatch import plan_from_owners, shard_batch
from burnish.rollout.scoring import from_arrays, to_arrays
from burnish.training.packing import prefix_trees

PAD = 9
"""The placeholder token."""


def picture(seed: int, grid: tuple[int, int, int] = (1, 2, 2), seconds: float | None = None) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (grid[0], 4 * grid[1], 4 * grid[2], 3), dtype=np.uint8)
    return Picture(pixels, grid, seconds)


def read(parent: int, before: int, *pictures: Picture) -> TokenNode:
    """A node that was read: `before` words, and images with a word behind each."""
    tokens, spans = list(range(1, before + 1)), list[PictureSpan]()
    for one in pictures:
        spans.append(PictureSpan(len(tokens), one))
        tokens += [PAD] * one.num_tokens + [8]
    return TokenNode(parent, np.array(tokens), pictures=tuple(spans))


def written(parent: int, *tokens: int) -> TokenNode:
    logp = np.full(len(tokens), -1.0, dtype=np.float32)
    return TokenNode(parent, np.array(tokens), logp, np.zeros(len(tokens), dtype=np.int32))


def sample(number: int, nodes: list[TokenNode], prompt: str = "p") -> Trajectory:
    return Trajectory(prompt, 0, number, nodes, "stop", "", reward=1.0, metadata={"prompt_length": 1})


def forked(number: int) -> list[TokenNode]:
    """A prompt with one image, an answer, and two branches with an image each."""
    return [
        read(-1, 2, picture(0)),
        written(0, 20 + number),
        read(1, 1, picture(1)),
        written(2, 30),
        read(1, 3, picture(2, (2, 1, 1), 0.5), picture(0)),
        written(4, 40),
    ]


def spans_of(batch: Batch) -> list[list[tuple[int, int]]]:
    return [[(span.start, span.picture.key) for span in own] for own in batch.picture_spans()]


def test_every_path_has_the_images_of_its_nodes_where_their_placeholders_are() -> None:
    trajectory = sample(0, forked(0))
    for path in trajectory.sequences:
        for span in path.pictures:
            assert path.tokens[span.start : span.end].tolist() == [PAD] * span.picture.num_tokens
    starts = [[span.start for span in path.pictures] for path in trajectory.sequences]
    assert starts == [[2, 9], [2, 11, 14]]


def test_a_batch_has_each_image_once_through_all_its_verbs() -> None:
    text_only = sample(0, [read(-1, 3), written(0, 5)], "q")
    batch = pack([sample(0, forked(0)), sample(1, forked(1)), text_only])
    assert len(batch.pictures) == 3
    own = spans_of(batch)
    assert [len(spans) for spans in own] == [2, 3, 2, 3, 0]
    chosen = batch.select(torch.tensor([3, 0]))
    assert spans_of(chosen) == [own[3], own[0]]
    assert spans_of(Batch.merge(list(batch.split([torch.tensor([4, 1]), torch.tensor([2])])))) == [
        own[4],
        own[1],
        own[2],
    ]
    mixed = Batch.merge([pack([text_only]), chosen])
    assert spans_of(mixed) == [[], own[3], own[0]]
    assert chosen.spans_within(int(chosen.offsets[1]), int(chosen.offsets[1]) + 7)[0].picture.key == own[0][0][1]
    for start, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        for span in batch.spans_within(start + 1, end):
            assert batch.tokens[start + 1 + span.start] == PAD


def test_a_text_batch_has_no_picture_columns() -> None:
    batch = pack([sample(0, [read(-1, 3), written(0, 5)])])
    assert not batch.ragged
    assert not batch.pictures
    assert batch.picture_spans() == []


def test_messages_and_shards_have_the_images_that_they_read_and_no_others() -> None:
    nodes = [[read(-1, 2, picture(k)), written(0, 5)] for k in range(3)]
    batch = pack([sample(k, own, f"p{k}") for k, own in enumerate(nodes)])
    back = batch_from_arrays(batch_to_arrays(batch.select(torch.tensor([2, 0]))))
    assert set(back.pictures) == {picture(0).key, picture(2).key}
    for span, expected in zip([own[0] for own in back.picture_spans()], (picture(2), picture(0)), strict=True):
        np.testing.assert_array_equal(span.picture.pixels, expected.pixels)
    plan = plan_from_owners(np.array([0, 1, 0]), 2, batch.offsets.numpy())
    first, second = (batch_from_arrays(part.arrays) for part in shard_batch(batch, plan).parts)
    assert set(first.pictures) == {picture(0).key, picture(2).key}
    assert set(second.pictures) == {picture(1).key}


def test_a_journal_gives_the_same_images_back_and_stores_each_once() -> None:
    trajectories = [sample(k, forked(k)) for k in range(4)]
    arrays = to_arrays(trajectories)
    assert sum(array.nbytes for array in arrays.values() if array.ndim == 4) == sum(
        one.pixels.nbytes for one in (picture(0), picture(1), picture(2, (2, 1, 1)))
    )
    back = from_arrays(arrays)
    for old, new in zip(trajectories, back, strict=True):
        for before, after in zip(old.nodes, new.nodes, strict=True):
            assert [s.start for s in after.pictures] == [s.start for s in before.pictures]
            for one, other in zip(before.pictures, after.pictures, strict=True):
                np.testing.assert_array_equal(other.picture.pixels, one.picture.pixels)
                assert other.picture.grid == one.picture.grid
                assert other.picture.seconds_per_frame == one.picture.seconds_per_frame
                assert other.picture.key == replace(other.picture).key  # the stored key is that of the content


def test_sequences_share_an_image_only_if_it_is_the_same() -> None:
    """Placeholder tokens are equal for all images, so that token ids alone would share the features of another one."""
    same = [sample(k, [read(-1, 2, picture(0)), written(0, 5 + k)]) for k in range(2)]
    other = [sample(k, [read(-1, 2, picture(k)), written(0, 5 + k)]) for k in range(2)]
    assert prefix_trees(pack(same))[0].shared == [0, 7]
    assert prefix_trees(pack(other))[0].shared == [0, 2]


def test_distinct_tokens_differ_by_image_and_place_and_survive_a_pickle() -> None:
    spans = [PictureSpan(1, picture(0)), PictureSpan(6, picture(1))]
    tokens = [1, *[PAD] * 4, 2, *[PAD] * 4]
    found = distinct_tokens(tokens, spans)
    assert len({number for number in found if number < 0}) == 8
    assert [found[0], found[5]] == [1, 2]
    assert distinct_tokens(tokens, pickle.loads(pickle.dumps(spans))) == found


def test_an_image_outside_its_node_is_refused() -> None:
    node = TokenNode(-1, np.array([PAD, PAD]), pictures=(PictureSpan(0, picture(0)),))
    with pytest.raises(ValueError, match="node 0"):
        _ = sample(0, [node]).sequences


def test_a_chain_gives_its_nodes_their_images() -> None:
    (path,) = sample(0, [read(-1, 2, picture(0)), written(0, 5, 6), read(1, 1, picture(1)), written(2, 7)]).sequences
    nodes = chain_nodes(path.tokens, path.action_mask, path.behaviour_logp, path.version, pictures=path.pictures)
    assert [[span.start for span in node.pictures] for node in nodes] == [[2], [], [1], []]
