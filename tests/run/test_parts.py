"""A checkpoint written by several processes (threads here, which share nothing but the folder)."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.checkpoint import contents
from burnish.run.checkpoint.checkpoints import MANIFEST, Checkpoints, damage
from burnish.run.checkpoint.contents import Blob, Part, Snapshot, Sums
from burnish.run.durable_files import sweep

COUNT = 4


def snapshot(rank: int) -> Snapshot:
    return Snapshot([Blob(f"model-{rank}", "w" * rank)], [Blob(f"state-{rank}", f"{rank}")], Part(rank, COUNT))


class Fails:
    """What cannot be written."""

    def write(self, folder: Path) -> Sums:
        raise UserError("cannot write optimizer-00003: No space left on device")


def test_all_parts_make_one_checkpoint_which_appears_when_the_last_is_there(tmp_path: Path) -> None:
    late = threading.Event()

    class Late:
        def write(self, folder: Path) -> Sums:
            assert late.wait(20)
            return Blob("late", "at last").write(folder)

    taken = [snapshot(rank) for rank in range(COUNT)]
    taken[2] = Snapshot(taken[2].model, [*taken[2].state, Late()], taken[2].part)
    with ThreadPoolExecutor(COUNT) as pool:
        writes = [pool.submit(Checkpoints(tmp_path, 1).write, 7, taken[rank], 0.5) for rank in range(COUNT)]
        others = [writes[rank].result(20) for rank in (1, 3)]
        assert not writes[0].done()
        assert not (tmp_path / "step-000007").exists()
        late.set()
        path = writes[0].result(20)
    assert {path, *others, writes[2].result()} == {tmp_path / "step-000007"}
    assert damage(path) is None
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], manifest["score"]) == (7, 0.5)
    names = {f"{kind}-{rank}": kind for kind in ("model", "state") for rank in range(COUNT)} | {"late": "state"}
    assert {name: entry["of"] for name, entry in manifest["files"].items()} == names
    assert sorted(f.name for f in path.iterdir()) == sorted([*names, MANIFEST])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["index.json", "step-000007"]


def test_the_first_process_hears_why_another_could_not_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No space left"):
        Checkpoints(tmp_path, 1).write(7, Snapshot([Fails()], (), Part(2, COUNT)))
    with pytest.raises(UserError, match=r"process 2 of 4 could not write its part of .*optimizer-00003: No space left"):
        Checkpoints(tmp_path, 1).write(7, snapshot(0))
    assert Checkpoints(tmp_path, 1).latest() is None


def test_a_process_that_never_comes_is_waited_for_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents, "DEADLINE_S", 0.1)
    for rank in (1, 3):
        Checkpoints(tmp_path, 1).write(7, snapshot(rank))
    with pytest.raises(UserError, match=r"no word from processes \[2\] of 4 after 0 s"):
        Checkpoints(tmp_path, 1).write(7, snapshot(0))


def test_what_killed_processes_left_is_swept_away(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 1).write(7, snapshot(1))
    assert Checkpoints(tmp_path, 1).latest() is None
    assert sweep(tmp_path) == [".tmp-parts-step-000007"]
