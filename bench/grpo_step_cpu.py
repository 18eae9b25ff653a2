"""One GRPO step on two CPU cores, compared with TRL's in the same run.

    python bench/grpo_step_cpu.py [--steps 12] [--repeats 3] [--trl-python /path/to/python]

A Qwen2-shaped decoder of 0.8 M parameters (hidden 128, 4 layers, 4/2 heads, mlp 384, vocabulary 128), 16 prompts of 13
tokens x 8 samples x exactly 64 new tokens, float32, two threads, one update a step. A step is everything that the trainer
does: drawing prompts, sampling, scoring in worker processes, advantages, forward, backward, AdamW, journal and metrics.
If TRL's interpreter is given, it runs the same model, prompts and reward (`bench/peers/trl_grpo_step.py`). The two systems
take turns, so that other load affects both; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import save, table

from burnish.config.schema import TrainConfig
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import save_decoder
from burnish.run import metrics
from burnish.trainers import rl
from burnish.trainers.assembly import build_context
from burnish.trainers.rl_run import checked_run

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 13, 64
ALPHABET = "".join(chr(c) for c in range(0x4E00, 0x4E00 + 126))  # one token each; with pad and eos, 128
PLUGINS = """
import json
from pathlib import Path

def rows():
    prompts = json.loads(Path(__file__).with_name("prompts.json").read_text())
    return [{"prompt": p} for p in prompts]

def reward(prompts, completions, **columns):
    return [float(sum(map(ord, c)) % 2) for c in completions]
"""


def make_model(directory: Path) -> None:
    """The toy as a Hugging Face directory, with its prompts and plug-ins beside it."""
    tokenizer = Tokenizer.from_characters(ALPHABET)
    arch = Architecture("qwen2", tokenizer.vocab_size, 128, 4, 4, 2, 32, 384, 128, qkv_bias=True, tied=True)
    model = Decoder(arch)
    initialise(model, seed=0)
    save_decoder(model, directory, None, tokenizer.eos_ids, tokenizer.pad_id)
    tokenizer.save(directory)
    prompts = ["".join(ALPHABET[(7 * i + 5 * k + i * k) % 126] for k in range(PROMPT_TOKENS)) for i in range(PROMPTS)]
    (directory / "prompts.json").write_text(json.dumps(prompts))
    (directory / "plugins.py").write_text(PLUGINS)


def config_for(directory: Path, steps: int) -> TrainConfig:
    """The run of this benchmark."""
    plugins = directory / "plugins.py"
    return TrainConfig.model_validate(
        {
            "run": {
                "directory": str(directory / "runs"),
                "name": "bench",
                "save_every": 1000,
                "samples_every": 1000,
                "threads": 2,
            },
            "model": {"path": str(directory)},
            "data": {
                "train": {"plugin": f"{plugins}:rows"},
                "max_prompt_tokens": PROMPT_TOKENS,
                "template": {"kind": "plain"},
            },
            "reward": {"parts": f"{plugins}:reward"},
            "rollout": {"prompts": PROMPTS, "n": SAMPLES, "max_tokens": NEW_TOKENS, "max_rows": PROMPTS * SAMPLES},
            "training": {"steps": steps, "token_budget": 4096, "optimizer": {"lr": 1e-6}},
        }
    )


def burnish_steps(directory: Path, steps: int) -> list[dict[str, float]]:
    """Metrics of `steps` steps; the first is a warm-up and is left out."""
    config = config_for(directory, steps)
    with tempfile.TemporaryDirectory() as folder:
        config = config.model_copy(update={"run": config.run.model_copy(update={"directory": folder})})
        with checked_run(config, {}, directory, "bench") as (parts, run):
            run.display._stream = None
            job = build_context(parts, run)
            job.policy.tokenizer.eos_ids = ()  # nothing stops a completion early: each has all its tokens, as TRL's have
            rl.train(job)
            return metrics.read_metrics(run.directory.metrics)[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trl-python", help="interpreter of an environment with trl")
    args = parser.parse_args()
    ours: list[dict[str, float]] = []
    peer: dict[str, list[float]] = {"steps_s": [], "generate_s": [], "memory_gib": []}
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        make_model(directory)
        for _ in range(args.repeats):
            ours += burnish_steps(directory, args.steps)
            if args.trl_python:
                script = Path(__file__).parent / "peers" / "trl_grpo_step.py"
                command = [args.trl_python, str(script), str(directory), str(args.steps)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"TRL failed:\n{done.stderr[-3000:]}")
                result = json.loads(done.stdout.strip().splitlines()[-1])
                version = result["version"]
                peer["steps_s"] += result["steps_s"][1:]
                peer["generate_s"] += result["generate_s"][1:]
                peer["memory_gib"].append(result["memory_gib"])
    tokens = PROMPTS * SAMPLES * NEW_TOKENS
    step_s, rollout_s = (statistics.median(row[f"time/{k}_s"] for row in ours) for k in ("step", "rollout"))
    rows = [
        {
            "work": "grpo_step_cpu", "system": "burnish", "step_s": step_s, "generate_s": rollout_s,
            "learn_s": statistics.median(r["time/step_s"] - r["time/rollout_s"] - r["time/reward_s"] for r in ours),
            "generate_tokens_per_s": tokens / rollout_s, "steps": len(ours),
            "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "mismatch_mean": max(r["mismatch/mean"] for r in ours), "mismatch_max": max(r["mismatch/max"] for r in ours),
        }
    ]  # fmt: skip
    if peer["steps_s"]:
        generate_s = statistics.median(peer["generate_s"])
        trl_s = statistics.median(peer["steps_s"])
        rows.append(
            {
                "work": "grpo_step_cpu", "system": f"TRL {version}", "step_s": trl_s, "generate_s": generate_s,
                "learn_s": trl_s - generate_s, "generate_tokens_per_s": tokens / generate_s, "steps": len(peer["steps_s"]),
                "memory_gib": max(peer["memory_gib"]),
            }
        )  # fmt: skip
        rows[0]["share_of_peer"] = step_s / trl_s
    print(
        table(
            rows, ["system", "step_s", "generate_s", "learn_s", "generate_tokens_per_s", "memory_gib", "share_of_peer"]
        )
    )
    print(f"saved {save('grpo_step_cpu', rows)}")


if __name__ == "__main__":
    main()
