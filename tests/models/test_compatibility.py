"""The digest of a model directory changes with any part of its files."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.models.compatibility import NUM_SAMPLES, SAMPLE_BYTES, model_digest


@pytest.mark.parametrize("at", [0.0, 0.31, 0.5, 0.999])
def test_a_change_all_over_large_weights_is_seen(tmp_path: Path, at: float) -> None:
    size = 4 * SAMPLE_BYTES * NUM_SAMPLES
    data = bytearray(size)
    (tmp_path / "model.safetensors").write_bytes(data)
    before = model_digest(tmp_path)
    start = int(at * size)
    data[start : start + 4 * SAMPLE_BYTES] = b"\1" * len(data[start : start + 4 * SAMPLE_BYTES])
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_digest(tmp_path) != before


def test_names_and_small_files_count_and_the_place_does_not(tmp_path: Path) -> None:
    found = []
    for number, name in enumerate(("config.json", "config.json", "other.json")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / name).write_text("{}")
        found.append(model_digest(folder))
    assert found[0] == found[1] != found[2]
