"""Recipes that come with burnish: by name from any folder, in a checkout and in an installed wheel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.recipe_names import named_recipes, recipe_path
from burnish.config.schema import TrainConfig

ROOT = Path(__file__).parents[2]


def test_a_bare_word_is_a_recipe_and_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dapo").write_text("seed: 1")
    Path("dapo.yaml").write_text("seed: 2")
    assert recipe_path("dapo") == ROOT / "recipes" / "dapo.yaml"
    assert recipe_path("dapo.yaml") == Path("dapo.yaml")
    assert recipe_path("./dapo") == Path("dapo")


def test_an_unknown_name_gets_the_nearest_and_a_file_of_that_name(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "sort_digit"]) == 2
    assert "there is no recipe 'sort_digit'; did you mean 'sort_digits'? (`burnish recipes`" in capsys.readouterr().err
    Path("mine").write_text("")
    with pytest.raises(UserError, match=r"the file beside you is \./mine"):
        recipe_path("mine")


def test_a_missing_file_with_the_name_of_a_recipe_says_how_to_name_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recipes/sort_digits.yaml"]) == 2
    assert "give sort_digits instead of recipes/sort_digits.yaml" in capsys.readouterr().err


def test_a_file_extends_a_recipe_by_name_and_finds_its_plug_ins(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("extends: science_world\nseed: 7")
    config = load(TrainConfig, tmp_path / "mine.yaml").config
    assert config.seed == 7
    assert config.data.train[0].plugin == f"{ROOT / 'recipes' / 'science_world_rows.py'}:rows"


def test_the_list_has_a_line_for_each_recipe_under_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    recipes = named_recipes()
    assert {recipe.name for recipe in recipes} == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert {recipe.name for recipe in recipes if recipe.command == "prefer"} == {"dpo", "ipo", "kto", "orpo", "simpo"}
    for recipe in recipes:
        assert recipe.summary, recipe.path
        assert [line for line in lines if line.split()[:1] == [recipe.name] and line.endswith(recipe.summary)]
    assert main(["recipes", "grpo"]) == 0
    assert capsys.readouterr().out.endswith((ROOT / "recipes" / "grpo.yaml").read_text())


def test_readme_and_status_count_the_algorithms() -> None:
    assert f"prints all {len(PRESETS)}\n" in (ROOT / "README.md").read_text()
    assert f"The {len(PRESETS)} algorithms" in (ROOT / "docs/status.md").read_text()


def test_a_wheel_has_the_recipes_and_runs_them_from_another_folder(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="a wheel is built with setuptools: pip install setuptools")
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("burnish", "recipes"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    # What `pip wheel` calls. The wheel is pure Python, so unpacking it is what `pip install --target` does.
    build = "import setuptools.build_meta as b; b.build_wheel('.')"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = source.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {Path(name).name for name in archive.namelist() if name.startswith("burnish/recipes/")}
        archive.extractall(site)
    assert packed == {path.name for path in (ROOT / "recipes").iterdir() if path.suffix in (".yaml", ".py")}

    def burnish(*words: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-m", "burnish.cli.main", *words],
            cwd=elsewhere,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    assert str(site / "burnish" / "recipes" / "gsm8k_agent.yaml") in burnish("recipes", "gsm8k_agent")
    assert "held-out accuracy after RL:" in burnish("train", "sort_digits", "--shrink")
    assert (elsewhere / "runs" / "sort_digits-shrunk-0" / "report.html").is_file()
