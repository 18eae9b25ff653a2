"""Only the values that changed, bit for bit: a bit for every value of a tensor, and the new values where it is set.

A step of reinforcement learning at a small learning rate leaves most values of a half type as they were: they move by less
than half of their last bit.
"""

from __future__ import annotations

import numpy as np

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by the bytes of a value: numbers are compared and moved as their bits."""


def changes(old: np.ndarray, new: np.ndarray, item_size: int) -> np.ndarray | None:
    """What makes the bytes `new` out of the bytes `old`; None where all of them would be no more."""
    before, after = old.view(WORDS[item_size]), new.view(WORDS[item_size])
    changed = before != after
    bits = np.packbits(changed)
    values = after[changed].view(np.uint8)
    return np.concatenate([bits, values]) if bits.size + values.size < new.size else None


def split(delta: np.ndarray, num_values: int, item_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which values change, [num_values] bool, and the bytes of those that do."""
    size = -(-num_values // 8)
    changed = np.unpackbits(delta[:size], count=num_values).view(bool)
    values = delta[size:]
    if values.size != int(changed.sum()) * item_size:
        raise ValueError(f"a delta of {int(changed.sum())} values of {item_size} bytes holds {values.size} bytes")
    return changed, values
