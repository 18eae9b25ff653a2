"""Unmodified recipes of tinker-cookbook against `burnish tinker`: their own metrics, step by step.

python bench/tinker_recipes.py MODEL --client PYTHON [--recipes sl_loop rl_loop] [--gsm8k FILE] [--largest 30] [--sl-steps 6] [--rl-steps 14] [--name NAME]

MODEL is a ChatML model, such as SmolLM2-135M-Instruct. PYTHON is an interpreter with tinker and tinker-cookbook (`make test-tinker` makes
`.venv-tinker/bin/python`). The recipes ask for a tokenizer and for data sets by their names on the hub. They are run in a folder that is laid
out like the hub, so that the libraries find local files under these names:

    Qwen/Qwen3-4B-Instruct-2507     the model's tokenizer, under a name whose renderer writes ChatML
    openai/gsm8k                    sums of two numbers up to `--largest` in GSM8K's form, or the rows of `--gsm8k` (a jsonl file of GSM8K itself)
    HuggingFaceH4/no_robots         the same questions as dialogues, with answers in \\boxed{}

The RL recipe goes on from the weights that the supervised one saved: its log folder begins with a record of that checkpoint, from which the
recipe resumes at batch 0. The recipes' files are those of the package; the script prints a checksum of each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import save, table

NAME = "Qwen/Qwen3-4B-Instruct-2507"
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
SHOWN = {"sl_loop": ("train_mean_nll", "num_tokens", "time_total"), "rl_loop": ("reward/total", "time/total")}


def make_hub(folder: Path, model: Path, gsm8k: Path | None, largest: int, seed: int) -> None:
    """Write tokenizer and data sets below their names on the hub."""
    tokenizer = folder / NAME
    tokenizer.mkdir(parents=True)
    for file in model.iterdir():
        if file.suffix in (".json", ".txt", ".jinja") and "safetensors" not in file.name:
            shutil.copy(file, tokenizer)
    rng = random.Random(seed)
    if gsm8k is not None:
        rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
    else:
        pairs = [(rng.randint(1, largest), rng.randint(1, largest)) for _ in range(2000)]
        rows = [{"question": f"What is {a} + {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in pairs]
    write(folder / "openai/gsm8k", rows, "main")
    write(folder / "HuggingFaceH4/no_robots", [{"messages": dialogue(row)} for row in rows], "default")


def dialogue(row: dict[str, str]) -> list[dict[str, str]]:
    """A row of GSM8K as a dialogue."""
    text, _, answer = row["answer"].rpartition("\n#### ")
    return [
        {"role": "user", "content": row["question"] + SUFFIX},
        {"role": "assistant", "content": f"{text}. The answer is \\boxed{{{answer}}}."},
    ]


def write(folder: Path, rows: list[dict[str, Any]], config: str) -> None:
    (folder / "data").mkdir(parents=True)
    (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files: data/train.jsonl\n---\n")


def begin_from(before: Path, after: Path) -> None:
    """Make a recipe begin with the last checkpoint of another one, at its first batch."""
    last = json.loads((before / "checkpoints.jsonl").read_text().splitlines()[-1])
    after.mkdir()
    (after / "checkpoints.jsonl").write_text(json.dumps(last | {"name": "start", "batch": 0}) + "\n")


def run_recipe(client: str, hub: Path, url: str, recipe: str, words: list[str]) -> dict[str, Any]:
    """Run a recipe in the hub's folder; its metrics."""
    environment = os.environ | {
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": "tml-bench",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(hub / "hf"),
    }
    where = "import importlib.util as u; print(u.find_spec('tinker_cookbook.recipes." + recipe + "').origin)"
    source = Path(subprocess.run([client, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
    command = [client, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={NAME}", f"log_path={recipe}", *words]
    started = time.perf_counter()
    subprocess.run(command, cwd=hub, env=environment, check=True)
    lines = (hub / recipe / "metrics.jsonl").read_text().splitlines()
    return {
        "recipe": recipe,
        "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        "options": words,
        "wall_s": time.perf_counter() - started,
        "steps": [json.loads(line) for line in lines],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--client", required=True)
    parser.add_argument("--recipes", nargs="+", default=["sl_loop", "rl_loop"], choices=SHOWN)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--largest", type=int, default=30)
    parser.add_argument("--sl-steps", type=int, default=6)
    parser.add_argument("--rl-steps", type=int, default=14)
    parser.add_argument("--sl", nargs="*", default=["batch_size=16", "learning_rate=0.0003", "lora_rank=16"])
    parser.add_argument(
        "--rl",
        nargs="*",
        default=["batch_size=6", "group_size=6", "learning_rate=0.0002", "lora_rank=16", "max_tokens=32"],
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="tinker_recipes")
    args = parser.parse_args()
    args.client = os.path.abspath(
        args.client
    )  # the recipes run in another folder; a link must stay one, or it leaves its environment
    with tempfile.TemporaryDirectory() as folder:
        hub = Path(folder)
        make_hub(hub, args.model, args.gsm8k, args.largest, args.seed)
        command = [sys.executable, "-m", "burnish.cli.main", "tinker", str(args.model), "--name", NAME, "--port", "0"]
        server = subprocess.Popen([*command, "--checkpoints", str(hub / "saved")], stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        log = []
        try:
            while not (found := re.search(r"TINKER_BASE_URL=(\S+)", log[-1] if log else "")):
                log.append(server.stderr.readline())
                assert log[-1], "the server has ended"
            options = {
                "sl_loop": [*args.sl, f"max_steps={args.sl_steps}"],
                "rl_loop": [*args.rl, f"max_steps={args.rl_steps}"],
            }
            with (hub / "server.log").open("w") as file:
                copying = subprocess.Popen(["cat"], stdin=server.stderr, stdout=file)
                rows = []
                for recipe in args.recipes:
                    if recipe == "rl_loop" and "sl_loop" in args.recipes:
                        begin_from(hub / "sl_loop", hub / "rl_loop")
                    rows.append(run_recipe(args.client, hub, found[1], recipe, options[recipe]))
                server.send_signal(signal.SIGINT)
                assert server.wait(60) == 0
                copying.wait(60)
            print((hub / "server.log").read_text()[-2000:])
        finally:
            server.kill()
            server.wait()
    packages = subprocess.run(
        [args.client, "-m", "pip", "list", "--format", "json"], capture_output=True, text=True, check=True
    ).stdout
    versions = {row["name"]: row["version"] for row in json.loads(packages) if row["name"].startswith("tinker")}
    for row in rows:
        row |= {"model": args.model.name, "packages": versions, "seed": args.seed}
        row["data"] = "GSM8K" if args.gsm8k is not None else f"sums of two numbers from 1 to {args.largest}"
        print(f"\n{row['recipe']}  {row['sha256'][:12]}  {' '.join(row['options'])}")
        print(table(row["steps"], ["step", *SHOWN[row["recipe"]]]))
    print(save(args.name, rows))


if __name__ == "__main__":
    main()
