"""`burnish environments`, and episodes in `burnish sample` and `burnish eval`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.environment import GAME_TURNS
from burnish.config.model import Model, NewModel
from burnish.data.tasks.games import GAME_ALPHABET
from burnish.environments.registry import environment_names
from burnish.environments.tools.built_in import BUILT_IN as BUILT_IN_TOOLS
from burnish.models.policy import load_policy

BARE = "environment.options={words: false, format: last_word}"
MINE = '''
from burnish.environments.base import End, Environment, Event, Observation


class Mine(Environment):
    """The model says something twice."""

    takes_truncated = True

    def __init__(self, goal, fails=False):
        self.goal, self.fails = goal, fails

    async def start(self, episode):
        return Observation()

    async def step(self, answer):
        if self.fails:
            raise ValueError("no such move")
        if answer.turn == 0:
            event = Event("odd", "step", "told once")
            return Observation(messages=({"role": "user", "content": f"again {self.goal}"},), reward=0.5, events=(event,))
        return End(1.0, success=True, metrics={"moves": 2}, text="bye")


class Duel(Environment):
    """The model plays both sides of nothing."""

    takes_truncated = True
    roles = ("a", "b")

    async def start(self, episode):
        return Observation(messages=({"role": "user", "content": "1"},), role="a")

    async def step(self, answer):
        if answer.turn == 0:
            return Observation(messages=({"role": "user", "content": "2"},), role="b")
        won = 1.0 if answer.text > "M" else -1.0
        return End(rewards={"a": -won, "b": won})
'''
TRAIN = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 64}, device: cpu}
data: {train: {task: addition}, max_prompt_tokens: 16}
environment: {name: 'mine.py:Duel', max_turns: 2, workers: 1}
rollout: {prompts: 3, n: 4, max_tokens: 3}
training: {steps: 1, optimizer: {lr: 1.0e-3}}
run: {threads: 1, directory: runs, name: r}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=256)
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    load_policy(Model(new=new, device="cpu"), None, GAME_ALPHABET, seed=1).save(path)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"question": f"say {k}"}) + "\n" for k in range(3)))


def test_the_table_has_every_environment_and_tool_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (*environment_names(), *BUILT_IN_TOOLS):
        (line,) = [line for line in lines if line.startswith(f"  {name} ")]
        assert len(line.split()) > 3, line


@pytest.mark.parametrize("name", [*environment_names(), "mine.py:Mine"])
def test_each_environment_is_described(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environments", name]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{name}\n")
    assert ("what the model reads first" in shown) == (name in (*GAME_TURNS, "countdown", "absolute_zero"))
    if name == "sokoban":
        assert "  size                  6\n" in shown
        assert "\n  #O_###\n  #X_###\n  #P__##\n" in shown
    if name == "mine.py:Mine":
        assert "  goal   (required)\n  fails  false" in shown


def test_an_episode_is_printed_turn_by_turn(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample", str(model), "--environment", "mine.py:Mine", "--data", "d.jsonl", "--row", "1"]
    options = ["environment.max_turns=3", "environment.options.goal=7", "--max-tokens", "3"]
    assert main([*command, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["--- prompt ---", "say 1", "--- model ---"]
    at = lines.index("! odd in step: told once")
    assert lines[at : at + 4] == ["! odd in step: told once", "reward +0.5", "--- environment ---", "again 7"]
    assert lines[-5:] == [
        "reward +1",
        "--- last words ---",
        "bye",
        "--- reward 1.500, success, 2 turns ---",
        "moves 2",
    ]
    assert main([*command, *options, "--episodes", "2", "--n", "2"]) == 0
    titles = [line for line in capsys.readouterr().out.splitlines() if line.startswith("===")]
    assert titles == [f"=== episode {k + 1} of 4, d.jsonl/{row} ===" for k, row in enumerate((1, 1, 2, 2))]
    failing = [*options, "environment.options.fails=true", "environment.retries=0"]
    assert main([*command, *failing]) == 0
    assert (
        "failed: row d.jsonl/1: the environment's step() failed: Mine.step: ValueError: no such move"
        in capsys.readouterr().out
    )


def test_a_game_is_played_without_further_settings(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(model), "--environment", "frozen_lake", BARE, "--max-tokens", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("--- model ---") == 5
    assert "--- reward -0.500, no success, 5 turns ---" in shown
    assert main(["sample", str(model), "--environment", "guess_number", "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("--- prompt ---\n")
    assert main(["eval", str(model), "task:frozen_lake", BARE, "--limit", "2", "--max-tokens", "3"]) == 0
    shown = capsys.readouterr()
    assert "played with environment.name=frozen_lake, environment.max_turns=5" in shown.err
    assert "turns            5.00 on average (most 5)" in shown.out
    rows = [json.loads(line) for line in Path("eval-tiny/frozen_lake.jsonl").read_text().splitlines()]
    assert [len([turn for turn in row["turns"] if turn["who"] == "model"]) for row in rows] == [5, 5]
    assert all("_" in row["prompt"] for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a prompt, or --environment NAME"),
        (["1", "--row", "2"], "--row is for episodes with an environment"),
        (["go", "--environment", "sokoban"], "plays the rows of its task, not a prompt"),
        (["--environment", "mine.py:Mine"], "what is to be played in environment mine.py:Mine?"),
        (["--environment", "mine.py:Mine", "--data", "d.jsonl", "--row", "9"], "the data has 3 rows"),
        (["--environment", "sokobann"], "did you mean 'sokoban'"),
        (["1", "2"], "got two prompts"),
    ],
)
def test_what_cannot_be_played_is_explained(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_step_trains_on_the_groups_of_every_player(capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.yaml").write_text(TRAIN)
    assert main(["train", "train.yaml"]) == 0
    last = json.loads(Path("runs/r/metrics.jsonl").read_text().splitlines()[-1])
    assert last["rollout/sequences_used"] == 3 * 4 * 2
    assert last["reward/role=a"] == -last["reward/role=b"]
    capsys.readouterr()
    assert main(["train", "train.yaml", "algorithm=remax", "run.name=other"]) == 2
    assert "has the players a and b, and a greedy game may end before one of them has a turn" in capsys.readouterr().err
    game = [
        "data.train={task: kuhn_poker}",
        "environment={name: kuhn_poker, max_turns: 4, options: {words: false, format: last_word}}",
    ]
    assert main(["train", "train.yaml", *game, "algorithm=dapo", "run.name=other"]) == 2
    said = capsys.readouterr().err
    assert (
        "zero_signal, signed must know which episodes are correct, but environment kuhn_poker gives rewards and never"
        in said
    )
    assert "give zero_signal metric: reward" in said
    one = [
        "algorithm.shaping=[]",
        "algorithm.filters=[{name: zero_signal, metric: reward}]",
        "algorithm.refill.rounds=2",
    ]
    assert main(["train", "train.yaml", *game, "algorithm=dapo", *one, "run.name=other"]) == 0
    assert main(["sample", "runs/r", "--max-tokens", "3"]) == 0
    shown = capsys.readouterr().out
    assert "--- environment, to b ---\n2\n--- model, b ---\n" in shown
    assert shown.count(", 1 turn ---") == 2
