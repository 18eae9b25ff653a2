"""Counter-based random keys: randomness as a function of what it is for, never of when or beside whom it is drawn.

A key is a 64-bit integer folded from (run seed, stream, prompt id, visit, sample index). Each position of a sample
then takes its own number from the key (`burnish.core.noise`). The mixing function is the finaliser of SplitMix64
(Steele, Lea and Flood, 2014), a bijection on 64 bits with full avalanche. Pure Python: no torch, no numpy.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

STREAMS = {"train": 1, "eval": 2, "baseline": 3}


def mix(x: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit integer."""
    x &= MASK
    x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK
    x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK
    return x ^ (x >> 31)


def fold(*parts: int | str) -> int:
    """One unsigned 64-bit key from a sequence of integers and strings; order matters."""
    x = 0
    for part in parts:  # `mix`, written out: a step has hundreds of thousands of them
        x = (x + GOLDEN + (hash_text(part) if isinstance(part, str) else part)) & MASK
        x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK
        x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK
        x ^= x >> 31
    return x


@lru_cache(maxsize=1 << 14)  # the samples of a prompt have its id in common
def hash_text(text: str) -> int:
    """A stable 64-bit hash of a string (unlike `hash`, the same in every process and on every machine)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_key(seed: int, stream: str, prompt_id: str, visit: int, sample: int) -> int:
    """The key of one sample: a prompt drawn again (a new visit) gets new noise, the same draw always the same."""
    return fold(seed, STREAMS[stream], prompt_id, visit, sample)


def unit(key: int) -> float:
    """A number in [0, 1) from a key, with 53 random bits."""
    return (mix(key) >> 11) * 2.0**-53


def permutation(size: int, *key: int | str) -> list[int]:
    """A permutation of range(size) that depends on the key alone, the same on every machine."""
    state = fold(*key)
    return sorted(range(size), key=lambda i: (mix((state + (i + 1) * GOLDEN) & MASK), i))
