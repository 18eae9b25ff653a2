"""Whole runs with agents that call the model themselves: sources, kills, rewards, branches, tables, evaluation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.core.trajectory import pack
from burnish.rollout.runner import RolloutRunner
from burnish.run.metrics import read_metrics
from burnish.run.samples import read_samples
from tests.trainers.test_overlapping_sources import live
from tests.trainers.test_resume_everything import MOMENTS, STEPS, dies, killing, result
from tests.trainers.tiny import run_of

PROGRAMS = Path(__file__).with_name("agent_programs.py")
AGENT = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32, max_positions: 64}, device: cpu}
data: {train: {task: sort_digits, limit: 12, options: {min_digits: 2, max_digits: 3}}}
environment: {agent: agent_programs.py:chain, workers: 1, max_turns: 4}
reward: {workers: 1}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 3, optimizer: {lr: 1.0e-2}}
algorithm: {kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 1, save_every: 100, threads: 1}
"""
PATIENCE_S = 120.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run, with the agents in it."""
    (tmp_path / "run").mkdir()
    shutil.copy(PROGRAMS, tmp_path / "run")
    return tmp_path / "run"


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("source", ["ahead", "{name: async, max_staleness: 1}"])
def test_every_source_uses_each_episode_once(folder: Path, source: str) -> None:
    more = [
        "data.validation={task: sort_digits, options: {min_digits: 2, max_digits: 3}}",
        "validation={limit: 3, every: 1}",
    ]
    run = run_of(folder, AGENT, [f"rollout.source={source}", "training.steps=4", *more])
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(row["reward/failed"] == 0 and row["rollout/turns_mean"] == 2 for row in rows[1:])
    assert all(row["validation/greedy/turns_mean"] == 2 for row in rows)
    assert max(row["staleness/max"] for row in rows[1:]) == 1
    used = live(run, "used")
    assert len(used) == len(set(used)) == 4 * 16
    assert {name.rpartition(".")[0] for name in used} <= set(live(run, "drawn"))


def test_a_run_that_dies_in_the_middle_ends_as_one_that_never_did(folder: Path, tmp_path: Path) -> None:
    overrides = [f"training.steps={STEPS}", "training.mini_batches=2", "run.save_every=3", "rollout.exact=true"]
    overrides += ["rollout.prompts=2", "rollout.n=2"]
    shutil.copytree(folder, tmp_path / "unbroken")
    expected = result(run_of(tmp_path / "unbroken", AGENT, overrides))
    for name in ("answers written, not scored", "step done, not committed", "right after a checkpoint"):
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(folder, AGENT, overrides)), f"the run never came to: {name}"
    found = result(run_of(folder, AGENT, overrides))
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []


COMMAND = """
import json, os, subprocess, sys
sys.path.insert(0, {folder!r})
from agent_programs import ask
child = subprocess.Popen(["sleep", "1000"])
ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], prompt=json.loads(sys.stdin.readline())["prompt"])
for pid in (os.getpid(), child.pid):
    open(os.path.join({folder!r}, f"pid-{{pid}}"), "w").close()
