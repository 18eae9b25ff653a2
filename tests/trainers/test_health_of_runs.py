"""Runs with an injected fault between engine and trainer: exactly that cause is named, once. Healthy runs are quiet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.trainers.assembly import diagnosis_facts
from tests.trainers.sorter import SORTING, with_outliers
from tests.trainers.tiny import run_of

ASK_AGAIN = """
from burnish.environments.base import Done, Turn


class AskAgain:
    def __init__(self, prompt, tokenizer):
        self.prompt, self.turns = tuple(prompt.tokens), 0

    def start(self):
        return Turn(self.prompt)

    def observe(self, completion, text):
        self.turns += 1
        return Turn(self.prompt) if self.turns == 1 else Done()
"""
AGAIN = "again.py"


Said = Callable[..., list[str]]
Factory = pytest.TempPathFactory


@pytest.fixture
def said(sorter: Path, tmp_path: Path) -> Said:
    """What the health check said in a run with these overrides."""

    def lines(*overrides: str, model: Path = sorter) -> list[str]:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / AGAIN).write_text(ASK_AGAIN)
        log = (run_of(folder, f"model: {{path: {model}}}\n{SORTING}", list(overrides)) / "log.txt").read_text()
        return [line for line in log.splitlines() if "likely cause" in line]

    return lines


def fault(name: str, **options: object) -> str:
    said = ", ".join(f"{key}: {value}" for key, value in options.items())
    return f"rollout.mismatch={{name: {name}, {said}}}" if said else f"rollout.mismatch={name}"


LARGE, SMALL = "training.optimizer.lr=3e-3", "training.optimizer.lr=1e-5"
FAULTS: dict[str, tuple[list[str], str]] = {
    "stale at a large learning rate": ([fault("stale", steps=2), LARGE], "cause: stale weights: tokens are"),
    "stale for long": ([fault("stale", steps=4)], "cause: stale weights: tokens are"),
    "never loaded": ([fault("never_loaded")], "cause: weights never arrived"),
    "never loaded at a large learning rate": ([fault("never_loaded"), LARGE], "cause: weights never arrived"),
    "noise": ([fault("noise", scale=0.05)], "cause: precision of the engine"),
    "colder": ([fault("temperature", factor=0.9)], "the engine's log-probs are of a colder policy"),
    "hotter": ([fault("temperature", factor=1.1)], "the engine's log-probs are of a hotter policy"),
    "reported before temperature": (
        [fault("temperature", factor=1.43, wrong="reported"), "rollout.temperature=0.7", "training.steps=3"],
        "a wrong temperature (temperature=0.7 is set): the engine's log-probs are of a hotter policy than the trainer's, at about 1.4",
    ),
    "top-p": ([fault("truncated", top_p=0.9, reported="truncated")], "cause: top-p or top-k is on, by a default"),
    "top-p that is not reported": (
        [fault("truncated", top_p=0.9)],
        "cause: top-p or top-k is on, by a default of its own, or",
    ),
    "top-p in the recipe": (["rollout.top_p=0.95"], "top-p or top-k is on (top_p=0.95 is set)"),
    "top-k in the recipe": (["rollout.top_k=3"], "top-p or top-k is on (top_k=3 is set)"),
    "re-encoded": ([fault("reencoded"), "rollout.temperature=1.3"], "cause: a server that re-encodes text"),
    "extra BOS": ([fault("extra_bos")], "cause: an added BOS token or a prompt encoded otherwise"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_once_and_nothing_else_is(said: Said, name: str) -> None:
    overrides, words = FAULTS[name]
    lines = said(*overrides)
    assert len(lines) == 1, lines
    assert words in lines[0]


HEALTHY: dict[str, list[str]] = {
    "one update a batch": [],
    "cold": ["rollout.temperature=0.7", "training.mini_batches=4"],
    "hot": ["rollout.temperature=1.3", "training.epochs=2", "training.mini_batches=2"],
    "a large learning rate": [LARGE, "training.steps=4"],
    "dapo": ["algorithm=dapo"],
    "gspo": ["algorithm=gspo", "training.mini_batches=2"],
    "corrected": ["algorithm.correction=decoupled_token_is"],
    "stale a little": [fault("stale", steps=1), SMALL],
    "bfloat16": ["model.dtype=bfloat16"],
    "bfloat16 weights in the engine": [fault("quantised", kind="bf16")],
    "int8 weights without outliers": [fault("quantised", kind="int8")],
    "two turns": [f"environment.name={AGAIN}:AskAgain", "environment.max_turns=2"],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_not_spoken_of(said: Said, name: str) -> None:
    assert said(*HEALTHY[name]) == []


def test_rounded_weights_are_spoken_of_once_they_matter(said: Said, sorter: Path, tmp_path_factory: Factory) -> None:
    outliers = with_outliers(sorter, tmp_path_factory.mktemp("outliers"))
    (line,) = said(fault("quantised", kind="int8"), model=outliers)
    assert "cause: precision of the engine" in line


def test_what_filters_do_to_the_samples_is_known(sorter: Path, tmp_path: Path) -> None:
    (tmp_path / "it.yaml").write_text(f"model: {{path: {sorter}}}\n{SORTING}")
    found = []
    for filters in ("[]", "[zero_signal]", "[overlong]", "[zero_signal, positives_only]"):
        for replay in ("null", "{}"):  # what comes back is not looked at
            overrides = [f"algorithm.filters={filters}", f"algorithm.replay={replay}"]
            found.append(diagnosis_facts(load(TrainConfig, tmp_path / "it.yaml", overrides).config).selection)
    assert found == ["none", "none", "unlikely", "unlikely", "any", "any", "any", "any"]
