"""A whole GRPO step of a 1.5B model on one GPU: R1's rollouts in groups of 8, then one update of all weights.

python bench/grpo_step.py [--steps 4] [--budget 16384]

Random weights in bfloat16 with float32 master weights and moments, 32 prompts of 128 tokens x 8 samples x 256 new tokens, no
reference model, one update a batch, so no pass for old log-probs. The engine samples from the learner's own tensors; its
cache sleeps while the learner works.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import on_this_gpu, save, table
from rollout import FLOPS, Work, random_model, requests_of

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.losses import PolicyLoss
from burnish.config.schema import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request
from burnish.core.segments import offsets_from_lengths
from burnish.rollout.native.paged import PagedEngine
from burnish.training.learner import Learner

WORK = Work("1.5B", 256, 256, group=8)


def batch_of(requests: list[Request], done: dict[str, Completion]) -> Batch:
    """The rollouts as one packed batch with advantages of both signs."""
    pairs = [(r, done[r.id]) for r in requests]
    tokens = torch.tensor([t for r, c in pairs for t in (*r.tokens, *c.tokens.tolist())])
    offsets = offsets_from_lengths(torch.tensor([len(r.tokens) + len(c.tokens) for r, c in pairs]))
    mask = torch.tensor([k >= len(r.tokens) for r, c in pairs for k in range(len(r.tokens) + len(c.tokens))])
    advantages = torch.tensor([1.0 if k % 2 else -1.0 for k in range(len(pairs))])
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, {"advantages": advantages})
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    model = random_model(WORK.shape)
    engine = PagedEngine(model, max_rows=WORK.requests)
    learner = Learner(model, Optimizer(lr=1e-6), 100, token_budget=args.budget)
    steps: list[tuple[float, float, float]] = []
    for k in range(args.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        requests = requests_of(WORK, model.arch.vocab_size, f"step{k}-")
        engine.submit(requests)
        batch = batch_of(requests, {c.id: c for c in engine.stream()})
        torch.cuda.synchronize()
        sampled = time.perf_counter()
        engine.sleep()
        if args.profile and k == args.steps - 1:
            with torch.profiler.profile() as profile:
                learner.update(batch, PolicyLoss())
            print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60))
        else:
            learner.update(batch, PolicyLoss())
        learner.release()
        engine.load(k, ())
        torch.cuda.synchronize()
        steps.append((time.perf_counter() - started, sampled - started, time.perf_counter() - sampled))
        print(f"step {k}: {steps[-1][0]:.2f} s, rollout {steps[-1][1]:.2f}, learning {steps[-1][2]:.2f}", flush=True)
    step_s, rollout_s, learn_s = sorted(steps[1:])[(len(steps) - 2) // 2]
    body = sum(p.numel() for p in model.parameters())
    row: dict[str, Any] = {
        "work": "GRPO step, R1's rollouts",
        "system": "burnish",
        "step_s": step_s,
        "rollout_s": rollout_s,
    }
    row |= {"learn_s": learn_s, "tokens": batch.num_tokens, "learn_tokens_per_s": batch.num_tokens / learn_s}
    row |= {
        "flops_share": 6 * body * batch.num_tokens / learn_s / FLOPS,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    print(table([row], list(row)))
    print(f"saved {save(on_this_gpu('grpo_step'), [row])}")


if __name__ == "__main__":
    main()
