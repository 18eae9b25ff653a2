"""Checks that the main path runs on a GPU: engine against learner in float32 and bfloat16, text families, and a few learner steps.

    python bench/gpu_smoke.py

Prints a table and saves bench/results/gpu_smoke.json; on a CPU it only tries itself, with few prompts. It does not measure
speed: `bench/rollout.py` and `bench/learner.py` do.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from common import save, table

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Request, SamplingOptions
from burnish.core.segments import offsets_from_lengths
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.latent_shape import LatentShape
from burnish.models.model_families import FAMILIES
from burnish.training.learner import Learner

TEXT_FAMILIES = [name for name, family in FAMILIES.items() if family.vision_names is None]
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_kv_heads": 8,
        "head_dim": 48,
        "latent": LatentShape(96, 64, 32, 16, 32),
        "experts": ExpertShape(8, 2, 192, (False, True, True, True), True, "sigmoid", True, 4, 2, 2.5, shared_size=192),
    }
}
"""What a family needs beyond its own fields and those of a new model."""


def measure(family: str, dtype: torch.dtype, device: torch.device, quantised: bool = False) -> dict[str, object]:
    """Sample 8 completions of each prompt, compare log-probs with the learner's, make three updates."""
    kind = FAMILIES[family]
    sizes = {"num_kv_heads": 4, "head_dim": 32} | kind.fixed | kind.new_model_fields(4) | SHAPES.get(family, {})
    arch = Architecture(family, 1024, 256, 4, 8, mlp_size=768, max_positions=512, **sizes)
    model = Decoder(arch)
    initialise(model, seed=0, std=0.05)
    model.to(device=device, dtype=dtype)
    engine = PagedEngine(model, max_rows=512, quantised=quantised)
    num_prompts = 64 if device.type == "cuda" else 4  # a CPU only tries the script
    prompts = [tuple((i * 37 + k * 11) % 1024 for k in range(5 + i % 40)) for i in range(num_prompts)]
    requests = [
        Request(f"{i}.{j}", p, SamplingOptions(max_tokens=16 + 3 * j), key=i * 8 + j)
        for i, p in enumerate(prompts)
        for j in range(8)
    ]
    started = time.perf_counter()
    engine.submit(requests)
    done = {c.id: c for c in engine.stream()}
    rollout_s = time.perf_counter() - started
    rows = [(r, done[r.id]) for r in requests]
    tokens = torch.tensor([t for r, c in rows for t in (*r.tokens, *c.tokens.tolist())])
    offsets = offsets_from_lengths(torch.tensor([len(r.tokens) + len(c.tokens) for r, c in rows]))
    mask = torch.tensor([k >= len(r.tokens) for r, c in rows for k in range(len(r.tokens) + len(c.tokens))])
    behaviour = torch.tensor([x for r, c in rows for x in [0.0] * len(r.tokens) + c.logp.tolist()])
    advantages = torch.tensor([1.0 if k % 2 else -1.0 for k in range(len(rows))])
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, {"advantages": advantages})
    batch = batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)
    learner = Learner(model, Optimizer(lr=1e-4), 10, token_budget=8192)
    gap = (learner.logprobs(batch).cpu() - behaviour)[mask].abs().double()
    started = time.perf_counter()
    norms = [learner.update(batch, PolicyLoss()).stats["grad_norm"] for _ in range(3)]
    update_s = (time.perf_counter() - started) / 3
    return {
        "work": f"{family} {str(dtype).removeprefix('torch.')}{', 8-bit cache' * quantised}", "system": "burnish", "rollout_s": rollout_s,
        "mismatch_mean": float(gap.mean()), "mismatch_max": float(gap.max()), "update_s": update_s, "grad_norm": norms[-1],
    }  # fmt: skip


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = [measure(f, d, device) for f in TEXT_FAMILIES for d in (torch.float32, torch.bfloat16)]
    rows += [measure(f, torch.bfloat16, device, quantised=True) for f in TEXT_FAMILIES]
    print(table(rows, ["work", "rollout_s", "mismatch_mean", "mismatch_max", "update_s", "grad_norm"]))
    print(f"saved {save('gpu_smoke' if device.type == 'cuda' else 'gpu_smoke-cpu', rows)}")


if __name__ == "__main__":
    main()
