"""The checkpoints of a run: writing them, finding the newest or best intact one, and deleting old ones.

A checkpoint is a folder `step-000050`, written under a temporary name and renamed. Its manifest `burnish.json` is written
last. It holds the step, the score with the name of its metric, and for each file its size, its CRC-32 and whether it
belongs to the model or to the training state. So a damaged checkpoint is detected before it is loaded.

The newest `keep_last` checkpoints and the best by each metric are kept. The others are deleted after the new one is on
disk. `index.json` lists the checkpoints for people and other tools; this program reads only the manifests.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.yaml_text import parse_yaml
from burnish.run.checkpoint.snapshot import (
    Checksums,
    Snapshot,
    are_checksums,
    assembled_folder,
    first_damaged_file,
    write_file,
    write_part,
)
from burnish.run.durable_files import START_OVER_HINT, atomic_directory, atomic_write, remove
from burnish.run.run_directory import earlier_configs

MANIFEST_FILE = "burnish.json"


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint folder, the step after which it was taken, and its validation score if it has one."""

    path: Path
    step: int
    score: float | None
    metric: str | None = None
    """The metric of the score. A leading minus means that lower is better. None if it is unknown."""

    @property
    def score_text(self) -> str:
        """The score with its metric: `validation/greedy/accuracy 0.500`."""
        if self.score is None:
            return "no score"
        name = "score" if self.metric is None else self.metric.removeprefix("-")
        return f"{name} {self.score:.3f}" + (", lower is better" if self.is_lower_better else "")

    @property
    def is_lower_better(self) -> bool:
        return self.metric is not None and self.metric.startswith("-")


