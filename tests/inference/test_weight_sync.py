"""Weight transfer in buckets: weights arrive bit for bit, whole or as deltas, and checksums depend on every bit."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from burnish.inference.weight_sync import (
    BLOCK_WORDS,
    BLOCKS_AT_ONCE,
    Publication,
    Publisher,
    apply_publication,
    checksum,
    decode_delta,
    digest,
    encode_delta,
    part_name,
    raw_bytes,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NAMES = ("embedding", "norm", "head", "bias")
SHAPES = ((7, 5), (5,), (3, 5), (1,))


def weights(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in zip(NAMES, SHAPES, strict=True)}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all((raw_bytes(one[name]) == raw_bytes(other[name])).all() for name in one)


def sent(publication: Publication) -> Publication:
    """A read-only copy, as from an object store."""
    found: Publication = pickle.loads(pickle.dumps(publication))
    for bucket in found.buckets:
        bucket.data.flags.writeable = False
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 64, 1 << 20])
def test_weights_arrive_in_buckets_of_any_size(dtype: torch.dtype, size: int) -> None:
    theirs, ours = weights(dtype, 1), weights(dtype, 2)
    publication = Publisher(lambda data: data, bucket_bytes=size).publish(3, theirs.items(), False, True)
    assert len(publication.buckets) == {1: 4, 64: len(publication.buckets), 1 << 20: 1}[size]
    apply_publication(sent(publication), ours, lambda data: data)
    assert same_bits(ours, theirs)
    assert publication.num_bytes == sum(t.nbytes for t in theirs.values())
    assert publication.checksums == {name: checksum(tensor) for name, tensor in ours.items()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_are_exact_over_many_versions(dtype: torch.dtype) -> None:
    theirs, ours = weights(dtype, 1), weights(dtype, 2)
    publisher = Publisher(lambda data: data, keeps_base=True, bucket_bytes=100)
    apply_publication(sent(publisher.publish(0, theirs.items(), as_delta=True, complete=True)), ours, lambda data: data)
    generator = torch.Generator().manual_seed(0)
    specials = torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=dtype)
    for version in range(1, 9):
        for tensor in theirs.values():
            moved = torch.rand(tensor.shape, generator=generator) < 0.3
            tensor[moved] = specials[version % 4] if version % 2 else tensor[moved] * 1.5
        publication = publisher.publish(version, theirs.items(), as_delta=True, complete=False)
        assert publication.base == version - 1
        apply_publication(sent(publication), ours, lambda data: data)
        assert same_bits(ours, theirs)
    assert any(entry.is_delta for entry in publication.entries)


def test_ranks_of_an_engine_get_their_parts_whole_as_deltas_and_again() -> None:
    """Rows for one rank, columns for both where they are cut so; the digests of the ranks add up to that of the publication."""

    def cut(name: str, tensor: Tensor, rank: int) -> Tensor:
        return tensor if tensor.dim() == 1 else tensor.tensor_split(2, 1)[rank]

    theirs = weights(torch.float32, 1)
    publisher = Publisher(lambda data: data, keeps_base=True, bucket_bytes=64, num_parts=2, cut=cut)
    ours = [{name: torch.zeros_like(cut(name, t, rank)).contiguous() for name, t in theirs.items()} for rank in (0, 1)]
    for version in range(3):
        theirs["embedding"][0, version] += 1.0
        published = publisher.publish(version, theirs.items(), as_delta=version > 0, complete=version == 0)
        found = {}
        for rank, parts in enumerate(ours):
            own = sent(published).of_rank(rank)
            assert own.num_bytes < published.num_bytes
            apply_publication(own, parts, lambda data: data)
            assert same_bits(parts, {name: cut(name, t, rank) for name, t in theirs.items()})
            found |= {part_name(name, rank, 2): checksum(tensor) for name, tensor in parts.items()}
        assert found == published.checksums
        assert (
            digest(found)
            == sum(digest({n: c for n, c in found.items() if n.endswith(f" {r}")}) for r in (0, 1)) % 2**64
        )
        assert (published.base is None) == (version == 0)
    again, late = publisher.publish_again(()), {name: torch.zeros_like(t) for name, t in ours[1].items()}
    apply_publication(again.of_rank(1), late, lambda data: data)
    assert same_bits(late, ours[1])


def test_what_changed_everywhere_is_sent_whole() -> None:
    theirs = weights(torch.float32)
    publisher = Publisher(lambda data: data, keeps_base=True)
    publisher.publish(0, theirs.items(), as_delta=False, complete=True)
    publication = publisher.publish(1, ((n, t + 1) for n, t in theirs.items()), as_delta=True, complete=True)
    assert not any(entry.is_delta for entry in publication.entries)


def test_a_step_at_a_small_learning_rate_changes_few_values_of_a_half_type() -> None:
    """AdamW moves a master weight by about the learning rate, 1e-6 here; most bfloat16 weights do not change."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(1 << 16, generator=generator) * 0.02
    publisher = Publisher(lambda data: data, keeps_base=True)
    publisher.publish(0, [("w", master.bfloat16())], as_delta=False, complete=True)
    master -= 1e-6 * torch.randn(master.shape, generator=generator).sign()
    publication = publisher.publish(1, [("w", master.bfloat16())], as_delta=True, complete=True)
    assert publication.num_bytes < 0.3 * master.numel() * 2
    ours = {"w": torch.zeros(1 << 16, dtype=torch.bfloat16)}
    apply_publication(
        Publisher(lambda data: data).publish(0, [("w", (master + 0).bfloat16())], False, True), ours, lambda data: data
    )
    assert torch.equal(ours["w"], master.bfloat16())


