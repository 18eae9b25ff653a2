"""Tokens per second of two CPU engines of one thread, compared with one engine and with the engine in this process.

    python bench/controller_cpu.py [--rounds 7] [--tokens 48]

The model of the default job in float32, 64 prompts with 8 samples each. The three take turns, so that other load on the
machine affects all equally; the table has the median of the rounds. `machine_load` is the number of other running
processes at the start. With more work than cores the second engine has no core to itself, and the ratio means little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from common import save, table

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.engine import Engine, Request, SamplingOptions
from burnish.distributed import engine_builder, roles
from burnish.distributed.ray_cluster import Cluster
from burnish.distributed.ray_roles import start_roles
from burnish.inference.remote_engine import RemoteEngine

PROMPTS, N = 64, 8
OPTIONS = [
    "model.new={family: llama, hidden_size: 128, num_layers: 2, num_heads: 4, mlp_size: 336, max_positions: 128}",
    "model.device=cpu",
    "data.train={task: sort_digits}",
    "rollout.max_rows=512",
    "placement=ray",
    "placement.engines=2",
]


def rate(engine: Engine, tokens: int, number: int) -> float:
    """Tokens a second of one generation."""
    options = SamplingOptions(max_tokens=tokens)  # no stop token: all are equally long
    asked = [
        Request(f"{number}/{k}.{s}", (1 + k % 9, 2, 3, 4), options, key=k * N + s)
        for k in range(PROMPTS)
        for s in range(N)
    ]
    started = time.perf_counter()
    engine.submit(asked)
    drawn = sum(len(completion.tokens) for completion in engine.stream())
    return drawn / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = load(TrainConfig, None, OPTIONS).config
    policy = roles.build_policy(config.model, config.data.train, config.seed, None)
    here = engine_builder.build_engine(
        roles.build_policy(config.model, config.data.train, config.seed, None), config.rollout
    )
    load_before = os.getloadavg()[0]
    found: dict[str, list[float]] = {"in this process": [], "one engine": [], "two engines": []}
    with TemporaryDirectory() as folder, Cluster(config.placement, False) as cluster:
        engine = start_roles(config, None, policy, None, cluster, Path(folder), print).engine
        assert isinstance(engine, RemoteEngine)
        engine.load(0, ())
        for number in range(args.rounds + 1):
            rates = {"in this process": rate(here, args.tokens, number)}
            engine.engines[1].has_weights = False  # so that nothing is dealt to it
            rates["one engine"] = rate(engine, args.tokens, number)
            engine.engines[1].has_weights = True
            rates["two engines"] = rate(engine, args.tokens, number)
            for name, value in rates.items() if number else ():  # the first round warms up
                found[name].append(value)
    one = statistics.median(found["one engine"])
    rows = [
        {
            "engine": name,
            "tokens_per_s": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "of_one": statistics.median(rates) / one,
            "machine_load": load_before,
        }
        for name, rates in found.items()
    ]
    print(table(rows, list(rows[0])))
    save("controller_cpu", rows)


if __name__ == "__main__":
    main()