def checkpoint_damage(path: Path, contents: bool = True, of: str | None = None) -> str | None:
    """Return why a checkpoint is not usable, or None. Without `contents` only names and sizes are compared, which is fast.

    With `of="model"` or `of="state"`, only the files of the model or of the training state are checked.
    """
    manifest = read_manifest(path)
    if manifest is None:
        return f"{MANIFEST_FILE} is missing or damaged"
    wanted = {name: entry for name, entry in manifest["files"].items() if of is None or entry["of"] == of}
    return first_damaged_file(path, wanted, contents)


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the best score. Of equal scores, the earlier one wins, because it needed less training.

    Values of different metrics are not comparable, so the metric of the newest checkpoint with a score is used.
    """
    scored = [c for c in checkpoints if c.score is not None]
    return best_of_each_metric(checkpoints)[scored[-1].metric] if scored else None


def best_of_each_metric(checkpoints: list[Checkpoint]) -> dict[str | None, Checkpoint]:
    """Return the best checkpoint by each metric."""
    best: dict[str | None, tuple[float, Checkpoint]] = {}
    for checkpoint in sorted(checkpoints, key=lambda c: c.step):
        if checkpoint.score is None:
            continue
        value = -checkpoint.score if checkpoint.is_lower_better else checkpoint.score
        if checkpoint.metric not in best or value > best[checkpoint.metric][0]:
            best[checkpoint.metric] = value, checkpoint
    return {metric: checkpoint for metric, (_, checkpoint) in best.items()}


def score_by(metric: str, measured: Mapping[str, float]) -> tuple[float, str] | None:
    """Return (value, metric) for a metric that may begin with a minus; None if it was not measured."""
    value = measured.get(metric.removeprefix("-"))
    return None if value is None else (value, metric)


def legacy_metric(run: Path) -> str | None:
    """Return the metric of scores whose manifest names none; None if `run` has no config.

    Versions without `run.best_by` wrote such manifests. They scored by held-out accuracy, in the first mode of `burnish train`.
    """
    files = [file for file in (*earlier_configs(run), run / "config.yaml") if file.is_file()]
    parsed = [parse_yaml(file.read_text(), str(file)) for file in files]
    configs = [config for config in parsed if isinstance(config, dict) and "run" in config]
    if not configs:
        return None
    earlier = [config for config in configs if "best_by" not in config["run"]]
    config = earlier[-1] if earlier else configs[0]
    if "validation" in config:
        kind = next(iter(config["validation"]["modes"]))
    else:
        kind = "answers" if config.get("preference", {}).get("loss", {}).get("name") == "kto" else "pairs"
    return f"validation/{kind}/accuracy"


def print_to_stderr(text: str) -> None:
    """Print a note to stderr. The default for `Checkpoints.report`."""
    print(text, file=sys.stderr, flush=True)


class Checkpoints:
    """The checkpoints of one run. `report` is called with a sentence about each damaged checkpoint that is skipped.

    With `of="model"`, `latest` and `best` look at the files of the model alone: for what reads no training state, which is six
    times larger and may be gone.
    """

    def __init__(
        self, folder: Path, keep_last: int, report: Callable[[str], None] = print_to_stderr, of: str | None = None
    ) -> None:
        self.folder = folder
        self.keep_last = keep_last
        self.report = report
        self.of = of

    def write(self, step: int, snapshot: Snapshot, score: float | None = None, metric: str | None = None) -> Path:
        """Write a snapshot as the checkpoint of `step`, then delete old checkpoints. Returns its path.

        Checkpoints of later steps are deleted too, because the run was rewound before them. When several processes save
        together, each calls this with its part. Process 0 also deletes, and returns when the checkpoint is complete.
        """
        path = self.folder / f"step-{step:06d}"
        self.folder.mkdir(parents=True, exist_ok=True)
        if snapshot.part.count == 1:
            with atomic_directory(path, replace=True) as folder:
                _write_manifest(folder, step, score, metric, snapshot.write(folder))
        else:
            write_part(path, snapshot)
            if snapshot.part.index != 0:
                return path
            with assembled_folder(path, snapshot.part) as (folder, sums):
                _write_manifest(folder, step, score, metric, sums)
        kept = self._to_keep(step)
        self._write_index(kept)
        for old in self.folders():
            if old not in [c.path for c in kept]:
                remove(old)
        return path

    def all(self) -> list[Checkpoint]:
        """Return every checkpoint with a readable manifest, oldest first. Contents are not checked."""
        found = []
        for path in self.folders():
            if manifest := read_manifest(path):
                score, metric = manifest["score"], manifest.get("metric")
                if score is not None and metric is None:
                    metric = self._unnamed_metric
                found.append(Checkpoint(path, manifest["step"], score, metric))
        return found

    @cached_property
    def _unnamed_metric(self) -> str | None:
        return legacy_metric(self.folder.parent)

    def latest(self) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None if none was ever written.

        A damaged checkpoint is reported and skipped. If all are damaged, that is a `UserError`.
        """
        reasons = []
        for path in reversed(self.folders()):
            reason = checkpoint_damage(path, of=self.of)
            if reason is None:
                return next(c for c in self.all() if c.path == path)
            reasons.append(f"{path}: {reason}")
            self.report(f"checkpoint {path} is damaged ({reason}); trying the one before")
        if reasons:
            listed = "\n  ".join(reasons)
            whole = [path for path in self.folders() if checkpoint_damage(path, of="model") is None]
            other = f", start another run from a model that is whole (model.path={whole[-1]})" if whole else ""
            raise UserError(
                f"no checkpoint of this run can be used:\n  {listed}\nrestore one from a copy{other}, {START_OVER_HINT}"
            )
        return None

    def best(self) -> Checkpoint | None:
        """Return the intact checkpoint with the best score, or None if none has a score."""
        candidates = self.all()
        while (best := best_of(candidates)) is not None:
            reason = checkpoint_damage(best.path, of=self.of)
            if reason is None:
                return best
            self.report(f"checkpoint {best.path} is damaged ({reason}); trying the next best")
            candidates.remove(best)
        return None

    def _to_keep(self, step: int) -> list[Checkpoint]:
        usable = [c for c in self.all() if c.step <= step and checkpoint_damage(c.path, contents=False) is None]
        # A resumed run may change its metric and later change it back, so the best by each earlier metric is kept too.
        best = best_of_each_metric(usable).values()
        return [c for c in usable if c in usable[-self.keep_last :] or c in best]

    def _write_index(self, kept: list[Checkpoint]) -> None:
        best = best_of(kept)
        rows = [{"step": c.step, "score": c.score, "metric": c.metric, "folder": c.path.name} for c in kept]
        best_by = best.metric if best else None
        index = {"checkpoints": rows, "latest": kept[-1].step, "best": best.step if best else None, "best_by": best_by}
        atomic_write(self.folder / "index.json", json.dumps(index, indent=1) + "\n")

    def delete_training_state(self) -> None:
        """Delete what only a resumed run reads, of every checkpoint."""
        for path in self.folders():
            manifest = read_manifest(path)
            for name, entry in {} if manifest is None else manifest["files"].items():
                if entry["of"] == "state":
                    (path / name).unlink(missing_ok=True)

    def folders(self) -> list[Path]:
        """Return every checkpoint folder, intact or not, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [p for p in self.folder.iterdir() if p.is_dir() and re.fullmatch(r"step-\d{6,}", p.name)]
        return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def _write_manifest(folder: Path, step: int, score: float | None, metric: str | None, sums: Checksums) -> None:
    finite = score if score is not None and math.isfinite(score) else None
    named = None if finite is None else metric
    manifest = {"step": step, "score": finite, "metric": named, "files": dict(sorted(sums.items()))}
    write_file(folder, MANIFEST_FILE, [json.dumps(manifest, indent=1).encode()])


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Return the manifest of a checkpoint; None if it is missing, damaged or incomplete."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    return manifest if _is_manifest(manifest) else None


def _is_manifest(found: Any) -> bool:
    if not isinstance(found, dict) or not {"step", "score", "files"} <= found.keys():
        return False
    return (
        type(found["step"]) is int
        and (found["score"] is None or type(found["score"]) in (int, float))
        and isinstance(found.get("metric"), str | None)
        and are_checksums(found["files"])
        and all(entry.get("of") in ("model", "state") for entry in found["files"].values())
    )
