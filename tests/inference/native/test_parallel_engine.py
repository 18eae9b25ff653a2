"""An engine of several ranks samples what an engine of one samples, token by token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.inference.native.parallel_ranks import cases_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.inference.native.parallel_ranks", str(request.param), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    said = "\n".join(file.read_text() for file in sorted(folder.glob("*.txt")))
    assert ran.returncode == 0, f"{said}\n{ran.stdout}\n{ran.stderr}"
    found = torch.load(folder / "results.pt", weights_only=False)
    found["resharded by rank"] = [torch.load(file) for file in sorted(folder.glob("resharded-*.pt"))]
    return request.param, found


def test_several_ranks_sample_the_tokens_of_one(results: tuple[int, dict[str, Any]], native: Any) -> None:
    size, found = results
    for case in cases_of(size):
        several, one = found[case]["several"], found[case]["one"]
        assert several.keys() == one.keys()
        assert len({tuple(c.tokens.tolist()) for c in several.values()}) > 6
        for name in one:
            native.same(several[name], one[name])
            assert (one[name].experts is not None) == ("recorded" in case)
            np.testing.assert_array_equal(several[name].experts, one[name].experts)


def test_a_rank_holds_its_part_of_the_model(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    assert 1 / size <= found["untied"]["share"] < 1.2 / size + 0.05
    several, one = found["latent attention, shared experts"]["token_bytes"]
    assert size * several == one, "the ranks divide the blocks of latents"
    for case in ("a small cache", "latent attention, a small cache") if size == 2 else ():
        assert found[case]["stats"].preemptions > 0, "rows were preempted on all ranks alike"


def test_what_cannot_be_divided_is_refused(results: tuple[int, dict[str, Any]]) -> None:
    size, found = results
    exact, heads, kv_heads, in_4_bits = found["refused"]
    assert "rollout.exact cannot hold" in exact
    assert f"placement.engine_tensor={size} does not divide the model's 3 query heads" in heads
    assert "key/value heads" in kv_heads
    assert "4 bits" in in_4_bits


def test_weights_of_a_divided_learner_reach_the_ranks_of_engines_with_the_fewest_bytes(
    results: tuple[int, dict[str, Any]],
) -> None:
    size, found = results
    by_rank = found["resharded by rank"]
    assert len(by_rank) == (size if size == 4 else 0), "four ranks reshard"
    for own in by_rank:
        assert all(case["equal"] and case["received"] and case["least"] for case in own.values()), own
    if by_rank:
        assert all(case["moved"] > 0 for case in by_rank[0].values())
        assert sum(case["relayed"] for case in by_rank[0].values()) > 0
