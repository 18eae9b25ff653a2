"""Checks that memory does not grow: updates of a small model on batches of changing lengths, and the resident size after each.

python bench/soak.py [--updates 200] [--activations keep]

It runs on a CPU, where the resident size of the process includes everything: the learner's tensors, autograd's graphs,
Python's objects. The slope is that of a straight line through the sizes of the second half, with its standard error. An
update must leave nothing behind, so the slope is 0 except for noise of the allocator.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import time
from typing import Any

import torch
from common import save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.training.learner import Learner
from burnish.training.meter import memory_metrics

VOCAB = 256


def batch_of(update: int) -> Batch:
    """Groups of four samples that share a prompt; how many and how long depends on the update."""
    random = torch.Generator().manual_seed(update)
    num_groups = int(torch.randint(2, 7, (), generator=random))
    prompts = torch.randint(1, 25, (num_groups,), generator=random).repeat_interleave(4)
    answers = torch.randint(1, 49, (4 * num_groups,), generator=random)
    offsets = offsets_from_lengths(prompts + answers)
    position = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], prompts + answers)
    owner = torch.repeat_interleave(torch.arange(4 * num_groups), prompts + answers)
    mask = position >= prompts[owner]
    tokens = torch.where(mask, torch.randint(VOCAB, mask.shape, generator=random), (owner // 4 + position) % VOCAB)
    columns = {"advantages": torch.arange(4 * num_groups) % 2 * 2.0 - 1, "group_ids": torch.arange(4 * num_groups) // 4}
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean"))


def resident_sizes(updates: int, activations: str) -> list[float]:
    """MiB after each update."""
    model = Decoder(Architecture("qwen3", VOCAB, 128, 4, 4, 2, 32, 384, 512, qk_norm=True))
    initialise(model, seed=0)
    set_activations(model, activations)
    learner = Learner(model, Optimizer(lr=1e-4), updates, token_budget=256)
    sizes = []
    for update in range(updates):
        batch = batch_of(update)
        learner.logprobs(batch)
        learner.update(batch, PolicyLoss())
        learner.meter.read()
        give_back()
        sizes.append(memory_metrics(learner.device)["memory/current_gib"] * 1024)
    return sizes


def give_back() -> None:
    """What the C library keeps of freed memory for later, to the system: it comes and goes with the lengths."""
    gc.collect()
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).malloc_trim(0)


def slope(sizes: list[float]) -> tuple[float, float]:
    """MiB an update of the line nearest to the sizes, and the standard error of that."""
    y = torch.tensor(sizes, dtype=torch.float64)
    x = torch.arange(len(sizes), dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    found = (x * y).sum() / (x * x).sum()
    rest = (y - found * x).square().sum() / (len(sizes) - 2)
    return float(found), float((rest / (x * x).sum()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--activations", nargs="*", default=["keep", "selective", "recompute"])
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for activations in args.activations:
        started = time.perf_counter()
        sizes = resident_sizes(args.updates, activations)
        late = sizes[args.updates // 2 :]
        rise, doubt = (1024 * value for value in slope(late))
        rows.append(
            {
                "work": f"{args.updates} updates, lengths changing",
                "system": "burnish",
                "activations": activations,
                "first_mib": sizes[0],
                "middle_mib": late[0],
                "last_mib": late[-1],
                "slope_kib": rise,
                "slope_error_kib": doubt,
                "sizes_mib": [round(size, 2) for size in sizes],
                "seconds": time.perf_counter() - started,
            }
        )
        print(
            f"{activations}: {rise:+.2f} +- {doubt:.2f} KiB an update after the first {args.updates // 2}", flush=True
        )
    print(table(rows, ["work", "activations", "first_mib", "middle_mib", "last_mib", "slope_kib", "slope_error_kib"]))
    print(f"saved {save('soak', rows)}")


if __name__ == "__main__":
    main()
