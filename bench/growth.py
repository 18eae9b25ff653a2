"""How the time of a step and the peak memory grow with the model, the length of sequences, the samples of a step and the turns.

python bench/growth.py [--only size lora length samples turns] [--limit 60] [--tiny]

    size     GRPO steps of 64 samples of 128 + 128 tokens: 0.1B, 0.5B, 1.5B with all weights trained; 7B with 8-bit moments; layers recomputed
    lora     the same of 14B and 32B with adapters of rank 32
    length   updates of 131,072 tokens of a 1.5B model, as sequences of 1k, 8k, 32k and one of 128k; layers recomputed
    samples  GRPO steps of a 0.1B model with 64, 1k and 16k samples of 64 + 64 tokens
    turns    GRPO steps of a 0.1B model with 64 episodes of 1, 8 and 64 turns: 64 tokens are sampled, 32 are observed

Random weights in bfloat16. Every row runs in a process of its own with a time limit, and is saved as soon as it is measured. Its second
step counts. `exponent` is the slope to the row before it in log-log: 1 is growth in proportion. `work` is its slope of arithmetic: of the learner
as executed (`models/flops.py`), of the rollout as one forward pass of every token. Where time grows faster than work, the parts of the
step that do so are printed with their own exponents. `--tiny` runs the same on a CPU with small shapes, in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

import torch
from batches import equal
from big_models import SHAPES, batch_of
from common import on_this_gpu, save_beside, table
from rollout import random_model

from burnish.algorithms.losses.policy_loss import NllLoss, PolicyLoss
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Engine, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.flops import forward_flops, packed_counts
from burnish.models.lora.adapters import add_lora
from burnish.training.learner import Learner

SHAPES |= {
    "0.1B": {"hidden_size": 768, "mlp_size": 2048, "num_layers": 16, "num_heads": 6, "num_kv_heads": 2, "vocab_size": 49152, "tied": True},
    "0.5B": {
        "hidden_size": 896, "mlp_size": 4864, "num_layers": 24, "num_heads": 14, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 151936,
        "tied": True,
    },
    "14B": {"hidden_size": 5120, "mlp_size": 13824, "num_layers": 48, "num_heads": 40, "num_kv_heads": 8, "vocab_size": 152064, "tied": False},
}  # fmt: skip
TINY_WIDTHS = {"0.1B": 32, "0.5B": 64, "1.5B": 96, "7B": 128, "14B": 128, "32B": 192}
OBSERVED = 32
GIB = 2**30
FASTER = 0.05
"""Difference of two exponents that is worth an explanation."""
PARTS = ("rollout_s", "forward_s", "backward_s", "optimizer_s", "other_s")
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A row: a model and the work of one step."""

    axis: str
    x: float
    """The size that grows: parameters, tokens, samples or turns."""
    shape: str
    samples: int
    prompt: int
    new: int
    turns: int = 1
    updates_only: bool = False
    lora: bool = False
    optimizer: Literal["adamw", "adam8bit"] = "adamw"
    is_tiny: bool = False

    @property
    def name(self) -> str:
        return f"{self.axis}: {self.shape}" if self.axis in ("size", "lora") else f"{self.axis}: {int(self.x):,}"


