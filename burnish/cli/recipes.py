"""`burnish recipes`: list the recipes that come with burnish, or print one of them."""

from __future__ import annotations

import argparse

from burnish.config.recipe_names import named_recipes, recipe_path

COMMAND_ORDER = ("train", "sft", "prefer", "reward-model", "stages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of a recipe."""
    parser.add_argument("name", nargs="?", help="print this recipe; without a name, list all")


def run(args: argparse.Namespace) -> int:
    """Print a line for each recipe under the command that runs it, or the file of one."""
    if args.name is not None:
        path = recipe_path(args.name)
        print(f"# {path}\n{path.read_text(encoding='utf-8')}", end="")
        return 0
    recipes = named_recipes()
    width = max(len(recipe.name) for recipe in recipes)
    for command in COMMAND_ORDER:
        print(f"burnish {command} NAME")
        for recipe in recipes:
            if recipe.command == command:
                print(f"  {recipe.name:<{width}}  {recipe.summary}")
    print(
        "\n`burnish recipes NAME` prints one; `extends: NAME` in a file of yours starts from it; --shrink tries it in seconds."
    )
    return 0
