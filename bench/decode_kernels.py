"""Time of the Hopper kernels of a decode step and of the kernels they replace, in bfloat16 and in 8 bits.

python bench/decode_kernels.py [--only gate down attention quantise]

Gate, up and activation in one kernel; the projection after it as partial sums; attention by the copy engine; quantisation of all
matrices after an update.

Each kernel is captured many times in one graph, over weights and caches that together exceed the GPU's own cache. The table
has the median of twenty replays. "plain" is torch's product with a Triton kernel for the activation, torch's product in parts,
and the Triton kernel for attention. "fp8" is the Hopper kernel in 8 bits, for the down projection with the quantisation of its rows;
"cublas_fp8" is torch's product in 8 bits. The errors are those of the output against float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from common import on_this_gpu, save_beside, table
from torch import Tensor
from torch.nn import functional

from burnish.models.kernels.cuda.hopper import decode_attention
from burnish.models.kernels.cuda.products import choose_parts, gated_product, num_processors, partial_product
from burnish.models.kernels.elementwise import inverse_frequencies, rotation_table
from burnish.models.kernels.fp8 import Fp8Rows, quantise_rows, scaled_product
from burnish.models.kernels.inference_ops import num_split_k, partial_products
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
    matrices, rows_8 = [quantise_rows(w) for w in weights], quantise_rows(x)
    row["fp8_s"] = seconds([lambda m=m: gated_product(rows_8, m, "silu") for m in matrices])
    row["cublas_fp8_s"] = seconds([lambda m=m: scaled_product(rows_8, m, torch.bfloat16) for m in matrices])
    gate, up = (x.double() @ weights[0].double().T).chunk(2, -1)
    row |= errors(
        functional.silu(gate) * up, gated_product(x, weights[0], "silu"), gated_product(rows_8, matrices[0], "silu")
    )
    return row


def down(shape: str, rows: int) -> dict[str, Any]:
    outputs, inputs = LAYERS[shape]
    copies = max(2, min(28, 2**31 // (2 * inputs * outputs)))
    weights = [random(outputs, inputs) * 0.02 for _ in range(copies)]
    x = random(rows, inputs)
    parts = num_split_k(rows, inputs, outputs)
    row = {"work": f"down, {shape}, {rows} rows", "system": "burnish"}
    row["product_alone_s"] = seconds([lambda w=w: functional.linear(x, w) for w in weights])
    row["plain_s"] = seconds([lambda w=w: partial_products(x, w, parts) for w in weights])
    matrices, rows_8 = [quantise_rows(w) for w in weights], quantise_rows(x)
    row["fp8_s"] = seconds([lambda m=m: partial_product(quantise_rows(x), m) for m in matrices])
    row["fp8_alone_s"] = seconds([lambda m=m: partial_product(rows_8, m) for m in matrices])
    row["cublas_fp8_s"] = seconds([lambda m=m: scaled_product(rows_8, m, torch.bfloat16) for m in matrices])
    tile, row["parts"] = choose_parts(rows, inputs, outputs, num_processors(x.device))
    row["tile"] = f"{tile.rows} x {tile.width}"
    found = partial_product(rows_8, matrices[0])
    truth = x.double() @ weights[0].double().T
    row |= errors(truth, functional.linear(x, weights[0]), found.double().sum(0) if found.dim() == 3 else found)
    return row


def errors(truth: Tensor, plain: Tensor, quantised: Tensor) -> dict[str, float]:
    """Relative errors in bfloat16 and in 8 bits."""
    size = truth.norm()
    found = {"error": plain, "fp8_error": quantised}
    return {name: float((x.double() - truth).norm() / size) for name, x in found.items()}


def quantise(shape: str) -> dict[str, Any]:
    """All MLP matrices of a model of 28 layers, as after an update."""
    inputs, outputs = LAYERS[shape]
    weights = [w for _ in range(28) for w in (random(2 * outputs, inputs), random(inputs, outputs))]
    moved = sum(w.numel() for w in weights) * 3
    row = {"work": f"quantise all MLPs, {shape}", "system": "burnish", "bytes_s": moved / COPY}
    row["fp8_s"] = seconds([lambda w=w: quantise_rows(w).scale for w in weights]) * len(weights)
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
    caches = [[Fp8Rows(*quantise_rows(half)) for half in cache] for cache in caches[:4]] * 6
    row["fp8_s"], row["triton_fp8_s"] = by(decode_attention), by(triton_kernels.decode_attention)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["gate", "down", "attention", "quantise"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    only = parser.parse_args().only
    drawn = np.random.default_rng(0).geometric(1 / 300, 256)
    ragged = [128 + int(length) for length in np.minimum(drawn, 1900)]
    rows = [product(*work) for work in PRODUCTS if "gate" in only]
    rows += [down(*work) for work in PRODUCTS if "down" in only]
    rows += [quantise(shape) for shape in ("1.5B", "7B") if "quantise" in only]
    if "attention" in only:
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
    columns = [
        "bytes_s",
        "product_alone_s",
        "plain_s",
        "hopper_s",
        "fp8_s",
        "fp8_alone_s",
        "cublas_fp8_s",
        "triton_fp8_s",
    ]
    print(table(rows, ["work", *columns, "parts", "tile", "error", "fp8_error"]))
    path = save_beside(on_this_gpu("decode_kernels"), rows, lambda row: row["work"])
    print(f"saved {path}")


if __name__ == "__main__":
    main()