def points(is_tiny: bool) -> list[Point]:
    """All rows, each axis in the order of growth."""
    full = {"0.1B": 0.14e9, "0.5B": 0.49e9, "1.5B": 1.54e9, "7B": 7.6e9, "14B": 14.8e9, "32B": 32.8e9}
    if is_tiny:
        full = {name: float(sum(p.numel() for p in Decoder(tiny_shape(name)).parameters())) for name in full}
    scale = 16 if is_tiny else 1
    found = [
        Point("size", full[s], s, 64 // min(scale, 8), 128 // scale, 128 // scale, optimizer="adam8bit" if s == "7B" else "adamw")
        for s in ("0.1B", "0.5B", "1.5B", "7B")
    ]  # fmt: skip
    found += [
        Point("lora", full[s], s, 64 // min(scale, 8), 128 // scale, 128 // scale, lora=True) for s in ("14B", "32B")
    ]
    tokens = 131072 // (16 * scale if is_tiny else 1)
    lengths = [tokens // 128, tokens // 16, tokens // 4, tokens]
    found += [Point("length", n, "1.5B", tokens // n, 0, n, updates_only=True) for n in lengths]
    counts = (8, 32, 128) if is_tiny else (64, 1024, 16384)
    found += [Point("samples", n, "0.1B", n, 64 // scale, 64 // scale) for n in counts]
    turns = (1, 2, 4) if is_tiny else (1, 8, 64)
    found += [Point("turns", n, "0.1B", 64 // scale, 64 // scale, 64 // scale, n) for n in turns]
    return [Point(**asdict(point) | {"is_tiny": is_tiny}) for point in found]


def tiny_shape(name: str) -> Architecture:
    width = TINY_WIDTHS[name]
    return Architecture("qwen2", 257, width, 2, width // 16, 1, 16, 3 * width, 32768, qkv_bias=True, tied=True)


# --- one row, in a process of its own --------------------------------------------------------------------------------------


def model_of(point: Point) -> Decoder:
    if not point.is_tiny:
        return random_model(point.shape)
    model = Decoder(tiny_shape(point.shape))
    initialise(model, 0)
    return model


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def episodes(engine: Engine, point: Point, step: int, vocab: int) -> list[tuple[tuple[int, ...], list[int]]]:
    """(prompt, the rest) of every sample, in groups of 8; the observations between turns are random."""
    random = torch.Generator().manual_seed(step)
    prompts = torch.randint(vocab, (max(1, point.samples // 8), point.prompt), generator=random).tolist()
    contexts = [list(prompts[i % len(prompts)]) for i in sorted(range(point.samples), key=lambda i: i % len(prompts))]
    for turn in range(point.turns):
        is_last = turn == point.turns - 1
        options = SamplingOptions(max_tokens=point.new)
        engine.submit([
            Request(f"{step}/{i}/{turn}", tuple(context), options, fold("growth", step, i), turn * point.new, may_continue=not is_last)
            for i, context in enumerate(contexts)
        ])  # fmt: skip
        for done in engine.stream():
            contexts[int(done.id.split("/")[1])] += done.tokens.tolist()
        if not is_last:
            for context in contexts:
                context += torch.randint(vocab, (OBSERVED,), generator=random).tolist()
    return [(tuple(context[: point.prompt]), context[point.prompt :]) for context in contexts]


def measure(point: Point) -> Row:
    """The second step: its seconds by part, its arithmetic, and the peak memory."""
    model = model_of(point)
    device = next(model.parameters()).device
    if point.lora:
        add_lora(model, Lora(rank=32), 0)
    set_activations(model, "recompute")
    longest = point.prompt + point.turns * (point.new + OBSERVED)
    learner = Learner(model, Optimizer(lr=1e-6, name=point.optimizer), 10, max(longest, 16384))
    engine: PagedEngine | DenseEngine | None = None
    if not point.updates_only:
        rows = min(point.samples, 1024)
        engine = DenseEngine(model, rows) if point.is_tiny else PagedEngine(model, rows)
        if isinstance(engine, PagedEngine):
            engine.num_contexts = point.samples if point.turns > 1 else 0
    for step in range(2):
        wait()
        started = time.perf_counter()
        if engine is None:
            batch: Batch = equal(point.samples, point.new, model.arch.vocab_size, device.type)
        else:
            batch = batch_of(episodes(engine, point, step, model.arch.vocab_size), 8, device.type)
            engine.sleep()
        wait()
        sampled = time.perf_counter()
        learner.meter.read()
        update = learner.update(batch, NllLoss() if engine is None else PolicyLoss())
        assert update.skipped is None, update.skipped
        learner.release()
        if engine is not None:
            engine.load(step, ())
        wait()
        ended = time.perf_counter()
    reading = learner.meter.read()
    assert reading.executed is not None
    lengths = batch.lengths.tolist()
    counts = packed_counts(lengths, point.samples * point.turns * point.new, model.arch.windows)
    sampling = 0.0 if engine is None else float(forward_flops(model.arch, counts).total)
    parts = {f"{part}_s": reading.seconds.get(part, 0.0) for part in ("forward", "backward", "optimizer")}
    on_gpu = device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    plan = engine.stats.plan if isinstance(engine, PagedEngine) else None
    cache = 0 if plan is None else plan.bytes  # it sleeps while the learner works, so it is no part of the peak
    return {
        "work": point.name, "system": "burnish", "axis": point.axis, "x": point.x, "tokens": batch.num_tokens,
        "step_s": ended - started if engine is not None else ended - sampled, "rollout_s": 0.0 if engine is None else sampled - started,
        "learn_s": ended - sampled, **parts, "other_s": ended - sampled - sum(parts.values()),
        "pflop": (reading.executed + sampling) / 1e15, "peak_gib": peak / GIB, "cache_gib": cache / GIB,
    }  # fmt: skip


# --- all rows ------------------------------------------------------------------------------------------------------------


def run_point(point: Point, limit_s: float) -> Row:
    """A row from a process of its own; one that fails or takes too long says so."""
    row: Row = {"work": point.name, "system": "burnish", "axis": point.axis, "x": point.x}
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return row | {"problem": f"took more than {limit_s:.0f} s"}
    if done.returncode:
        return row | {"problem": (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]}
    found: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def slope(before: Row, after: Row, key: str) -> float | None:
    """The exponent between two rows: d log(value) / d log(x); None if one is not known or 0."""
    first, last = before.get(key), after.get(key)
    if not first or not last or before["x"] == after["x"]:
        return None
    return math.log(last / first) / math.log(after["x"] / before["x"])


def with_exponents(rows: list[Row]) -> list[Row]:
    """The rows with their slopes to the row before of the same axis."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row["axis"]):
        measured = list(group)
        found.append(measured[0])
        for before, after in pairwise(measured):
            slopes = {"exponent": "step_s", "work_exponent": "pflop", "memory_exponent": "peak_gib"}
            found.append(after | {name: slope(before, after, key) for name, key in slopes.items()})
    return found


def explanations(rows: list[Row]) -> Iterator[str]:
    """What made the time of a row grow faster than its arithmetic: the parts of the step that did, as measured."""
    for before, after in pairwise(rows):
        time_slope, work_slope = slope(before, after, "step_s"), slope(before, after, "pflop")
        if before["axis"] != after["axis"] or time_slope is None or work_slope is None:
            continue
        if time_slope <= work_slope + FASTER:
            continue
        grown = [(part, slope(before, after, part)) for part in PARTS]
        faster = [
            f"{part.removesuffix('_s')} ^{s:.2f} ({after[part] / after['step_s']:.0%} of the step)"
            for part, s in grown
            if s is not None and s > work_slope + FASTER and after[part] > 0.01 * after["step_s"]
        ]
        yield f"{after['work']}: time ^{time_slope:.2f}, work ^{work_slope:.2f}; faster than the work grew {', '.join(faster)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    axes = ("size", "lora", "length", "samples", "turns")
    parser.add_argument("--only", nargs="+", choices=axes, default=axes)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a row, its process's start included")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.point is not None:
        print(json.dumps(measure(Point(**json.loads(args.point)))))
        return
    started, rows, name = time.perf_counter(), list[Row](), "growth-tiny" if args.tiny else on_this_gpu("growth")
    columns = ["work", "tokens", "step_s", "exponent", "work_exponent", "rollout_s", "learn_s", "peak_gib", "memory_exponent", "cache_gib", "problem"]  # fmt: skip
    for point in (point for point in points(args.tiny) if point.axis in args.only):
        rows.append(run_point(point, args.limit))
        print(f"{point.name} after {time.perf_counter() - started:.0f} s", flush=True)
        path = save_beside(name, with_exponents(rows), lambda row: row["work"])
    print(table(with_exponents(rows), columns))
    for text in explanations(rows):
        print(text)
    print(f"saved {path}")


if __name__ == "__main__":
    main()
