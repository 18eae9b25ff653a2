"""The recipes that come with burnish, by name: `burnish train sort_digits`, `extends: dapo`.

A bare word is the name of one of them. A word with a path separator or the ending `.yaml` or `.yml` is a file, so a file `dapo.yaml` in the
working directory never replaces the recipe `dapo`, and the recipe never hides the file. In a checkout the recipes are the folder `recipes/`
beside the package; in an installed package they are `burnish/recipes/` (setup.py puts them there).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from burnish.config.errors import UserError, did_you_mean
from burnish.config.yaml_text import parse_yaml

FILE_ENDINGS = (".yaml", ".yml")
RECIPE_HELP = "a YAML file, or the name of a recipe that `burnish recipes` lists"
COMMAND_KEYS = {"stages": "stages", "sft": "sft", "preference": "prefer", "reward_model": "reward-model"}
"""The top-level key that only recipes of this command have. All others are for `burnish train`."""


class NamedRecipe(NamedTuple):
    """A recipe that comes with burnish."""

    name: str
    path: Path
    command: str
    """The command that runs it: train, sft, prefer, reward-model or stages."""
    summary: str
    """The first line of its file, which says what it is."""


def recipes_folder() -> Path:
    """The folder of the recipes, in an installed package or in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "recipes", package.parent / "recipes"):
        if (folder / "sort_digits.yaml").is_file():
            return folder
    raise UserError(
        f"the recipes of burnish are neither in {package / 'recipes'} nor in {package.parent / 'recipes'}: install the package again"
    )


def recipe_names() -> list[str]:
    """The names of all recipes, sorted."""
    return sorted(path.stem for path in recipes_folder().glob("*.yaml"))


def is_recipe_name(text: str) -> bool:
    """Whether a word names a recipe that comes with burnish, rather than a file."""
    separators = {os.sep, os.altsep or os.sep, "/"}
    return not text.endswith(FILE_ENDINGS) and not any(separator in text for separator in separators)


def recipe_path(text: str) -> Path:
    """The file of a recipe that a command or `extends` names. A file need not exist: reading it reports that."""
    if not is_recipe_name(text):
        return Path(text)
    path = recipes_folder() / f"{text}.yaml"
    if path.is_file():
        return path
    own = f"; the file beside you is ./{text}" if Path(text).is_file() else ""
    raise UserError(
        f"there is no recipe {text!r}{did_you_mean(text, recipe_names())} (`burnish recipes` lists them; a file of yours "
        f"has a / or .yaml in its name{own})"
    )


def same_name_hint(path: Path) -> str:
    """For a file that does not exist: the recipe of the same name, if there is one."""
    if path.suffix not in FILE_ENDINGS or path.stem not in recipe_names():
        return ""
    return f"; the recipe of that name comes with burnish: give {path.stem} instead of {path}"


def named_recipes() -> list[NamedRecipe]:
    """All recipes with their commands and summaries, sorted by name."""
    return [_describe(recipes_folder() / f"{name}.yaml") for name in recipe_names()]


def command_of(path: Path) -> str:
    """The command that runs a recipe."""
    keys = set(parse_yaml(path.read_text(encoding="utf-8"), str(path)) or ())
    return next((command for key, command in COMMAND_KEYS.items() if key in keys), "train")


def _describe(path: Path) -> NamedRecipe:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return NamedRecipe(path.stem, path, command_of(path), first.lstrip("# ").rstrip() if first.startswith("#") else "")
