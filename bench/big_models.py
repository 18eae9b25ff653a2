"""Whole GRPO steps, rollouts included, of models that fill one GPU of 139 GiB.

python bench/big_models.py [--only 7B-8bit 7B-offload 32B-lora 30B-A3B-lora 32k]

Random weights in bfloat16, 8 prompts of 128 tokens x 8 samples x 256 new tokens. The native engine samples from the
learner's own tensors; then one update follows.

  7B-8bit     all weights, moments in 8 bits, layers recomputed
  7B-offload  all weights, AdamW's master weights and moments in host memory (about 85 GiB), layers recomputed
  32B-lora    adapters of rank 32 on all projections, layers recomputed
  30B-A3B-lora  128 experts of which a token has 8, adapters of rank 16 on all projections and experts, layers recomputed
  32k         1.5B, all weights, one sequence of 32,768 tokens besides the samples
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from common import on_this_gpu, save_beside, table
from rollout import SHAPES, Work, random_model, requests_of

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.activation_checkpointing import set_activations
from burnish.models.lora.adapters import add_lora
from burnish.training.learner import Learner

SHAPES["32B"] = {
    "hidden_size": 5120, "mlp_size": 27648, "num_layers": 64, "num_heads": 40, "num_kv_heads": 8, "vocab_size": 152064, "tied": False,
}  # fmt: skip
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A model, what of it is trained, and how."""

    shape: str
    optimizer: Optimizer
    lora: Lora | None = None
    long: int = 0
    budget: int = 8192


CASES = {
    "7B-8bit": Case("7B", Optimizer(lr=1e-6, name="adam8bit")),
    "7B-offload": Case("7B", Optimizer(lr=1e-6, offload=True)),
    "32B-lora": Case("32B", Optimizer(lr=1e-5), Lora(rank=32)),
    "30B-A3B-lora": Case("30B-A3B", Optimizer(lr=1e-5), Lora(rank=16)),
    "32k": Case("1.5B", Optimizer(lr=1e-6), long=32768, budget=32768),
}


def batch_of(sequences: list[tuple[tuple[int, ...], list[int]]], group: int, device: str = "cuda") -> Batch:
    """(prompt, completion) pairs, packed, with advantages of both signs."""
    tokens = torch.tensor([t for prompt, written in sequences for t in (*prompt, *written)])
    offsets = offsets_from_lengths(torch.tensor([len(a) + len(b) for a, b in sequences]))
    mask = torch.tensor([k >= len(a) for a, b in sequences for k in range(len(a) + len(b))])
    number = torch.arange(len(sequences))
    columns = {"advantages": torch.where(number % 2 == 0, -1.0, 1.0), "group_ids": number // group}
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)


def run(name: str, case: Case, num_steps: int) -> dict[str, Any]:
    """Seconds and memory of the last of a few steps."""
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model = random_model(case.shape)
    if case.lora is not None:
        add_lora(model, case.lora, 0)
    set_activations(model, "recompute")
    work = Work(case.shape, 64, 256, group=8)
    engine = PagedEngine(model, max_rows=work.requests)
    learner = Learner(model, case.optimizer, 100, token_budget=case.budget)
    print(f"{name}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    for k in range(num_steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        requests = requests_of(work, model.arch.vocab_size, f"step{k}-")
        engine.submit(requests)
        done = {c.id: c.tokens.tolist() for c in engine.stream()}
        sampled = time.perf_counter()
        engine.sleep()
        sequences = [(r.tokens, done[r.id]) for r in requests]
        if case.long:
            tokens = torch.randint(model.arch.vocab_size, (case.long,)).tolist()
            sequences.append((tuple(tokens[:128]), tokens[128:]))
        update = learner.update(batch_of(sequences, work.group), PolicyLoss())
        assert update.skipped is None, update.skipped
        learner.release()
        engine.load(k, ())
        torch.cuda.synchronize()
        ended = time.perf_counter()
        print(f"{name}: step {k} {ended - started:.1f} s, of it rollout {sampled - started:.1f}", flush=True)
    return {
        "work": name,
        "system": "burnish",
        "step_s": ended - started,
        "rollout_s": sampled - started,
        "learn_s": ended - sampled,
        "loss": update.stats["loss"],
        "trained_parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tokens": sum(len(a) + len(b) for a, b in sequences),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    rows = []
    for name in args.only:
        rows.append(run(name, CASES[name], args.steps))
        gc.collect()
        torch.cuda.empty_cache()
    print(table(rows, ["work", "step_s", "rollout_s", "learn_s", "trained_parameters", "tokens", "peak_gib"]))
    print(f"saved {save_beside(on_this_gpu('big_models'), rows, lambda row: row['work'])}")


if __name__ == "__main__":
    main()
