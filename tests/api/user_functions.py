"""Functions as users write them. Worker processes import this file, so it imports nothing heavy."""

from __future__ import annotations

from typing import Any


def share_of_digits(completions: list[str], **columns: Any) -> list[float]:
    """In TRL's convention."""
    return [sum(c.isdigit() for c in text) / 4 for text in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """In verl's convention."""
    return float(solution_str.startswith(ground_truth))


def above_the_mean(batch: Any, scale: float = 1.0) -> Any:
    """An advantage."""
    return scale * (batch.sequence["reward"] - batch.sequence["reward"].mean())


def backwards(size: int, seed: int, epoch: int) -> Any:
    """A sampler."""
    return reversed(range(size))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b
