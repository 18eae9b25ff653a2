"""Multi-turn runs with GiGPO: kills, overlapping sources, environment failures, sample tables, evaluation."""

from __future__ import annotations

import base64
import itertools
import json
import re
import zlib
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from burnish.cli.main import main
from burnish.config.loading import algorithm_from_preset
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.base import Done, Turn
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.tokenizer import Tokenizer
from burnish.report.embedded_samples import collect_groups, embed_samples
from burnish.rollout.runner import RolloutRunner
from burnish.run.metrics import read_metrics
from burnish.run.samples import read_samples
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from tests.trainers.test_resume_everything import MOMENTS, STEPS, dies, killing, result
from tests.trainers.tiny import run_of

GAME = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 32, max_positions: 64}}
data: {train: {task: guess_number, limit: 12, options: {numbers: 3}}}
environment: {name: guess_number, max_turns: 2}
warm_start:
  data: {task: guess_number, options: {num: 200, numbers: 3, guesses: 2}}
  updates: 60
  batch_size: 32
  optimizer: {lr: 1.0e-2}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 3, optimizer: {lr: 1.0e-3}}
algorithm: {preset: gigpo, kl: {loss: {coef: 0}, reference: none}}
run: {samples_every: 100, save_every: 100}
"""


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that plays the game badly."""
    return run_of(tmp_path_factory.mktemp("player") / "run", GAME, ["training.steps=1"]) / "warm_start"


@pytest.fixture
def start(player: Path) -> list[str]:
    """Overrides that begin with it."""
    return ["model.new=null", f"model.path={player}", "warm_start=null"]


# --- the worked example, from an environment to the learner's column ---------------------------------------------------


class Worked:
    """The first trajectory is in s0, s1 and earns 1 at the end, the second in s0, s2, s0 and earns nothing."""

    gives_rewards = True
    made = itertools.count()

    def __init__(self, prompt: Prompt) -> None:
        self.prompt, self.left = prompt, [["s0", "s1"], ["s0", "s2", "s0"]][next(self.made) % 2]

    def start(self) -> Turn:
        return Turn(tuple(self.prompt.tokens), self.left[0])

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        before, *self.left = self.left
        return Turn((5, 6), self.left[0]) if self.left else Done(float(before == "s1"))


def test_the_worked_example_from_the_environment_to_the_loss() -> None:
    tokenizer = Tokenizer.from_characters("0123456789>")
    model = Decoder(Architecture("llama", 13, 16, 1, 2, 2, 8, 24, 256)).double()
    initialise(model, 0, std=0.3)
    runner = RolloutRunner(DenseEngine(model), Worked, tokenizer, 0, max_turns=3)
    row = Row("r", "31>", "rows", None)
    draw = PromptSample(Prompt(row, "31>", tokenizer.encode("31>")), 0)
    found = list(runner.run([draw], 2, SamplingOptions(max_tokens=60, stop_tokens=(1, 2, 3, 4)), "train"))
    found.sort(key=lambda t: t.sample)
    assert [[span.state for span in t.turns] for t in found] == [["s0", "s1"], ["s0", "s2", "s0"]]
    algorithm = algorithm_from_preset("gigpo").model_copy(update={"kl": algorithm_from_preset("dr_grpo").kl})
    batch = AlgorithmPipeline(algorithm, num_updates=1).prepare(pack(found), StepContext(cast(Any, None)))
    got, expected = batch.token["advantages"], [[1.133333, 0.5], [-0.816667, -0.5, -0.816667]]
    for k, (one, values) in enumerate(zip(found, expected, strict=True)):
        column = got[batch.offsets[k] : batch.offsets[k + 1]]
        starts = [place.start for place in one.turn_places]
        for start, end, value in zip(starts, [*starts[1:], len(column)], values, strict=True):
            written = torch.from_numpy(one.sequences[0].action_mask[start:end])
            torch.testing.assert_close(column[start:end][written], torch.full((int(written.sum()),), value).double(), atol=1e-6, rtol=0)  # fmt: skip
            assert (column[start:end][~written] == 0).all()


# --- runs ----------------------------------------------------------------------------------------------------------------


