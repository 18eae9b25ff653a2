"""Plug-ins by file and by module, also next to files with the names of installed modules."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin, is_plugin_file, load_plugin, plugin_source

SCORER = """
import colorsys, json, math, random, types
import numpy
import neighbour_of_the_scorer

def score(solution_str, ground_truth):
    from second_neighbour import TWO
    drawn = random.Random(0).random()
    return [math.floor(drawn), json.dumps(1), types.SimpleNamespace.__name__, neighbour_of_the_scorer.ONE, TWO, hasattr(colorsys, "rgb_to_hsv")]
"""
CHECK = """
import sys
from burnish.config.plugins import load_plugin
score = load_plugin(sys.argv[1])
assert score("x", "y") == [0, "1", "SimpleNamespace", 1, 2, True], score("x", "y")
import colorsys, random, numpy
assert not hasattr(random, "SHADOW") and not hasattr(numpy, "SHADOW")
"""


@pytest.fixture
def restored_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_files_beside_a_plugin_do_not_replace_installed_modules(tmp_path: Path) -> None:
    for name in ("random", "types", "math", "colorsys", "json", "numpy", "datasets"):
        (tmp_path / f"{name}.py").write_text(
            "SHADOW = True\nraise RuntimeError('imported in place of what is installed')\n"
        )
    (tmp_path / "neighbour_of_the_scorer.py").write_text("ONE = 1\n")
    (tmp_path / "second_neighbour.py").write_text("TWO = 2\n")
    (tmp_path / "scorer.py").write_text(SCORER)
    # A process of its own, in which none of these modules is loaded already.
    command = [sys.executable, "-P", "-c", CHECK, f"{tmp_path / 'scorer.py'}:score"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("restored_path")
def test_a_module_is_loaded_by_its_name_with_its_relative_imports(tmp_path: Path) -> None:
    package = tmp_path / "package_of_a_user"
    (package / "inner").mkdir(parents=True)
    for folder in (package, package / "inner"):
        (folder / "__init__.py").write_text("")
    (package / "tools.py").write_text("THREE = 3\n")
    (package / "inner" / "scoring.py").write_text(
        "from ..tools import THREE\n\ndef score(completions):\n    return THREE\n"
    )
    spec = "package_of_a_user.inner.scoring:score"
    assert is_plugin(spec)
    assert not is_plugin_file(spec)
    assert load_plugin(spec, tmp_path)([]) == 3
    assert plugin_source(spec, tmp_path) == package / "inner" / "scoring.py"
    assert plugin_source("no_such_package.of_anyone:score", tmp_path) is None
    (tmp_path / "package_that_fails").mkdir()
    (tmp_path / "package_that_fails" / "__init__.py").write_text("raise SystemExit(0)\n")
    for ask in (plugin_source, load_plugin):
        with pytest.raises(UserError, match=r"importing .*package_that_fails.* failed: SystemExit: 0"):
            ask("package_that_fails.inner:score", tmp_path)
    for wrong, message in (
        ("package_of_a_user.inner.scoring:scores", "did you mean 'score'"),
        ("package_of_a_user.other:score", "there is no module 'package_of_a_user.other'"),
        ("no_such_package.of_anyone:score", "there is no module 'no_such_package'"),
        (f"{package / 'inner' / 'scoring.py'}:score", "package.module:name instead"),
        ("grpo", "not of the form path/to/file.py:name or package.module:name"),
    ):
        with pytest.raises(UserError, match=message):
            load_plugin(wrong, tmp_path)


@pytest.mark.usefixtures("restored_path")
def test_two_plugins_with_different_neighbours_of_one_name_are_refused(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same_name_twice.py").write_text(f"WHERE = {folder!r}\n")
        (tmp_path / folder / "scorer.py").write_text("from same_name_twice import WHERE\n")
    assert load_plugin("one/scorer.py:WHERE", tmp_path) == "one"
    with pytest.raises(UserError, match=r"is taken by .*one/same_name_twice.py of another plug-in: rename"):
        load_plugin("two/scorer.py:WHERE", tmp_path)
    for folder in ("one", "two"):
        (tmp_path / folder / "module_twice.py").write_text(f"WHERE = {folder!r}\n")
    assert load_plugin("module_twice:WHERE", tmp_path / "one") == "one"
    for ask in (load_plugin, plugin_source):
        with pytest.raises(
            UserError, match=r"'module_twice:WHERE' needs .*two/module_twice.py .* rename one of the two"
        ):
            ask("module_twice:WHERE", tmp_path / "two")


@pytest.mark.parametrize("text", ["grpo", "a b:c", "http://host:8000", "x.py", "1a:b", "a.:b", "C:\\x:y", "a:b:c"])
def test_other_texts_are_no_plugins(text: str) -> None:
    assert not is_plugin(text)


def test_threads_that_load_a_file_at_once_all_see_the_whole_module(tmp_path: Path, restored_path: None) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time\ntime.sleep(0.05)\nVALUE = 1\n")
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: load_plugin("slow_to_import.py:VALUE", tmp_path), range(8)))
    assert found == [1] * 8
