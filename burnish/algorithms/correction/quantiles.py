"""Exact quantiles of any number of weights, by partition: nothing is sorted but rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def quantiles(values: Tensor, shares: Sequence[float]) -> Tensor:
    """The quantiles of [M] at increasing `shares`, interpolated linearly between the two nearest values."""
    last = values.shape[0] - 1
    ranks = [int(share * last) for share in shares]
    pairs = _on_cpu(values, ranks) if values.device.type == "cpu" else _elsewhere(values, ranks)
    return _between(pairs, values.shape[0], shares)


def row_quantiles(values: Tensor, counts: Tensor, shares: Sequence[float]) -> Tensor:
    """The quantiles of [R] values that occur `counts` times each."""
    values, order = values.sort()
    ends = counts[order].cumsum(0)
    last = int(ends[-1]) - 1
    ranks = torch.tensor([int(share * last) for share in shares], device=values.device)
    found = [values[torch.searchsorted(ends, r.clamp(max=last), right=True)] for r in (ranks, ranks + 1)]
    return _between(torch.stack(found, 1), last + 1, shares)


def _on_cpu(values: Tensor, ranks: Sequence[int]) -> Tensor:
    """[K, 2] the values of rank r and r + 1. What is left of a rank is never looked at again, so that all of them
    together cost two or three partitions; torch's kthvalue is several times slower.
    """
    left, start, found = values.numpy().copy(), 0, []
    for rank in ranks:
        left[start:].partition(rank - start)
        start = rank
        above = left[rank + 1 :]
        found.append([left[rank], above.min() if above.size else left[rank]])
    return torch.tensor(found, dtype=values.dtype)


def _elsewhere(values: Tensor, ranks: Sequence[int]) -> Tensor:
    last = values.shape[0] - 1
    return torch.stack(
        [torch.stack([values.kthvalue(min(r, last) + 1).values for r in (rank, rank + 1)]) for rank in ranks]
    )


def _between(pairs: Tensor, num: int, shares: Sequence[float]) -> Tensor:
    places = torch.tensor([share * (num - 1) for share in shares], dtype=pairs.dtype, device=pairs.device)
    return pairs[:, 0] + (pairs[:, 1] - pairs[:, 0]) * places.frac()
