"""Episodes of several turns over two engines and two workers of Ray's: the same tokens and numbers as in one process.

A Ray of its own and two short runs: about half a minute.
"""

from __future__ import annotations

import pytest

from tests.distributed.shared_runs import made, numbers, samples

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")


@pytest.mark.slow
def test_gigpo_on_ray_is_that_of_one_process(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = made(tmp_path_factory, "ray-games", ["games"], deadline_s=1800)
    rows = numbers(folder, "one")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["rollout/turns_max"] == 2 and row["actor/updates"] == 2 for row in rows)
    for row, other in zip(rows, numbers(folder, "two"), strict=True):
        for key in [key for key in row if key.startswith(("actor/", "reward/", "rollout/"))]:
            assert other[key] == pytest.approx(row[key], abs=1e-9), (row["step"], key)
    assert samples(folder, "two") == samples(folder, "one")
