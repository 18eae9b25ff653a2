"""Seconds per step with a slow reward, with and without the work that a step does while it waits.

    python bench/slow_rewards.py [--steps 8] [--reward-s 0.02]

A small new model, GRPO with a reference and two mini-batches, a validation after every step, one reward worker that takes `--reward-s`
for each answer. The two ways take turns. `usual place` is what burnish does with rewards that are not slow: the passes of the preparation
come after the rewards, and the validation before the next step. Medians over the steps without the first two and the last.
"""

from __future__ import annotations

import argparse
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from common import save, table

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.rewards.scoring import Rewards
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import checked_run, execute

REWARD = """
import time

def slow(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    return float(len(solution_str) % 3)
"""
OPTIONS = [
    "model={device: cpu, new: {family: llama, hidden_size: 192, num_layers: 4, num_heads: 4, mlp_size: 512, max_positions: 160}}",
    "data={train: {task: sort_digits}, validation: {task: sort_digits}}",
    "rollout={prompts: 8, n: 8, max_tokens: 48}",
    "algorithm.kl={loss: {coef: 0.01}, reference: frozen}",
    "training={mini_batches: 2, optimizer: {lr: 1.0e-4}}",
    "validation={every: 1, limit: 64}",
    "run={samples_every: 1000, save_every: 1000, keep_best: false}",
]
WAYS = ("usual place", "while scoring")


def seconds_of(folder: Path, way: str, number: int, overrides: list[str]) -> list[dict[str, float]]:
    """Of each step: the seconds from its line to the line of the step before, and its parts."""
    name = f"{way.replace(' ', '-')}-{number}"
    loaded = load(TrainConfig, None, [*OPTIONS, *overrides, f"run.directory={folder}", f"run.name={name}"])
    # No option makes a run wait for slow rewards, so the bench replaces the property that decides.
    known = Rewards.may_be_slow
    if way == "usual place":
        Rewards.may_be_slow = property(lambda self: False)  # type: ignore[method-assign, assignment]
    try:
        with checked_run(loaded.config, loaded.resolved, folder, name) as (parts, run):
            assert execute(parts, run)
    finally:
        Rewards.may_be_slow = known  # type: ignore[method-assign]
    rows = read_metrics(folder / name / "metrics.jsonl")
    pairs = list(zip(rows, rows[1:], strict=False))[2:-1]
    return [{**after, "wall_s": after["time/elapsed_s"] - before["time/elapsed_s"]} for before, after in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--reward-s", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    load_before = os.getloadavg()[0]
    with TemporaryDirectory() as root:
        folder = Path(root)
        (folder / "slow.py").write_text(REWARD.replace("{seconds}", str(args.reward_s)))
        reward = f"reward={{workers: 1, parts: [{{name: '{folder / 'slow.py'}:slow'}}]}}"
        for number in range(args.rounds):
            for way in WAYS:
                found[way] += seconds_of(folder, way, number, [reward, f"training.steps={args.steps}"])
    rows = []
    for way in WAYS:
        middle = {name: statistics.median(row.get(name, 0.0) for row in found[way]) for name in found[way][0]}
        rows.append(
            {
                "work": way,
                "system": "burnish",
                "wall_s": middle["wall_s"],
                "rollout_s": middle["time/rollout_s"],
                "reward_wait_s": middle["time/reward_s"],
                "while_scoring_s": middle.get("time/while_scoring_s", 0.0),
                "learn_s": middle["time/learn_s"],
                "one_reward_s": args.reward_s,
                "steps": len(found[way]),
                "machine_load": load_before,
            }
        )
    print(table(rows, list(rows[0])))
    print("saved", save("slow_rewards", rows).name)


if __name__ == "__main__":
    main()
