"""A whole GRPO step of a 1.5B model on one GPU: rollouts of R1 in groups of 8, then one update of all weights.

python bench/grpo_step.py [--steps 4] [--budget 36864] [--layers fp8] [--rollout fp8] [--deterministic] [--trl-python /path/to/python [--trl-vllm]]

Random weights in bfloat16 with float32 master weights and moments, 32 prompts of 128 tokens x 8 samples x 256 new tokens,
no reference model, one update a batch and therefore no pass for old log-probs. The engine samples from the learner's own
tensors, and its cache is released while the learner works. The samples of a group share the forward and backward of their
prompt. `--layers fp8` is `training.layers`, and `--rollout fp8` both `rollout.weights` and `rollout.cache_dtype`; their rows are saved
beside that of bfloat16, and their shares of the peak are of bfloat16's. `--deterministic` is `training.deterministic`, saved likewise.

TRL runs the same work afterwards in a separate process (`bench/peers/trl_grpo_step_gpu.py`), if this interpreter or the
one named has it. With `--trl-vllm` it generates with vLLM.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import on_this_gpu, save_beside, table
from rollout import FLOPS, FP8, SHAPES, Work, random_model, requests_of

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.engine import Completion, Request
from burnish.core.segments import offsets_from_lengths
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.fp8_layers import set_fp8
from burnish.models.kernels.device import use_deterministic_algorithms
from burnish.training.learner import Learner
from burnish.training.meter import MeterReading

WORK = Work("1.5B", 256, 256, group=8)
NAME = "GRPO step, R1's rollouts"


@dataclass(frozen=True)
class Step:
    """Seconds of a step, and what its learner did in it."""

    step_s: float
    rollout_s: float
    learn_s: float
    reading: MeterReading


def batch_of(requests: list[Request], done: dict[str, Completion]) -> Batch:
    """The rollouts as one packed batch with advantages of both signs."""
    pairs = [(r, done[r.id]) for r in requests]
    tokens = torch.tensor([t for r, c in pairs for t in (*r.tokens, *c.tokens.tolist())])
    offsets = offsets_from_lengths(torch.tensor([len(r.tokens) + len(c.tokens) for r, c in pairs]))
    mask = torch.tensor([k >= len(r.tokens) for r, c in pairs for k in range(len(r.tokens) + len(c.tokens))])
    number = torch.arange(len(pairs))
    columns = {"advantages": torch.where(number % 2 == 0, -1.0, 1.0), "group_ids": number // WORK.group}
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to("cuda")


def one_step(k: int, engine: PagedEngine, learner: Learner, vocab: int, is_profiled: bool) -> tuple[Step, Batch]:
    """Sample, update, and tell the engine."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    requests = requests_of(WORK, vocab, f"step{k}-")
    engine.submit(requests)
    batch = batch_of(requests, {c.id: c for c in engine.stream()})
    torch.cuda.synchronize()
    sampled = time.perf_counter()
    engine.sleep()
    if is_profiled:
        with torch.profiler.profile() as profile:
            learner.update(batch, PolicyLoss())
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60))
    else:
        learner.update(batch, PolicyLoss())
    learner.release()
    engine.load(k, ())
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return Step(ended - started, sampled - started, ended - sampled, learner.meter.read()), batch