def test_a_run_shows_its_turns_in_metrics_tables_and_report(start: list[str], tmp_path: Path) -> None:
    more = ["run.samples_every=1", "data.validation={task: guess_number, options: {numbers: 3}}", "validation.limit=6"]
    folder = run_of(tmp_path / "run", GAME, [*start, *more])
    rows = read_metrics(folder / "metrics.jsonl")
    for row in rows[1:]:
        assert 1 <= row["rollout/turns_mean"] <= row["rollout/turns_max"] <= 2
        assert row["rollout/environment_errors"] == 0
        assert 0 < row["rollout/out_of_turns"] < 1
        assert (
            row["reward/part/environment"]
            == row["reward/mean"]
            == pytest.approx(1 - row["rollout/out_of_turns"] - row["rollout/truncated"])
        )
        assert row["actor/updates"] == 1
        assert row["actor/grad_norm"] > 0
    assert 1 <= rows[0]["validation/greedy/turns_mean"] <= 2
    table = [row for row in read_samples(folder / "samples") if row["kind"] == "train"]
    assert len(table) == 3 * 16
    several = 0
    for row in table:
        said = json.loads(row["turns"])
        assert [one["who"] for one in said] == ["model", "environment", "model"][: len(said)]
        assert "".join(one["text"] for one in said) == row["completion"]
        assert said[0]["state"] == row["prompt"].strip("?").replace("-0", "-").removeprefix("0")
        assert sum(one.get("reward", 0) for one in said) == row["reward"]
        assert len(row["advantages"]) == row["length"]
        several += len(set(row["advantages"])) > 1
    assert several, "turns of an episode have advantages of their own"
    groups, _ = collect_groups(folder / "samples")
    (texts,) = [json.loads(zlib.decompress(base64.b64decode(block))) for block, _ in embed_samples(groups).blocks]
    shown = [[one["who"], one["text"], one.get("state"), one.get("reward")] for one in json.loads(table[0]["turns"])]
    assert shown in texts["turns"]


def test_a_run_that_dies_in_the_middle_ends_as_one_that_never_did(start: list[str], tmp_path: Path) -> None:
    overrides = [*start, f"training.steps={STEPS}", "training.mini_batches=2", "run.save_every=3", "reward.workers=1"]
    expected = result(run_of(tmp_path / "unbroken", GAME, overrides))
    moments = (
        "answers written, not scored",
        "between two mini-batches",
        "step done, not committed",
        "right after a checkpoint",
    )
    for name in moments:
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", GAME, overrides)), f"the run never came to: {name}"
    found = result(run_of(tmp_path / "run", GAME, overrides))
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []


@pytest.mark.parametrize("source", ["ahead", "{name: async, max_staleness: 1}"])
def test_episodes_of_older_weights_are_learnt_from(start: list[str], tmp_path: Path, source: str) -> None:
    folder = run_of(tmp_path / "run", GAME, [*start, "training.steps=6", f"rollout.source={source}"])
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert all(row["actor/updates"] == 1 and row["rollout/turns_max"] <= 2 for row in rows)
    assert all(row["reward/failed"] == 0 for row in rows)
    assert max(row["staleness/max"] for row in rows) == 1


def test_a_step_may_earn_something_and_a_limit_of_tokens_ends_episodes(start: list[str], tmp_path: Path) -> None:
    whole = read_metrics(run_of(tmp_path / "whole", GAME, start) / "metrics.jsonl")
    short = read_metrics(run_of(tmp_path / "short", GAME, [*start, "environment.max_tokens=12"]) / "metrics.jsonl")
    assert max(row["rollout/truncated"] for row in whole) < 0.1 < min(row["rollout/truncated"] for row in short)
    assert whole[-1]["actor/loss"] != short[-1]["actor/loss"]


FLAKY = """
from burnish.environments.guess_number import GuessNumber


class Flaky(GuessNumber):
    \"\"\"The server of even numbers is down, that of multiples of three cannot even be reached.\"\"\"

    def __init__(self, prompt, tokenizer):
        super().__init__(prompt, tokenizer)
        if self.secret % 3 == 0:
            raise ConnectionError(f"no server for {self.secret}")

    def observe(self, completion, text):
        if self.secret % 2 == 0:
            raise ConnectionError(f"no answer for {self.secret}")
        return super().observe(completion, text)
"""


@pytest.mark.parametrize("source", ["sync", "{name: async, max_staleness: 1}"])
def test_an_environment_from_a_file_that_fails_costs_its_samples_and_not_the_run(
    start: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "flaky.py").write_text(FLAKY)
    more = ["environment.name=flaky.py:Flaky", "run.samples_every=1", f"rollout.source={source}"]
    folder = run_of(tmp_path / "run", GAME, [*start, *more])
    rows = read_metrics(folder / "metrics.jsonl")
    table = read_samples(folder / "samples")
    lost = [row for row in table if row["error"] is not None]
    assert lost
    assert len(lost) < len(table)
    for row in lost:
        assert row["reward"] is None
        assert row["finish"] == "error"
        at_once = int(row["answer"]) % 3 == 0
        why = "start() raised ConnectionError: no server" if at_once else "observe() raised ConnectionError: no answer"
        assert row["error"] == f"row {row['group'].partition('#')[0]}: the environment's {why} for {row['answer']}"
        assert (row["length"] == 0) == at_once
    assert all(row["reward"] is not None for row in table if int(row["answer"]) % 2 and int(row["answer"]) % 3)
    assert (
        sum(row["rollout/environment_errors"] for row in rows) == sum(row["reward/failed"] for row in rows) == len(lost)
    )
    assert "samples could not be scored and are not used; first: row guess_number/" in capsys.readouterr().out


