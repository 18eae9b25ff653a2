"""`burnish export` and `burnish merge`: results of finished runs as model directories.

Export writes the files of a model as a plain Hugging Face directory, without optimizer and trainer state. They are checked against the
checksums of the checkpoint before anything is written, and the directory appears complete or not at all. A model with adapters becomes a
PEFT directory, or with --merged a full model.

Merge averages the weights of several models without training. Kimi k1.5 (2501.12599) merges a model with long answers and one with short
answers (long2short).
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.run.checkpoint.checkpoints import Checkpoints


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish export RUN OUT`."""
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints/step-... folders")
    _add_out(parser)
    add("--step", metavar="N|best|last", help="which checkpoint of a run (default: best, or last if none has a score)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (default: unchanged)")
    add("--merged", action="store_true", help="merge adapters (LoRA) into the weights of their base model")


def run_export(args: argparse.Namespace) -> int:
    """Write the model directory and list its files."""
    from burnish.run.checkpoint.checkpoints import read_manifest
    from burnish.run.durable_files import atomic_directory

    _check_out(args.out)
    path, why = choose_checkpoint(args.source, args.step)
    _check_undamaged(path)
    manifest = read_manifest(path)
    assert manifest is not None, "an undamaged checkpoint has a manifest"
    print(f"exporting {path} ({why})")
    names = [name for name, entry in manifest["files"].items() if entry["of"] == "model"]
    import torch

    from burnish.models.export_and_merge import copy_model, merge_adapter

    dtype = None if args.dtype is None else getattr(torch, args.dtype)
    try:
        with atomic_directory(args.out) as folder:
            if args.merged:
                merge_adapter(path, folder, dtype)
            else:
                copy_model(path, names, folder, dtype)
    except OSError as error:
        raise UserError(f"cannot export {path} to {args.out}: {error.strerror} ({error.filename})") from error
    _print_files(args.out)
    return 0


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    """`burnish merge OUT A B ...`."""
    add = parser.add_argument
    _add_out(parser)
    add(
        "models",
        type=Path,
        nargs="+",
        metavar="MODEL",
        help="two or more: Hugging Face directories, ids of the hub, checkpoints, or runs (their best checkpoint)",
    )
    add("--weights", type=float, nargs="+", metavar="W", help="one for each model, with sum 1 (default: equal)")
    add(
        "--method",
        choices=("linear", "slerp"),
        default="linear",
        help="weighted average, or spherical interpolation of two models (default linear)",
    )
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the result (default: as the first model)")


def run_merge(args: argparse.Namespace) -> int:
    """Write the merged model directory and list its files."""
    import torch

    from burnish.models.export_and_merge import MergeRecipe, check_merge, merge_models
    from burnish.run.durable_files import atomic_directory

    _check_out(args.out)
    weights = tuple(args.weights or [1 / len(args.models)] * len(args.models))
    recipe = MergeRecipe(weights, args.method, None if args.dtype is None else getattr(torch, args.dtype))
    sources = [model_of(path) for path in args.models]
    check_merge(sources, recipe)
    for path, weight in zip(sources, weights, strict=True):
        print(f"  {weight:8.4f}  {path}")
    try:
        with atomic_directory(args.out) as folder:
            merge_models(sources, folder, recipe, _print_progress)
    except OSError as error:
        raise UserError(f"cannot merge into {args.out}: {error.strerror} ({error.filename})") from error
    _print_files(args.out)
    return 0


def model_of(path: Path) -> Path:
    """The model directory of a path: a plain directory itself, or the checkpoint of a run that `burnish export` would choose."""
    from burnish.config.model_ids import fetch_model, parse_model_id
    from burnish.run.checkpoint.checkpoints import MANIFEST_FILE

    model = parse_model_id(str(path)) if not path.exists() else None
    if model is not None:
        return fetch_model(model, say=_print_progress)
    if (path / "config.json").is_file() and not (path / MANIFEST_FILE).is_file():
        return path
    chosen, why = choose_checkpoint(path, None)
    _check_undamaged(chosen)
    if chosen != path:
        _print_progress(f"{path}: {chosen.name}, {why}")
    return chosen


def choose_checkpoint(source: Path, step: str | None) -> tuple[Path, str]:
    """The checkpoint that a run, a checkpoint and `--step` select, and why."""
    from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, Checkpoints
    from burnish.run.run_directory import RunDirectory

    if (re.fullmatch(r"step-\d+", source.name) and source.is_dir()) or (source / MANIFEST_FILE).is_file():
        if step is not None:
            raise UserError(f"--step {step} selects a checkpoint of a run, but {source} is a checkpoint already")
        return source, "the given checkpoint"
    if (source / "config.json").is_file():
        raise UserError(f"{source} is a plain model directory already: copy it instead")
    checkpoints = Checkpoints(RunDirectory.open(source).checkpoints, keep_last=1)
    if not checkpoints.folders():
        raise UserError(f"run {source} has no checkpoint yet; wait for its first one (run.save_every)")
    return choose_run_checkpoint(source, checkpoints, step)


def choose_run_checkpoint(source: Path, checkpoints: Checkpoints, step: str | None) -> tuple[Path, str]:
    """A run's checkpoint by its step, or the best or last one."""
    from burnish.run.checkpoint.checkpoints import best_of

    folders = {int(folder.name.removeprefix("step-")): folder for folder in checkpoints.folders()}
    if step is not None and step.isdigit():
        if int(step) not in folders:
            raise UserError(f"run {source} has no checkpoint of step {step}: there are {', '.join(map(str, folders))}")
        return folders[int(step)], "the given step"
    if step not in (None, "best", "last"):
        raise UserError(f"--step {step}: expected the number of a step, best or last")
    best = best_of(checkpoints.all())
    if step == "best" and best is None:
        raise UserError(f"run {source} has no checkpoint with a score, so none is best: use --step last")
    if step == "last" or best is None:
        return folders[max(folders)], "its last" + ("" if step == "last" else ", none has a score")
    return best.path, f"its best: {best.score_text}"


def _undamaged_hint(path: Path) -> str:
    """What to do about a damaged checkpoint, with the undamaged ones beside it."""
    from burnish.run.checkpoint.checkpoints import Checkpoints, checkpoint_damage

    siblings = [folder for folder in Checkpoints(path.parent, keep_last=1).folders() if folder != path]
    undamaged = [
        int(folder.name.removeprefix("step-")) for folder in siblings if checkpoint_damage(folder, of="model") is None
    ]
    listed = f"; the checkpoints of step {', '.join(map(str, undamaged))} are undamaged (--step)" if undamaged else ""
    return f": restore it from a copy{listed}"


def _add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="the directory to write; it must not exist, or be empty")


def _check_out(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty directory: nothing is overwritten, choose another name")


def _check_undamaged(checkpoint: Path) -> None:
    from burnish.run.checkpoint.checkpoints import checkpoint_damage

    if reason := checkpoint_damage(checkpoint, of="model"):
        raise UserError(f"checkpoint {checkpoint} is damaged ({reason}){_undamaged_hint(checkpoint)}")


def _print_files(out: Path) -> None:
    for file in sorted(f for f in out.rglob("*") if f.is_file()):
        print(f"  {size_text(file.stat().st_size):>10}  {file.relative_to(out)}")
    print(f"model: {out}")


def _print_progress(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def size_text(num_bytes: int) -> str:
    """`3.1 GB`, `12.4 KB`, `512 B`."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
