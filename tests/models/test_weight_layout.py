"""Row order of fused matrices in a tensor-parallel model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.models.weight_layout import in_hf_order, row_order


@given(units=st.lists(st.integers(1, 4), min_size=1, max_size=3), parts=st.integers(1, 4))
def test_each_part_has_its_rows_of_every_matrix_in_one_block(units: list[int], parts: int) -> None:
    sizes = tuple(unit * parts for unit in units)
    order = row_order(sizes, parts)
    assert sorted(order.tolist()) == list(range(sum(sizes)))
    matrices = torch.arange(sum(sizes)).split(sizes)
    for part, block in enumerate(order.chunk(parts)):
        expected = torch.cat([matrix.chunk(parts)[part] for matrix in matrices])
        assert torch.equal(block, expected)
    rows = torch.randn(sum(sizes), 2)
    assert torch.equal(in_hf_order(rows[order], order), rows)


@pytest.mark.parametrize("parts", [1, 2])
def test_two_key_heads_of_one_row_each(parts: int) -> None:
    expected = {1: [0, 1, 2, 3, 4, 5, 6, 7], 2: [0, 1, 4, 6, 2, 3, 5, 7]}
    assert row_order((4, 2, 2), parts).tolist() == expected[parts]
