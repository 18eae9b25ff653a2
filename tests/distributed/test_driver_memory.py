"""The driver's memory over many steps: what a step leaves behind would be there at the end."""

from __future__ import annotations

import numpy as np
import pytest

from burnish.run.metrics import read_metrics
from tests.distributed.shared_runs import made

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
pytestmark = pytest.mark.slow  # two hundred steps: one to two minutes

STEPS, SETTLED = 200, 50


def test_the_drivers_resident_size_has_no_slope_over_200_steps(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = made(tmp_path_factory, "ray-long", ["long"], deadline_s=400)
    sizes = np.array([row["controller/resident_gib"] for row in read_metrics(folder / "long" / "metrics.jsonl")]) * 1024
    assert len(sizes) == STEPS
    slope = float(np.polyfit(np.arange(SETTLED, STEPS), sizes[SETTLED:], 1)[0])
    print(f"resident size: {sizes[0]:.1f} MiB, {sizes[SETTLED]:.1f}, {sizes[-1]:.1f}; {1024 * slope:.1f} KiB a step")
    assert slope * (STEPS - SETTLED) < 0.01 * sizes[SETTLED]
