"""Rollouts with slow tools: 1,024 episodes of four turns of 256 new tokens on 256 rows, with tools that take 0 s and 1 s.

python bench/tool_rollouts.py [--episodes 1024] [--turns 4] [--new 256] [--rows 256] [--tool-s 0 1] [--where loop worker] [--repeats 3]
python bench/tool_rollouts.py --open 10000        # host memory and time of episodes that are all open at once

Random weights: Qwen2.5's 1.5B shape in bfloat16 on a GPU, a decoder of 0.1 M parameters on a CPU. Prompts of 128 random characters, no stop
token. No tool follows the last turn. `loop` waits in the event loop of the runner, `worker` sleeps in plain Python in worker processes.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import string
import time
from pathlib import Path
from typing import Any

import torch
from common import save, table
from slow_tool import SlowTool

from burnish.config.data import Template
from burnish.core.engine import Engine, SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.host import EnvironmentHost, EnvironmentKind
from burnish.environments.workers import ObjectSpec, ObjectWorkers
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner

ALPHABET = string.ascii_letters + string.digits + " .,?\n"


def kind_of(where: str, tool_s: float, turns: int) -> EnvironmentKind:
    if where == "loop":
        return EnvironmentKind("slow", "loop", make=lambda: SlowTool(tool_s, turns), takes_truncated=True)
    spec = ObjectSpec(
        f"{Path(__file__).with_name('slow_tool.py')}:BlockingTool", {"tool_s": tool_s, "turns": turns}, None
    )
    return EnvironmentKind("slow", "worker", spec=spec, takes_truncated=True)


def make_engine(rows: int, contexts: int, tokenizer: Tokenizer) -> Engine:
    if torch.cuda.is_available():
        from rollout import random_model

        engine = PagedEngine(random_model("1.5B"), rows, tokenizer.decode)
        engine.num_contexts = contexts
        return engine
    arch = Architecture(
        family="qwen2", hidden_size=64, mlp_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
        vocab_size=tokenizer.vocab_size, tied=True, max_positions=8192, rope_theta=1e4, qkv_bias=True,
    )  # fmt: skip
    torch.manual_seed(0)
    return DenseEngine(Decoder(arch), rows, tokenizer.decode)


def make_draws(count: int, tokenizer: Tokenizer) -> list[PromptSample]:
    dice = random.Random(0)
    draws = []
    for index in range(count):
        text = "".join(dice.choices(ALPHABET, k=128))
        row = Row(f"bench/{index}", text, "bench", None)
        draws.append(PromptSample(Prompt(row, text, tokenizer.encode(text)), 0))
    return draws


def play(
    engine: Engine, tokenizer: Tokenizer, where: str, tool_s: float, args: argparse.Namespace, tag: int
) -> dict[str, Any]:
    host = EnvironmentHost(kind_of(where, tool_s, args.turns), lambda: ObjectWorkers(num_workers=args.workers))
    renderer = ChatRenderer(tokenizer, Template(kind="plain"))
    runner = RolloutRunner(engine, None, tokenizer, tag, args.turns, host=host, renderer=renderer)  # type: ignore[arg-type]
    sampling = SamplingOptions(max_tokens=args.new)
    draws = make_draws(args.episodes, tokenizer)
    started = time.perf_counter()
    tokens = episodes = 0
    for trajectory in runner.run(draws, 1, sampling, "train"):
        assert trajectory.error is None, trajectory.error
        tokens, episodes = tokens + trajectory.num_actions, episodes + 1
    wall_s = time.perf_counter() - started
    runner.close()
    return {"work": f"{where}, tools of {tool_s:g} s", "system": "burnish", "tokens_per_s": tokens / wall_s, "wall_s": wall_s, "episodes": episodes}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1024)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tool-s", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--where", nargs="+", default=["loop", "worker"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--open", type=int, help="open so many episodes at once instead, and report the memory")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_characters(ALPHABET)
    if args.open:
        args.episodes, args.turns, args.new, args.repeats = args.open, 2, 16, 1
    engine = make_engine(args.rows, args.episodes, tokenizer)
    play(engine, tokenizer, "loop", 0.0, argparse.Namespace(**(vars(args) | {"episodes": args.rows})), 1)  # warm-up
    rows = []
    for where in args.where:
        found: dict[float, list[dict[str, Any]]] = {tool_s: [] for tool_s in args.tool_s}
        for repeat in range(args.repeats):
            for tool_s in args.tool_s:  # in turn, so that a busy machine disturbs all alike
                found[tool_s].append(play(engine, tokenizer, where, tool_s, args, repeat))
        base = statistics.median(one["tokens_per_s"] for one in found[args.tool_s[0]])
        for results in found.values():
            median = sorted(results, key=lambda one: one["wall_s"])[len(results) // 2]
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            rows.append(median | {"share": median["tokens_per_s"] / base, "host_gib": memory, "repeats": args.repeats})
    machine = "-h200" if torch.cuda.is_available() else ""
    name = f"open_episodes{machine}" if args.open else f"tool_rollouts{machine}"
    print(table(rows, ["work", "tokens_per_s", "wall_s", "share", "host_gib"]))
    print(f"saved {save(name, rows)}")


if __name__ == "__main__":
    main()
