"""The learner on one GPU: share of the peak throughput, cost of log-probs, long sequences, shared prompts.

python bench/learner.py [--only a b c d e f 32k 128k] [--layers fp8] [--repeats 3]

Random weights of the named shapes in bfloat16, prompts of 64 to 192 tokens and completions of 64 to 448 (384 together on
average), packed. Every update gives the log-prob and the entropy of each completion token. Shares are executed operations
(`burnish/models/flops.py`) over 790 TFLOP/s, the throughput of an H200 in a large product. There is one of the whole
update, and one of its forward and backward passes. `needed` leaves out what is computed twice to save memory. With `--layers fp8`
(`training.layers`) the works a, b, d and e have rows of their own, whose shares are of the same 790 TFLOP/s.

  a  1.5B, all weights trained, only logits recomputed; 8 x 1024 tokens like transformers, which runs for comparison
  b  7B with LoRA of rank 32
  c  log-prob and entropy of 131,072 tokens over 152k words, forward and backward, compared with materialised logits
  d  one sequence of 32,768 tokens, 1.5B, activations kept and recomputed
  e  32 groups of 8 samples, 1.5B, with the prompt computed once and eight times
  32k, 128k  one sequence of so many tokens, 1.5B, activations recomputed and in host memory, with the memory plan beside the peak
  f  Qwen3-30B-A3B's shape with LoRA of rank 16 on all projections and experts, four sequences of 8,192 tokens
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from batches import equal, ragged
from common import on_this_gpu, save_beside, table
from rollout import FLOPS, architecture_of, random_model

from burnish.algorithms.losses.policy_loss import NllLoss, PolicyLoss
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.memory_plan.planner import RunSetup, plan_memory
from burnish.memory_plan.suggestions import plan_text
from burnish.models.activation_checkpointing import set_activations
from burnish.models.flops import backward_flops, forward_flops, packed_counts
from burnish.models.fp8_layers import set_fp8
from burnish.models.kernels.logprob import head_logprob
from burnish.models.lora.adapters import add_lora
from burnish.training.learner import Learner

GIB = 2**30
Row = dict[str, Any]


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def median_s(work: Callable[[], Any], repeats: int, warm_up: int = 1) -> float:
    """Seconds of a call, the device waited for; the first calls do not count."""
    times = []
    for k in range(warm_up + repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if k >= warm_up:
            times.append(time.perf_counter() - started)
    return sorted(times)[(len(times) - 1) // 2]


def updates(learner: Learner, batch: Batch, repeats: int, loss: Any = None) -> Row:
    """One update: its seconds, where they go, what share of the peak they are, the memory it takes."""
    chosen = PolicyLoss() if loss is None else loss
    torch.cuda.reset_peak_memory_stats()
    learner.update(batch, chosen)
    learner.meter.read()
    update_s = median_s(lambda: learner.update(batch, chosen), repeats, warm_up=0)
    reading = learner.meter.read()
    assert reading.needed is not None
    assert reading.executed is not None
    split = {f"{part}_s": seconds / repeats for part, seconds in reading.seconds.items() if part != "communication"}
    executed, needed = reading.executed / repeats, reading.needed / repeats
    passes_s = split["forward_s"] + split["backward_s"]
    return {
        "tokens": batch.num_tokens,
        "update_s": update_s,
        "tokens_per_s": batch.num_tokens / update_s,
        "flops_share": executed / update_s / FLOPS,
        "passes_s": passes_s,
        "passes_tokens_per_s": batch.num_tokens / passes_s,
        "passes_flops_share": executed / passes_s / FLOPS,
        "needed_flops_share": needed / update_s / FLOPS,
        "executed_pflop": executed / 1e15,
        **split,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def model_of(shape: str, layers: str) -> Any:
    """A model with random weights whose layers compute so (`training.layers`)."""
    model = random_model(shape)
    set_fp8(model, layers == "fp8")
    return model


def system_of(layers: str) -> str:
    return "burnish" if layers == "plain" else f"burnish, layers={layers}"


def learner_of(model: Any, budget: int, **options: Any) -> Learner:
    return Learner(model, Optimizer(lr=1e-6), 1000, budget, **options)


# --- the works -----------------------------------------------------------------------------------------------------------


def full_training(repeats: int, layers: str) -> list[Row]:
    """a"""
    model, system = model_of("1.5B", layers), system_of(layers)
    vocab = model.arch.vocab_size
    learner = learner_of(model, 16384, share_prefixes=False)
    rows = [{"work": "a: 1.5B, 256 ragged samples", "system": system} | updates(learner, ragged(256, vocab), repeats)]
    rows += [
        {"work": "a: 1.5B, 8 x 1024", "system": system} | updates(learner, equal(8, 1024, vocab), repeats, NllLoss())
    ]
    del model, learner
    clear()
    return rows if layers == "fp8" else [*rows, transformers_row(repeats)]


def transformers_row(repeats: int) -> Row:
    """transformers' own forward and backward of the same shape, 8 x 1024 tokens, its cross-entropy, nothing recomputed."""
    import transformers

    arch = architecture_of("1.5B")
    config = transformers.Qwen2Config(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=arch.mlp_size, num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads, num_key_value_heads=arch.num_kv_heads, tie_word_embeddings=arch.tied, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device("cuda"):
        theirs: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    theirs.train()
    tokens = torch.randint(arch.vocab_size, (8, 1024), device="cuda")

    def both_passes() -> None:
        theirs.zero_grad(set_to_none=True)
        theirs(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    clear()
    passes_s = median_s(both_passes, repeats, warm_up=2)
    counts = packed_counts([1024] * 8, 8 * 1024)
    executed = (forward_flops(arch, counts) + backward_flops(arch, counts)).total
    return {
        "work": "a: 1.5B, 8 x 1024", "system": f"transformers {transformers.__version__}, forward and backward alone",
        "tokens": tokens.numel(), "passes_s": passes_s, "passes_tokens_per_s": tokens.numel() / passes_s,
        "passes_flops_share": executed / passes_s / FLOPS, "executed_pflop": executed / 1e15,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }  # fmt: skip


def lora(repeats: int, layers: str) -> list[Row]:
    """b"""
    model = random_model("7B")
    add_lora(model, Lora(rank=32, alpha=64), seed=0)
    set_fp8(model, layers == "fp8")
    learner = learner_of(model, 8192, share_prefixes=False)
    measured = updates(learner, ragged(128, model.arch.vocab_size), repeats)
    return [{"work": "b: 7B, LoRA of rank 32, 128 ragged samples", "system": system_of(layers)} | measured]


def head(repeats: int, _: str) -> list[Row]:
    """c"""
    num, hidden_size, vocab = 131_072, 1536, 151_936
    with torch.device("cuda"):
        hidden = torch.randn(num, hidden_size, dtype=torch.bfloat16).requires_grad_()
        weight = (0.02 * torch.randn(vocab, hidden_size, dtype=torch.bfloat16)).requires_grad_()
        targets = torch.randint(vocab, (num,))
    rows: list[Row] = []

    def measured(system: str, work: Callable[[], Any], **more: Any) -> None:
        def afresh() -> None:
            hidden.grad = weight.grad = None
            work()

        hidden.grad = weight.grad = None
        clear()
        before = torch.cuda.memory_allocated()
        both_s = median_s(afresh, repeats)
        extra = (torch.cuda.max_memory_allocated() - before) / GIB
        gradients = 2 * (hidden.numel() + weight.numel()) / GIB
        row = {"work": f"c: log-prob and entropy of {num:,} tokens", "system": system, "passes_s": both_s}
        row |= {"passes_tokens_per_s": num / both_s, "extra_gib": extra, "gradients_gib": gradients}
        rows.append(row | more)

    def ours() -> None:
        logp, entropy = head_logprob(hidden, weight, targets, 1.0, True)
        assert entropy is not None
        (logp + 0.01 * entropy).sum().backward()

    measured("burnish", ours)
    chunk = largest_chunk(hidden, weight, targets)
    measured(
        f"materialised logits, {chunk:,} tokens at once",
        lambda: materialised(hidden, weight, targets, chunk),
        chunk=chunk,
    )
    rows[0]["speed_up"] = rows[1]["passes_s"] / rows[0]["passes_s"]
    return rows


def materialised(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int) -> None:
    """Log-probs and entropies as they are usually written, in chunks that fit: float32 logits, log-softmax, its entropy."""
    hidden.grad = torch.empty_like(hidden)
    for i in range(0, targets.numel(), chunk):
        rows = hidden.detach()[i : i + chunk].requires_grad_()
        log_p = torch.nn.functional.linear(rows, weight).float().log_softmax(-1)
        logp = log_p.gather(1, targets[i : i + chunk, None]).squeeze(1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        (logp + 0.01 * entropy).sum().backward()
        assert rows.grad is not None
        hidden.grad[i : i + chunk] = rows.grad


def largest_chunk(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> int:
    """The most tokens, halved from all, whose logits and gradients the device can hold; tried on two chunks."""
    chunk = targets.numel()
    while chunk > 1:
        hidden.grad = weight.grad = None
        clear()
        try:
            materialised(hidden.detach()[: 2 * chunk], weight, targets[: 2 * chunk], chunk)
        except torch.OutOfMemoryError:
            chunk //= 2
        else:
            return chunk
    raise RuntimeError("not even one row of logits fits")


def long_sequences(repeats: int, layers: str) -> list[Row]:
    """d"""
    rows: list[Row] = []
    model = model_of("1.5B", layers)
    batch = equal(1, 32768, model.arch.vocab_size)
    for policy in ("keep", "recompute"):
        set_activations(model, policy)
        learner = learner_of(model, 32768)
        rows.append(
            {"work": f"d: 1 x 32,768, activations={policy}", "system": system_of(layers)}
            | updates(learner, batch, repeats, NllLoss())
        )
        del learner
        clear()
    return rows


def one_long_sequence(length: int, repeats: int, layers: str) -> list[Row]:
    """32k, 128k"""
    rows: list[Row] = []
    model = model_of("1.5B", layers)
    batch = equal(1, length, model.arch.vocab_size)
    for policy in ("recompute", "offload"):
        set_activations(model, policy)
        learner = learner_of(model, length)
        setup = RunSetup(
            model.arch, "bfloat16", True, Optimizer(), length, length, length, policy, in_fp8=layers == "fp8"
        )
        plan = plan_memory(setup)
        print(plan_text(plan, None), flush=True)
        row = {"work": f"{length // 1024}k: 1 x {length:,}, activations={policy}", "system": system_of(layers)}
        measured = updates(learner, batch, repeats, NllLoss())
        rows.append(row | measured | {"planned_gib": plan.learners_peak(2) / GIB})
        del learner
        clear()
    return rows


def shared_prompts(repeats: int, layers: str) -> list[Row]:
    """e"""
    rows: list[Row] = []
    model = model_of("1.5B", layers)
    batch = ragged(256, model.arch.vocab_size, group=8)
    for shares in (True, False):
        learner = learner_of(model, 16384, share_prefixes=shares)
        work = f"e: 32 groups of 8, share_prefixes={str(shares).lower()}"
        rows.append({"work": work, "system": system_of(layers)} | updates(learner, batch, repeats))
        del learner
        clear()
    rows[0]["speed_up"] = rows[1]["update_s"] / rows[0]["update_s"]
    return rows


def experts(repeats: int, _: str) -> list[Row]:
    """f"""
    model = random_model("30B-A3B")
    add_lora(model, Lora(rank=16), seed=0)
    learner = learner_of(model, 8192, share_prefixes=False)
    measured = updates(learner, equal(4, 8192, model.arch.vocab_size), repeats, NllLoss())
    return [{"work": "f: 30B-A3B, LoRA of rank 16, 4 x 8,192", "system": "burnish"} | measured]


WORKS: dict[str, Callable[[int, str], list[Row]]] = {
    "a": full_training,
    "b": lora,
    "c": head,
    "d": long_sequences,
    "e": shared_prompts,
    "f": experts,
    "32k": partial(one_long_sequence, 32768),
    "128k": partial(one_long_sequence, 131072),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*WORKS], default=[*WORKS])
    parser.add_argument("--layers", choices=("plain", "fp8"), default="plain")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    columns = ["work", "system", "update_s", "tokens_per_s", "flops_share", "needed_flops_share"]
    columns += [
        "passes_s",
        "passes_tokens_per_s",
        "passes_flops_share",
        "optimizer_s",
        "peak_gib",
        "planned_gib",
        "extra_gib",
        "speed_up",
    ]
    rows: list[Row] = []
    for name in args.only:
        started = time.perf_counter()
        clear()
        found = WORKS[name](args.repeats, args.layers)
        rows += found
        print(table(found, columns), f"\n{name} took {time.perf_counter() - started:.0f} s\n", flush=True)
    print(table(rows, columns))
    print(
        f"saved {save_beside(on_this_gpu('learner'), rows, lambda row: (row['work'].split(':')[0], 'fp8' in row['system']))}"
    )


if __name__ == "__main__":
    main()
