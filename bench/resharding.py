"""Bytes of a weight transfer from learner meshes to engine meshes, against the lower bound, for 8 to 512 simulated ranks.

    python bench/resharding.py [--models 7b 30b-a3b 671b]

The plans are those of `burnish/inference/resharding.py`, for models in bfloat16 on machines of 8 GPUs. Nothing is sent: the bytes are
counted, and the seconds are those of the busiest link at 450 GB/s between the GPUs of a machine (NVLink, one direction) and 50 GB/s
for each GPU between machines (400 Gb/s). They leave out latency and everything but the transfer. `shared` ranks train and sample in
turns, `apart` ranks do one of both. `through rank 0` is what a learner needs that gathers all weights on one rank, from which every
rank of an engine fetches its part over that rank's link.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from common import save, table

from burnish.inference.reshard_layouts import EngineMesh, LearnerMesh, TensorSpec, layouts
from burnish.inference.resharding import lower_bound, make_plan

GPUS_PER_NODE = 8
NVLINK, NETWORK = 450e9, 50e9
"""Bytes per second and GPU, within a machine and between machines."""
BFLOAT16 = 2


@dataclass(frozen=True)
class Shape:
    """A decoder with grouped-query attention, dense or with experts."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    experts: int = 0


def decoder(shape: Shape) -> Iterator[TensorSpec]:
    """The tensors of a decoder as the native one has them."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield TensorSpec("embedding.weight", (shape.vocab, h), dim=0, is_vocabulary=True)
    for k in range(shape.layers):
        at = f"layers.{k}"
        yield from (TensorSpec(f"{at}.{name}", (h,), k) for name in ("attention_norm.weight", "mlp_norm.weight"))
        heads = (q, shape.heads), (kv, shape.kv_heads), (kv, shape.kv_heads)
        yield TensorSpec(f"{at}.qkv.weight", (q + 2 * kv, h), k, 0, heads)
        yield TensorSpec(f"{at}.out.weight", (h, q), k, 1, ((q, shape.heads),))
        if shape.experts:
            yield TensorSpec(f"{at}.router", (shape.experts, h), k)
            yield from experts(at, k, h, shape.mlp, shape.experts)
        else:
            yield from mlp(at, k, h, shape.mlp)
    yield TensorSpec("norm.weight", (h,))
    yield TensorSpec("head.weight", (shape.vocab, h), dim=0, is_vocabulary=True)


def mlp(at: str, layer: int, hidden: int, size: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{at}.gate_up.weight", (2 * size, hidden), layer, 0, ((size, size), (size, size)))
    yield TensorSpec(f"{at}.down.weight", (hidden, size), layer, 1, ((size, size),))


def experts(at: str, layer: int, hidden: int, size: int, number: int) -> Iterator[TensorSpec]:
    fused = (size, size), (size, size)
    yield TensorSpec(f"{at}.experts.gate_up", (number, 2 * size, hidden), layer, 1, fused, is_expert=True)
    yield TensorSpec(f"{at}.experts.down", (number, hidden, size), layer, 2, ((size, size),), is_expert=True)


def deepseek_v3() -> Iterator[TensorSpec]:
    """671B: latent attention of 128 heads, 3 dense layers, 58 with 256 experts and a shared one (2412.19437)."""
    h, heads, vocab = 7168, 128, 129280
    yield TensorSpec("embedding.weight", (vocab, h), dim=0, is_vocabulary=True)
    for k in range(61):
        at = f"layers.{k}"
        for name, size in (("attention_norm", h), ("mlp_norm", h), ("q_norm", 1536), ("kv_norm", 512)):
            yield TensorSpec(f"{at}.{name}.weight", (size,), k)
        yield TensorSpec(f"{at}.q_down.weight", (1536, h), k)
        yield TensorSpec(f"{at}.q_up.weight", (heads * 192, 1536), k, 0, ((heads * 192, heads),))
        yield TensorSpec(f"{at}.kv_down.weight", (576, h), k)
        yield TensorSpec(f"{at}.kv_up.weight", (heads * 256, 512), k, 0, ((heads * 256, heads),))
        yield TensorSpec(f"{at}.out.weight", (h, heads * 128), k, 1, ((heads * 128, heads),))
        if k < 3:
            yield from mlp(at, k, h, 18432)
        else:
            yield TensorSpec(f"{at}.router", (256, h), k)
            yield from mlp(f"{at}.shared", k, h, 2048)
            yield from experts(at, k, h, 2048, 256)
    yield TensorSpec("norm.weight", (h,))
    yield TensorSpec("head.weight", (vocab, h), dim=0, is_vocabulary=True)


MODELS = {
    "7b": lambda: decoder(Shape(3584, 28, 28, 4, 128, 18944, 152064)),
    "30b-a3b": lambda: decoder(Shape(2048, 48, 32, 4, 128, 768, 151936, experts=128)),
    "671b": deepseek_v3,
}
L, E = LearnerMesh, EngineMesh
CASES: list[tuple[str, LearnerMesh, EngineMesh, bool]] = [
    ("7b", L(dp=8), E(tp=1, replicas=8), True),
    ("7b", L(dp=8), E(tp=4, replicas=2), True),
    ("7b", L(dp=4, tp=2), E(tp=4, replicas=2), True),
    ("7b", L(dp=8), E(tp=4, replicas=2), False),
    ("7b", L(dp=64), E(tp=4, replicas=16), True),
    ("7b", L(dp=8, replicate=8), E(tp=4, replicas=16), True),
    ("7b", L(dp=32), E(tp=4, replicas=8), False),
    ("30b-a3b", L(ep=8), E(tp=4, replicas=2), True),
    ("30b-a3b", L(ep=8), E(tp=1, ep=8), True),
    ("30b-a3b", L(dp=8, ep=8), E(tp=4, ep=2, replicas=8), True),
    ("30b-a3b", L(dp=8, cp=2, ep=4), E(tp=4, replicas=16), True),
    ("30b-a3b", L(pp=2, dp=4, ep=8), E(tp=4, ep=2, replicas=8), False),
    ("671b", L(pp=8, dp=4, ep=8), E(tp=8, ep=4, replicas=8), True),
    ("671b", L(pp=4, dp=2, ep=32), E(tp=8, ep=4, replicas=8), False),
    ("671b", L(pp=16, dp=4, ep=8), E(tp=8, ep=4, replicas=16), True),
]
COLUMNS = [
    "model", "learner", "engine", "ranks", "model_gb", "moved_gb", "moved_to_bound", "across_gb", "across_to_bound", "busiest_gb",
    "busiest_to_bound", "seconds", "rank0_seconds", "transfers", "plan_s",
]  # fmt: skip


def measure(model: str, learner: LearnerMesh, engine: EngineMesh, is_shared: bool) -> dict[str, Any]:
    """One case as a row of the table."""
    specs = list(MODELS[model]())
    first = 0 if is_shared else learner.size
    started = time.perf_counter()
    tensors = list(layouts(specs, learner, engine, first, BFLOAT16))
    plan = make_plan(tensors, node_of, keeps_transfers=False)
    plan_s = time.perf_counter() - started
    bound = lower_bound(tensors, node_of)
    size = sum(product(spec.shape) for spec in specs) * BFLOAT16
    needed = plan.moved_bytes + plan.kept_bytes
    num_ranks = max(learner.size, engine.size) if is_shared else learner.size + engine.size
    return {
        "model": model,
        "learner": " ".join(f"{k}={v}" for k, v in vars(learner).items() if v > 1),
        "engine": " ".join(f"{k}={v}" for k, v in vars(engine).items() if v > 1)
        + (" shared" if is_shared else " apart"),
        "ranks": num_ranks,
        "model_gb": size / 1e9,
        "moved_gb": plan.moved_bytes / 1e9,
        "moved_to_bound": ratio(plan.moved_bytes, bound.moved_bytes),
        "across_gb": plan.across.total / 1e9,
        "across_to_bound": ratio(plan.across.total, bound.across_bytes),
        "busiest_gb": plan.across.busiest / 1e9,
        "busiest_to_bound": ratio(plan.across.busiest, bound.busiest_across),
        "seconds": plan.seconds(NVLINK, NETWORK),
        "rank0_seconds": (size + needed) / (NETWORK if num_ranks > GPUS_PER_NODE else NVLINK),
        "transfers": plan.num_transfers,
        "plan_s": plan_s,
    }


def node_of(rank: int) -> int:
    return rank // GPUS_PER_NODE


def product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def ratio(found: int, least: int) -> float:
    """1 where there is nothing to do."""
    return found / least if least else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    wanted = parser.parse_args().models
    rows = [measure(*case) for case in CASES if case[0] in wanted]
    print(table(rows, COLUMNS))
    if wanted == list(MODELS):
        print(f"saved {save('resharding', rows)}")


if __name__ == "__main__":
    main()
