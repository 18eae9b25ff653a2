"""The memory plan compared with a real GPU: learners are planned, made with random weights, and measured over two updates.

python bench/memory.py [--only 1.5B-full 1.5B-lora 1.5B-offload 7B-full 7B-lora 30B-A3B-lora 7B-offload]

bfloat16, packed sequences of 128 to 640 tokens, two micro-batches that fill the token budget. `planned` is the planned
peak of torch's allocated memory in the second update, `measured` the real one. `device` is all memory of the GPU that is
in use then. A learner that does not fit by its plan runs with the settings that the plan names. 7B-full does not fit: it
needs its optimizer's state in host memory, 85 GiB.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from batches import ragged
from common import on_this_gpu, save_beside, table
from rollout import architecture_of, random_model

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.memory_plan.planner import GIB, RunSetup, plan_memory
from burnish.memory_plan.suggestions import PLAN_TOLERANCE, enough_suggestions, plan_error, plan_text
from burnish.models.activation_checkpointing import set_activations
from burnish.models.lora.adapters import add_lora
from burnish.training.learner import Learner


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    shape: str
    budget: int = 16384
    activations: str = "keep"
    optimizer: Optimizer = field(default_factory=Optimizer)
    lora: Lora | None = None


CASES = {
    "1.5B-full": Case("1.5B"),
    "1.5B-lora": Case("1.5B", lora=Lora(rank=32)),
    "1.5B-offload": Case("1.5B", activations="selective", optimizer=Optimizer(offload=True)),
    "7B-full": Case("7B"),
    "7B-lora": Case("7B", lora=Lora(rank=32)),
    "30B-A3B-lora": Case("30B-A3B", budget=8192, lora=Lora(rank=16)),
    "7B-offload": Case("7B", activations="recompute", optimizer=Optimizer(offload=True)),
}
FILLED = 0.99
"""Of two token budgets: micro-batches are balanced, and two of them shall be enough."""
LONGEST = 640


def batch_for(budget: int, vocab: int) -> Batch:
    """As many sequences as two micro-batches hold."""
    num = int(2 * budget / 350)
    while (batch := ragged(num, vocab, device="cpu")).num_tokens > 2 * FILLED * budget:
        num -= 1
    return batch


def prepared(case: Case, room: int, host_room: int) -> tuple[RunSetup, list[str]]:
    """What is run: the case, or what its plan makes of it where it does not fit; and the levers pulled for that."""
    arch = architecture_of(case.shape)
    tokens = batch_for(case.budget, arch.vocab_size).num_tokens
    setup = RunSetup(
        *(arch, "bfloat16", True, case.optimizer, case.budget, LONGEST, tokens),
        activations=case.activations,
        lora=case.lora,
    )
    made = plan_memory(setup)
    print(plan_text(made, room), flush=True)
    safe = int(room * (1 - PLAN_TOLERANCE))
    if made.total <= safe and made.host <= host_room:
        return setup, []
    pulled, made = enough_suggestions(setup, safe, host_room)
    assert made.total <= safe, f"no lever makes it fit: {made.total / GIB:.1f} GiB"
    levers = [lever.text for lever in pulled]
    print(f"does not fit; with {', '.join(levers)}:\n{plan_text(made, room)}", flush=True)
    return made.setup, levers


def measure(name: str, case: Case, room: int, host_room: int) -> dict[str, Any]:
    """Two updates of a learner, and what they held."""
    setup, levers = prepared(case, room, host_room)
    made = plan_memory(setup)
    model = random_model(case.shape)
    if setup.lora is not None:
        add_lora(model, setup.lora, seed=0)
    set_activations(model, setup.activations)
    learner = Learner(model, setup.optimizer, 10, setup.token_budget)
    batch = batch_for(case.budget, model.arch.vocab_size).to("cuda")
    peaks, seconds = [], []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        update = learner.update(batch, PolicyLoss())
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        peaks.append(torch.cuda.max_memory_allocated())
        assert update.skipped is None, update.skipped
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    errors = [plan_error(made.learners_peak(k + 1), peak) for k, peak in enumerate(peaks)]
    print("\n".join(f"update {k + 1}: {text}" for k, (_, text) in enumerate(errors)), flush=True)
    return {
        "work": name,
        "system": "burnish",
        "activations": setup.activations,
        "levers": levers,
        "budget": setup.token_budget,
        "tokens": batch.num_tokens,
        "planned_gib": made.learners_peak(2) / GIB,
        "measured_gib": peaks[1] / GIB,
        "error": errors[1][0],
        "first_planned_gib": made.learners_peak(1) / GIB,
        "first_measured_gib": peaks[0] / GIB,
        "first_error": errors[0][0],
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "device_gib": (torch.cuda.max_memory_reserved() + outside) / GIB,
        "outside_gib": outside / GIB,
        "host_gib": made.host / GIB,
        "update_s": seconds[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    args = parser.parse_args()
    _, room = torch.cuda.mem_get_info()
    host_room = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 110 * GIB)
    rows = []
    for name in args.only:
        print(f"\n{name}", flush=True)
        started = time.perf_counter()
        rows.append(measure(name, CASES[name], room, host_room))
        gc.collect()
        torch.cuda.empty_cache()
        print(f"{time.perf_counter() - started:.0f} s", flush=True)
    print(
        "\n"
        + table(
            rows, ["work", "activations", "planned_gib", "measured_gib", "error", "device_gib", "host_gib", "update_s"]
        )
    )
    print(f"saved {save_beside(on_this_gpu('memory'), rows, lambda row: row['work'])}")
    worst = max(abs(row["error"]) for row in rows)
    assert worst <= 0.1, f"a plan is {worst:.0%} off"


if __name__ == "__main__":
    main()
