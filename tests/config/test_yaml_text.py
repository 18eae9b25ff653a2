"""YAML parsing and output."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from burnish.config import yaml_text
from burnish.config.errors import UserError
from burnish.config.yaml_text import FastLoader, Loader, parse_yaml, render_yaml
from burnish.config.yaml_text import _load as load_with

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.sampled_from(["1e-6", "-2E5", "1e", "no", "null", "~", "=", "<<", "2024-01-01", "0x1f", "1_000", "12:30"]),
)
KEYS = st.text(st.characters(exclude_categories=["Cs"]))
TREES = st.recursive(SCALARS, lambda t: st.one_of(st.lists(t), st.dictionaries(KEYS, t)), max_leaves=12)


@example({"\x85": None, "a\u2028b": ["\u2029", "\u8a9e"]})
@given(TREES)
def test_what_is_rendered_parses_to_the_same(tree: object) -> None:
    again = parse_yaml(render_yaml(tree), "here")
    assert again == tree
    assert repr(again) == repr(tree)  # 1 == 1.0 == True, which must not pass for one another


@pytest.mark.skipif(FastLoader is None, reason="this PyYAML has no libyaml")
def test_both_loaders_read_every_recipe_alike() -> None:
    assert RECIPES
    for path in RECIPES:
        text = path.read_text(encoding="utf-8")
        assert repr(load_with(FastLoader, text)) == repr(load_with(Loader, text)), path


@pytest.mark.parametrize(
    "text", ["a: 1\na: 2", "a: [1, 2", "a:\n\t- 1", "1: 2", "a: 'x", "a: b: c", "\x01", "- 1\nb: 2", "a: !x 1"]
)
def test_an_error_reads_alike_with_and_without_libyaml(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError) as fast:
        parse_yaml(text, "here")
    monkeypatch.setattr(yaml_text, "FastLoader", None)
    with pytest.raises(UserError) as plain:
        parse_yaml(text, "here")
    assert str(fast.value) == str(plain.value)


@pytest.mark.skipif(FastLoader is None, reason="this PyYAML has no libyaml")
def test_an_error_is_told_behind_text_that_only_libyaml_reads() -> None:
    with pytest.raises(UserError, match=r"here, line 3, column 1: key 'b' is given twice, first in line 2"):
        parse_yaml("a: 1\t# a tab before a comment\nb: 1\nb: 2", "here")


LEVELS = yaml_text.MAX_FAST_LEVELS


@pytest.mark.skipif(FastLoader is None, reason="this PyYAML has no libyaml")
@pytest.mark.parametrize(
    "text",
    ["[" * LEVELS + "]" * LEVELS, "- " * LEVELS, "\n".join(" " * level + "a:" for level in range(LEVELS))],
    ids=["flow", "list", "mapping"],
)
def test_the_deepest_text_for_libyaml_fits_a_small_stack(text: str) -> None:
    program = (
        "import sys, threading; from burnish.config.yaml_text import FastLoader, _load\n"
        "def read():\n"
        "    _load(FastLoader, sys.argv[1])\n"
        "    print('read')\n"
        "threading.stack_size(256 * 1024); thread = threading.Thread(target=read); thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", program, text], capture_output=True, text=True, check=False)
    assert done.stdout == "read\n"


@pytest.mark.parametrize(
    ("text", "value"), [("1e-6", 1e-6), ("-2E+5", -2e5), (".5e1", 5.0), ("1.e3", 1000.0), ("3e4", 3e4)]
)
def test_exponents_are_numbers(text: str, value: float) -> None:
    assert parse_yaml(text, "here") == value
    assert parse_yaml(f"'{text}'", "here") == text


def test_merge_keys_are_not_duplicates() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}", "here") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


def test_python_objects_are_refused() -> None:
    with pytest.raises(UserError, match="line 1, column 1"):
        parse_yaml("!!python/object/apply:os.getcwd []", "here")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: &a [" + "1, " * 9 + "]\n" + "".join(f"{c}: &{c} [{f'*{b}, ' * 9}]\n" for b, c in itertools.pairwise("abcdefghi")), "aliases expand to"),
        ("a: &a [1, *a]", "an alias refers to a value that contains it"),
        ("a: &a {b: {<<: *a}}", "an alias refers to a value that contains it"),
        ("a: " + "[" * 2000, "nested too deeply"),
        ("a: " + "[" * 900 + "]" * 900, "nested too deeply"),
    ],
    ids=["many", "inside", "merged", "deep", "deep for one loader"],
)  # fmt: skip
def test_aliases_and_depth_are_bounded(text: str, words: str) -> None:
    with pytest.raises(UserError, match=f"recipe.yaml.*{words}"):
        parse_yaml(text, "recipe.yaml")


def test_ordinary_aliases_are_understood() -> None:
    assert parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: [*a, *a]}", "r") == {
        "a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": [{"x": 1}, {"x": 1}]}
    }  # fmt: skip