def test_a_tensor_of_another_shape_or_type_is_refused() -> None:
    publication = Publisher(lambda data: data).publish(0, [("w", torch.zeros(4))], False, True)
    for other in (torch.zeros(5), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"w is \d x torch.float\d\d here and 4 x torch.float32 at the trainer"):
            apply_publication(publication, {"w": other}, lambda data: data)


@given(st.binary(min_size=8, max_size=200), st.data())
def test_a_delta_is_exact_or_not_used(content: bytes, data: st.DataObject) -> None:
    item = data.draw(st.sampled_from([2, 4, 8]))
    old = np.frombuffer(content[: len(content) // 8 * 8], dtype=np.uint8)
    new = old.copy()
    for place in data.draw(st.lists(st.integers(0, len(new) - 1), max_size=6)):
        new[place] ^= data.draw(st.integers(0, 255))
    found = encode_delta(old, new, item)
    if found is None:
        assert len(old) // item // 8 + item * np.any((old != new).reshape(-1, item), 1).sum() + 1 >= len(new)
        return
    changed, values = decode_delta(found, len(new) // item, item)
    again = old.copy().reshape(-1, item)
    again[changed] = values.reshape(-1, item)
    assert (again.reshape(-1) == new).all()
    assert found.size < new.size


def test_a_torn_delta_is_noticed() -> None:
    old, new = np.zeros(64, dtype=np.uint8), np.zeros(64, dtype=np.uint8)
    new[8] = 1
    found = encode_delta(old, new, 4)
    assert found is not None
    with pytest.raises(ValueError, match="a delta of 1 values of 4 bytes holds 3 bytes"):
        decode_delta(found[:-1], 16, 4)


# --- checksums -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000])
def test_every_bit_counts(size: int) -> None:
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    seen = {checksum(tensor)}
    for bit in range(min(size, 20) * 8):
        other = tensor.clone()
        other[bit // 8] ^= 1 << bit % 8
        seen.add(checksum(other))
    assert len(seen) == min(size, 20) * 8 + 1


def test_changes_do_not_make_up_for_each_other() -> None:
    tensor = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = {checksum(tensor)}
    for i in range(64):
        for j in range(i):
            other = tensor.clone()
            other[[i, j]] *= -1
            seen.add(checksum(other))
    assert len(seen) == 64 * 63 // 2 + 1


def test_order_and_place_count() -> None:
    one, two = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([3.0, 4.0, 1.0, 2.0])
    assert checksum(one) != checksum(two)
    assert checksum(torch.cat([one, torch.zeros(8)])) != checksum(torch.cat([torch.zeros(8), one]))
    assert checksum(torch.zeros(8)) != checksum(torch.zeros(9))


def test_memory_layout_does_not_count() -> None:
    tensor = torch.randn(6, 4)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())


def test_blocks_are_chained_and_how_many_are_summed_at_once_makes_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.randn(3 * BLOCK_WORDS + 7, dtype=torch.float64)
    expected = checksum(tensor)
    moved = torch.cat([tensor[BLOCK_WORDS : 2 * BLOCK_WORDS], tensor[:BLOCK_WORDS], tensor[2 * BLOCK_WORDS :]])
    assert checksum(moved) != expected
    monkeypatch.setitem(BLOCKS_AT_ONCE, "cpu", 2)
    assert checksum(tensor) == expected
