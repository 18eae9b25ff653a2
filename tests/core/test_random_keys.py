"""Random keys and the noise they give: a function of what it is for, the same bits everywhere, and uniform."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.random_keys import (
    GOLDEN,
    MULTIPLIER_1,
    MULTIPLIER_2,
    fold,
    hash_text,
    mix,
    permutation,
    sample_key,
    to_int64,
    uniform_from_key,
    uniforms,
)

WORD = 1 << 64
KEYS = st.integers(0, WORD - 1)
DRAW: dict[str, Any] = {"seed": 3, "stream": "train", "prompt_id": "p", "visit": 0, "sample": 2}


def unmix(y: int) -> int:
    """The inverse of SplitMix64's finaliser, to ask for the key that gives chosen bits."""

    def unshift(x: int, by: int) -> int:
        result = x
        for _ in range(64 // by):
            result = x ^ (result >> by)
        return result

    y = unshift(y, 31) * pow(MULTIPLIER_2, -1, WORD) % WORD
    y = unshift(y, 27) * pow(MULTIPLIER_1, -1, WORD) % WORD
    return unshift(y, 30)


def test_the_mixing_function_is_splitmix64() -> None:
    def outputs(seed: int) -> list[int]:
        return [mix(seed + i * GOLDEN) for i in range(1, 6)]

    # The published outputs of the generator for these two seeds.
    assert outputs(0)[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert outputs(1234567) == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(KEYS)
def test_the_mixing_function_is_a_bijection(key: int) -> None:
    assert unmix(mix(key)) == key


def test_the_same_draw_always_has_the_same_key() -> None:
    assert sample_key(**DRAW) == sample_key(**DRAW) == 0x666389F671D359A0


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"stream": "eval"}, {"stream": "baseline"}, {"prompt_id": "q"}, {"visit": 1}, {"sample": 3}],
)
def test_any_other_draw_has_another_key_and_other_noise(change: dict[str, Any]) -> None:
    one, other = (torch.tensor([to_int64(sample_key(**d))]).expand(50) for d in (DRAW, DRAW | change))
    positions = torch.arange(50)
    assert not bool((uniforms(one, positions) == uniforms(other, positions)).any())


def test_parts_do_not_run_into_each_other() -> None:
    keys = [sample_key(s, t, p, v, i) for s in range(4) for t in ("train", "eval") for p in "ab" for v in range(4) for i in range(8)]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert fold(1, 2) != fold(2, 1)
    assert fold("ab", "c") != fold("a", "bc")


def test_an_unknown_stream_is_refused() -> None:
    with pytest.raises(KeyError):
        sample_key(**(DRAW | {"stream": "test"}))


def test_text_hashes_do_not_depend_on_the_process() -> None:
    expected = hashlib.blake2b("prüfung".encode(), digest_size=8).digest()
    assert hash_text("prüfung") == sum(byte << (8 * i) for i, byte in enumerate(expected))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(KEYS, st.integers(0, 10**6)), min_size=1, max_size=8))
def test_torch_noise_equals_its_python_twin_bit_for_bit(pairs: list[tuple[int, int]]) -> None:
    keys = torch.tensor([to_int64(k) for k, _ in pairs])
    got = uniforms(keys, torch.tensor([p for _, p in pairs]))
    assert got.dtype == torch.float64
    assert got.tolist() == [((mix(k + (p + 1) * GOLDEN) >> 12) + 0.5) / 2**52 for k, p in pairs]


@settings(max_examples=100, deadline=None)
@given(st.one_of(KEYS, st.sampled_from([0, WORD - 1, 1 << 63, (1 << 63) - 1, 1 << 11, WORD - (1 << 11)])))
def test_noise_lies_strictly_between_0_and_1_whatever_the_bits(bits: int) -> None:
    key = (unmix(bits) - GOLDEN) % WORD
    assert 0 < float(uniforms(torch.tensor([to_int64(key)]), torch.tensor([0]))) < 1
    assert 0 <= uniform_from_key(unmix(bits)) < 1


def test_signed_keeps_the_bits() -> None:
    assert [to_int64(v) for v in (0, (1 << 63) - 1, 1 << 63, WORD - 1)] == [0, (1 << 63) - 1, -(1 << 63), -1]


def chi_square(cells: list[int], num_cells: int) -> float:
    expected = len(cells) / num_cells
    counts = Counter(cells)
    return sum((counts[c] - expected) ** 2 / expected for c in range(num_cells))


def test_noise_is_uniform_alone_and_in_pairs() -> None:
    """Fixed keys, so this cannot flicker; bounds are the 99.9% points of chi-square with 31 and 63 degrees."""
    keys = torch.tensor([to_int64(sample_key(0, "train", f"p{i // 8}", 0, i % 8)) for i in range(256)])
    table = uniforms(keys[:, None].expand(-1, 128), torch.arange(128).expand(256, -1))  # [sample, position]
    assert chi_square((table * 32).long().flatten().tolist(), 32) < 61.1
    cells = (table * 8).long()
    along = cells[:, ::2] * 8 + cells[:, 1::2]
    across = cells[::2] * 8 + cells[1::2]
    assert chi_square(along.flatten().tolist(), 64) < 103.5
    assert chi_square(across.flatten().tolist(), 64) < 103.5


def test_noise_of_a_row_does_not_depend_on_its_batch_mates() -> None:
    keys, positions = torch.arange(20) * 7919, torch.arange(20) % 5
    together = uniforms(keys, positions)
    alone = torch.cat([uniforms(keys[i : i + 1], positions[i : i + 1]) for i in range(20)])
    assert torch.equal(together, alone)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 60), KEYS)
def test_a_permutation_permutes(size: int, key: int) -> None:
    assert sorted(permutation(size, key)) == list(range(size))


def test_a_permutation_depends_on_its_key_alone() -> None:
    # From an implementation of SplitMix64 and of the fold written apart from this one.
    assert permutation(10, 7, "epoch", 0) == [3, 9, 2, 7, 5, 4, 8, 6, 0, 1]
    assert permutation(10, 7, "epoch", 1) != permutation(10, 7, "epoch", 0)


def test_every_place_of_a_permutation_is_equally_likely() -> None:
    first = [permutation(8, seed)[0] for seed in range(800)]
    assert chi_square(first, 8) < 24.4  # 99.9% point with 7 degrees
