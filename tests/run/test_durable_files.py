"""Atomic writes: after a kill there is the old thing or the new thing, and sweeping leaves nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from burnish.run import durable_files
from burnish.run.durable_files import append_durably, atomic_directory, atomic_write, remove, remove_leftovers


class Killed(BaseException):
    """What a kill looks like from inside: nothing may handle it."""


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def kill_before_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop at the rename, and stop the clean-up too, as a SIGKILL would."""

    def killed(*_: object, **__: object) -> None:
        raise Killed

    monkeypatch.setattr(durable_files.os, "rename", killed)
    monkeypatch.setattr(durable_files.shutil, "rmtree", killed)
    monkeypatch.setattr(Path, "unlink", killed)


def test_a_write_replaces_the_content(tmp_path: Path) -> None:
    atomic_write(tmp_path / "a", "old")
    atomic_write(tmp_path / "a", b"n\xc3\xb6w")
    assert (tmp_path / "a").read_text() == "nöw"
    assert names(tmp_path) == ["a"]


def test_a_kill_between_write_and_rename_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    atomic_write(tmp_path / "a", "old")
    with monkeypatch.context() as patch:
        kill_before_rename(patch)
        with pytest.raises(Killed):
            atomic_write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert len(names(tmp_path)) == 2
    assert len(remove_leftovers(tmp_path)) == 1
    assert names(tmp_path) == ["a"]


def test_an_error_while_writing_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(tmp_path / "a", "new")
    assert names(tmp_path) == []


def test_a_failed_append_keeps_the_old_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_durably(tmp_path / "a", b"one\n")
    with monkeypatch.context() as patch:
        patch.setattr(durable_files.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            append_durably(tmp_path / "a", b"two\n")
    append_durably(tmp_path / "a", b"three\n")
    assert (tmp_path / "a").read_bytes() == b"one\nthree\n"


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "d") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "f").write_text("x")
        assert not (tmp_path / "d").exists()
    assert (tmp_path / "d" / "sub" / "f").read_text() == "x"
    assert names(tmp_path) == ["d"]


def test_every_file_and_folder_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rename, sync = os.rename, durable_files.fsync_path

    def watched_sync(path: Path) -> None:
        events.append(path.name)
        sync(path)

    def watched_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(durable_files, "fsync_path", watched_sync)
    monkeypatch.setattr(durable_files.os, "rename", watched_rename)
    with atomic_directory(tmp_path / "d") as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "f").write_text("x")
    before = events[: events.index("rename")]
    assert before[:2] == ["f", "sub"]
    assert before[2].endswith("-d")
    assert events[events.index("rename") + 1 :] == [tmp_path.name]


def test_an_error_inside_the_block_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> None:
        with atomic_directory(tmp_path / "d") as temporary:
            (temporary / "f").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert names(tmp_path) == []


def test_a_complete_directory_is_replaced_only_on_request(tmp_path: Path) -> None:
    with atomic_directory(tmp_path / "d") as temporary:
        (temporary / "f").write_text("old")
    with pytest.raises(FileExistsError), atomic_directory(tmp_path / "d"):
        pass
    with atomic_directory(tmp_path / "d", replace=True) as temporary:
        (temporary / "g").write_text("new")
    assert names(tmp_path / "d") == ["g"]
    assert names(tmp_path) == ["d"]


def test_an_empty_leftover_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    with atomic_directory(tmp_path / "d") as temporary:
        (temporary / "f").write_text("x")
    assert names(tmp_path / "d") == ["f"]


@pytest.mark.parametrize("renames_before_the_kill", [0, 1])
def test_a_kill_while_replacing_a_directory_loses_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames_before_the_kill: int
) -> None:
    with atomic_directory(tmp_path / "d") as temporary:
        (temporary / "f").write_text("old")
    rename, left = os.rename, [renames_before_the_kill]

    def killed(a: Path, b: Path) -> None:
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        rename(a, b)

    def rewrite() -> None:
        with atomic_directory(tmp_path / "d", replace=True) as temporary:
            (temporary / "f").write_text("new")

    with monkeypatch.context() as patch:
        patch.setattr(durable_files.os, "rename", killed)
        patch.setattr(durable_files.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            rewrite()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["d"]
    assert (tmp_path / "d" / "f").read_text() == "old"


def test_a_kill_after_the_replacement_keeps_the_new_directory(tmp_path: Path) -> None:
    (tmp_path / ".old-d").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("new")
    assert remove_leftovers(tmp_path) == [".old-d"]
    assert (tmp_path / "d" / "f").read_text() == "new"


def test_sweeping_touches_only_leftovers(tmp_path: Path) -> None:
    (tmp_path / "keep").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / ".tmp-0-d").mkdir()
    (tmp_path / ".tmp-0-d" / "f").write_text("x")
    assert remove_leftovers(tmp_path) == [".tmp-0-d"]
    assert names(tmp_path) == [".hidden", "keep"]


def test_removing_a_directory_takes_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / "sub" / "f").write_text("x")
    remove(tmp_path / "d")
    assert names(tmp_path) == []
