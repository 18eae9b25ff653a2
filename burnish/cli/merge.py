"""`burnish merge OUT A B ...`: one model out of several, by averaging their weights; no training.

Kimi k1.5 (2501.12599) merges a model that thinks long with one that answers shortly (long2short).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from burnish.config.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, metavar="OUT", help="the directory to write; it must not exist, or be empty")
    add(
        "models",
        type=Path,
        nargs="+",
        metavar="MODEL",
        help="two or more: Hugging Face directories, checkpoints, or runs (their best checkpoint)",
    )
    add("--weights", type=float, nargs="+", metavar="W", help="one for each model, adding up to 1 (default: equal)")
    add(
        "--method",
        choices=("linear", "slerp"),
        default="linear",
        help="average, or the arc between two (default linear)",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the result (default: as the first model)")


def run(args: argparse.Namespace) -> int:
    """Write the directory and say what is in it."""
    import torch

    from burnish.cli.export import size_text
    from burnish.models.export_and_merge import MergeRecipe, check_merge, merge_models
    from burnish.run.durable_files import atomic_directory

    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise UserError(f"{args.out} exists and is not an empty directory: nothing is overwritten, choose another name")
    weights = tuple(args.weights or [1 / len(args.models)] * len(args.models))
    recipe = MergeRecipe(weights, args.method, None if args.dtype is None else getattr(torch, args.dtype))
    sources = [model_of(path) for path in args.models]
    check_merge(sources, recipe)
    for path, weight in zip(sources, weights, strict=True):
        print(f"  {weight:8.4f}  {path}")
    try:
        with atomic_directory(args.out) as folder:
            merge_models(sources, folder, recipe, say)
    except OSError as error:
        raise UserError(f"cannot merge into {args.out}: {error.strerror} ({error.filename})") from error
    for file in sorted(f for f in args.out.rglob("*") if f.is_file()):
        print(f"  {size_text(file.stat().st_size):>10}  {file.relative_to(args.out)}")
    print(f"model: {args.out}")
    return 0


def model_of(path: Path) -> Path:
    """The model that is meant: a plain directory itself, of a run or a checkpoint what `burnish export` would write."""
    from burnish.cli.export import choose_checkpoint, whole_checkpoints_hint
    from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, checkpoint_damage

    if (path / "config.json").is_file() and not (path / MANIFEST_FILE).is_file():
        return path
    chosen, why = choose_checkpoint(path, None)
    if reason := checkpoint_damage(chosen, of="model"):
        raise UserError(f"checkpoint {chosen} is damaged ({reason}){whole_checkpoints_hint(chosen)}")
    if chosen != path:
        say(f"{path}: {chosen.name}, {why}")
    return chosen


def say(text: str) -> None:
    """How far it is, beside what is printed."""
    print(f"  {text}", file=sys.stderr, flush=True)
