"""Agents from nothing on a CPU: a decoder that learns to call a calculator, and one that learns to reverse strings.

python bench/agents_cpu.py [--runs calculator_toy reverse_text without_calculator openai_agents] [--seeds 0 1] [--threads 1]

`openai_agents` is an agent of that package with a calculator (examples/agents/openai_agents_tool.py), which calls the model over HTTP. It needs
`pip install openai-agents`. `without_calculator` is the control: the same decoder and student, without calls. `make agents` runs the first two with one seed. It prints held-out accuracy before and after RL, and saves bench/results/agents_cpu.json.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

from burnish.run.metrics import read_metrics

RECIPES = Path(__file__).parents[1] / "recipes"
AGENTS = Path(__file__).parents[1] / "examples" / "agents"
OPENAI_AGENTS = "openai_agents"
NO_TOOLS = ["environment.name=single_turn", "environment.max_turns=1", "environment.tools=[]", "environment.options={}"]
RUNS: dict[str, tuple[str, list[str]]] = {
    "calculator_toy": ("calculator_toy", []),
    "reverse_text": ("reverse_text", []),
    OPENAI_AGENTS: (str(AGENTS / "openai_agents_tool"), []),
    "without_calculator": (
        "calculator_toy",
        [*NO_TOOLS, "warm_start.data={task: calculator, options: {num: 4000, calls: 0.0}}"],
    ),
}
"""The recipe of each run, and its overrides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", default=["calculator_toy", "reverse_text"], choices=list(RUNS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--threads", type=int, default=None, help="CPU threads for arithmetic")
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/agents_cpu.json")
    args = parser.parse_args()
    rows = list[dict[str, Any]]()
    for name in args.runs:
        for seed in args.seeds:
            rows.append(learn(name, seed, args.threads))
            save("agents_cpu", rows, args.out)
    columns = ["run", "seed", "wall_s", "cpu_s", "greedy_before", "greedy_after", "sampled_before", "sampled_after"]
    print(table(rows, columns))
    for name in args.runs:
        mine = [row for row in rows if row["run"] == name]
        medians = [
            statistics.median(row[f"{mode}_{when}"] for row in mine)
            for mode in ("greedy", "sampled")
            for when in ("before", "after")
        ]
        print("{}: greedy {:.3f} -> {:.3f}, sampled {:.3f} -> {:.3f} (median)".format(name, *medians))
    print(f"saved {save('agents_cpu', rows, args.out)}")


def learn(name: str, seed: int, threads: int | None) -> dict[str, Any]:
    """One run of the command line, with its progress on the screen."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recipe, overrides = RUNS[name]
        command = ["train", str(RECIPES / f"{recipe}.yaml"), f"seed={seed}", f"run.directory={folder}", "run.name=run"]
        command += overrides
        if name == OPENAI_AGENTS:
            subprocess.run([sys.executable, str(AGENTS / "small_chat_model.py"), folder], check=True)
            command += [f"model.path={folder}/model", f"warm_start.data.path={folder}/lessons.jsonl"]
        command += [f"run.threads={threads}"] if threads is not None else []
        subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True)
        rows = read_metrics(Path(folder) / "run" / "metrics.jsonl")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"run": name, "seed": seed, "wall_s": time.perf_counter() - started, "cpu_s": cpu_s, **outcome(rows)}


def outcome(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Held-out accuracy before and after RL."""
    measured = [row for row in rows if "validation/greedy/accuracy" in row]
    return {
        f"{mode}_{when}": row[f"validation/{mode}/accuracy"]
        for mode in ("greedy", "sampled")
        for when, row in (("before", measured[0]), ("after", measured[-1]))
    }


if __name__ == "__main__":
    main()
