"""DPO compared with TRL's DPOTrainer: the same model, pairs and settings; the loss and the time of every step.

    python bench/dpo_vs_trl.py --trl-python /path/to/python [--steps 10] [--repeats 2] [--threads 2]

A Qwen2-shaped decoder of 0.8 M parameters in float32; 16 pairs a step with prompts of 24 to 64 tokens and answers of 16 to
64; AdamW at 1e-3, so that the loss falls far below log 2 within ten steps. Both take the pairs in the order of this run's
seed. There are two comparisons: the reference's log-probs are computed before training, or in every step. The two systems
take turns, so that other load affects both. Medians without the first step are compared. The benchmark fails if losses
differ by more than 1e-4.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save, table
from grpo_step_cpu import ALPHABET, make_model

from burnish.config.loading import to_plain_values
from burnish.config.schema import PreferConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.preference import answer_pair_order, execute

PAIRS, LR, BETA, CLOSE = 16, 1e-3, 0.1, 1e-4
MODES = {"cached": "reference log-probs computed before training", "live": "reference asked in every step"}


def make_rows(steps: int) -> list[dict[str, str]]:
    """Pairs of random letters in which the chosen answer goes up the alphabet more often than the rejected one."""
    draw = random.Random(0)

    def text(low: int, high: int) -> str:
        return "".join(draw.choice(ALPHABET) for _ in range(draw.randint(low, high)))

    rows = []
    for _ in range(steps * PAIRS):
        prompt, answer = text(24, 64), text(16, 64)
        rows.append({"prompt": prompt, "chosen": "".join(sorted(answer)), "rejected": text(16, 64)})
    return rows


def config_for(directory: Path, steps: int, mode: str, threads: int) -> PreferConfig:
    """The run of this benchmark."""
    return PreferConfig.model_validate(
        {
            "run": {"directory": str(directory / "runs"), "name": mode, "save_every": 1000, "threads": threads},
            "model": {"path": str(directory), "device": "cpu"},
            "template": {"kind": "plain"},
            "preference": {
                "loss": {"name": "dpo", "beta": BETA},
                "data": {"path": str(directory / "pairs.jsonl")},
                "reference": mode,
                "updates": steps,
                "batch_size": PAIRS,
                "optimizer": {"lr": LR},
            },
        }
    )


def burnish_steps(directory: Path, steps: int, mode: str, threads: int) -> dict[str, list[float]]:
    """Losses and seconds of each step."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_for(directory, steps, mode, threads)
        config = config.model_copy(update={"run": config.run.model_copy(update={"directory": folder})})
        outcome = execute(config, to_plain_values(config), directory, "bench")
        assert outcome is not None
        rows = read_metrics(outcome.directory / "metrics.jsonl")
    return {"losses": [r["preference/loss"] for r in rows], "steps_s": [r["time/step_s"] for r in rows]}


def trl_steps(python: str, directory: Path, steps: int, mode: str, threads: int) -> dict[str, Any]:
    """The same of TRL, in a process of its own."""
    asked = {"directory": str(directory), "steps": steps, "pairs": PAIRS, "lr": LR, "beta": BETA, "mode": mode}
    script = Path(__file__).parent / "peers" / "trl_dpo.py"
    command = [python, str(script), json.dumps(asked | {"threads": threads})]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(directory: Path, args: argparse.Namespace, mode: str) -> list[dict[str, Any]]:
    """A row of each system."""
    ours: dict[str, list[float]] = {"losses": [], "steps_s": []}
    theirs: dict[str, list[float]] = {"losses": [], "steps_s": []}
    version = ""
    for _ in range(args.repeats):
        mine = burnish_steps(directory, args.steps, mode, args.threads)
        peer = trl_steps(args.trl_python, directory, args.steps, mode, args.threads)
        version = peer["version"]
        for table_of, found in ((ours, mine), (theirs, peer)):
            table_of["losses"] += found["losses"]
            table_of["steps_s"] += found["steps_s"][1:]
    apart = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"], strict=True))
    for step, (a, b) in enumerate(zip(ours["losses"][: args.steps], theirs["losses"][: args.steps], strict=True), 1):
        print(f"{mode} step {step}: burnish {a:.6f}, TRL {b:.6f}, apart {abs(a - b):.1e}")
    step_s, trl_s = statistics.median(ours["steps_s"]), statistics.median(theirs["steps_s"])
    shared = {"work": MODES[mode], "steps": args.steps}
    last = args.steps - 1
    return [
        {**shared, "system": "burnish", "step_s": step_s, "share_of_peer": step_s / trl_s, "loss_apart": apart}
        | {"first_loss": ours["losses"][0], "last_loss": ours["losses"][last]},
        {**shared, "system": f"TRL {version}", "step_s": trl_s}
        | {"first_loss": theirs["losses"][0], "last_loss": theirs["losses"][last]},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter of an environment with trl")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(directory)
        rows = make_rows(args.steps)
        (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = config_for(directory, args.steps, "cached", args.threads)
        order = answer_pair_order(len(rows), config.preference, config.seed)
        (directory / "in_order.jsonl").write_text("".join(json.dumps(rows[i]) + "\n" for i in order))
        results = [row for mode in MODES for row in compare(directory, args, mode)]
    print(table(results, ["work", "system", "step_s", "share_of_peer", "first_loss", "last_loss", "loss_apart"]))
    print(f"saved {save('dpo_vs_trl', results)}")
    if (worst := max(row.get("loss_apart", 0.0) for row in results)) > CLOSE:
        sys.exit(f"the losses are up to {worst:.1e} apart, more than {CLOSE:.0e}")


if __name__ == "__main__":
    main()
