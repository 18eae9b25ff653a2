"""Results that the documentation shows: well-formed, and the numbers in the text are those of the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FILES = sorted((DOCS / "results").glob("*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_is_well_formed_and_in_the_text(path: Path) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    recipe, _, seed = path.stem.rpartition("-")
    assert (path.parents[2] / "recipes" / f"{recipe}.yaml").exists()
    assert found["seed"] == int(seed)
    low, high = found["ci"]
    assert 0 <= low < found["accuracy"] < high <= 1
    seconds, accuracies = zip(*found["curve"], strict=True)
    assert list(seconds) == sorted(seconds)
    assert accuracies[-1] == found["accuracy"]
    assert seconds[-1] == pytest.approx(found["wall_s"], abs=0.1)
    text = (DOCS / "results.md").read_text(encoding="utf-8")
    assert f"{100 * found['accuracy']:.1f}% [{100 * low:.1f}, {100 * high:.1f}]" in text
    assert f"{100 * found['base_accuracy']:.1f}%" in text


def test_there_are_results() -> None:
    assert FILES
