"""What the rows of `bench/gpu_everything.py` share: recipes, commands of burnish in processes of their own, servers, and comparisons."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from burnish.run.metrics import read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
START_LIMIT_S = 120.0
"""How long a server may take until it answers."""


class NotHere(Exception):
    """This machine cannot run the row; the text says what is missing."""


class Failed(Exception):
    """The row did not work; the text says why."""


@dataclass(frozen=True)
class Job:
    """Where and with what the rows run."""

    work: Path
    model: Path | None
    """A Hugging Face directory; None: a small decoder from nothing."""
    device: str
    dtype: str
    is_tiny: bool
    limit_s: float
    """Time limit of one command."""

    @property
    def lengths(self) -> tuple[int, int]:
        """The longest prompt and answer in tokens. A chat template takes most of a real model's prompt."""
        return (16, 10) if self.model is None else (96, 24)

    def number(self, tiny: int, full: int) -> int:
        return tiny if self.is_tiny else full

    @property
    def training(self) -> dict[str, Any]:
        return {"steps": self.number(6, 12), "optimizer": {"lr": 2e-4 if self.model is None else 1e-5}}

    def burnish(self, *words: str, name: str) -> str:
        """Run a command in the work folder. Its output is in NAME.log and is returned."""
        log = self.work / f"{name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(command(*words), cwd=self.work, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment())  # fmt: skip
            try:
                status = process.wait(self.limit_s)
            except subprocess.TimeoutExpired as error:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
                process.wait()
                raise Failed(f"burnish {words[0]} took more than {self.limit_s:.0f} s; see {log.name}") from error
        text = log.read_text()
        if status:
            raise Failed(f"burnish {words[0]} ended with status {status}: {last_line(text)}")
        return text

    def offline(self, kind: str, section: dict[str, Any], model: dict[str, Any], name: str) -> list[dict[str, Any]]:
        """Train on a fixed data set with `burnish KIND` and return the metrics of its steps."""
        recipe = self.recipe(name, {"model": model, kind.replace("-", "_").replace("prefer", "preference"): section})
        self.burnish(kind, recipe, "--fresh", name=name)
        return read_metrics(self.work / name / "metrics.jsonl")

    def recipe(self, name: str, content: dict[str, Any]) -> str:
        """Write a recipe; JSON is YAML."""
        content = {**content, "run": {"directory": ".", "name": name, **content.get("run", {})}}
        content["model"] = {"device": self.device, "dtype": self.dtype, **content["model"]}
        (self.work / f"{name}.yaml").write_text(json.dumps(content, indent=1))
        return f"{name}.yaml"

    def rl_recipe(self, name: str, **changes: Any) -> str:
        """A recipe of GRPO on sorting digits, from the model that the row `sft` made. `changes` are whole sections."""
        prompt, answer = self.lengths
        content = {
            "model": {"path": str(trained(self, "sft"))},
            "data": {"train": {"task": "sort_digits"}, "validation": {"task": "sort_digits"}, "max_prompt_tokens": prompt},
            "reward": {"parts": "task", "workers": 2},
            "rollout": {"prompts": self.number(8, 64), "n": 8, "max_tokens": answer, "max_rows": 512},
            "algorithm": {"preset": "grpo", "aggregation": "token-mean"},
            "training": self.training,
            "validation": {"limit": self.number(64, 256)},
            "run": {"save_every": 2},
        }  # fmt: skip
        for section, values in changes.items():
            content[section] = {**content.get(section, {}), **values}
        return self.recipe(name, content)

    def train(self, name: str, *options: str, **changes: Any) -> list[dict[str, Any]]:
        """Train with RL and return the metrics of its steps."""
        self.burnish("train", self.rl_recipe(name, **changes), "--fresh", "--max-restarts", "0", *options, name=name)
        return read_metrics(self.work / name / "metrics.jsonl")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "burnish.cli.main", *words]


def environment(variables: dict[str, str] | None = None) -> dict[str, str]:
    """The variables of a command. It runs in another folder, so that relative entries of PYTHONPATH would not be found."""
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    paths = [str(REPOSITORY), *(str(Path(entry).resolve()) for entry in entries)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}


def last_line(text: str) -> str:
    """The error of a command: its last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def trained(job: Job, name: str) -> Path:
    """The last checkpoint of a run."""
    found = sorted((job.work / name / "checkpoints").glob("step-*"))
    if not found:
        raise Failed(f"the row {name} has left no checkpoint")
    return found[-1]


def weights(job: Job, name: str) -> dict[str, torch.Tensor]:
    return load_file(trained(job, name) / "model.safetensors")


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference of two sets of weights; 0 only if all values are equal."""
    if one.keys() != other.keys():
        raise Failed(f"tensors of one model alone: {sorted(one.keys() ^ other.keys())[:3]}")
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> str:
    difference = largest_difference(one, other)
    return "bit-equal" if difference == 0 else f"weights differ by {difference:.1e}"


@contextmanager
def server(job: Job, name: str, words: list[str], url: str, variables: dict[str, str] | None = None) -> Iterator[None]:
    """Start a server, wait until a URL answers, and end its process group with the block."""
    log = job.work / f"{name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(words, cwd=job.work, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, env=environment(variables))  # fmt: skip
        try:
            until = time.monotonic() + START_LIMIT_S
            while not answers(url):
                if process.poll() is not None:
                    raise Failed(f"the server ended with status {process.returncode}: {last_line(log.read_text())}")
                if time.monotonic() > until:
                    raise Failed(
                        f"the server does not answer after {START_LIMIT_S:.0f} s: {last_line(log.read_text())}"
                    )
                time.sleep(0.2)
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def remove(folder: Path) -> None:
    """Delete the output of an earlier try."""
    if folder.exists():
        shutil.rmtree(folder)
