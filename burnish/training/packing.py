"""Micro-batches under a token budget.

Which sequences share a micro-batch changes memory and speed, never the gradient: a loss is a weighted sum whose
weights are fixed before the split. Sequences of similar length go together, so that attention stacks them with little
padding.
"""

from __future__ import annotations


def micro_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each micro-batch; a sequence longer than the budget gets its own."""
    parts: list[list[int]] = []
    size = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if parts and size + lengths[i] <= budget:
            parts[-1].append(i)
            size += lengths[i]
        else:
            parts.append([i])
            size = lengths[i]
    return parts
