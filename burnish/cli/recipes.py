"""`burnish recipes`: list the recipes that come with burnish, print one of them, or find the recipe of a published system."""

from __future__ import annotations

import argparse

from burnish.config.errors import UserError
from burnish.config.recipe_names import named_recipes, recipe_path

COMMAND_ORDER = ("train", "sft", "prefer", "reward-model", "stages")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The name of a recipe, or of a system."""
    parser.add_argument("name", nargs="?", help="print this recipe; without a name, list all")
    parser.add_argument(
        "--system",
        metavar="NAME",
        help="find the recipe of a published system (Search-R1, TinyZero, ...), and what is not the same",
    )


def run(args: argparse.Namespace) -> int:
    """Print a line for each recipe under the command that runs it, or the file of one."""
    if args.system is not None:
        if args.name is not None:
            raise UserError(f"give the name of a recipe ({args.name}) or --system {args.system}, not both")
        from burnish.config.systems import describe_system, find_system

        print("\n".join(describe_system(find_system(args.system))))
        return 0
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
