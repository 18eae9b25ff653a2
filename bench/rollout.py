"""Rollout throughput of the native engine on one GPU: the works R1 to R5, experts (E1, E2, and E2 with a larger cache), and the cost of groups and ragged lengths.

python bench/rollout.py [--works R1 R2 ...] [--repeats 3] [--transformers] [--vllm-python PYTHON] [--parts] [--first-token]

Random weights of the named shapes in bfloat16, prompts of 128 random tokens, temperature 1, no stop token, the log-prob
of every sampled token, prefill included. `--transformers` also runs `generate` on R1. vLLM also runs on R1 to R5 if this
interpreter has it, or the one that `--vllm-python` names. `--parts` prints where the time of every work goes. `--tail` measures
speculative decoding on a real model and nothing else (`tail.py` has its options).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import on_this_gpu, save, save_beside, table
from first_token import breakdown, starts
from tail import run as run_tail

from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.expert_shape import ExpertShape
from burnish.models.weight_files import materialise, on_meta_device

SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 1536, "mlp_size": 8960, "num_layers": 28, "num_heads": 12, "num_kv_heads": 2, "vocab_size": 151936, "tied": True},
    "7B": {"hidden_size": 3584, "mlp_size": 18944, "num_layers": 28, "num_heads": 28, "num_kv_heads": 4, "vocab_size": 152064, "tied": False},
    "30B-A3B": {
        "hidden_size": 2048, "mlp_size": 6144, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4, "vocab_size": 151936, "tied": False,
        "family": "qwen3_moe", "qkv_bias": False, "qk_norm": True, "experts": ExpertShape(num_experts=128, experts_per_token=8, expert_size=768),
    },
}  # fmt: skip
"""Qwen2.5's 1.5B and 7B, Qwen3-30B-A3B."""
COPY, FLOPS = 4.3e12, 790e12  # bytes and operations a second of an H200, measured


@dataclass(frozen=True)
class Work:
    """What is asked of an engine."""

    shape: str
    requests: int
    new: int
    prompt: int = 128
    group: int = 1
    rows: int = 1024
    ragged: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


ROOMY = {"cache_bytes": 40 * 2**30}
"""A cache that holds all rows of E2. By default it takes 40% of what the weights leave, because a learner needs the rest, and rows are preempted."""
FP8 = {"weights": "fp8", "quantised": True}
"""An engine with weights and cache in 8 bits."""
PLAIN = ("R1", "R2", "R3", "R4", "R5")
"""Those that peers run too."""
WORKS = {
    "R1": Work("1.5B", 256, 256),
    "R2": Work("1.5B", 1024, 256),
    "R3": Work("1.5B", 512, 2048),
    "R4": Work("7B", 256, 256),
    "R5": Work("7B", 256, 1024),
    "E1": Work("30B-A3B", 256, 256),
    "E2": Work("30B-A3B", 1024, 256),
    "E2, roomy": Work("30B-A3B", 1024, 256, engine=ROOMY),
    "ragged": Work("1.5B", 2048, 2048, rows=256, ragged=True),
    "ragged, 512 rows": Work("1.5B", 2048, 2048, rows=512, ragged=True),
    "group of 1": Work("1.5B", 32, 1, prompt=2048),
    "group of 8": Work("1.5B", 256, 1, prompt=2048, group=8),
    "R1, top-p and top-k": Work("1.5B", 256, 256, sampling={"top_p": 0.95, "top_k": 50}),
    "R1, top-p": Work("1.5B", 256, 256, sampling={"top_p": 0.95}),
    "R1, bias and raw": Work("1.5B", 256, 256, sampling={"logit_bias": ((7, -100.0), (9, 1.0)), "raw_logprobs": True}),
    "R1, 8 bits": Work("1.5B", 256, 256, engine={"quantised": True}),
    "R3, 8 bits": Work("1.5B", 512, 2048, engine={"quantised": True}),
    "R1, fp8 weights": Work("1.5B", 256, 256, engine={"weights": "fp8"}),
    "R1, fp8": Work("1.5B", 256, 256, engine=FP8),
    "R2, fp8": Work("1.5B", 1024, 256, engine=FP8),
    "R3, fp8": Work("1.5B", 512, 2048, engine=FP8),
    "R4, fp8": Work("7B", 256, 256, engine=FP8),
    "R5, fp8": Work("7B", 256, 1024, engine=FP8),
}
PARTS = {
    "attention": ("_decode", "decode_attention", "_combine_splits", "flash"),
    "experts": ("grouped", "sum_slots", "expert", "_dispatch"),
    "matmuls": ("gemm", "nvjet", "cutlass", "splitk", "cublas", "gated_product", "product", "scaled_mm"),
    "norms and activation": ("_add_norm", "_swiglu"),
    "quantisation": ("_quantise_rows",),
    "rotation and cache": ("_rotate_store",),
    "drawing": ("_sum_chunks", "_draw", "_find_cut"),
    "copies": ("memcpy", "memset"),
}
"""Kernels by a part of their names; the first that fits."""


