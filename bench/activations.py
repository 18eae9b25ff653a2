"""Cost and savings of each activation mode on one GPU, and the effect of torch.compile on the layers.

python bench/activations.py [--shape 1.5B] [--repeats 3] [--only keep selective recompute offload compile compile+recompute]

Random weights in bfloat16, all trained; 84 packed samples of 128 to 640 tokens in micro-batches of 16,384; log-probs and
entropies. `planned` is the memory plan's figure. The plan does not model the compiler and treats it as `keep`.
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

import torch
from batches import ragged
from common import on_this_gpu, save, table
from rollout import random_model

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.config.model import Optimizer
from burnish.memory_plan.planner import GIB, RunSetup, plan_memory
from burnish.models.activation_checkpointing import set_activations
from burnish.models.compiled_layers import compile_layers
from burnish.training.learner import Learner

WAYS = ("keep", "selective", "recompute", "offload", "compile", "compile+recompute")
BUDGET, SAMPLES = 16384, 84


def measure(shape: str, way: str, repeats: int) -> dict[str, Any]:
    """Updates of a new learner: seconds of the median one after the first, memory at the peak."""
    policy = way.removeprefix("compile").removeprefix("+") or "keep"
    model = random_model(shape)
    set_activations(model, policy)
    if way.startswith("compile"):
        compile_layers(model)
    batch = ragged(SAMPLES, model.arch.vocab_size)
    learner = Learner(model, Optimizer(), 100, BUDGET, share_prefixes=False)
    seconds = []
    for _ in range(1 + repeats):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        learner.update(batch, PolicyLoss())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    longest = int(batch.lengths.max())
    setup = RunSetup(model.arch, "bfloat16", True, Optimizer(), BUDGET, longest, batch.num_tokens, activations=policy)
    update_s = sorted(seconds[1:])[(repeats - 1) // 2]
    return {
        "work": f"{shape}, {way}",
        "system": "burnish",
        "tokens": batch.num_tokens,
        "first_s": seconds[0],
        "update_s": update_s,
        "tokens_per_s": batch.num_tokens / update_s,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "planned_gib": plan_memory(setup).learners_peak(2) / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    args = parser.parse_args()
    rows = []
    for way in args.only:
        rows.append(measure(args.shape, way, args.repeats))
        print(table(rows[-1:], list(rows[-1])), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    columns = ["work", "update_s", "tokens_per_s", "peak_gib", "planned_gib", "first_s"]
    print(table(rows, columns))
    print(f"saved {save(on_this_gpu('activations'), rows)}")


if __name__ == "__main__":
    main()
