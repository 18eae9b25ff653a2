"""Atomic and durable writes: a kill at any moment leaves the old content or the new, never half of either.

A file or folder is written under a temporary name beside its target, synced to disk and renamed. Syncing the parent
folder makes the rename durable. `remove_leftovers` deletes what killed writers left behind. Only the holder of the run's
lock may call it, because the temporary name of a live writer looks the same.
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
"""The last part of error messages about a run that cannot be resumed."""
FolderId = tuple[int, int]
"""Device and inode of a folder. A rename does not change them."""


def folder_id(path: Path) -> FolderId | None:
    """Return the identity of a folder, which a later folder of the same name does not share; None if there is no folder."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError that lacks one. The error of a full disk, for example, names no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def fsync_path(path: Path) -> None:
    """Sync a file's content, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with name_file_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def atomic_write(path: Path, content: bytes | str, syncs_folder: bool = True) -> None:
    """Replace a file's content durably, or leave the file unchanged.

    Without `syncs_folder` the new name is not synced, and the folder may be renamed by a reader as soon as the file is there.
    """
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
    if syncs_folder:
        fsync_path(path.parent)


def replace_quickly(path: Path, content: bytes) -> None:
    """Replace a file's content without syncs. A reader sees the old content or the new; a loss of power may leave neither."""
    temporary = _temporary_path(path)
    try:
        temporary.write_bytes(content)
        os.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_durably(path: Path, data: bytes) -> None:
    """Append bytes to a file and sync them to disk. On an error the file keeps its old length."""
    created = not path.exists()
    append(path, data, durable=True)
    if created:
        fsync_path(path.parent)


def append(path: Path, data: bytes, durable: bool = False) -> None:
    """Append all of the bytes to a file, or none. Without `durable` they survive a kill but not a loss of power.

    On an error the file is truncated to its old length. Otherwise a full disk would leave half a line in the middle of the
    file after the next append.
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
    """Truncate a file durably."""
    with name_file_in_errors(path), open(path, "r+b") as file:
        file.truncate(length)
        os.fsync(file.fileno())


@contextmanager
def atomic_directory(path: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends, and is deleted if the block raises.

    All of its files and folders are synced before the rename. An empty folder at `path` is a leftover and is replaced.
    A folder with content is a `FileExistsError` unless `replace`.
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
    """Rename a filled folder to `path`, durably. A folder at `path` is deleted only after it has been replaced."""
    for folder, _, names in os.walk(temporary, topdown=False):
        for name in names:
            fsync_path(Path(folder, name))
        fsync_path(Path(folder))
    replaced = _move_replaced(path)
    try:
        os.rename(temporary, path)
    except BaseException:
        _restore_replaced(path.with_name(REPLACED_PREFIX + path.name))
        raise
    fsync_path(path.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def remove_leftovers(folder: Path) -> list[str]:
    """Delete what killed writers left directly in a folder. Returns the sorted names.

    A folder whose replacement never arrived gets its old name back.
    """
    removed = []
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith(REPLACED_PREFIX) and _restore_replaced(entry):
            continue
        if entry.name.startswith((TEMPORARY_PREFIX, REPLACED_PREFIX)):
            remove(entry)
            removed.append(entry.name)
    return removed


def remove(path: Path) -> None:
    """Delete a file or a folder. A folder is renamed first, so that no reader sees half of it."""
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
    """Move away the folder that is to be replaced, because a rename cannot overwrite a folder with content."""
    if not path.exists() or not any(path.iterdir()):
        return None
    replaced = path.with_name(REPLACED_PREFIX + path.name)
    if replaced.exists():
        shutil.rmtree(replaced)
    os.rename(path, replaced)
    return replaced


def _restore_replaced(replaced: Path) -> bool:
    target = replaced.with_name(replaced.name.removeprefix(REPLACED_PREFIX))
    if not replaced.exists() or target.exists():
        return False
    os.rename(replaced, target)
    return True


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, for manifests that other tools can check."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums(paths: Iterable[Path]) -> list[dict[str, str]]:
    """Return names and checksums of files for a manifest, without their folders, which may change."""
    return [{"file": path.name, "sha256": sha256(path)} for path in paths]
