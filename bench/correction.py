"""What the mismatch report costs: both forms, the symptoms and a budget's step at 8 M tokens.

python bench/correction.py [--tokens 8000000] [--sequences 4096] [--repeats 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from common import save, table

from burnish.algorithms.correction import budget_correction, decoupled_correction, seed_correction
from burnish.algorithms.correction.symptoms import symptoms
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths

ALL = {
    "token_k1": (0.5, 2.0), "token_k2": 0.5, "token_k3": 0.5, "seq_sum_k1": (0.01, 100.0), "seq_sum_k2": 50.0, "seq_sum_k3": 50.0,
    "seq_mean_k1": (0.9, 1.1), "seq_mean_k2": 0.1, "seq_mean_k3": 0.1, "seq_max_k2": 5.0, "seq_max_k3": 5.0,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8_000_000)
    parser.add_argument("--sequences", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    batch = make(args.tokens, args.sequences)
    jobs: dict[str, Callable[[], object]] = {
        "first form, report alone": lambda: seed_correction(batch, apply=False),
        "first form, token TIS": lambda: seed_correction(batch),
        "first form, sequence MIS": lambda: seed_correction(batch, level="sequence", mode="mask"),
        "second form, token TIS": lambda: decoupled_correction(batch, "token"),
        "second form, in full": lambda: decoupled_correction(batch, "token", 2.0, True, ALL),
        "symptoms": lambda: symptoms(batch),
        "budget, one step": lambda: budget_correction(batch, None, 1.0, 0.5),
    }
    rows = [{"work": name, "system": "burnish", "tokens": batch.num_tokens, "wall_s": median(job, args.repeats)} for name, job in jobs.items()]  # fmt: skip
    print(table(rows, ["work", "tokens", "wall_s"]))
    print(f"saved {save('correction', rows)}")


def make(tokens: int, sequences: int) -> Batch:
    """Ragged answers behind one prompt token each, float32 log-probs a hundredth apart."""
    generator = torch.Generator().manual_seed(0)
    mean = tokens // sequences
    lengths = torch.randint(mean // 2, mean + mean // 2, (sequences,), generator=generator)
    offsets = offsets_from_lengths(lengths + 1)
    size = int(offsets[-1])
    mask = torch.ones(size, dtype=torch.bool).index_fill(0, offsets[:-1], False)
    old = -torch.rand(size, generator=generator) * 3
    behaviour = old + 0.01 * torch.randn(size, generator=generator)
    columns = {"action_mask": mask, "loss_mask": mask, "old_logp": old, "behaviour_logp": behaviour}
    return Batch(torch.zeros(size, dtype=torch.int64), offsets, columns)


def median(job: Callable[[], object], repeats: int) -> float:
    job()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        job()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
