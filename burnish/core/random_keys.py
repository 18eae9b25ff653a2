"""Counter-based random keys: a random number depends on its key and position alone, never on the order of draws.

A key is a 64-bit integer folded from (run seed, stream, prompt id, visit, sample index). The visit is the number of times
that the run has drawn the prompt before. Each position of a sample takes its own number from the key. A sample's random
numbers therefore do not depend on the batch it is in, on the device or on a restart.

The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection on 64 bits with full avalanche.
Importing this module loads neither torch nor numpy, because commands that only read settings import it.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: SplitMix64's increment
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB

STREAMS = {"train": 1, "eval": 2, "baseline": 3}
"""Number of each stream. Equal prompts in different streams get different random numbers."""


def mix(x: int) -> int:
    """SplitMix64's finaliser on an unsigned 64-bit integer."""
    x &= MASK_64
    x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK_64
    x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK_64
    return x ^ (x >> 31)


def fold(*parts: int | str) -> int:
    """Fold integers and strings into one unsigned 64-bit key. Their order matters."""
    x = 0
    for part in parts:  # `mix` is inlined: a step makes hundreds of thousands of these calls
        x = (x + GOLDEN + (hash_text(part) if isinstance(part, str) else part)) & MASK_64
        x = ((x ^ (x >> 30)) * MULTIPLIER_1) & MASK_64
        x = ((x ^ (x >> 27)) * MULTIPLIER_2) & MASK_64
        x ^= x >> 31
    return x


@lru_cache(maxsize=1 << 14)  # all samples of a prompt hash the same prompt id
def hash_text(text: str) -> int:
    """Hash a string to 64 bits. Unlike `hash`, the result is the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_key(seed: int, stream: str, prompt_id: str, visit: int, sample: int) -> int:
    """Return the key of one sample. A new visit of a prompt gets a new key; the same visit always gets the same key."""
    return fold(seed, STREAMS[stream], prompt_id, visit, sample)


def uniform_from_key(key: int) -> float:
    """Return a number in [0, 1) with 53 random bits."""
    return (mix(key) >> 11) * 2.0**-53


def permutation(size: int, *key: int | str) -> list[int]:
    """Return a permutation of range(size) that depends on the key alone. It is the same on every machine."""
    state = fold(*key)
    return sorted(range(size), key=lambda i: (mix((state + (i + 1) * GOLDEN) & MASK_64), i))


# The functions below do the same arithmetic on tensors. int64 multiplication wraps in torch, so every device gives the same bits.


def to_int64(value: int) -> int:
    """Return the int64 with the same bits as an unsigned 64-bit integer."""
    value &= MASK_64
    return value - (1 << 64) if value >= 1 << 63 else value


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Return float64 numbers in (0, 1), one for each (key, position). Both inputs are int64."""
    import torch

    if keys.device.type == "cpu":  # numpy gives the same bits, and takes a tenth of torch's time for a few rows
        return torch.from_numpy(_uniforms_numpy(keys.numpy(), positions.numpy()))
    bits = _mix_tensor(keys + (positions + 1) * to_int64(GOLDEN))
    # 52 bits plus the half use all 53 bits of a float64. With one bit more, the half would round the largest number up to 1.
    return (((bits >> 12) & ((1 << 52) - 1)).to(torch.float64) + 0.5) * 2.0**-52


def _mix_tensor(x: Tensor) -> Tensor:
    # torch shifts int64 arithmetically; the masks make the shifts logical.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * to_int64(MULTIPLIER_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * to_int64(MULTIPLIER_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _uniforms_numpy(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    import numpy as np

    x = keys.view(np.uint64) + (positions.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
