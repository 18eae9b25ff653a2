"""Writing so that a kill at any moment leaves either the old thing or the new thing, never half of one.

A file or a folder is written under a temporary name beside its target, forced to disk, and renamed into place; the
rename itself is forced by syncing the folder that holds it. `sweep` clears what killed writers left behind; only the
holder of the run's lock may call it, because a live writer's temporary name looks the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY_PREFIX = ".tmp-"
REPLACED_PREFIX = ".old-"
START_OVER_HINT = (
    "or start the run anew: move its folder away (burnish train, sft, prefer and reward-model do so with --fresh)"
)
"""What helps where a run cannot go on, in the words of its errors."""
FolderId = tuple[int, int]
"""Device and inode: what a folder keeps when it is renamed."""


def folder_id(path: Path) -> FolderId | None:
    """What tells a folder from others that have its name later; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Put the name of a file into what the system says when it refuses to write it: a full disk is otherwise an error without a name."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_file_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace a file's content, durably, or leave it as it was."""
    temporary = _temporary_path(path)
    try:
        with name_file_in_errors(path), open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def append_durably(path: Path, data: bytes) -> None:
    """Add bytes at the end of a file and force them to disk; on an error the file keeps its old length."""
    created = not path.exists()
    append(path, data, durable=True)
    if created:
        fsync_path(path.parent)


def append(path: Path, data: bytes, durable: bool = False) -> None:
    """Add bytes at the end of a file, all or none; not `durable`, they outlive a kill but not a loss of power.

    Without the cut a full disk would leave half a line, and the next append would bury it in the middle of the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        length = os.fstat(descriptor).st_size
        try:
            with name_file_in_errors(path):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
                if durable:
                    os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, length)
            raise
    finally:
        os.close(descriptor)


def truncate(path: Path, length: int) -> None:
    """Cut a file to its first bytes, durably."""
    with name_file_in_errors(path), open(path, "r+b") as file:
        file.truncate(length)
        os.fsync(file.fileno())


@contextmanager
def atomic_directory(path: Path, replace: bool = False) -> Iterator[Path]:
    """A temporary folder to fill, which becomes `path` when the block ends well and vanishes when it raises.

    Every file and folder in it is on disk before the rename. An empty folder at `path` is a leftover and is
    replaced; a folder with content is a `FileExistsError` unless `replace`.
    """
    if not replace and path.exists() and any(path.iterdir()):
        raise FileExistsError(f"{path} exists already and is not empty")
    temporary = _temporary_path(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        commit_directory(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def commit_directory(temporary: Path, path: Path) -> None:
    """Make a filled folder `path`, durably; what was there goes when it has been replaced, and not before."""
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    aside = _move_replaced(path)
    try:
        os.rename(temporary, path)
    except BaseException:
        _restore_replaced(path.with_name(REPLACED_PREFIX + path.name))
        raise
    fsync_path(path.parent)
    if aside is not None:
        shutil.rmtree(aside)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what killed writers left directly in a folder; returns the names, sorted.

    A folder set aside for its replacement goes back when the replacement never arrived.
    """
    swept = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(REPLACED_PREFIX) and _restore_replaced(entry):
            continue
        if entry.name.startswith((TEMPORARY_PREFIX, REPLACED_PREFIX)):
            remove(entry)
            swept.append(entry.name)
    return swept


def remove(path: Path) -> None:
    """Delete a file or a whole folder, the folder under a temporary name first so that no reader meets half of it."""
    if not path.is_dir():
        path.unlink()
        return
    if not path.name.startswith((TEMPORARY_PREFIX, REPLACED_PREFIX)):
        hidden = _temporary_path(path)
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex[:8]}-{path.name}")


def _move_replaced(path: Path) -> Path | None:
    """Make room for a replacement: a rename cannot land on a folder with content."""
    if not path.exists() or not any(path.iterdir()):
        return None
    aside = path.with_name(REPLACED_PREFIX + path.name)
    if aside.exists():
        shutil.rmtree(aside)
    os.rename(path, aside)
    return aside


def _restore_replaced(aside: Path) -> bool:
    target = aside.with_name(aside.name.removeprefix(REPLACED_PREFIX))
    if not aside.exists() or target.exists():
        return False
    os.rename(aside, target)
    return True


# --- SHA-256 of files, for manifests that others can check with their own tools.


def sha256(path: Path) -> str:
    """The checksum of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Names and checksums of files, as a manifest holds them: without their folders, which may be other ones tomorrow."""
    return [{"file": path.name, "sha256": sha256(path)} for path in paths]
