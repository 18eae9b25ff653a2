"""Cost of adapters on a GPU: each fused projection of a layer, forward and backward, and the engine's throughput.

python bench/lora.py [--rank 32] [--tokens 16384] [--repeats 20] [--four-bits]

Random weights in bfloat16. `plain` is a frozen projection (forward, and the gradient of its input), `lora` the same with
adapters (and their gradients), `floor_ms` the time to read and write activations once more at 4.3 TB/s.

With --four-bits it measures the cost and savings of frozen weights in 4 bits (`model.lora.base`) at 7B instead. It times
products of few rows by a plain matrix and by a dequantised one, then updates and generation over each base, with peak memory.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from batches import ragged
from common import on_this_gpu, save, table
from learner import GIB, clear, learner_of, median_s, updates
from rollout import COPY, SHAPES, WORKS, Work, architecture_of, drain, random_model, requests_of
from torch import nn
from torch.nn import functional

from burnish.config.model import Lora, LoraBase
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.lora.adapters import LoraLinear, add_lora
from burnish.models.nf4 import Nf4, dequantise_nf4, quantise_nf4, weight_bytes
from burnish.models.weight_layout import lora_targets

Row = dict[str, Any]


def both_passes(layer: nn.Module, x: torch.Tensor, slope: torch.Tensor) -> None:
    """Forward and backward, as one layer of many: its input wants a gradient."""
    x.grad = None
    layer(x).backward(slope)
    for parameter in layer.parameters():
        parameter.grad = None


def projections(shape: str, rank: int, tokens: int, repeats: int) -> list[Row]:
    """Each fused projection of one layer."""
    arch = architecture_of(shape)
    rows = []
    for module in ("qkv", "out", "gate_up", "down"):
        parts = [target for target in lora_targets(arch, Lora(rank=rank)) if target.module == module]
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


# --- in 4 bits -----------------------------------------------------------------------------------------------------------


def made_plain(x: torch.Tensor, matrix: Nf4) -> torch.Tensor:
    return functional.linear(x, dequantise_nf4(matrix, x.dtype))


@torch.inference_mode()
def products(repeats: int) -> list[Row]:
    """Few rows by the widest and by the deepest matrix of a 7B: twenty products a call, or the launch would be timed."""
    hidden, mlp = (int(SHAPES["7B"][key]) for key in ("hidden_size", "mlp_size"))
    rows = list[Row]()

    def timed(work: Any) -> float:
        return 1e3 * median_s(lambda: [work() for _ in range(20)], repeats, 2) / 20

    for outputs, inputs in ((2 * mlp, hidden), (hidden, mlp)):
        weight = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        matrix = quantise_nf4(weight, double=False)
        for num in (1, 16, 32, 64, 128, 256):
            x = torch.randn(num, inputs, device="cuda", dtype=torch.bfloat16)
            found = {
                "plain_ms": timed(partial(functional.linear, x, weight)),
                "made_plain_ms": timed(partial(made_plain, x, matrix)),
            }
            rows.append({"work": f"{num} rows, {inputs} to {outputs}"} | found)
        alone = timed(partial(dequantise_nf4, matrix, torch.bfloat16))
        rows.append({"work": f"made plain, {inputs} to {outputs}", "made_plain_ms": alone})
        rows[-1]["tb_per_s"] = 2.5 * weight.numel() / alone / 1e9
    return rows


def over(base: LoraBase, rank: int) -> list[Row]:
    """A 7B with adapters: an update of 64 ragged samples, then 64 new tokens of so many requests."""
    clear()
    model = random_model("7B")
    add_lora(model, Lora(rank=rank, base=base), seed=0)
    clear()
    held = weight_bytes(model) / GIB
    learner = learner_of(model, 8192, share_prefixes=False)
    measured = updates(learner, ragged(64, model.arch.vocab_size), 2)
    kept = ("update_s", "tokens_per_s", "flops_share", "peak_gib")
    rows = [{"work": "7B, update", "system": base, "weights_gib": held} | {key: measured[key] for key in kept}]
    learner.release()
    del learner
    for requests in (8, 64, 256):
        clear()
        engine, work = PagedEngine(model, max_rows=requests), Work("7B", requests, 64)
        runs = []
        for k in range(3):
            engine.load(k, ())
            runs.append(drain(engine, requests_of(work, model.arch.vocab_size, f"run{k}")))
        tokens, wall_s = min(runs[1:], key=lambda run: run[1])
        row = {"work": f"7B, {requests} requests", "system": base, "tokens_per_s": tokens / wall_s}
        rows.append(row | {"peak_gib": torch.cuda.max_memory_allocated() / GIB})
        engine.sleep()
        del engine
    return rows


def four_bits(rank: int, repeats: int) -> None:
    """All of it."""
    rows = products(repeats)
    bases: tuple[LoraBase, ...] = ("dtype", "nf4", "nf4-double")
    for base in bases:
        rows += over(base, rank)
    columns = ["work", "system", "plain_ms", "made_plain_ms", "tb_per_s", "weights_gib", "update_s"]
    print(table(rows, [*columns, "tokens_per_s", "flops_share", "peak_gib"]))
    print(f"saved {save(on_this_gpu('lora_four_bits'), rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--four-bits", action="store_true", help="the frozen weights in 4 bits instead")
    args = parser.parse_args()
    if args.four_bits:
        four_bits(args.rank, args.repeats)
        return
    rows = [row for shape in ("1.5B", "7B") for row in projections(shape, args.rank, args.tokens, args.repeats)]
    rows += [row for name in ("R1", "R4") for row in engine(name, args.rank)]
    print(table(rows, ["work", "system", "plain_ms", "lora_ms", "more", "floor_ms", "tokens_per_s"]))
    print(f"saved {save(on_this_gpu('lora'), rows)}")


if __name__ == "__main__":
    main()