def architecture_of(shape: str) -> Architecture:
    """The architecture of a named shape."""
    common = {"family": "qwen2", "head_dim": 128, "max_positions": 32768, "rope_theta": 1e6, "qkv_bias": True}
    return Architecture(**common | SHAPES[shape])


def random_model(shape: str, dtype: torch.dtype = torch.bfloat16) -> Decoder:
    """A decoder of the shape with random weights, made on the GPU."""
    with on_meta_device():
        model = Decoder(architecture_of(shape))
    materialise(model, dtype, torch.device("cuda"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.02)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model


def requests_of(work: Work, vocab: int, tag: str) -> list[Request]:
    """The requests of a work, every one with its own key."""
    random = np.random.default_rng(0)
    lengths = np.full(work.requests, work.new)
    if work.ragged:  # geometric, mean 256
        lengths = np.minimum(random.geometric(1 / 256, work.requests), work.new)
    prompts = [tuple(random.integers(0, vocab, work.prompt).tolist()) for _ in range(work.requests // work.group)]
    return [
        Request(
            f"{tag}{i}",
            prompts[i // work.group],
            SamplingOptions(max_tokens=int(lengths[i]), **work.sampling),
            fold(tag, i),
        )
        for i in range(work.requests)
    ]


def drain(engine: PagedEngine, wanted: Sequence[Request]) -> tuple[int, float]:
    """(tokens, seconds) from the submission to the last completion."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    engine.submit(wanted)
    tokens = sum(len(completion.tokens) for completion in engine.stream())
    torch.cuda.synchronize()
    return tokens, time.perf_counter() - started


def limit_s(work: Work, model: Decoder) -> float:
    """Seconds that matmuls at full rate and keys and values at full bandwidth take, one after the other."""
    arch = model.arch
    body = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(("emb", "head"))
    )
    head = arch.vocab_size * arch.hidden_size
    active = body  # weights that a token is multiplied with
    if arch.experts is not None:
        idle = arch.experts.num_experts - arch.experts.experts_per_token
        active -= 3 * arch.num_layers * idle * arch.experts.expert_size * arch.hidden_size
    token_bytes = 4 * arch.num_layers * arch.num_kv_heads * arch.head_dim
    prefill = 2 * active * work.prompt * work.requests / work.group / FLOPS
    step = max(2 * (active + head) * work.requests / FLOPS, 2 * (body + head) / COPY)
    past = token_bytes * work.requests * (work.prompt + work.new / 2) / COPY
    return prefill + (work.new - 1) * (step + past)


def measure(name: str, work: Work, model: Decoder, repeats: int) -> dict[str, Any]:
    """Median over repeats after one that compiles and captures."""
    rows = min(work.requests, work.rows)
    engine = PagedEngine(model, max_rows=rows, **work.engine)
    vocab = model.arch.vocab_size
    started = time.perf_counter()
    short = [
        Request(r.id, r.tokens, replace(r.sampling, max_tokens=min(work.new, 12)), r.key)
        for r in requests_of(work, vocab, "warm")
    ]
    engine.submit(requests_of(replace(work, requests=1, group=1, ragged=False), vocab, "longest"))
    list(engine.stream())
    drain(engine, short[: 2 * rows])
    ready_s = time.perf_counter() - started
    runs = []
    for k in range(repeats):
        engine.load(k + 1, ())  # as after an update: nothing cached counts
        waited_s = engine.stats.waited_s
        tokens, wall_s = drain(engine, requests_of(work, vocab, f"run{k}-"))
        runs.append((wall_s, tokens, wall_s - (engine.stats.waited_s - waited_s)))
    wall_s, tokens, host_s = sorted(runs)[(len(runs) - 1) // 2]
    torch.cuda.synchronize()
    row = {
        "work": name,
        "system": "burnish",
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
        "host_s": host_s,
        "first_run_s": ready_s,
        "prefilled_tokens": engine.stats.prefilled_tokens,
        "compile_s": engine.stats.compile_s,
        "capture_s": engine.stats.capture_s,
        "graphs": engine.stats.graphs,
        "cache_gib": engine.runner.held_bytes / 2**30,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
    if not work.ragged and not work.engine.keys() & FP8.keys():
        row["limit_share"] = limit_s(work, model) / wall_s
    return row


def parts(name: str, work: Work, model: Decoder) -> dict[str, Any]:
    """Seconds of one run by what the device does, and those in which it does nothing."""
    engine = PagedEngine(model, max_rows=min(work.requests, work.rows), **work.engine)
    drain(engine, requests_of(work, model.arch.vocab_size, "warm"))
    engine.load(1, ())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        _, wall_s = drain(engine, requests_of(work, model.arch.vocab_size, "seen"))
    seconds = dict.fromkeys([*PARTS, "other"], 0.0)
    for event in seen.key_averages():
        lower = event.key.lower()
        part = next((part for part, words in PARTS.items() if any(word in lower for word in words)), "other")
        seconds[part] += event.self_device_time_total / 1e6
    row: dict[str, Any] = {"work": f"{name}, by part", "system": "burnish", "wall_s": wall_s}
    row |= {f"{part.replace(' ', '_')}_s": value for part, value in seconds.items()}
    return row | {"idle_s": max(0.0, wall_s - sum(seconds.values()))}


def with_vllm(python: str, shape: str, names: Sequence[str], repeats: int) -> list[dict[str, Any]]:
    """vLLM on the works of a shape, in a process of its own, which has the whole GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    works = {name: {k: asdict(WORKS[name])[k] for k in ("requests", "new", "prompt")} for name in names}
    asked = {"shape": SHAPES[shape], "works": works, "repeats": repeats}
    script = Path(__file__).parent / "peers" / "vllm_rollout.py"
    done = subprocess.run(
        [python, str(script), json.dumps(asked)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout.splitlines()
    rows: list[dict[str, Any]] = json.loads(done[-1])
    return rows


def with_transformers(model: Decoder, work: Work) -> dict[str, Any]:
    """transformers' own generate on the same shape and work, with scores, as RL needs them."""
    import transformers

    arch = model.arch
    config = transformers.Qwen2Config(
        vocab_size=arch.vocab_size, hidden_size=arch.hidden_size, intermediate_size=arch.mlp_size, num_hidden_layers=arch.num_layers,
        num_attention_heads=arch.num_heads, num_key_value_heads=arch.num_kv_heads, tie_word_embeddings=arch.tied,
    )  # fmt: skip
    theirs: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda()
    prompt = torch.randint(0, arch.vocab_size, (work.requests, work.prompt), device="cuda")
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "pad_token_id": 0, "eos_token_id": None}
    theirs.generate(prompt[:8], max_new_tokens=4, **options)
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = theirs.generate(prompt, max_new_tokens=work.new, min_new_tokens=work.new, **options)
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - started
    tokens = work.requests * (out.shape[1] - work.prompt)
    return {
        "work": "R1",
        "system": f"transformers {transformers.__version__}",
        "tokens": tokens,
        "wall_s": wall_s,
        "tokens_per_s": tokens / wall_s,
    }


def sleep_and_wake(model: Decoder) -> dict[str, Any]:
    """Seconds to give the cache back and to take it again, and that the graphs still run afterwards."""
    engine = PagedEngine(model, max_rows=1024)
    work = Work("1.5B", 1024, 2048)
    engine.submit(requests_of(work, model.arch.vocab_size, "room"))
    engine.abort([f"room{i}" for i in range(work.requests)], keep=False)
    few = Work("1.5B", 64, 32)
    first = drain(engine, requests_of(few, model.arch.vocab_size, "few"))
    assert engine.runner.arena is not None
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.sleep()
        torch.cuda.synchronize()
        asleep = time.perf_counter()
        free = torch.cuda.mem_get_info()[0]
        woken = time.perf_counter()
        engine.wake()
        torch.cuda.synchronize()
        times.append((asleep - started, time.perf_counter() - woken, free))
    again = drain(engine, requests_of(few, model.arch.vocab_size, "few"))
    sleep_s, wake_s = (sorted(t[k] for t in times)[2] for k in (0, 1))
    row = {"work": "sleep and wake", "system": "burnish", "cache_gib": engine.runner.arena.size.value / 2**30}
    return row | {"sleep_s": sleep_s, "wake_s": wake_s, "before_s": first[1], "after_s": again[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKS, "sleep and wake", "first token"]
    parser.add_argument("--works", nargs="+", choices=names, default=names)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument(
        "--vllm-python", help="interpreter of an environment with vllm (default: this one, if it has it)"
    )
    parser.add_argument("--parts", action="store_true", help="also the time of every work by part")
    parser.add_argument(
        "--first-token", action="store_true", help="only the time from process start to the first token"
    )
    parser.add_argument(
        "--tail", help="only speculative decoding of few rows, with the weights of this model directory"
    )
    parser.add_argument("--prompts", type=Path, help="JSONL file with the questions of --tail")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16, 32])
    parser.add_argument("--drafts", nargs="+", type=int, default=[3, 7, 15])
    parser.add_argument("--new", type=int, default=1024)
    parser.add_argument("--temperature", type=float, default=1.0)
    args = parser.parse_args()
    if args.tail is not None:
        if args.prompts is None:
            parser.error("--tail needs --prompts")
        run_tail(args)
        return
    rows: list[dict[str, Any]] = []
    if args.first_token or "first token" in args.works:
        rows = starts()
        print(breakdown(rows), flush=True)
    if args.first_token:
        print(f"saved {save(on_this_gpu('first_token'), rows)}")
        return
    vllm = args.vllm_python or (sys.executable if importlib.util.find_spec("vllm") else None)
    for shape in SHAPES:
        names = [name for name in args.works if name in WORKS and WORKS[name].shape == shape]
        if names:
            rows += of_shape(shape, names, args)
        plain = [name for name in names if name in PLAIN]
        if vllm is not None and plain:
            rows += with_vllm(vllm, shape, plain, args.repeats)
    columns = ["work", "system", "tokens_per_s", "wall_s", "limit_share", "host_s", "first_run_s", "first_token_s"]
    print(table(rows, [*columns, "compile_s", "capture_s", "peak_gib"]))
    print(f"saved {save_beside(on_this_gpu('rollout'), rows, lambda row: (row['work'], row['system']))}")


def of_shape(shape: str, names: Sequence[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of all works of a shape; each is printed when it is there."""
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(table([row], list(row)), flush=True)

    model = random_model(shape)
    for name in names:
        torch.cuda.reset_peak_memory_stats()
        add(measure(name, WORKS[name], model, args.repeats))
        if args.parts:
            add(parts(name, WORKS[name], model))
    if "sleep and wake" in args.works and shape == "1.5B":
        add(sleep_and_wake(model))
    if args.transformers and "R1" in names:
        add(with_transformers(model, WORKS["R1"]))
    return rows


if __name__ == "__main__":
    main()
