"""Cost of a checkpoint: how long training is blocked, and how much slower updates are while it is written.

    python bench/checkpoint.py [--shape 1.5B] [--updates 6] [--folder /tmp]

A policy with random weights in bfloat16 and AdamW's float32 state (14 bytes a parameter), updated on ragged batches of
64 sequences. Without a GPU: a policy of 24 M parameters in float32 (12 bytes), updated on one sequence. Rows are ways to save:

  wait          the loop waits until the files are on disk; nothing is copied
  background    copied to host memory, and written by a thread during updates (the first time, memory must be allocated)

`blocked_s` is how long the loop was blocked, `write_s` the time until the files were on disk, `update_s` the time of an
update without writing, `update_meanwhile_s` that of an update during writing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from batches import ragged
from common import on_this_gpu, save, table
from rollout import random_model

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.model import Optimizer
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.weight_files import decoder_contents
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.saver import CheckpointSaver, TensorStaging
from burnish.run.checkpoint.snapshot import Snapshot
from burnish.training.learner import Learner

SMALL = Architecture("qwen2", 16384, 384, 8, 6, 2, 64, 1536, 1024, qkv_bias=True, tied=True)


def make_learner(shape: str) -> tuple[Decoder, Learner, Any]:
    """A learner and a batch for it."""
    if torch.cuda.is_available():
        model, num = random_model(shape), 64
    else:
        model, num = Decoder(SMALL), 1
        initialise(model, 0)
    learner = Learner(model, Optimizer(lr=1e-6), 1000, token_budget=8192)
    return model, learner, ragged(num, model.arch.vocab_size, device=str(learner.device))


def update(learner: Learner, batch: Any) -> float:
    started = time.perf_counter()
    learner.update(batch, NllLoss())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(
    way: str, number: int, model: Decoder, learner: Learner, batch: Any, num: int, folder: Path
) -> dict[str, Any]:
    """One checkpoint while updates are made, and as many updates without."""
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=1)
    saving = CheckpointSaver(checkpoints, way != "wait", print)

    def take(stage: TensorStaging) -> Snapshot:
        return Snapshot(list(decoder_contents(model, stage, None)), learner.contents(stage))

    alone = [update(learner, batch) for _ in range(num)]
    started = time.perf_counter()
    saving.begin(number, take, None)
    blocked = time.perf_counter() - started
    meanwhile = []
    while way != "wait" and (saved := saving.collect(wait=False)) is None:
        meanwhile.append(update(learner, batch))
    saved = saving.collect(wait=True) if way == "wait" else saved
    assert saved is not None
    size = sum(f.stat().st_size for f in saved.path.rglob("*") if f.is_file())
    return {
        "way": way,
        "gigabytes": size / 1e9,
        "blocked_s": blocked,
        "write_s": saved.write_s,
        "update_s": statistics.median(alone),
        "update_meanwhile_s": statistics.median(meanwhile) if meanwhile else None,
        "updates_meanwhile": len(meanwhile),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="1.5B")
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    args = parser.parse_args()
    folder = args.folder / "bench-checkpoint"
    model, learner, batch = make_learner(args.shape)
    for _ in range(2):
        update(learner, batch)
    rows: list[dict[str, Any]] = []
    for number, way in enumerate(["wait", "background", "background"], 1):
        rows.append(measure(way, number, model, learner, batch, args.updates, folder))
        print(table(rows[-1:], list(rows[-1])), flush=True)
    shutil.rmtree(folder)
    print(f"saved {save(on_this_gpu('checkpoint'), rows)}")


if __name__ == "__main__":
    main()
