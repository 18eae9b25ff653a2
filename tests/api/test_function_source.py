"""Functions and classes of a program reach other processes as files, or are refused with the reason."""

from __future__ import annotations

import inspect
import json
import linecache
import os.path
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.api import function_source
from burnish.api.function_source import file_of, written_source
from burnish.api.python_inputs import PythonInputs
from burnish.config.errors import UserError


def in_program(source: str) -> dict[str, Any]:
    """What a script or a notebook cell with this source defines."""
    name = f"<cell {len(linecache.cache)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec", dont_inherit=True), namespace)
    return namespace


def elsewhere(text: str, expression: str) -> str:
    """The value of an expression in another process that has only this file."""
    script = f"{text}\nprint({expression})"
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


CELL = '''
import functools
import re
import xml.dom.minidom
import os.path as osp
from math import sqrt
from json import dumps as as_json
from collections import OrderedDict

WEIGHTS = {"right": 2.0, "wrong": -1}
DIGITS = re.compile(r"\\d+", re.IGNORECASE)
START = OrderedDict(a=1)
SEEN = {"b", "a", "c"}
model = object()

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n > 0 and even(n - 1)

def doubled(function):
    @functools.wraps(function)
    def twice(*values):
        return 2 * function(*values)
    return twice

class Grader:
    """Grades."""
    scale = WEIGHTS["right"]

    def grade(self, text):
        return self.scale * len(DIGITS.findall(text))

@doubled
def once(x=len(WEIGHTS)):
    return x

def score(text, suffix=osp.sep):
    model = even(len(text))  # a local name, not the object above
    return as_json([Grader().grade(text), model, osp.join("a", suffix), START["a"], len(SEEN), sqrt(4), xml.dom.minidom.Node.TEXT_NODE])
'''


def test_a_function_travels_with_what_it_uses() -> None:
    names = in_program(CELL)
    text = written_source(names["score"])
    assert json.loads(elsewhere(text, "score('1 and 22')")) == json.loads(names["score"]("1 and 22"))
    assert "object()" not in text
    assert "pickle.loads" not in text.replace("START = pickle.loads", "")
    assert "SEEN = {'a', 'b', 'c'}" in text  # the same text in every process
    assert elsewhere(written_source(names["once"]), "once(4)") == "8"


def test_a_class_of_a_cell_travels_too() -> None:
    text = written_source(in_program(CELL)["Grader"])
    assert elsewhere(text, "Grader().grade('1 22 x')") == "4.0"
    assert '"""Grades."""' in text


def test_annotations_stay_as_they_were() -> None:
    cell = "from __future__ import annotations\ndef score(x: Unknown) -> int:\n    return x\n"
    assert elsewhere(written_source(in_program(cell)["score"]), "score(3)") == "3"


def test_an_object_of_a_file_is_named_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "face_rewards.py").write_text("def score(completions):\n    return [1.0]\n")
    (tmp_path / "face_package").mkdir()
    (tmp_path / "face_package" / "__init__.py").write_text("")
    (tmp_path / "face_package" / "parts.py").write_text(
        "from . import __name__ as package\ndef where():\n    return package\n"
    )
    import face_package.parts
    import face_rewards

    assert file_of(face_rewards.score) == f"{tmp_path / 'face_rewards.py'}:score"
    assert file_of(inspect.cleandoc) == "inspect:cleandoc"
    assert file_of(face_package.parts.where) is None  # a worker's path has no such folder
    assert elsewhere(written_source(face_package.parts.where), "where()") == "face_package"


REFUSED: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("def make(k):\n    def score(x):\n        return x + k\n    return score\n", lambda n: n["make"](3), "score is a closure over k"),
    ("score = lambda x: x + 1\n", lambda n: n["score"], "it is a lambda"),
    ("import threading\nlock = threading.Lock()\ndef score(x):\n    return lock.locked()\n", lambda n: n["score"], "score uses lock, a _thread.lock"),
    ("class Odd:\n    pass\nodd = Odd()\ndef score(x):\n    return odd\n", lambda n: n["score"], "score uses odd"),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "get", "reason"), REFUSED, ids=["closure", "lambda", "unpicklable", "own class"])
