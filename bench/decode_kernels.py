"""Time of the two Hopper kernels and of the kernels they replace: gate, up and activation in one, and attention by the copy engine.

python bench/decode_kernels.py

Each kernel is captured many times in one graph, over weights and caches that together exceed the GPU's own cache. The table
has the median of twenty replays. "plain" is torch's product with a Triton kernel for the activation, and the Triton kernel
for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import on_this_gpu, save, table
from torch import Tensor
from torch.nn import functional

from burnish.models.kernels.cuda.hopper import decode_attention, gated_product
from burnish.models.kernels.elementwise import inverse_frequencies, rotation_table
from burnish.models.kernels.paged_cache import Placement
from burnish.models.kernels.triton import decode_attention as triton_kernels
from burnish.models.kernels.triton.elementwise_kernels import swiglu

PAGE, DIM = 16, 128
COPY = 4.3e12  # bytes a second of an H200, measured
LAYERS = {"0.5B": (896, 4864), "1.5B": (1536, 8960), "7B": (3584, 18944)}
PRODUCTS = [("0.5B", 256), *(("1.5B", rows) for rows in (8, 64, 128, 192, 256, 1024, 2560, 16384))]
PRODUCTS += [("7B", rows) for rows in (256, 16384)]
REPLAYS = 20


def seconds(calls: Sequence[Callable[[], Tensor]]) -> float:
    """Of one call."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(5 + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(kept))
    return sorted(times[5:])[REPLAYS // 2]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def product(shape: str, rows: int) -> dict[str, Any]:
    inputs, outputs = LAYERS[shape]
    copies = max(2, min(28, 2**31 // (4 * inputs * outputs)))
    weights = [random(2 * outputs, inputs) * 0.02 for _ in range(copies)]
    x = random(rows, inputs)
    row = {"work": f"gate and up, {shape}, {rows} rows", "system": "burnish"}
    row["product_alone_s"] = seconds([lambda w=w: functional.linear(x, w) for w in weights])
    row["plain_s"] = seconds([lambda w=w: swiglu(functional.linear(x, w)) for w in weights])
    row["hopper_s"] = seconds([lambda w=w: gated_product(x, w, "silu") for w in weights])
    return row


def attention(
    name: str, lengths: Sequence[int], splits: int, least: int, kv_heads: int = 2, queries: int = 6
) -> dict[str, Any]:
    rows, width = len(lengths), max(lengths) // PAGE + 1
    pages = (torch.randperm(rows * width) + 1).view(rows, width).int().cuda()
    place = Placement(torch.arange(rows).cuda(), torch.tensor(lengths).cuda(), pages)
    qkv = random(rows, (queries + 2) * kv_heads * DIM)
    turns = [x.cuda() for x in rotation_table(4096, inverse_frequencies(DIM, 1e4, None), torch.bfloat16)]
    caches = [random(2, rows * width + 1, kv_heads, PAGE, DIM) for _ in range(4)] * 6
    row = {"work": f"attention, {name}, {splits} stretches", "system": "burnish"}
    row["bytes_s"] = sum(lengths) * kv_heads * DIM * 4 / COPY

    def by(kernel: Callable[..., Tensor]) -> float:
        asked = (qkv, *turns, place, None)
        return seconds([lambda c=c: kernel(*asked, c[0], c[1], None, splits, least) for c in caches])

    row["plain_s"], row["hopper_s"] = by(triton_kernels.decode_attention), by(decode_attention)
    return row


def main() -> None:
    rows = [product(*work) for work in PRODUCTS]
    drawn = np.random.default_rng(0).geometric(1 / 300, 256)
    ragged = [128 + int(length) for length in np.minimum(drawn, 1900)]
    rows += [
        attention("256 rows of 256", [256] * 256, 1, 512),
        attention("256 rows of 1,100", [1100] * 256, 1, 512),
        attention("1,024 rows of 256", [256] * 1024, 1, 512),
        attention("256 rows of 256, 7B", [256] * 256, 1, 512, 4, 7),
        attention("256 unequal rows", ragged, 4, 512),
        attention("64 unequal rows", ragged[:64], 16, 128),
        attention("8 rows of 600", [600] * 8, 32, 64),
        attention("1 row of 1,500", [1500], 32, 64),
    ]
    print(table(rows, ["work", "bytes_s", "product_alone_s", "plain_s", "hopper_s"]))
    print(f"saved {save(on_this_gpu('decode_kernels'), rows)}")


if __name__ == "__main__":
    main()
