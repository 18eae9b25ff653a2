"""Power and clock of the GPU while R1 runs repeatedly, and while one product does: they limit the rollout throughput.

python bench/power.py

Needs `nvidia-smi`, which is queried every 40 ms. The product is gate and up of a 1.5B for 256 rows, repeated for a second
over weights that together exceed the GPU's cache.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from common import on_this_gpu, save, table
from rollout import WORKS, drain, random_model, requests_of

from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.kernels.cuda.products import gated_product

ASK = ["nvidia-smi", "--format=csv,noheader,nounits", "-lms", "40"]
ASK += ["--query-gpu=power.draw.instant,clocks.sm,clocks_event_reasons.active"]
CAPPED = 0x4  # the reason: software's limit of power
RUNS, SIZES, WEIGHTS = 20, (1536, 8960), 28


def watched(work: Callable[[], float]) -> dict[str, Any]:
    """What the work gives as seconds of one piece of it, and how the GPU was while it ran."""
    lines: list[str] = []
    with subprocess.Popen(ASK, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lambda out=process.stdout: lines.extend(out), daemon=True)
        reader.start()
        time.sleep(0.5)
        lines.clear()
        seconds = work()
        process.terminate()
        reader.join(5)
    samples = [line.split(", ") for line in lines if line.count(",") == 2]
    return {
        "seconds": seconds,
        "watts": statistics.median(float(watts) for watts, _, _ in samples),
        "mhz": statistics.median(int(clock) for _, clock, _ in samples),
        "samples": len(samples),
        "capped": sum(bool(int(reason, 16) & CAPPED) for _, _, reason in samples),
    }


def rollouts() -> Callable[[], float]:
    """R1 again and again; the median of its seconds."""
    model, work = random_model("1.5B"), WORKS["R1"]
    engine = PagedEngine(model, max_rows=work.requests)

    def once(number: int) -> float:
        engine.load(number, ())  # as after an update: nothing cached counts
        return drain(engine, requests_of(work, model.arch.vocab_size, f"run{number}"))[1]

    once(0)  # compiles and captures
    return lambda: statistics.median(once(number) for number in range(1, RUNS + 1))


def products() -> Callable[[], float]:
    """A product again and again for a second; the seconds of the last ones."""
    inputs, outputs = SIZES
    weights = [torch.randn(2 * outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(WEIGHTS)]
    x = torch.randn(256, inputs, device="cuda", dtype=torch.bfloat16)
    gated_product(x, weights[0], "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [gated_product(x, weight, "silu") for weight in weights]

    def run() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        started = time.perf_counter()
        while time.perf_counter() - started < 1:
            begin.record()
            for _ in range(50):
                graph.replay()
            end.record()
            end.synchronize()
        return begin.elapsed_time(end) / 1e3 / 50 / len(kept)

    return run


def main() -> None:
    rows = [{"work": "R1, twenty times on end", "system": "burnish", **watched(rollouts())}]
    rows.append({"work": "gate and up of 256 rows, for a second", "system": "burnish", **watched(products())})
    print(table(rows, list(rows[0])))
    print(f"saved {save(on_this_gpu('power'), rows)}")


if __name__ == "__main__":
    main()