def test_without_cloudpickle_the_reason_is_said(
    cell: str, get: Callable[[dict[str, Any]], Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_source, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"{reason}.*pip install cloudpickle"):
        written_source(get(in_program(cell)))


def test_cloudpickle_sends_a_closure_and_says_what_it_cannot_send() -> None:
    pytest.importorskip("cloudpickle")
    closure = REFUSED[0][1](in_program(REFUSED[0][0]))
    text = written_source(closure)
    assert elsewhere(text, "score(4)") == "7"
    assert "closure over k" in text
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"score cannot be sent.*closure over lock.*cloudpickle says TypeError"):
        written_source(
            in_program("def make(lock):\n    def score(x):\n        return lock\n    return score\n")["make"](lock)
        )


CHANGED = """
from functools import lru_cache
from dataclasses import dataclass

@lru_cache(None)
def cached(x):
    return x + 1

def round(x):
    return "mine"

@dataclass
class Weights:
    right: float = 2.0

    def total(self):
        return self.right

def shadows(x):
    return round(x), cached(x), Weights().total()

scored = []
for weight in (1, 2):
    def weighted(x, weight=weight):
        return x * weight
    scored.append(weighted)

def made(factor):
    def inner(x, factor=factor):
        return x * factor
    return inner
"""


def test_what_a_name_meant_when_a_function_was_defined_is_sent() -> None:
    cell = in_program(CHANGED)
    assert elsewhere(written_source(cell["shadows"]), "shadows(1)") == "('mine', 2, 2.0)"
    assert [elsewhere(written_source(f), "weighted(10)") for f in cell["scored"]] == ["10", "20"]
    assert elsewhere(written_source(cell["made"](5)), "inner(2)") == "10"


def test_a_pickled_object_is_loaded_with_the_folder_of_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_weights.py").write_text("class Weights:\n    right = 3\n\ndef triple(x):\n    return x * 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell = in_program("import my_weights\nW = my_weights.Weights()\ndef f(x):\n    return x * W.right\n")
    assert elsewhere(written_source(cell["f"]), "f(2)") == "6"
    cell = in_program("import my_weights\nf = lambda x: my_weights.triple(x)\n")
    assert elsewhere(written_source(cell["f"]), "function(2)") == "6"


def test_rows_of_any_kind_become_one_file() -> None:
    import numpy as np

    class Dataset:  # as Hugging Face's: it iterates over rows
        def __iter__(self) -> Any:
            yield {"prompt": "é", "answer": np.int64(3), "scores": np.ones(2)}

    inputs = PythonInputs()
    assert inputs.sources(Dataset(), "train") == [{"path": "inputs/train.jsonl"}]
    assert inputs.sources([{"question": "1"}, {"question": "2"}], "train") == [{"path": "inputs/train-2.jsonl"}]
    assert json.loads(inputs.files["train.jsonl"]) == {"prompt": "é", "answer": 3, "scores": [1.0, 1.0]}
    assert inputs.sources(["task:sort_digits", {"path": "x.jsonl", "limit": 3}], "train") == [
        {"task": "sort_digits"},
        {"path": "x.jsonl", "limit": 3},
    ]
    assert inputs.sources(os.path.join, "train") == [{"plugin": "posixpath:join"}]
    with pytest.raises(UserError, match="train, row 1, column 'image': a object cannot be written"):
        inputs.sources([{"prompt": "1"}, {"prompt": "2", "image": object()}], "train")
    with pytest.raises(UserError, match="train holds no rows"):
        inputs.rows([], "train")
    with pytest.raises(UserError, match="train is a int; expected a path"):
        inputs.sources(5, "train")
