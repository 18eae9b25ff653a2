"""BM25 search over a local corpus."""

from __future__ import annotations

import asyncio
import builtins
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.data.search_corpus import bm25_index
from burnish.data.search_corpus.bm25_index import BM25Index, import_bm25s
from burnish.environments.tools.search_bm25 import SearchBM25

PASSAGES: list[dict[str, Any]] = [
    {"id": "p0", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "p1", "title": "Rome", "text": "Rome is the capital of Italy, and older than Paris."},
    {"id": "p2", "contents": '"Mont Blanc"\nThe highest mountain of France and Italy.'},
]


def write_corpus(folder: Path, passages: list[dict[str, Any]] = PASSAGES) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps(passage) + "\n" for passage in passages))
    return path


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "bm25s":
            raise ImportError("No module named 'bm25s'")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'burnish\[search\]'"):
        SearchBM25(str(write_corpus(tmp_path)))


def test_scores_are_bm25(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    found = BM25Index(write_corpus(tmp_path), k1=0.9, b=0.4).search(["capital france", "zzz", ""], 3)
    assert [passage.id for passage in found[0]] == ["p0", "p2", "p1"]
    assert found[1] == found[2] == []
    # Lucene's form: idf * tf / (tf + k1 (1 - b + b * length / mean length)); stop words and single letters are not counted
    lengths = [4, 7, 6]  # such as: rome rome capital italy older than paris
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    mean = np.mean(lengths)
    weight = [idf / (1 + 0.9 * (0.6 + 0.4 * length / mean)) for length in lengths]
    expected = [2 * weight[0], weight[2], weight[1]]
    assert [passage.score for passage in found[0]] == pytest.approx(expected, rel=1e-5)


def test_the_text_is_search_r1s(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    tool = SearchBM25("corpus.jsonl", base=str(write_corpus(tmp_path).parent), top_k=2)
    assert asyncio.run(tool.call({"query": "highest mountain of France"})) == (
        'Doc 1(Title: "Mont Blanc") The highest mountain of France and Italy.\n'
        "Doc 2(Title: Paris) Paris is the capital of France."
    )
    assert asyncio.run(tool.call({"query": "the of"})) == "No results."


def test_the_index_is_built_once_and_again_when_the_corpus_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bm25s")
    built = []
    real = bm25_index._build
    monkeypatch.setattr(bm25_index, "_build", lambda *arguments: (built.append(1), real(*arguments)))
    corpus = write_corpus(tmp_path)
    index = BM25Index(corpus)
    assert isinstance(index._retriever.scores["data"], np.memmap)
    BM25Index(corpus)
    os.utime(corpus, (1, 1))  # the same contents with another time
    BM25Index(corpus)
    assert len(built) == 1
    BM25Index(corpus, k1=1.5)
    assert len(built) == 2
    write_corpus(tmp_path, [{"text": "A new passage about Oslo."}])
    assert BM25Index(corpus, k1=1.5).search(["Oslo"], 3)[0][0].text == "A new passage about Oslo."
    assert len(built) == 3
    with pytest.raises(RuntimeError, match="was changed while it was in use"):
        index.search(["Rome"], 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ('{"name": "x"}', "line 2: a document has `text`"),
        ("5", "line 2: expected an object"),
    ],
)
def test_a_bad_line_of_the_corpus_is_named(tmp_path: Path, line: str, message: str) -> None:
    pytest.importorskip("bm25s")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        BM25Index(corpus)


def test_a_missing_corpus_and_bad_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no corpus"):
        SearchBM25(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="top_k"):
        SearchBM25(str(write_corpus(tmp_path)), top_k=0)
    with pytest.raises(UserError, match="b from 0 to 1"):
        SearchBM25(str(write_corpus(tmp_path)), b=2.0)


def test_jax_is_hidden_from_bm25s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bm25s imports JAX where it finds it, and JAX takes most of a GPU's memory."""
    (tmp_path / "jax.py").write_text("raise AssertionError('imported')\n")
    (tmp_path / "bm25s.py").write_text("try:\n    import jax.lax\nexcept ImportError:\n    has_jax = False\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("jax", "bm25s")]:
        monkeypatch.delitem(sys.modules, name)
    assert not import_bm25s().has_jax
    assert "jax" not in sys.modules
    del sys.modules["bm25s"]