child.wait()
"""


@pytest.mark.parametrize("kind", [pytest.param("function", marks=pytest.mark.slow), "command"])
def test_agents_and_their_children_die_with_the_driver(folder: Path, kind: str) -> None:
    (folder / "command.py").write_text(COMMAND.format(folder=str(folder)))
    command = {"agent": [sys.executable, "command.py"], "workers": 4}
    agent = {"agent": "agent_programs.py:leaves_a_mark", "workers": 1} if kind == "function" else command
    (folder / "agent.yaml").write_text(AGENT)
    words = [
        "train",
        str(folder / "agent.yaml"),
        f"environment={json.dumps(agent)}",
        f"run.directory={folder}",
        "run.name=it",
    ]
    driver = subprocess.Popen(
        [sys.executable, "-c", "import sys; from burnish.cli.main import main; sys.exit(main(sys.argv[1:]))", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(
            lambda: len(list(folder.glob("pid-*"))) >= (1 if kind == "function" else 8) or driver.poll() is not None
        )
        assert driver.poll() is None
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    pids = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    wait_until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- rewards --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gives", ["nothing", "answer"])
def test_the_configured_reward_reads_the_answer_of_the_agent(folder: Path, gives: str) -> None:
    (folder / "judge.py").write_text(
        "import pathlib\n\n\ndef judge(data_source, solution_str, ground_truth, extra_info):\n"
        f"    pathlib.Path({str(folder)!r}, 'seen.txt').open('a').write(solution_str + '|' + ground_truth + '\\n')\n"
        "    return float(len(solution_str))\n"
    )
    more = ["environment.agent=agent_programs.py:sorts", f"environment.options={{gives: {gives}}}", "training.steps=1"]
    run = run_of(folder, AGENT, [*more, "reward.parts=[judge.py:judge]"])
    seen = [line.split("|") for line in (folder / "seen.txt").read_text().splitlines()]
    rows = read_samples(run / "samples")
    assert len(seen) == len(rows) == 16
    if gives == "answer":
        assert all(read == answer for read, answer in seen)
        assert {row["last_words"] for row in rows} == {row["answer"] for row in rows}
        return
    for row in rows:  # the second answer of the dialogue, although the call beside it came last
        last = [entry for entry in json.loads(row["turns"]) if entry["who"] == "model"][1]
        assert row["reward"] == len(last["text"].replace("<pad>", ""))  # rewards read no control tokens


def test_rewards_of_calls_reach_their_turns_and_branches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    whole = RolloutRunner.run

    def watched(self: RolloutRunner, *args: Any, **options: Any) -> Any:
        for trajectory in whole(self, *args, **options):
            kept.append(trajectory)
            yield trajectory

    monkeypatch.setattr(RolloutRunner, "run", watched)
    more = ["environment.agent=agent_programs.py:branches", "training.steps=1"]
    runs = {}
    for credit in ("episode", "branch"):
        target = folder.parent / credit
        shutil.copytree(folder, target)
        kept.clear()
        options = [f"environment.options={{credit: {credit}}}", "algorithm.advantage=rebn"]
        runs[credit] = run_of(target, AGENT, [*more, *options]), sorted(kept, key=lambda t: t.id)
    for t in runs["episode"][1]:
        first, beside, last = (span.reward for span in t.turns)
        assert (first, last, t.reward) == (0.5, 1.0, 1.5 + beside)
        assert beside in (0, -1, -2)
        assert t.metadata["episode_metrics"].items() >= {"calls": 3, "roots": 2, "branches": 2, "looked": 2}.items()
    together, apart = (pack(runs[credit][1]).sequence for credit in ("episode", "branch"))
    assert "answer_ids" not in together
    assert apart["answer_ids"].tolist() == list(range(1, 33))
    assert apart["trajectory_ids"].tolist() == together["trajectory_ids"].tolist()
    for k, t in enumerate(runs["branch"][1]):
        beside = t.turns[1].reward
        assert sorted(apart["reward"][2 * k : 2 * k + 2].tolist()) == sorted([1.5, 1.0 + beside])
    (table, other) = (read_samples(runs[credit][0] / "samples") for credit in ("episode", "branch"))
    assert [row["reward"] for row in table] == [row["reward"] for row in other]
    assert [row["advantages"] for row in table] != [row["advantages"] for row in other]
    assert any(len(set(row["advantages"])) > 1 for row in table), "turns have advantages of their own"
    said = [(entry["who"], entry.get("branch"), entry.get("after")) for entry in json.loads(table[0]["turns"])]
    there, back = ("environment", 2, None), ("environment", 1, 1)
    assert said == [(model := ("model", None, None)), there, model, back, model]
    (metrics,) = read_metrics(runs["episode"][0] / "metrics.jsonl")
    wanted = {"environment/calls": 3, "environment/branches": 2, "environment/forks": 0, "environment/call_retries": 0}
    assert metrics.items() >= wanted.items()
    assert {"environment/compactions", "environment/rewritten", "environment/relinked"} <= metrics.keys()


def test_agents_that_never_call_end_the_run_and_are_told_their_address(folder: Path) -> None:
    with pytest.raises(UserError, match=r"step 1: not one of 16 agents called the model.*http://127.0.0.1:\d+/s/"):
        run_of(folder, AGENT, ["environment.agent=agent_programs.py:silent", "environment.retries=0"])


# --- commands --------------------------------------------------------------------------------------------------------------


def test_agents_are_evaluated_watched_and_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(folder, AGENT, ["environment.agent=agent_programs.py:branches", "training.steps=1"])
    monkeypatch.chdir(folder)
    out = folder / "out"
    assert (
        main(
            [
                "eval",
                str(run),
                "task:sort_digits",
                "--limit",
                "3",
                "--out",
                str(out),
                "data.source.options={min_digits: 2, max_digits: 3}",
            ]
        )
        == 0
    )
    rows = [json.loads(line) for line in next(out.glob("*.jsonl")).read_text().splitlines()]
    assert [row["accuracy"] for row in rows] == [1.0, 1.0, 1.0]
    capsys.readouterr()
    assert main(["sample", str(run), "--max-tokens", "4"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("--- prompt ---\n")
    assert said.count("--- model ---") == 3
    assert "--- branch 2, a new conversation ---\n--- agent ---\n7>\n" in said
    assert "--- branch 1, after turn 1 ---\n--- agent ---\n9>\n" in said
    assert "reward +0.5" in said
    assert ", success, 3 turns ---" in said
    section = "{agent: 'agent_programs.py:chain', workers: 1}"
    assert main(["sample", str(run), "--environment", section, "--max-tokens", "4"]) == 0
    assert ", 2 turns ---" in capsys.readouterr().out
    assert main(["environments"]) == main(["environments", "agent"]) == 0
    said = capsys.readouterr().out
    assert "environment.command" in said
    assert "train_calls" in said
    assert os.environ.get("OPENAI_BASE_URL") is None