def burnish_row(num_steps: int, budget: int, is_profiled: bool, layers: str, rollout: str) -> dict[str, Any]:
    """The median step after the first."""
    settings = {"layers": layers, "rollout": rollout}
    words = [f"{name}=fp8" for name, value in settings.items() if value == "fp8"]
    words += ["deterministic"] if torch.are_deterministic_algorithms_enabled() else []
    model = random_model(WORK.shape)
    set_fp8(model, layers == "fp8")
    engine = PagedEngine(model, max_rows=WORK.requests, **(FP8 if rollout == "fp8" else {}))
    learner = Learner(model, Optimizer(lr=1e-6), 100, token_budget=budget)
    steps: list[Step] = []
    for k in range(num_steps):
        last = is_profiled and k == num_steps - 1
        step, batch = one_step(k, engine, learner, model.arch.vocab_size, last)
        steps.append(step)
        split = ", ".join(f"{part} {seconds:.2f}" for part, seconds in step.reading.seconds.items() if seconds > 0.005)
        print(
            f"step {k}: {step.step_s:.2f} s, rollout {step.rollout_s:.2f}, learning {step.learn_s:.2f} ({split})",
            flush=True,
        )
    step = sorted(steps[1:], key=lambda step: step.step_s)[(len(steps) - 2) // 2]
    seconds, executed = step.reading.seconds, step.reading.executed
    assert executed is not None
    assert step.reading.needed is not None
    return {
        "work": NAME,
        "system": ", ".join(["burnish", *words]),
        "budget": budget,
        "step_s": step.step_s,
        "rollout_s": step.rollout_s,
        "learn_s": step.learn_s,
        "forward_s": seconds["forward"],
        "backward_s": seconds["backward"],
        "optimizer_s": seconds["optimizer"],
        "other_s": step.learn_s - seconds["forward"] - seconds["backward"] - seconds["optimizer"],
        "tokens": batch.num_tokens,
        "learn_tokens_per_s": batch.num_tokens / step.learn_s,
        "flops_share": executed / step.learn_s / FLOPS,
        "needed_flops_share": step.reading.needed / step.learn_s / FLOPS,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def trl_row(python: str, num_steps: int, with_vllm: bool) -> dict[str, Any]:
    """TRL's median step after the first."""
    asked = {
        "shape": SHAPES[WORK.shape], "prompts": WORK.requests // WORK.group, "samples": WORK.group, "prompt_tokens": WORK.prompt,
        "new_tokens": WORK.new, "micro_batch": 16, "steps": num_steps, "vllm": with_vllm,
    }  # fmt: skip
    script = Path(__file__).parent / "peers" / "trl_grpo_step_gpu.py"
    done = subprocess.run([python, str(script), json.dumps(asked)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    step_s, rollout_s = (statistics.median(found[k][1:]) for k in ("steps_s", "generate_s"))
    system = f"TRL {found['version']}" + (" with vLLM" if with_vllm else "")
    row = {"work": NAME, "system": system, "step_s": step_s, "rollout_s": rollout_s, "learn_s": step_s - rollout_s}
    return row | {"peak_gib": found["peak_gib"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--budget", type=int, default=36864, help="tokens of a micro-batch")
    parser.add_argument("--layers", choices=("plain", "fp8"), default="plain")
    parser.add_argument("--rollout", choices=("plain", "fp8"), default="plain", help="weights and cache of the engine")
    parser.add_argument("--deterministic", action="store_true", help="training.deterministic")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--trl-python", help="interpreter of an environment with trl; this one where it has it")
    parser.add_argument("--trl-vllm", action="store_true", help="let TRL generate with vLLM")
    args = parser.parse_args()
    if args.deterministic:
        use_deterministic_algorithms()
    rows = [burnish_row(args.steps, args.budget, args.profile, args.layers, args.rollout)]
    gc.collect()
    torch.cuda.empty_cache()
    python = args.trl_python or (sys.executable if importlib.util.find_spec("trl") else None)
    if python is None:
        print("TRL is not installed here: no row of its own")
    else:
        rows.append(trl_row(python, args.steps, args.trl_vllm))
        rows[0]["share_of_peer"] = rows[0]["step_s"] / rows[1]["step_s"]
    columns = ["system", "step_s", "rollout_s", "learn_s", "forward_s", "backward_s", "optimizer_s", "other_s"]
    print(table(rows, [*columns, "flops_share", "needed_flops_share", "peak_gib", "share_of_peer"]))
    print(f"saved {save_beside(on_this_gpu('grpo_step'), rows, lambda row: row['system'])}")


if __name__ == "__main__":
    main()
