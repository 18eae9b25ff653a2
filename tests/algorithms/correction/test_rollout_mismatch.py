"""Quantiles by partition against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.rollout_mismatch import (
    _interpolated,
    _neighbours_on_device,
    quantiles,
    row_quantiles,
)

SHARES = [0.25, 0.5, 0.75, 0.95, 0.99]


@given(seed=st.integers(0, 10_000), num=st.integers(1, 300), ties=st.booleans())
@settings(max_examples=60, deadline=None)
def test_quantiles_are_exact(seed: int, num: int, ties: bool) -> None:
    values = torch.rand(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (values * 4).floor() if ties else values
    before = values.clone()
    expected = np.quantile(values.numpy(), SHARES)
    assert quantiles(values, SHARES).tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)
    assert bool((values == before).all()), "the weights are not reordered"
    ranks = [int(share * (num - 1)) for share in SHARES]
    assert _interpolated(_neighbours_on_device(values, ranks), num, SHARES).tolist() == pytest.approx(
        expected, rel=1e-12, abs=1e-15
    )


@given(seed=st.integers(0, 10_000), num=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_quantiles_of_rows_count_each_as_often_as_it_has_tokens(seed: int, num: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(num, generator=generator, dtype=torch.float64)
    counts = torch.randint(1, 9, (num,), generator=generator)
    expected = np.quantile(values.repeat_interleave(counts).numpy(), SHARES)
    assert row_quantiles(values, counts, SHARES).tolist() == pytest.approx(expected, rel=1e-12)
