"""One update of each optimizer on the parameters of a 1.5B model: time, state, and memory besides the state.

python bench/optimizers.py [--shape 1.5B] [--repeats 5] [--small]

Parameters in bfloat16 with random gradients summed in float32, as in training; clipping is timed separately. For
comparison `torch.optim.AdamW` (fused) runs on the same shapes in float32. `--small` is a model of 2 M parameters, for a CPU.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from common import on_this_gpu, save, table
from rollout import SHAPES
from torch import Tensor, nn

from burnish.config.model import Optimizer as Config
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.training.optimizers.update_rules import make_optimizer

SMALL: dict[str, Any] = {"hidden_size": 256, "mlp_size": 512, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "vocab_size": 2048, "tied": True}  # fmt: skip
SYSTEMS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, stochastic": {"precision": "stochastic"},
    "adamw, offload": {"offload": True},
    "adam8bit": {"name": "adam8bit"},
    "adam8bit, stochastic": {"name": "adam8bit", "precision": "stochastic"},
    "adam8bit, stochastic, offload": {"name": "adam8bit", "precision": "stochastic", "offload": True},
    "muon": {"name": "muon"},
    "muon, stochastic": {"name": "muon", "precision": "stochastic"},
    "muon, offload": {"name": "muon", "offload": True},
}


def decoder(shape: dict[str, Any], dtype: torch.dtype, device: str) -> Decoder:
    """Parameters of a shape with gradients."""
    with torch.device("meta"):
        model = Decoder(Architecture(family="qwen2", head_dim=128, max_positions=32768, qkv_bias=True, **shape))
    model = model.to(dtype).to_empty(device=device)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
            parameter.grad = torch.randn_like(parameter) * 1e-3
    return model


def seconds(work: Callable[[], Any], repeats: int, device: str) -> float:
    """The shortest of several runs, after one that makes the state."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])


def row(system: str, model: nn.Module, work: Callable[[], Any], state: Callable[[], list[Tensor]], args: Any) -> dict:
    """What an update takes; `state` are the tensors an optimizer keeps."""
    num = sum(p.numel() for p in model.parameters())
    step_s = seconds(work, args.repeats, args.device)
    beside = None
    if args.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        beside = (torch.cuda.max_memory_allocated() - before) / 2**30
    kept = {where: sum(t.nbytes for t in state() if t.device.type == where) for where in ("cpu", "cuda")}
    return {
        "system": system,
        "step_ms": step_s * 1e3,
        "ns_per_parameter": step_s * 1e9 / num,
        "state_bytes_per_parameter": sum(kept.values()) / num,
        "on_host_bytes_per_parameter": kept["cpu"] / num if args.device == "cuda" else None,
        "beside_gib": beside,
    }


def ours(system: str, options: dict[str, Any], shape: dict[str, Any], args: Any) -> dict[str, Any]:
    model = decoder(shape, torch.bfloat16, args.device)
    optimizer = make_optimizer(model, dict(model.named_parameters()), Config(weight_decay=0.1, **options))
    optimizer.accumulate_gradients()
    clip_s = seconds(lambda: optimizer.clip(1.0), args.repeats, args.device)
    found = row(system, model, lambda: optimizer.step(1e-6, 0), lambda: list(optimizer.tensors().values()), args)
    kept = sum(t.nbytes for t in optimizer.tensors().values())
    assert kept == optimizer.state_bytes(), "the state takes what it said it would"
    return found | {"clip_ms": clip_s * 1e3}


def peer(shape: dict[str, Any], args: Any) -> dict[str, Any]:
    model = decoder(shape, torch.float32, args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1, fused=True)

    def state() -> list[Tensor]:
        return [t for held in optimizer.state.values() for t in held.values()]

    return row("torch.optim.AdamW, float32", model, optimizer.step, state, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1.5B", choices=SHAPES)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    args.device = "cuda" if torch.cuda.is_available() and not args.small else "cpu"
    shape = SMALL if args.small else SHAPES[args.shape]
    rows = []
    for system, options in SYSTEMS.items():
        try:
            found = ours(system, options, shape, args)
        except torch.OutOfMemoryError:
            found = {"system": f"{system}: does not fit"}
        rows.append({"shape": "small" if args.small else args.shape, **found})
        print(rows[-1], flush=True)
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    rows.append({"shape": "small" if args.small else args.shape, **peer(shape, args)})
    columns = ["system", "step_ms", "clip_ms", "ns_per_parameter", "state_bytes_per_parameter"]
    print(table(rows, [*columns, "on_host_bytes_per_parameter", "beside_gib"]))
    print(f"saved {save('optimizers-cpu' if args.small else on_this_gpu('optimizers'), rows)}")


if __name__ == "__main__":
    main()
