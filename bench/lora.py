"""What adapters cost on a GPU: each fused projection of a layer, forward and backward, and the engine's rate.

python bench/lora.py [--rank 32] [--tokens 16384] [--repeats 20]

Random weights in bfloat16. `plain` is a frozen projection (forward, and the gradient of its input), `lora` the same with
adapters (and their gradients), `floor_ms` what reading and writing activations once more takes at 4.3 TB/s.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from common import on_this_gpu, save, table
from learner import median_s
from rollout import COPY, SHAPES, WORKS, drain, random_model, requests_of
from torch import nn

from burnish.config.lora import Lora
from burnish.models.architecture import Architecture
from burnish.models.lora import add_lora
from burnish.models.ops.lora import LoraLinear
from burnish.models.projections import targets
from burnish.rollout.native.paged import PagedEngine

Row = dict[str, Any]


def both_passes(layer: nn.Module, x: torch.Tensor, slope: torch.Tensor) -> None:
    """Forward and backward, as one layer of many: its input wants a gradient."""
    x.grad = None
    layer(x).backward(slope)
    for parameter in layer.parameters():
        parameter.grad = None


def projections(shape: str, rank: int, tokens: int, repeats: int) -> list[Row]:
    """Each fused projection of one layer."""
    arch = Architecture(family="qwen2", head_dim=128, max_positions=32768, qkv_bias=True, **SHAPES[shape])
    rows = []
    for module in ("qkv", "out", "gate_up", "down"):
        parts = [target for target in targets(arch, Lora(rank=rank)) if target.module == module]
        inputs, outputs = parts[0].num_inputs, parts[-1].stop
        plain = nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
        adapted = LoraLinear(plain, [(part.start, part.stop) for part in parts], rank, 1.0)
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16).requires_grad_()
        slope = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        times = [median_s(partial(both_passes, one, x, slope), repeats, 3) for one in (plain, adapted)]
        # y is read and written for B, its gradient read for dB and dz, x read for z and dA, its gradient read and written.
        floor_s = 2 * tokens * (4 * outputs + 4 * inputs) / COPY
        rows.append({
            "work": f"{shape} {module}, {tokens} tokens", "plain_ms": 1e3 * times[0], "lora_ms": 1e3 * times[1],
            "more": times[1] / times[0] - 1, "floor_ms": 1e3 * (times[0] + floor_s),
        })  # fmt: skip
    return rows


def engine(name: str, rank: int) -> list[Row]:
    """Tokens a second without and with adapters."""
    work, rows = WORKS[name], list[Row]()
    for has_adapters in (False, True):
        model = random_model(work.shape)
        if has_adapters:
            add_lora(model, Lora(rank=rank), seed=0)
        runner = PagedEngine(model, max_rows=work.requests)
        runs = []
        for k in range(4):
            runner.load(k, ())
            runs.append(drain(runner, requests_of(work, model.arch.vocab_size, f"run{k}")))
        tokens, wall_s = min(runs[1:], key=lambda run: run[1])
        system = f"rank {rank}" if has_adapters else "no adapters"
        rows.append({"work": f"{name}, {work.shape}", "system": system, "tokens_per_s": tokens / wall_s})
        del model, runner
        torch.cuda.empty_cache()
    rows[1]["more"] = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"] - 1
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()
    rows = [row for shape in ("1.5B", "7B") for row in projections(shape, args.rank, args.tokens, args.repeats)]
    rows += [row for name in ("R1", "R4") for row in engine(name, args.rank)]
    print(table(rows, ["work", "system", "plain_ms", "lora_ms", "more", "floor_ms", "tokens_per_s"]))
    print(f"saved {save(on_this_gpu('lora'), rows)}")


if __name__ == "__main__":
    main()
