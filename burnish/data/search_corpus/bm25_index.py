"""The BM25 index of a corpus (extra `[search]`, package `bm25s`), and the passages that it finds.

A line of a corpus is `{"id", "title", "text"}`, or `{"id", "contents"}` as in Search-R1, whose first line is the title in quotes. The index is
built once and saved in a folder beside the corpus. Later uses map it into memory, so processes on a machine share its pages. Passages are
read from the corpus file by their position and are never all in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.config.extras import install_hint

INDEX_VERSION = 1
SOURCE_FILE, OFFSETS_FILE = "source.json", "offsets.npy"
CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Passage:
    """A passage that a search has found."""

    id: str
    title: str
    text: str
    score: float = 0.0


def passage_of(document: Any, where: str, score: float = 0.0) -> Passage:
    """The passage of a document; ValueError that says `where` if it has neither text nor contents."""
    if not isinstance(document, Mapping):
        raise ValueError(f"{where}: expected an object, not {type(document).__name__}")
    number, title = str(document.get("id", "")), document.get("title")
    text = document.get("text")
    if not isinstance(text, str):
        contents = document.get("contents")
        if not isinstance(contents, str):
            raise ValueError(f"{where}: a document has `text` (and `title`) or `contents`, not {', '.join(document)}")
        if title is None:
            title, _, text = contents.partition("\n")
        else:
            text = contents
    return Passage(number, "" if title is None else str(title), text, score)


def import_bm25s() -> Any:
    """The package `bm25s`; UserError that names the extra if it is missing.

    It imports JAX where that is installed, and JAX then takes three quarters of a GPU's memory. So JAX is hidden from it.
    """
    is_hidden = "jax" not in sys.modules
    if is_hidden:
        sys.modules["jax"] = None  # type: ignore[assignment]  # an import of it fails
    try:
        import bm25s
    except ImportError as error:
        raise UserError(f"BM25 search needs the package bm25s: {install_hint('search')} ({error})") from error
    finally:
        if is_hidden:
            del sys.modules["jax"]
    return bm25s


def find_corpus(corpus: str, base: str | None) -> Path:
    """The file of a corpus, relative to `base` (the folder of the recipe) or else to the working directory, as data files are."""
    beside = Path(base or ".") / corpus
    return beside if beside.is_file() else Path(corpus) if Path(corpus).is_file() else beside


class BM25Index:
    """The index of a corpus, built on first use."""

    _file = -1

    def __init__(self, corpus: Path, k1: float = 0.9, b: float = 0.4, cache: Path | None = None) -> None:
        if not corpus.is_file():
            raise UserError(f"BM25 search: there is no corpus {corpus}")
        if k1 < 0 or not 0 <= b <= 1:
            raise UserError(f"BM25 search: k1 must be 0 or more and b from 0 to 1, not {k1} and {b}")
        self._bm25s, self._corpus = import_bm25s(), corpus
        folder = cache or corpus.with_name(corpus.name + ".bm25")
        with _locked(folder):
            if not _is_current(folder, corpus, k1, b):
                _build(self._bm25s, folder, corpus, k1, b)
            self._retriever = self._bm25s.BM25.load(str(folder), mmap=True)
            self._offsets = np.load(folder / OFFSETS_FILE, mmap_mode="r")
            self._file = os.open(corpus, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        """The best passages for each query, best first. Passages without a word of the query are left out."""
        tokens = self._bm25s.tokenize(queries, return_ids=False, show_progress=False)
        vocabulary = self._retriever.vocab_dict
        known = [[token for token in query if token in vocabulary] for query in tokens]
        found: list[list[Passage]] = [[] for _ in queries]
        places = [place for place, query in enumerate(known) if query]
        if not places:
            return found
        numbers, scores = self._retriever.retrieve(
            [known[place] for place in places],
            k=min(top_k, len(self)),
            show_progress=False,
            backend_selection="numpy",
        )
        for place, row, row_scores in zip(places, numbers, scores, strict=True):
            found[place] = [self._passage(int(n), float(s)) for n, s in zip(row, row_scores, strict=True) if s > 0]
        return found

    def _passage(self, number: int, score: float) -> Passage:
        begin, end = int(self._offsets[number]), int(self._offsets[number + 1])
        try:
            return passage_of(json.loads(os.pread(self._file, end - begin, begin)), f"passage {number}", score)
        except ValueError as error:
            raise RuntimeError(f"the corpus {self._corpus} was changed while it was in use: {error}") from error

    def close(self) -> None:
        """Close the corpus file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


# --- building --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of an index folder, so that one process builds it while the others wait."""
    lock = folder.with_name(folder.name + ".lock")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(
            f"BM25 search: the index folder {folder} cannot be written ({error.strerror}); name another with `cache`"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _is_current(folder: Path, corpus: Path, k1: float, b: float) -> bool:
    """Whether the folder has the index of this corpus. The corpus is only read if its size or time of change differs."""
    source = folder / SOURCE_FILE
    if not source.is_file():
        return False
    saved = json.loads(source.read_text())
    if [saved.get(key) for key in ("version", "k1", "b")] != [INDEX_VERSION, k1, b]:
        return False
    state = corpus.stat()
    if (saved["size"], saved["mtime_ns"]) == (state.st_size, state.st_mtime_ns):
        return True
    if saved["size"] != state.st_size or saved["checksum"] != _checksum(corpus):
        return False
    source.write_text(json.dumps(saved | {"mtime_ns": state.st_mtime_ns}))
    return True


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _build(bm25s: Any, folder: Path, corpus: Path, k1: float, b: float) -> None:
    """Build the index in a temporary folder, then move it to its place."""
    state = corpus.stat()
    texts, offsets = _read_texts(corpus)
    unfinished = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    retriever = bm25s.BM25(k1=k1, b=b)
    retriever.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    retriever.save(str(unfinished), show_progress=False)
    np.save(unfinished / OFFSETS_FILE, np.array(offsets, dtype=np.int64))
    source = {"version": INDEX_VERSION, "k1": k1, "b": b, "size": state.st_size, "mtime_ns": state.st_mtime_ns}
    (unfinished / SOURCE_FILE).write_text(json.dumps(source | {"checksum": _checksum(corpus)}))
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(unfinished, folder)


def _read_texts(corpus: Path) -> tuple[list[str], list[int]]:
    """The searchable text of each passage, and where each line begins. Lines without text are refused with their number."""
    texts, offsets = [], [0]
    with corpus.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                passage = passage_of(json.loads(line), f"{corpus}, line {number}")
            except ValueError as error:
                problem = str(error) if str(corpus) in str(error) else f"{corpus}, line {number}: not JSON ({error})"
                raise UserError(f"BM25 search: {problem}") from error
            texts.append(f"{passage.title}\n{passage.text}")
            offsets.append(offsets[-1] + len(line))
    if not texts:
        raise UserError(f"BM25 search: the corpus {corpus} has no passage")
    return texts, offsets