IN_A_WORKER = """
from burnish.environments.base import End, Environment, Observation


class Talks(Environment):
    takes_truncated = True

    async def start(self, episode):
        self.secret = int(episode.answer)
        return Observation()

    async def step(self, answer):
        print("asked for", self.secret, flush=True)
        if self.secret % 2 == 0:
            raise ConnectionError(f"no answer for {self.secret}")
        return End(reward=float(str(self.secret) in answer.text))
"""


def test_what_environments_in_worker_processes_print_and_raise_is_in_the_run(start: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "talks.py").write_text(IN_A_WORKER)
    more = ["environment={name: talks.py:Talks, max_turns: 1, workers: 1, retries: 0}", "run.samples_every=1"]
    folder = run_of(tmp_path / "run", GAME, [*start, *more, "algorithm=dr_grpo"])
    logged = (folder / "environment_workers.log").read_text()
    lost = [row for row in read_samples(folder / "samples") if row["error"] is not None]
    assert lost
    for row in lost:
        assert f"0| asked for {row['answer']}\n" in logged
        assert f"ConnectionError: no answer for {row['answer']}\n" in logged
        assert row["error"].endswith("(all output of environment workers: environment_workers.log of the run)")
    rows = read_metrics(folder / "metrics.jsonl")
    counts = [{k.split("/")[-1]: v for k, v in row.items() if "/environment_workers/" in k} for row in rows]
    assert [count["started"] for count in counts] == [1, 0, 0]
    assert [count["opened"] for count in counts] == [16, 16, 16]
    assert {count["died"] for count in counts} == {0}
    assert not any(
        "environment_workers" in name
        for name in read_metrics(run_of(tmp_path / "other", GAME, start) / "metrics.jsonl")[0]
    )


def test_an_evaluation_plays_as_the_run_did(
    start: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_of(tmp_path / "run", GAME, start)
    out = tmp_path / "out"
    options = ["--limit", "20", "--temperature", "1", "--out", str(out), "data.source.options={numbers: 3}"]
    assert main(["eval", str(folder), "task:guess_number", *options]) == 0
    said = capsys.readouterr()
    assert "20 prompts, 1 sample of each in environment guess_number" in said.err
    rows = [json.loads(line) for line in next(out.glob("*.jsonl")).read_text().splitlines()]
    assert len(rows) == 20
    assert {row["accuracy"] for row in rows} <= {0.0, 1.0}
    assert {row["answered"] for row in rows} == {None}, "nothing to vote on"
    assert all((row["finish"] == "stop") == (row["accuracy"] == 1.0) for row in rows if row["finish"] != "length")
    assert main(["sample", str(folder), "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("--- prompt ---\n")
    assert main(["sample", str(folder), "17-19?", "--max-tokens", "4"]) == 2
    assert "plays the rows of its task, not a prompt" in capsys.readouterr().err
    model = next((folder / "checkpoints").glob("step-*"))
    other = ["--out", str(tmp_path / "other"), *options[:2], *options[-1:]]
    assert main(["eval", str(model), "task:guess_number", *other]) == 0
    assert "played with environment.name=guess_number, environment.max_turns=3" in capsys.readouterr().err


def test_an_evaluation_leaves_every_turn_its_share_of_what_an_episode_may_have(
    player: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = ["environment={name: guess_number, max_turns: 3, max_tokens: 60}", "data.source.options={numbers: 3}"]
    options = ["--limit", "20", "--temperature", "1", "--out", str(tmp_path / "out")]
    assert main(["eval", str(player), "task:guess_number", *options, *game]) == 0
    told = r"max_tokens cut from 256 to (\d+): environment.max_tokens=60, (\d+) of them prompt, the rest for 3 turns"
    found = re.search(told, capsys.readouterr().err)
    assert found is not None
    assert int(found[1]) == (60 - int(found[2])) // 3
    rows = [json.loads(line) for line in next((tmp_path / "out").glob("*.jsonl")).read_text().splitlines()]
    assert any("?" in row["completion"] for row in rows), "no model was asked a second time"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gigpo_learns_to_play(seed: int, tmp_path: Path) -> None:
    """The recipe of the docs, two to four minutes each on two cores."""
    recipe = Path(__file__).parents[2] / "recipes" / "guess_number.yaml"
    rows = read_metrics(run_of(tmp_path / "run", recipe.read_text(), [f"seed={seed}"]) / "metrics.jsonl")
    before, after = (rows[k]["validation/sampled/accuracy"] for k in (0, -1))
    rewards = [row["reward/mean"] for row in rows[1:]]
    assert before < 0.6
    assert after > before + 0.05
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
