"""`burnish export RUN OUT`: the model of a run, or of one checkpoint, as a plain Hugging Face directory.

The files that make the model, without optimizer and trainer state, whole or not at all: they are checked against the
checkpoint's checksums before one is written. A model with adapters gives a PEFT directory, or with --merged a whole one.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from burnish.config.errors import UserError

if TYPE_CHECKING:
    from burnish.run.checkpoint.checkpoints import Checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run, or one of its checkpoints/step-... folders")
    add("out", type=Path, metavar="OUT", help="the directory to write; it must not exist, or be empty")
    add("--step", metavar="N|best|last", help="which checkpoint of a run (default: best, or last if none has a score)")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights (default: as they are)")
    add("--merged", action="store_true", help="with adapters (LoRA): add them into the weights of their base")


def run(args: argparse.Namespace) -> int:
    """Write the directory and say what is in it."""
    from burnish.run.checkpoint.checkpoints import checkpoint_damage, read_manifest
    from burnish.run.durable_files import atomic_directory

    if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
        raise UserError(f"{args.out} exists and is not an empty directory: nothing is overwritten, choose another name")
    path, why = choose_checkpoint(args.source, args.step)
    if reason := checkpoint_damage(path, of="model"):
        raise UserError(f"checkpoint {path} is damaged ({reason}){whole_checkpoints_hint(path)}")
    manifest = read_manifest(path)
    assert manifest is not None, "a checkpoint that is not damaged has one"
    print(f"exporting {path} ({why})")
    names = [name for name, entry in manifest["files"].items() if entry["of"] == "model"]
    try:
        with atomic_directory(args.out) as folder:
            export(path, names, folder, args.dtype, args.merged)
    except OSError as error:
        raise UserError(f"cannot export {path} to {args.out}: {error.strerror} ({error.filename})") from error
    for file in sorted(f for f in args.out.rglob("*") if f.is_file()):
        print(f"  {size_text(file.stat().st_size):>10}  {file.relative_to(args.out)}")
    print(f"model: {args.out}")
    return 0


def export(path: Path, names: list[str], folder: Path, dtype: str | None, merged: bool) -> None:
    """The model in a folder."""
    import torch

    from burnish.models.export_and_merge import copy_model, merge_adapter

    wanted = None if dtype is None else getattr(torch, dtype)
    if merged:
        merge_adapter(path, folder, wanted)
    else:
        copy_model(path, names, folder, wanted)


def choose_checkpoint(source: Path, step: str | None) -> tuple[Path, str]:
    """The checkpoint that is meant, and why."""
    from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, Checkpoints
    from burnish.run.run_directory import RunDirectory

    if (re.fullmatch(r"step-\d+", source.name) and source.is_dir()) or (source / MANIFEST_FILE).is_file():
        if step is not None:
            raise UserError(f"--step {step} chooses a checkpoint of a run, and {source} is a checkpoint already")
        return source, "the checkpoint asked for"
    if (source / "config.json").is_file():
        raise UserError(f"{source} is a plain model directory already: copy it")
    checkpoints = Checkpoints(RunDirectory.open(source).checkpoints, keep_last=1)
    if not checkpoints.folders():
        raise UserError(f"run {source} has no checkpoint yet; wait for its first one (run.save_every)")
    return choose_run_checkpoint(source, checkpoints, step)


def choose_run_checkpoint(source: Path, checkpoints: Checkpoints, step: str | None) -> tuple[Path, str]:
    """A run's checkpoint by its number, or by what it is."""
    from burnish.run.checkpoint.checkpoints import best_of

    folders = {int(folder.name.removeprefix("step-")): folder for folder in checkpoints.folders()}
    if step is not None and step.isdigit():
        if int(step) not in folders:
            raise UserError(f"run {source} has no checkpoint of step {step}: there are {', '.join(map(str, folders))}")
        return folders[int(step)], "the step asked for"
    if step not in (None, "best", "last"):
        raise UserError(f"--step {step}: expected the number of a step, best or last")
    best = best_of(checkpoints.all())
    if step == "best" and best is None:
        raise UserError(f"run {source} has no checkpoint with a score, so none is best: use --step last")
    if step == "last" or best is None:
        return folders[max(folders)], "its last" + ("" if step == "last" else ", none has a score")
    return best.path, f"its best: {best.score_text}"


def whole_checkpoints_hint(path: Path) -> str:
    """What to do about a damaged checkpoint."""
    from burnish.run.checkpoint.checkpoints import Checkpoints, checkpoint_damage

    beside = [folder for folder in Checkpoints(path.parent, keep_last=1).folders() if folder != path]
    whole = [
        int(folder.name.removeprefix("step-")) for folder in beside if checkpoint_damage(folder, of="model") is None
    ]
    listed = f"; whole are those of step {', '.join(map(str, whole))} (--step)" if whole else ""
    return f": restore it from a copy{listed}"


def size_text(num_bytes: int) -> str:
    """`3.1 GB`, `12.4 KB`, `512 B`."""
    size = float(num_bytes)
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
