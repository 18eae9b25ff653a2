"""The rows of `bench/gpu_everything.py`: each runs one command of burnish for real and returns a number that shows that it worked.

A row is a function of a `Job`. It returns what to show, raises `NotHere` where this machine lacks something, and `Failed` where the
command ended badly or its result is wrong. Rows that need the outputs of others name them in `NEEDS`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from everything_job import (
    Failed,
    Job,
    NotHere,
    command,
    environment,
    free_port,
    largest_difference,
    last_line,
    remove,
    same,
    server,
    trained,
    weights,
)
from safetensors.torch import load_file

from burnish.config.model import NewModel
from burnish.run.metrics import read_metrics

MOST_NOISE = 0.1
"""Accuracy on the few held-out problems that a row asks may fall by so much without meaning that a run unlearns."""
KILL_AFTER = 4
"""The run that is killed has this many lines of metrics: the validation before it, and the steps that it has committed."""


def accuracy_change(metrics: list[dict[str, Any]]) -> str:
    """Held-out accuracy before and after, and the number of updates. The accuracy must not have fallen."""
    found = [row["validation/greedy/accuracy"] for row in metrics if "validation/greedy/accuracy" in row]
    updates = sum("actor/loss" in row for row in metrics)
    if not updates:
        raise Failed("no step made an update")
    if found[-1] < found[0] - MOST_NOISE:
        raise Failed(f"held-out accuracy has fallen: {found[0]:.3f} -> {found[-1]:.3f}")
    return f"accuracy {found[0]:.3f} -> {found[-1]:.3f}, {updates} updates"


def rl_shown(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """What a row of RL shows: accuracy, seconds of a step after the first, and the gap between engine and learner."""
    times = [row["time/step_s"] for row in metrics if row["step"] > 1]
    gap = max((row.get("mismatch/max", 0.0) for row in metrics), default=0.0)
    shown = f"{accuracy_change(metrics)}, largest log-prob gap {gap:.1e}"
    return {"shown": shown, "step_s": statistics.median(times) if times else None}


# --- training on fixed data ------------------------------------------------------------------------------------------------------


def sft(job: Job) -> dict[str, Any]:
    size = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "mlp_size": 672} if not job.is_tiny else {}
    model = {"new": {"max_positions": 64, **size}} if job.model is None else {"path": str(job.model)}
    rate = 3e-3 if job.is_tiny else 1e-3 if job.model is None else 1e-5
    metrics = job.offline("sft", {
        "data": {"task": "sort_digits", "options": {"num": 2000}}, "updates": job.number(60, 200 if job.model is None else 40),
        "batch_size": 128, "max_tokens": sum(job.lengths) + 6, "optimizer": {"lr": rate, "warmup": 5},
    }, model, "sft")  # fmt: skip
    return {"shown": falling(metrics, "sft/loss")}


def prefer(job: Job) -> dict[str, Any]:
    pairs = {"task": "sort_digits", "options": {"num": 1000}}
    metrics = job.offline("prefer", {
        "loss": "dpo", "data": pairs, "held_out": {"task": "sort_digits", "options": {"num": 100}}, "held_out_every": 10,
        "updates": 20, "batch_size": 32, "max_tokens": sum(job.lengths) + 6, "optimizer": {"lr": 3e-4 if job.model is None else 1e-6},
    }, {"path": str(trained(job, "sft"))}, "prefer")  # fmt: skip
    return {"shown": f"{falling(metrics, 'preference/loss')}, held-out pairs {metrics[-1]['validation/pairs/accuracy']:.2f} right"}  # fmt: skip


def reward_model(job: Job) -> dict[str, Any]:
    pairs = {"task": "sort_digits", "options": {"num": 1000}}
    metrics = job.offline("reward-model", {
        "data": pairs, "held_out": {"task": "sort_digits", "options": {"num": 100}}, "held_out_every": 10, "updates": 30,
        "batch_size": 64, "max_tokens": sum(job.lengths) + 6, "optimizer": {"lr": 1e-3 if job.model is None else 1e-5},
    }, {"path": str(trained(job, "sft"))}, "reward_model")  # fmt: skip
    accuracy = next(value for key, value in metrics[-1].items() if key.startswith("validation/") and key.endswith("accuracy"))  # fmt: skip
    return {"shown": f"{falling(metrics, 'reward_model/loss')}, held-out pairs {accuracy:.2f} right"}


def falling(metrics: list[dict[str, Any]], key: str) -> str:
    """`loss 2.4 -> 0.5`: means of the first and last three steps. The loss must have fallen."""
    values = [row[key] for row in metrics if key in row]
    first, last = statistics.mean(values[:3]), statistics.mean(values[-3:])
    if not last < first:
        raise Failed(f"{key} has not fallen: {first:.4f} -> {last:.4f}")
    return f"loss {first:.3f} -> {last:.3f}"


def stages(job: Job) -> dict[str, Any]:
    """The stages of R1 on sorting digits: SFT, RL, rejection sampling, SFT, a reward model, RL against it.

    The row shows that they run one after the other. Their steps are too few to learn: the last policy starts anew from the base.
    """
    prompt, answer = job.lengths
    words = [
        f"model.device={job.device}",
        f"model.dtype={job.dtype}",
        "run.directory=.",
        "run.name=stages",
        "measure.limit=100",
    ]
    if job.model is not None:
        words += ["model.new=null", f"model.path={job.model}"]
    words += [f"stages.{name}.config.sft.updates={job.number(40, 60)}" for name in ("cold_start", "second_sft")]
    words += [f"stages.{name}.config.sft.max_tokens={prompt + answer + 6}" for name in ("cold_start", "second_sft")]
    words += [
        "stages.samples.options.limit=100",
        f"stages.samples.options.max_tokens={answer}",
        f"measure.max_tokens={answer}",
    ]
    words += [
        "stages.scorer.config.reward_model.updates=10",
        f"stages.scorer.config.reward_model.max_tokens={prompt + answer + 6}",
    ]
    for name in ("reasoning", "all_scenarios"):
        words += [
            f"stages.{name}.config.{key}" for key in ("training.steps=4", "validation.limit=50", "validation.every=0")
        ]
        words += [
            f"stages.{name}.config.data.max_prompt_tokens={prompt}",
            f"stages.{name}.config.rollout.max_tokens={answer}",
        ]
    remove(job.work / "stages")
    job.burnish("stages", "r1_toy", *words, "--max-restarts", "0", name="stages")
    found = [json.loads((job.work / "stages" / f"{name}.measured" / f"{name}.measured.json").read_text())["accuracy"] for name in ("base", "cold_start", "all_scenarios")]  # fmt: skip
    return {
        "shown": f"accuracy {found[0]:.2f} base, {found[1]:.2f} after the cold start, {found[2]:.2f} after all stages"
    }


# --- reinforcement learning --------------------------------------------------------------------------------------------------------


def train(job: Job) -> dict[str, Any]:
    return rl_shown(job.train("train"))


def ppo(job: Job) -> dict[str, Any]:
    metrics = job.train("ppo", algorithm={"preset": "ppo"})
    losses = [row["critic/loss"] for row in metrics if "critic/loss" in row]
    row = rl_shown(metrics)
    return {**row, "shown": f"{row['shown']}, critic loss {losses[0]:.3f} -> {losses[-1]:.3f}"}


def lora(job: Job) -> dict[str, Any]:
    return adapted(job, "lora", {"rank": 8})


def nf4(job: Job) -> dict[str, Any]:
    return adapted(job, "nf4", {"rank": 8, "base": "nf4"})


def adapted(job: Job, name: str, options: dict[str, Any]) -> dict[str, Any]:
    path = str(trained(job, "sft"))
    metrics = job.train(name, model={"path": path, "lora": options}, training={"steps": job.number(3, 8), "optimizer": {"lr": 1e-3}})  # fmt: skip
    return rl_shown(metrics)


def moe(job: Job) -> dict[str, Any]:
    """A small model with experts, made from nothing: SFT, then RL."""
    if "experts" not in NewModel.model_fields:
        raise NotHere("this version has no experts")
    size = (
        {"hidden_size": 128, "num_layers": 2, "num_heads": 4}
        if job.is_tiny
        else {"hidden_size": 256, "num_layers": 4, "num_heads": 4}
    )
    model = {"new": {"family": "qwen3_moe", "max_positions": 64, "experts": [8, 2, 168], **size}}
    data = {
        "data": {"task": "sort_digits", "options": {"num": 2000}},
        "updates": job.number(40, 200),
        "batch_size": 128,
    }
    learned = job.offline("sft", {**data, "max_tokens": 32, "optimizer": {"lr": 3e-3, "warmup": 5}}, model, "moe-sft")
    row = rl_shown(job.train("moe", model={"path": str(trained(job, "moe-sft"))}, **short_answers(job)))
    return {**row, "shown": f"SFT: {falling(learned, 'sft/loss')}; {row['shown']}"}


def short_answers(job: Job) -> dict[str, Any]:
    """Sections for a model that was made from nothing, whatever --model is."""
    rollout = {"prompts": job.number(8, 64), "n": 8, "max_tokens": 10, "max_rows": 512}
    data = {"train": {"task": "sort_digits"}, "validation": {"task": "sort_digits"}, "max_prompt_tokens": 16}
    return {"rollout": rollout, "data": data}


def ahead(job: Job) -> dict[str, Any]:
    return overlapping(job, "ahead", {"name": "ahead"})


def asynchronous(job: Job) -> dict[str, Any]:
    """Weights are loaded in the middle of samples, which are then continued: partial rollouts.

    With few rows the engine is still sampling when an update ends. With many it waits then, since it may not be further ahead.
    """
    return overlapping(job, "async", {"name": "async", "max_staleness": 2}, max_rows=4)


def overlapping(job: Job, name: str, source: dict[str, Any], max_rows: int = 256) -> dict[str, Any]:
    rollout = {
        "prompts": job.number(8, 64),
        "n": 8,
        "max_tokens": job.lengths[1],
        "max_rows": max_rows,
        "source": source,
    }
    corrected = {"correction": "decoupled_token_is"}  # without it stale samples unlearn the task
    metrics = job.train(name, rollout=rollout, algorithm=corrected)
    ages = [row["staleness/max"] for row in metrics if "staleness/max" in row]
    mixed = max(row["staleness/mixed"] for row in metrics if "staleness/mixed" in row)
    if max(ages) < 1:
        raise Failed(
            f"no token was older than its step (staleness/max {ages}): nothing was sampled while the learner trained"
        )
    if source["name"] == "async" and not mixed:
        raise Failed("no sample was continued with newer weights: the engine had none in flight when weights came")
    row = rl_shown(metrics)
    return {
        **row,
        "shown": f"{row['shown']}, tokens up to {max(ages):.0f} steps old, {mixed:.0%} of samples continued with newer weights",
    }


def ray(job: Job) -> dict[str, Any]:
    """One worker and one engine, colocated."""
    if importlib.util.find_spec("ray") is None:
        raise NotHere("ray is not installed")
    return rl_shown(job.train("ray", placement={"name": "ray", "workers": 1, "engines": 1}))


def vllm_server(job: Job) -> dict[str, Any]:
    if importlib.util.find_spec("vllm") is None:
        raise NotHere("vllm is not installed")
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(trained(job, "sft")),
        "--port",
        str(port),
    ]
    words += [
        "--logprobs-mode",
        "processed_logprobs",
        "--scheduling-policy",
        "priority",
        "--gpu-memory-utilization",
        "0.3",
    ]
    with server(job, "vllm_server", words, f"http://127.0.0.1:{port}/health", {"VLLM_SERVER_DEV_MODE": "1"}):
        metrics = job.train("vllm", rollout={**vllm_rollout(job), "engine": "vllm", "vllm": {"url": f"http://127.0.0.1:{port}"}})  # fmt: skip
    return rl_shown(metrics)


def sglang_server(job: Job) -> dict[str, Any]:
    if importlib.util.find_spec("sglang") is None:
        raise NotHere("sglang is not installed")
    port = free_port()
    words = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(trained(job, "sft")),
        "--port",
        str(port),
    ]
    with server(job, "sglang_server", [*words, "--mem-fraction-static", "0.3"], f"http://127.0.0.1:{port}/health"):
        metrics = job.train("sglang", rollout={**vllm_rollout(job), "engine": "sglang", "sglang": {"urls": f"http://127.0.0.1:{port}"}})  # fmt: skip
    return rl_shown(metrics)


def vllm_rollout(job: Job) -> dict[str, Any]:
    return {"prompts": job.number(8, 64), "n": 8, "max_tokens": job.lengths[1], "max_rows": 256}


# --- failures and repeatability -----------------------------------------------------------------------------------------------------


def resume(job: Job) -> dict[str, Any]:
    """Kill the run of the row `train` in the middle with SIGKILL, start it again, and compare with the undisturbed one."""
    return {"shown": f"killed and resumed: {killed_and_resumed(job, 'resume', 'train')}"}


def deterministic(job: Job) -> dict[str, Any]:
    """Two equal runs with training.deterministic must have equal weights; the row `train` has the time of a step without it."""
    runs = [f"deterministic-{number}" for number in (1, 2)]
    metrics = [job.train(name, **deterministic_training(job)) for name in runs]
    one, other = (weights(job, name) for name in runs)
    if (difference := largest_difference(one, other)) > 0:
        raise Failed(f"the weights of two equal runs differ by {difference:.1e}")
    without = rl_shown(read_metrics(job.work / "train" / "metrics.jsonl"))["step_s"]
    steps = [rl_shown(rows)["step_s"] for rows in metrics]
    shown = f"two runs bit-equal; a step takes {min(steps):.3f} s, and {without:.3f} s without ({same(one, weights(job, 'train'))})"
    return {"shown": shown, "step_s": min(steps), "step_s_without": without}


def deterministic_resume(job: Job) -> dict[str, Any]:
    """As `resume`, with training.deterministic: the weights must be equal bit for bit."""
    shown = killed_and_resumed(job, "deterministic-resume", "deterministic-1", **deterministic_training(job))
    if not shown.endswith("bit-equal"):
        raise Failed(f"killed and resumed: {shown}")
    return {"shown": f"killed and resumed: {shown}"}


def deterministic_training(job: Job) -> dict[str, Any]:
    return {"training": {**job.training, "deterministic": True}}


def killed_and_resumed(job: Job, name: str, undisturbed: str, **changes: Any) -> str:
    words = command("train", job.rl_recipe(name, **changes), "--max-restarts", "0")
    metrics = job.work / name / "metrics.jsonl"
    remove(job.work / name)  # a run of an earlier try would be taken for this one's steps
    with (job.work / f"{name}-killed.log").open("w") as log:
        process = subprocess.Popen(words, cwd=job.work, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment())  # fmt: skip
        until = time.monotonic() + job.limit_s
        while process.poll() is None and time.monotonic() < until and num_lines(metrics) < KILL_AFTER:
            time.sleep(0.005)
        if process.poll() is not None:
            raise Failed(f"the run ended by itself with status {process.returncode} before it could be killed")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = num_lines(metrics)
    if done < KILL_AFTER:
        raise Failed(f"the run wrote {done} lines of metrics in {job.limit_s:.0f} s")
    text = job.burnish(*words[3:], name=name)
    whole = read_metrics(job.work / undisturbed / "metrics.jsonl")
    steps = [row["step"] for row in read_metrics(metrics)]
    if done >= len(whole):
        raise Failed("the run was complete when it was killed: give it more steps")
    if steps != [row["step"] for row in whole]:
        raise Failed(f"the resumed run has steps {steps}, and not those of an undisturbed one: {last_line(text)}")
    return f"after {done - 1} of {len(whole) - 1} steps, {same(weights(job, name), weights(job, undisturbed))}"


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


# --- models as files and servers ----------------------------------------------------------------------------------------------------


def evaluate(job: Job) -> dict[str, Any]:
    out = job.work / "evaluation"
    job.burnish("eval", "train", "task:sort_digits", "--limit", "200", "--max-tokens", str(job.lengths[1]), "--out", str(out), "--force", "--device", job.device, name="eval")  # fmt: skip
    found = json.loads(next(out.glob("*.json")).read_text())
    low, high = found["ci"]
    return {"shown": f"accuracy {found['accuracy']:.3f} [{low:.3f}, {high:.3f}] of {found['num_samples']} answers"}


def export(job: Job) -> dict[str, Any]:
    """Export the LoRA run with its adapters merged; transformers loads the directory and gives the logits of our decoder."""
    out = job.work / "exported"
    remove(out)
    job.burnish("export", "lora", str(out), "--merged", name="export")
    from transformers import AutoModelForCausalLM

    from burnish.config.model import Model
    from burnish.models.policy import load_policy

    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ours = load_policy(Model(dtype="float32", device="cpu"), out, None, 0)
    tokens = torch.arange(12) % ours.module.arch.vocab_size
    with torch.no_grad():
        difference = (
            (theirs(tokens[None]).logits[0] - ours.module.logits(ours.module.hidden(tokens, torch.tensor([0, 12]))))
            .abs()
            .max()
        )
    if difference > 1e-3:
        raise Failed(f"logits of transformers and of burnish differ by {difference:.2e}")
    return {"shown": f"transformers loads it; logits differ by {difference:.1e} in float32"}


def merge(job: Job) -> dict[str, Any]:
    out = job.work / "merged"
    remove(out)
    parts = [str(trained(job, "sft")), str(trained(job, "train"))]
    job.burnish("merge", str(out), *parts, "--dtype", "float32", name="merge")
    one, other = (load_file(Path(part) / "model.safetensors") for part in parts)
    mean = {name: (one[name].double() + other[name].double()) / 2 for name in one}
    difference = largest_difference(load_file(out / "model.safetensors"), mean)
    if difference > 1e-6:
        raise Failed(f"the merged weights differ from the mean by {difference:.1e}")
    return {"shown": f"the mean of two models to {difference:.1e}"}


def serve(job: Job) -> dict[str, Any]:
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHere(f"{' and '.join(missing)} not installed")
    port = free_port()
    words = command(
        "serve", "train", "--port", str(port), "--device", job.device, "--cache-gib", "0.5", "--max-rows", "64"
    )
    with server(job, "serve", words, f"http://127.0.0.1:{port}/v1/models"):
        body = {"model": "train", "prompt": "4312>", "max_tokens": job.lengths[1], "temperature": 0}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            reply = json.loads(answer.read())
    if not reply["usage"]["completion_tokens"]:
        raise Failed(f"the reply has no tokens: {reply}")
    return {
        "shown": f"'4312>' is answered by {reply['choices'][0]['text']!r}, {reply['usage']['completion_tokens']} tokens"
    }


ROWS: dict[str, Callable[[Job], dict[str, Any]]] = {
    "sft": sft, "train": train, "lora": lora, "nf4": nf4, "ppo": ppo, "moe": moe, "ahead": ahead, "async": asynchronous, "resume": resume,
    "deterministic": deterministic, "deterministic resume": deterministic_resume,
    "eval": evaluate, "export": export, "merge": merge, "serve": serve, "prefer": prefer, "reward-model": reward_model,
    "stages": stages, "ray": ray, "vllm server": vllm_server, "sglang server": sglang_server,
}  # fmt: skip
"""Rows by name, in the order in which they run."""
NEEDS = {"resume": ("sft", "train"), "deterministic": ("sft", "train"), "deterministic resume": ("sft", "train", "deterministic"), "eval": ("sft", "train"), "serve": ("sft", "train"), "merge": ("sft", "train"), "export": ("sft", "lora"), "sft": (), "stages": (), "moe": ()}  # fmt: skip
"""The rows whose outputs a row reads; without an entry, those of `sft`."""
