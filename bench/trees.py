"""SPO-chain and SPO-tree compared with GRPO: held-out accuracy over sampled tokens, from the same warm start.

Every system samples about the same number of tokens per step. Systems that sample for values or branches have fewer prompts.

python bench/trees.py [--systems grpo spo_chain ...] [--steps 30] [--seeds 0 1 2]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import save, table

from burnish.run.metrics import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "sort_digits.yaml"
KEY = "validation/greedy/accuracy"
LIMIT, EVERY = 400, 5
CHAIN = "algorithm.advantage={name: spo_chain, every: 1, rollouts: 2}"
TREE = "algorithm.advantage={name: spo_tree, branches: [2, 2], segment: 2}"
# Answers have 5 to 8 tokens: a cut before every unsure one, and edges of two tokens, are to them what the paper's 5 and 30 are to
# its own. A tree has up to 28 edges, so 32 of them are all.
SYSTEMS: dict[str, list[str]] = {
    "grpo": [
        "algorithm=grpo",
        "algorithm.aggregation=token-mean",
        "algorithm.kl={loss: {coef: 0}, reference: none}",
        "rollout.prompts=32",
        "rollout.n=8",
    ],
    "spo_chain": ["algorithm=spo_chain", CHAIN, "rollout.prompts=36", "rollout.n=4"],
    "spo_tree": ["algorithm=spo_tree", TREE, "rollout.prompts=24", "rollout.n=4", "algorithm.replay=null"],
    "spo_tree, replayed": [
        "algorithm=spo_tree",
        TREE,
        "rollout.prompts=24",
        "rollout.n=4",
        "algorithm.filters=[prob_mask, {name: tree_edges, most: 16}]",
        "algorithm.replay={share: 1.0, uses: 2, max_age: 1}",
    ],
}
LONGER = {"spo_chain": 1.5, "spo_tree": 1.2, "spo_tree, replayed": 1.2}
"""Steps as a multiple of GRPO's, to sample as many tokens: a policy that grows sure of itself has fewer borders, and shorter branches."""
COLUMNS = ["system", "seed", "tokens", "before", "after", "best", "tokens_to_grpo", "tokens_to_090"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--steps", type=int, default=30, help="of GRPO, whose tokens are the budget of all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="where the rows go instead of bench/results/trees.json")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as folder:
            base = learn("grpo", seed, args.steps, Path(folder), [])
            start = ["warm_start=null", "model.new=null", f"model.path={folder}/grpo/warm_start"]
            others = [name for name in args.systems if name != "grpo"]
            found = [base, *(learn(n, seed, round(args.steps * LONGER[n]), Path(folder), start) for n in others)]
        rows += [judged(row, base) for row in found]
        print(table(rows[-len(found) :], COLUMNS), flush=True)
        print(f"saved {save('trees', rows, args.out)}", flush=True)


def learn(name: str, seed: int, steps: int, folder: Path, start: list[str]) -> dict[str, Any]:
    """One run of the command line, and its curve as [sampled tokens, accuracy] pairs."""
    plain = name.replace(", ", "_").replace(" ", "_")
    command = [
        "train",
        str(RECIPE),
        *SYSTEMS[name],
        f"seed={seed}",
        f"training.steps={steps}",
        "training.mini_batches=2",
    ]
    command += [
        f"validation.every={EVERY}",
        f"validation.limit={LIMIT}",
        f"run.directory={folder}",
        f"run.name={plain}",
    ]
    command += ["validation.modes={greedy: {temperature: 0}}", "run.threads=1", "run.keep_best=false", *start]
    subprocess.run([sys.executable, "-m", "burnish.cli.main", *command], check=True, stdout=subprocess.DEVNULL)
    tokens, curve = 0.0, list[list[float]]()
    for row in read_metrics(folder / plain / "metrics.jsonl"):
        tokens += row.get("rollout/tokens", 0.0)
        if KEY in row:
            curve.append([tokens, row[KEY]])
    return {"system": name, "seed": seed, "curve": curve}


def judged(row: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """A run within the tokens of GRPO's: where it ended, and when it came to where GRPO ended, and to 0.9."""
    budget, target = base["curve"][-1]
    curve = [point for point in row["curve"] if point[0] <= budget * 1.02]

    def tokens_to(wanted: float) -> float | None:
        return next((tokens for tokens, accuracy in curve if accuracy >= wanted), None)

    accuracies = [accuracy for _, accuracy in curve]
    ends = {"tokens": curve[-1][0], "before": accuracies[0], "after": accuracies[-1], "best": max(accuracies)}
    return {**row, **ends, "tokens_to_grpo": tokens_to(target), "tokens_to_090": tokens_to(0.9)}


if __name__ == "__main__":
    main()
