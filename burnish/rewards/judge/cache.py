"""Answers of a judge on disk: what was asked once is never paid for again, whatever becomes of the run.

One line an answer, with a checksum, appended in one write: a kill leaves it whole or torn, and a torn one is only asked
again. Several processes may use one folder; each sees what the others had written when it started.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError

FILE = "answers.jsonl"


def key_of(asked: Mapping[str, Any]) -> str:
    """The key of a question: a hash of everything that decides the answer."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class Cache:
    """Texts by key, in memory and in a file. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.num_damaged = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"the judge's cache {folder} cannot be written: {error.strerror}") from error
        self._texts = self._read()

    def get(self, key: str) -> str | None:
        """What was answered, or None."""
        with self._lock:
            return self._texts.get(key)

    def put(self, key: str, text: str) -> None:
        """Keep an answer; it outlives a kill as soon as this returns."""
        body = json.dumps([key, text])
        line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
        with self._lock:
            try:
                num_written = os.write(self._file, line)
            except OSError as error:
                raise UserError(f"the judge's cache {self.path} cannot be written: {error.strerror}") from error
            if num_written != len(line):
                raise UserError(f"the judge's cache {self.path} cannot be written: no room is left")
            self._texts[key] = text

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _read(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # torn: what comes next must not be written behind half a line
            os.write(self._file, b"\n")
        for line in lines:
            checksum, _, body = line.partition(b" ")
            if checksum == b"%08x" % zlib.crc32(body) and body:
                key, text = json.loads(body)
                texts[key] = text
            else:
                self.num_damaged += bool(line)
        return texts
