"""Time of a layer of experts in a decode step: our kernels against torch's grouped product, by part, and tiles to choose from.

python bench/expert_kernels.py [--tiles] [--tokens 64 256 1024]

The layer has the shape of Qwen3-30B-A3B (128 experts of 768, 8 of a token) with random weights and a random choice. Each call is
captured for several layers in one graph, so that no matrix is in the GPU's own cache. The table has medians of twenty replays;
`limit_share` is the time to read all matrices once over the time of the call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from common import on_this_gpu, save, table
from decode_kernels import COPY, seconds
from torch import Tensor

from burnish.models.expert_shape import ExpertShape
from burnish.models.experts import ExpertMlp, dispatch, route, weighted_rows
from burnish.models.kernels.elementwise import swiglu
from burnish.models.kernels.grouped_products import grouped_product
from burnish.models.kernels.triton import expert_decode, expert_kernels
from burnish.models.kernels.triton.expert_decode import Tile

HIDDEN, SHAPE, LAYERS = 2048, ExpertShape(128, 8, 768), 4
ROW_TILES = (16, 32, 64, 128)
LOOPS = ((64, 64, 5, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 4, 8), (128, 128, 3, 8))
"""Columns, depth, stages and warps."""


@torch.inference_mode()
def measure(layers: list[ExpertMlp], tokens: int, with_tiles: bool) -> list[dict[str, Any]]:
    """Seconds of the parts of a layer and of all of it."""
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    logits = [layer.router(x) for layer in layers]
    choices = [route(one, SHAPE)[0] for one in logits]
    ways = [dispatch(choice.experts, SHAPE.num_experts) for choice in choices]
    cases = list(zip(layers, logits, choices, ways, strict=True))
    rows = [
        weighted_rows(swiglu, layer.gate_up.from_tokens(x, way), choice.weights.reshape(-1)[way.slots])
        for layer, _, choice, way in cases
    ]
    gate_up_bytes = layers[0].gate_up.weight.numel() * 2
    found: list[dict[str, Any]] = []

    def add(part: str, system: str, call: Callable[[int], Any], read: int = 0) -> None:
        time_s = seconds([lambda k=k: call(k) for k in range(LAYERS)])
        row = {"tokens": tokens, "part": part, "system": system, "us": round(time_s * 1e6, 1)}
        found.append(row | ({"limit_share": round(read / COPY / time_s, 3)} if read else {}))

    def torch_gate_up(k: int) -> Tensor:
        layer, _, choice, way = cases[k]
        return layer.activated(layer.gate_up.from_tokens(x, way), choice.weights, way.slots)

    def own_gate_up(k: int, tile: Tile | None = None) -> Tensor:
        layer, _, choice, way = cases[k]
        return expert_decode.gate_up(x, layer.gate_up.matrices(), choice.weights, way.tokens, way.slots, way.ends, tile)

    def own_down(k: int, tile: Tile | None = None) -> Tensor:
        return expert_decode.down(rows[k], layers[k].down.matrices(), ways[k].ends, tile)

    add("route", "torch", lambda k: route(logits[k], SHAPE)[0].weights)
    add("route", "burnish", lambda k: expert_decode.route(logits[k], 8, SHAPE.normalised, 1.0))
    add("dispatch", "torch", lambda k: dispatch(choices[k].experts, 128))
    add("dispatch", "burnish", lambda k: expert_decode.sort_pairs(choices[k].experts, 128))
    add("gate_up", "torch", torch_gate_up, gate_up_bytes)
    add(
        "down", "torch", lambda k: grouped_product(rows[k], layers[k].down.matrices(), ways[k].ends), gate_up_bytes // 2
    )
    add("sum", "burnish", lambda k: expert_kernels.sum_slots(expert_decode.down(rows[k], layers[k].down.matrices(), ways[k].ends), ways[k].rows))  # fmt: skip
    add("gate_up", "burnish", own_gate_up, gate_up_bytes)
    add("down", "burnish", own_down, gate_up_bytes // 2)
    add("all", "torch", lambda k: layers[k](x), gate_up_bytes * 3 // 2)
    add("all", "burnish", lambda k: layers[k].infer(x), gate_up_bytes * 3 // 2)
    if with_tiles:
        mean = tokens * 8 / 128
        for rows_of_tile in (size for size in ROW_TILES if mean / 4 <= size <= max(16, 4 * mean)):
            for loop in LOOPS:
                tile = Tile(rows_of_tile, *loop)
                for part, call in (("gate_up", own_gate_up), ("down", own_down)):
                    try:
                        read = gate_up_bytes if part == "gate_up" else gate_up_bytes // 2
                        add(part, f"tile {tuple(tile)}", lambda k, call=call, tile=tile: call(k, tile), read)
                    except Exception as error:  # noqa: BLE001  printed: a tile may need more shared memory than there is
                        print(part, tile, type(error).__name__, str(error)[:80], flush=True)
    expected = layers[0](x)
    difference = (layers[0].infer(x).float() - expected.float()).norm() / expected.float().norm()
    found.append({"tokens": tokens, "part": "relative difference", "system": "burnish", "us": float(difference)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="also other tiles of the products")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256, 512, 1024, 2048])
    args = parser.parse_args()
    torch.manual_seed(0)
    layers = [ExpertMlp(HIDDEN, SHAPE, swiglu).to("cuda", torch.bfloat16) for _ in range(LAYERS)]
    rows: list[dict[str, Any]] = []
    for tokens in args.tokens:
        rows += measure(layers, tokens, args.tiles)
        print(
            table([row for row in rows if row["tokens"] == tokens], ["tokens", "part", "system", "us", "limit_share"])
        )
    save(on_this_gpu("expert_kernels"), rows)


if __name__ == "__main__":
    main()
