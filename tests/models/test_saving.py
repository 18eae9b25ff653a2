"""Which process writes which weights."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.models import weight_saving
from burnish.models.weight_saving import plan_files


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_parts=st.integers(1, 9))
def test_all_weights_are_written_once_in_order_and_about_evenly(sizes: list[int], num_parts: int) -> None:
    named = [(str(k), size) for k, size in enumerate(sizes)]
    files = plan_files(named, num_parts)
    assert [name for _, members in files for name in members] == [name for name, _ in named]
    owners = [owner for owner, _ in files]
    assert owners == sorted(set(owners)), "one file each"
    assert max(owners) < num_parts
    shares = [sum(dict(named)[name] for name in members) for _, members in files]
    assert max(shares) <= sum(sizes) / num_parts + max(sizes)


def test_no_file_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_saving, "FILE_BYTES", 100)
    files = plan_files([(str(k), 30) for k in range(20)], 2)
    assert [(owner, len(members)) for owner, members in files] == [(0, 3)] * 3 + [(0, 1)] + [(1, 3)] * 3 + [(1, 1)]
    assert all(b >= a for (a, _), (b, _) in itertools.pairwise(files))
    assert plan_files([("one", 1000)], 3) == [(1, ["one"])], "a tensor is never cut"
