"""The learner on two CPU cores: one process of two threads, and two ranks of one thread each.

python bench/learner_cpu.py [--steps 1] [--repeats 1] [--tokens 32768] [--limit 240]

A Qwen2-shaped decoder of 25 M parameters (hidden 512, 6 layers, 8/4 heads of 64, mlp 1536, vocabulary 12,288, tied),
float32, all weights trained. A step is one update on 32 k packed tokens of ragged samples, including log-probs, entropies
and AdamW. The ranks communicate through gloo and hold half of every parameter each (FSDP2). An update is about 5.5 TFLOP,
20 s on two quiet cores; one of each system takes a minute, start included. With more repeats the two take turns, so that
other load affects both, and medians are compared. A run that takes longer than `--limit` seconds is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from batches import ragged
from common import save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.config.model import Optimizer
from burnish.config.placement import Parallel
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.training.learner import Learner
from burnish.training.meter import memory_metrics
from burnish.training.parallel.ranks import join_process_group, leave_process_group, parallelize_model

SHAPE = Architecture("qwen2", 12288, 512, 6, 8, 4, 64, 1536, 1024, qkv_bias=True, tied=True)
AVERAGE = 384  # tokens of a sample


def work(steps: int, tokens: int) -> dict[str, Any]:
    """Updates of this process (with its peers, where a launcher gave it some): seconds of each, and where they went."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = Decoder(SHAPE)
    initialise(model, seed=0)
    ranks = join_process_group(Parallel(), on_gpu=False)
    parallelize_model(model, ranks)
    learner = Learner(model, Optimizer(lr=1e-6), 1000, token_budget=4096, ranks=ranks)
    small, whole = (ranks.local_shard(ragged(num, SHAPE.vocab_size, device="cpu")) for num in (8, tokens // AVERAGE))
    learner.update(small, PolicyLoss())
    learner.meter.read()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        learner.update(whole, PolicyLoss())
        seconds.append(time.perf_counter() - started)
    reading = learner.meter.read()
    split = {f"{part}_s": value / steps for part, value in reading.seconds.items()}
    assert reading.executed is not None
    found = {"update_s": seconds, "tokens": whole.num_tokens, **split, **memory_metrics(torch.device("cpu"))}
    leave_process_group()
    return found | {"executed_tflop": reading.executed / steps / 1e12}


def launched(num_ranks: int, threads: int, steps: int, tokens: int, limit: float) -> list[dict[str, Any]]:
    """What every process of a system reports; a rank that fails, or all of them being slow, ends the others too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--worker", "--steps", str(steps), "--tokens", str(tokens)]
    alone = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": str(threads)}
    peers = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            command,
            env=alone if num_ranks == 1 else alone | peers | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    deadline = time.monotonic() + limit
    while any(process.poll() is None for process in started):
        failed = any(process.poll() for process in started)
        if failed or time.monotonic() > deadline:
            for process in started:
                process.kill()
            sys.exit(f"{num_ranks} ranks {'failed' if failed else f'did not end within {limit:g} s'}")
        time.sleep(0.2)
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{num_ranks} ranks failed")
    found = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    print(
        f"{num_ranks} ranks of {threads} threads: {', '.join(f'{s:.1f} s' for s in found[0]['update_s'])}", flush=True
    )
    return found


def row_of(system: str, runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """The medians of a system's runs; tokens, operations and memory of all its processes together, times of the first."""
    update_s = statistics.median(seconds for run in runs for seconds in run[0]["update_s"])
    tokens = sum(process["tokens"] for process in runs[0])
    row = {"work": f"update on {tokens:,} tokens", "system": system, "update_s": update_s, "tokens": tokens}
    row["tokens_per_s"] = tokens / update_s
    row["gflops_per_s"] = sum(process["executed_tflop"] for process in runs[0]) / update_s * 1000
    for part in ("forward", "backward", "optimizer", "communication", "other"):
        row[f"{part}_s"] = statistics.median(run[0][f"{part}_s"] for run in runs)
    row["memory_gib"] = max(sum(process["memory/peak_gib"] for process in run) for run in runs)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--limit", type=float, default=240, help="seconds a run may take")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        print(json.dumps(work(args.steps, args.tokens)))
        return
    one, two = [], []
    for _ in range(args.repeats):
        one.append(launched(1, 2, args.steps, args.tokens, args.limit))
        two.append(launched(2, 1, args.steps, args.tokens, args.limit))
    rows = [row_of("burnish, one process of two threads", one), row_of("burnish, two ranks of one thread", two)]
    rows[1]["share_of_one_process"] = rows[1]["update_s"] / rows[0]["update_s"]
    columns = ["system", "update_s", "tokens_per_s", "gflops_per_s", "forward_s", "backward_s", "optimizer_s"]
    print(table(rows, [*columns, "communication_s", "memory_gib", "share_of_one_process"]))
    print(f"saved {save('learner_cpu', rows)}")


if __name__ == "__main__":
    main()
