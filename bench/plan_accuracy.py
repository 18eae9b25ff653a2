"""The planner of `--cluster` compared with what was measured on one H200: memory and seconds of rollouts, updates and whole steps.

    python bench/plan_accuracy.py

It measures nothing itself. The measured numbers are those of bench/results/*-h200.json, made by `rollout.py`, `learner.py`, `grpo_step.py` and
`big_models.py`. The planner's shares of the hardware's peak were chosen on these rows, so they show how far one set of shares describes
different sizes, not how well it predicts a new machine.
"""

from __future__ import annotations

import json
from typing import Any

from common import RESULTS, save, table

from burnish.config.model import Lora, Optimizer
from burnish.config.placement import MeshSizes
from burnish.memory_plan.hardware import parse_cluster
from burnish.memory_plan.mesh_memory import Workload, device_memory
from burnish.memory_plan.mesh_time import rollout_seconds, step_time
from burnish.memory_plan.model_shapes import published_shape
from burnish.memory_plan.planner import CUDA_CONTEXT_BYTES, GIB

H200 = parse_cluster("H200")
ROLLOUTS = {
    "R1": ("1.5B", 256, 256),
    "R2": ("1.5B", 1024, 256),
    "R3": ("1.5B", 512, 2048),
    "R4": ("7B", 256, 256),
    "R5": ("7B", 256, 1024),
    "E1": ("30B-A3B", 256, 256),
    "E2": ("30B-A3B", 1024, 256),
}
"""Size, requests and new tokens, of 128 tokens of prompt each."""
BIG: dict[str, dict[str, Any]] = {
    "7B-8bit": {"optimizer": Optimizer(name="adam8bit")},
    "7B-offload": {"optimizer": Optimizer(offload=True)},
    "32B-lora": {"optimizer": Optimizer(), "lora": Lora(rank=32)},
    "30B-A3B-lora": {"optimizer": Optimizer(), "lora": Lora(rank=16)},
}


def main() -> None:
    rows = all_rows()
    print(table(rows, ["work", "what", "planned", "measured", "error"]))
    worst = max(rows, key=lambda row: abs(row["error"]))
    print(f"largest error {worst['error']:+.0%}: {worst['work']}, {worst['what']}")
    print(f"saved {save('plan_accuracy', rows)}")


def all_rows() -> list[dict[str, Any]]:
    return [*rollouts(), *long_updates(), *update_of_experts(), grpo_step(), *big_models()]


def measured(name: str) -> dict[str, dict[str, Any]]:
    """The rows of burnish in a file of results, by their work."""
    rows = json.loads((RESULTS / f"{name}-h200.json").read_text())["rows"]
    return {row["work"]: row for row in rows if row["system"] == "burnish"}


def workload(size: str, **options: Any) -> Workload:
    shape = published_shape(f"Qwen{3 if size == '30B-A3B' else 2.5}-{size}")
    assert shape is not None
    given = {"optimizer": Optimizer(), "prompt": 128, "answer": 256, **options}
    return Workload(shape, "bfloat16", longest=given["prompt"] + given["answer"], max_rows=1024, **given)


def row(work: str, what: str, planned: float, found: float) -> dict[str, Any]:
    return {"work": work, "what": what, "planned": planned, "measured": found, "error": planned / found - 1}


def rollouts() -> list[dict[str, Any]]:
    found, rows = measured("rollout"), []
    for suffix, in_8_bits in (("", False), (", fp8", True)):
        options = {"samples": 1, "weights_in_8_bits": in_8_bits, "cache_in_8_bits": in_8_bits}
        for name, (size, num, new) in ROLLOUTS.items():
            if (name := name + suffix) in found:
                work = workload(size, prompts=num, answer=new, **options)
                rows.append(row(name, "rollout s", rollout_seconds(work, 1, 100 * GIB, H200), found[name]["wall_s"]))
    return rows


def long_updates() -> list[dict[str, Any]]:
    """One sequence of 32,768 tokens, of which all are trained on."""
    found, rows = measured("learner"), []
    for policy in ("keep", "recompute"):
        work = workload("1.5B", prompts=1, samples=1, prompt=1, answer=32767, token_budget=32768, activations=policy)
        name = f"d: 1 x 32,768, activations={policy}"
        rows.append(row(name, "update s", step_time(work, MeshSizes(), 1, 0, H200).update, found[name]["update_s"]))
        rows.append(row(name, "peak GiB", peak(work), found[name]["peak_gib"]))
    return rows


def update_of_experts() -> list[dict[str, Any]]:
    """Four sequences of 8,192 tokens through 30B-A3B with adapters on experts."""
    name = "f: 30B-A3B, LoRA of rank 16, 4 x 8,192"
    found = measured("learner")[name]
    work = workload("30B-A3B", prompts=4, samples=1, prompt=1, answer=8191, lora=Lora(rank=16))
    planned = step_time(work, MeshSizes(), 1, 0, H200).update
    return [row(name, "update s", planned, found["update_s"]), row(name, "peak GiB", peak(work), found["peak_gib"])]


def grpo_step() -> dict[str, Any]:
    name = "GRPO step, R1's rollouts"
    work = workload("1.5B", prompts=32, samples=8, token_budget=36864)
    return row(
        name, "step s", step_time(work, MeshSizes(), 1, 100 * GIB, H200).total, measured("grpo_step")[name]["step_s"]
    )


def big_models() -> list[dict[str, Any]]:
    found, rows = measured("big_models"), []
    for name, options in BIG.items():
        work = workload(name.rpartition("-")[0], prompts=8, samples=8, activations="recompute", **options)
        time = step_time(work, MeshSizes(), 1, 100 * GIB, H200)
        rows.append(row(name, "rollout s", time.rollout, found[name]["rollout_s"]))
        rows.append(row(name, "learning s", time.update, found[name]["learn_s"]))
        rows.append(row(name, "step s", time.total, found[name]["step_s"]))
        rows.append(row(name, "peak GiB", peak(work), found[name]["peak_gib"]))
    return rows


def peak(work: Workload) -> float:
    """The planned peak of torch's memory in GiB."""
    return (device_memory(work, MeshSizes(), 1, H200).total - CUDA_CONTEXT_BYTES) / GIB


if __name__ == "__main__":
    main()
