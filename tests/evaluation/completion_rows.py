"""Completions as an evaluation makes them, for tests of what is made of them."""

from __future__ import annotations

from typing import Any


def row(question: str, sample: int, accuracy: float | None, **more: Any) -> dict[str, Any]:
    """A completion; without an accuracy its scorer failed."""
    return {
        "id": question,
        "sample": sample,
        "data_source": "s",
        "tags": {},
        "prompt": f"Q: {question}",
        "completion": "text",
        "answer": "7",
        "answered": None,
        "formatted": None,
        "accuracy": accuracy,
        "reward": accuracy,
        "parts": {} if accuracy is None else {"number": accuracy},
        "length": 4,
        "finish": "stop",
        "truncated": False,
        "timed_out": False,
        "error": "boom" if accuracy is None else None,
        **more,
    }
