"""Where compiled kernels are kept for the next time, and how a file gets there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def kept_in() -> Path | None:
    """Where compiled kernels are kept, nobody else's to write; None where there is no such place."""
    try:
        path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "burnish"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return None
    is_ours = found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return path if is_ours and os.access(path, os.W_OK | os.X_OK) else None


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A file to write, which gets the name `path` when it is whole: another process may make the same, and neither reads half of it."""
    handle, name = tempfile.mkstemp(suffix=path.suffix, dir=path.parent)
    os.close(handle)
    draft = Path(name)
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
