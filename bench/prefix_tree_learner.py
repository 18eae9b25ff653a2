"""The learner on traces whose context is rewritten every turn: as separate rows, as prefix trees, and as many tokens in one chain.

python bench/prefix_tree_learner.py [--cases 8192 ...] [--repeats 3] [--profile]

A trace has 8 turns. Each turn samples 256 tokens, of which 192 are thinking that the context of the next turn drops. Turn k
is therefore a row with the prompt, the last 64 tokens of the turns before it, and its own 256. A node of the tree of these
rows is computed once. The chain has as many tokens as the tree, and the same number of them in the loss: it is the time that
the tree would take if sharing were free. Medians are over repeats in which the systems take turns.

`--profile` prints the kernels that took most of a GPU's time, for each system. On a GPU seconds are of the forward and backward passes of
an update, the model has the 1.5B shape in bfloat16, and trees are also computed by one call of flash attention over copies of the prefixes. On a CPU
seconds are the CPU time of an update, which other programs disturb less than the clock: set OMP_NUM_THREADS=1. There, in float32, a small decoder has the full lengths, and one of
25 M parameters has shorter prompts: 2,048 tokens, and 512 with turns of 64, whose rows fit the C kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import on_this_gpu, save, table
from learner_cpu import SHAPE
from rollout import random_model

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.decoder import Decoder, initialise
from burnish.models.kernels import tree_attention
from burnish.training.learner import Learner

TREES, COPIES = "prefix trees", "prefix trees, one call over copies"
BUDGET = 16_384
TINY = replace(SHAPE, vocab_size=2048, hidden_size=256, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=768)
Rows = list[tuple[list[int], int]]
"""Token ids of each sequence, and how many of the last are in the loss."""


@dataclass(frozen=True)
class Case:
    """The sizes of the traces."""

    name: str
    prompt: int
    turn: int = 256
    kept: int = 64
    """Tokens of a turn that stay in the context."""
    turns: int = 8
    traces: int = 1


CPU_CASES = {"8192": Case("2 M", 8192), "2048": Case("25 M", 2048), "512": Case("25 M", 512, 64, 16, traces=2)}
GPU_CASES = {"8192": Case("1.5B", 8192, traces=4)}


def model_of(case: Case, device: str) -> Decoder:
    if device == "cuda":
        return random_model(case.name)
    model = Decoder(TINY if case.name == "2 M" else SHAPE)
    initialise(model, seed=0)
    return model


def trace_rows(case: Case, vocab: int, generator: torch.Generator) -> Rows:
    """The rows of one trace."""

    def draw(count: int) -> list[int]:
        return torch.randint(vocab, (count,), generator=generator).tolist()

    context, rows = draw(case.prompt), []
    for _ in range(case.turns):
        turn = draw(case.turn)
        rows.append((context + turn, case.turn))
        context = context + turn[-case.kept :]
    return rows


def chain_rows(case: Case, vocab: int, generator: torch.Generator) -> Rows:
    """One sequence with as many tokens as the tree of a trace."""
    length = case.prompt + case.turns * case.turn + (case.turns - 1) * case.kept
    return [(torch.randint(vocab, (length,), generator=generator).tolist(), case.turns * case.turn)]


def batch_of(traces: list[Rows], device: str) -> Batch:
    rows = [row for trace in traces for row in trace]
    mask = torch.cat([torch.arange(len(tokens)) >= len(tokens) - count for tokens, count in rows])
    columns = {
        "advantages": torch.where(torch.arange(len(rows)) % 2 == 0, -1.0, 1.0),
        "group_ids": torch.tensor([k for k, trace in enumerate(traces) for _ in trace]),
    }
    tokens = torch.tensor([token for tokens, _ in rows for token in tokens])
    offsets = offsets_from_lengths(torch.tensor([len(tokens) for tokens, _ in rows]))
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)


def on_gpu(learner: Learner, batch: Batch) -> float:
    """Seconds of the forward and backward passes of an update."""
    torch.cuda.reset_peak_memory_stats()
    learner.meter.read()
    learner.update(batch, PolicyLoss())
    spent = learner.meter.read().seconds
    return spent["forward"] + spent["backward"]


def on_cpu(learner: Learner, batch: Batch) -> float:
    """CPU seconds of an update."""
    started = time.process_time()
    learner.update(batch, PolicyLoss())
    return time.process_time() - started


def print_profile(name: str, learner: Learner, batch: Batch) -> None:
    """Print the kernels of one update that took most of the GPU's time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        learner.update(batch, PolicyLoss())
        torch.cuda.synchronize()
    events = [event for event in found.key_averages() if event.self_device_time_total > 0]
    print(f"{name}: {sum(event.self_device_time_total for event in events) / 1e6:.3f} s of kernels")
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:14]:
        print(f"  {event.self_device_time_total / 1e3:9.1f} ms  {event.count:6} x  {event.key[:110]}")


def measured(case: Case, repeats: int, device: str, profiles: bool) -> list[dict[str, Any]]:
    """A row of results for each system."""
    model = model_of(case, device)
    vocab = model.arch.vocab_size
    systems = {}
    for name, make, shares in (
        ("separate rows", trace_rows, False),
        (TREES, trace_rows, True),
        ("unique tokens in a chain", chain_rows, True),
        *([(COPIES, trace_rows, True)] if device == "cuda" else []),
    ):
        generator = torch.Generator().manual_seed(0)
        batch = batch_of([make(case, vocab, generator) for _ in range(case.traces)], device)
        systems[name] = Learner(model, Optimizer(lr=1e-6), 1000, BUDGET, share_prefixes=shares), batch
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    peaks: dict[str, float] = {}
    for repeat in range(repeats + (device == "cuda")):
        for name, (learner, batch) in systems.items():
            tree_attention.PIECES_ON_GPU = name != COPIES
            spent = on_gpu(learner, batch) if device == "cuda" else on_cpu(learner, batch)
            if device == "cuda":
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
            if device == "cpu" or repeat > 0:  # the first on a GPU compiles kernels
                seconds[name].append(spent)
    if profiles:
        for name, (learner, batch) in systems.items():
            tree_attention.PIECES_ON_GPU = name != COPIES
            print_profile(name, learner, batch)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    alone, _, chain = list(medians.values())[:3]
    work = f"{case.name}, prompt {case.prompt:,}, {case.turns} turns of {case.turn}, {case.traces} traces"
    return [
        {
            "work": work,
            "system": name,
            "tokens": batch.num_tokens,
            "seconds": medians[name],
            "all_seconds": seconds[name],
            **(
                {"speed_up": alone / medians[name], "over_unique_tokens": medians[name] / chain}
                if name.startswith(TREES)
                else {}
            ),
            **({"peak_gib": peaks[name]} if peaks else {}),
        }
        for name, (_, batch) in systems.items()
    ]


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = GPU_CASES if device == "cuda" else CPU_CASES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=[*cases], default=[*cases], help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print what the GPU's time goes to")
    args = parser.parse_args()
    if args.profile and device == "cpu":
        parser.error("--profile needs a GPU")
    rows = []
    for name in args.cases:
        rows += measured(cases[name], args.repeats, device, args.profile)
        columns = ["work", "system", "tokens", "seconds", "speed_up", "over_unique_tokens", "peak_gib"]
        print(table([row for row in rows if row["work"] == rows[-1]["work"]], columns), flush=True)
    print(f"saved {save(on_this_gpu('prefix_tree_learner'), rows)}")


if __name__ == "__main__":
    main()
