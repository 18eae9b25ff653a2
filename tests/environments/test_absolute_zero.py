"""Absolute Zero: which proposals are valid, what proposers and solvers earn, and a buffer that a scripted policy fills."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

from burnish.config.data import Data, Source, Template
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import RECORD, pack
from burnish.data.prompt_stream import PromptStream
from burnish.data.row import Row
from burnish.data.row_formats import read_rows
from burnish.data.tasks.absolute_zero import AbsoluteZeroTask
from burnish.data.tasks.code_tasks import CodeTask
from burnish.environments.absolute_zero import AbsoluteZero, learnability
from burnish.environments.base import Answer, End, Episode, Observation
from burnish.environments.registry import environment_of, environment_renderer
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.run.journal import Journal
from tests.gateway.scripted_engine import TOKENIZER, Draw, ScriptedEngine
from tests.rollout.test_async_source import Judge

T = TypeVar("T")
IDENTITY = "def f(x):\n    return x"


def test_learnability_is_zero_where_nothing_can_be_learnt() -> None:
    assert [learnability(p) for p in (0, 0.25, 0.5, 1)] == [0, 0.75, 0.5, 0]
    assert [learnability(p, "full") for p in (0, 0.25, 0.5, 1)] == [1, 0.75, 0.5, 0]


# --- single episodes -----------------------------------------------------------------------------------------------------------


def tagged(*blocks: tuple[str, str]) -> str:
    return "<think>so</think><answer>" + "\n".join(f"```{name}\n{text}\n```" for name, text in blocks) + "</answer>"


def proposal(program: str, text: str = "3") -> str:
    return tagged(("python", program), ("input", text))


def row_of(kind: str, past: CodeTask | None = None, **options: Any) -> Row:
    task = AbsoluteZeroTask(seed=0, **options)
    if past is not None:
        task._add(past)
    return task.row("train", ("deduction", "abduction", "induction").index(kind))


async def play(
    row: Row, answers: list[str], **options: Any
) -> tuple[AbsoluteZero, list[Observation], Observation | End]:
    environment = AbsoluteZero(**({"attempts": len(answers) - 1 or 1, "timeout_s": 30.0} | options))
    seen: Observation | End = await environment.start(Episode(row.id, 0, row.prompt, extra=row.extra))
    asked = list[Observation]()
    for text in answers:
        assert isinstance(seen, Observation)
        asked.append(seen)
        seen = await environment.step(Answer(text, text))
    return environment, asked, seen


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


INVALID = {
    "not in the format": "no tags",
    "no function f": proposal("def g(x):\n    return x"),
    "forbidden module random": proposal("import random\ndef f(x):\n    return x"),
    "forbidden name id": proposal("def f(x):\n    return id(x)"),
    "does not parse": proposal("def f(x):\n  return ("),
    "ZeroDivisionError": proposal("def f(x):\n    return x / 0"),
    "out of time": proposal("def f(x):\n    while x:\n        pass"),
    "returns nothing": proposal("def f(x):\n    pass"),
    "no literal": proposal("def f(x):\n    return f"),
    "different outputs": proposal("def f(x):\n    return str(eval('__imp' + 'ort__')('uuid').uuid4())"),
    "address in memory": proposal("def f(x):\n    return str(x.__add__)"),
    "an output has": proposal("def f(x):\n    return 'a' * 1000"),
    "an input has": proposal(IDENTITY, "'" + 600 * "a" + "'"),
    "an input is no literal": proposal(IDENTITY, "open('/etc/passwd')"),
    "the program has": proposal(IDENTITY + "#" * 2000),
    "spoilt": proposal("def f(x):\n    eval('__imp' + 'ort__')('posix').write(1, b'[')\n    return x"),
}


def test_proposals_that_are_not_valid_are_worth_minus_one_and_solvers_get_a_past_task() -> None:
    async def all_of_them() -> None:
        for reason, text in INVALID.items():
            row = row_of("deduction")
            limit = {"timeout_s": 0.5} if reason == "out of time" else {}
            environment, asked, end = await play(row, [text, tagged(("output", "'Hello World'"))], **limit)
            assert isinstance(end, End)
            assert environment.problem is not None
            assert reason in environment.problem
            assert end.rewards == {"deduction_propose": -1.0, "deduction_solve#0": 1.0}
            assert end.record is not None
            assert (end.record["proposed"], end.record["learnability"]) == (None, None)
            assert "Hello World" in asked[1].messages[0]["content"]  # type: ignore[index]

    run(all_of_them())


def test_an_invalid_proposal_with_an_empty_buffer_ends_the_episode() -> None:
    _, _, end = run(play(row_of("induction"), ["no tags"]))
    assert isinstance(end, End)
    assert (end.rewards, end.successes) == ({"induction_propose": -1.0}, {})


def test_solvers_of_all_three_types_are_graded_by_execution() -> None:
    """Right in another form, wrong, and not in the format."""
    double = "def f(x):\n    return [x % 10] * 2"
    inputs = [("input", str(k)) for k in (1, 2, 3, 4)]
    plays = {
        "deduction": [proposal(double, "13"), tagged(("output", "[3,  3]")), tagged(("output", "[3]")), "[3, 3]"],
        "abduction": [
            proposal(double, "13"),
            tagged(("input", "23")),
            tagged(("input", "24")),
            tagged(("output", "1")),
        ],
        "induction": [
            tagged(*inputs, ("message", "the last digit, twice")),
            tagged(("python", "f = lambda y: y\ndef f(y):\n    return list((y % 10, y % 10))")),
            tagged(("python", "def f(x):\n    return {1: [1, 1], 2: [2, 2]}.get(x, 0)")),  # right on the pairs it saw
            tagged(("input", "1")),
        ],
    }

    async def all_of_them() -> None:
        for kind, answers in plays.items():
            past = CodeTask("abduction", double, ("1",), ("[1, 1]",))
            row = row_of(kind, past if kind == "induction" else None, inputs=4)
            row.extra["program"] = double
            _, asked, end = await play(row, answers)
            assert isinstance(end, End)
            roles = [f"{kind}_propose", *(f"{kind}_solve#{k}" for k in range(3))]
            assert [one.role for one in asked] == roles
            assert end.rewards == dict(zip(roles, (1 - 1 / 3, 1.0, -0.5, -1.0), strict=True))
            assert end.successes == dict(zip(roles[1:], (True, False, False), strict=True))
            shown = asked[1].messages[0]["content"]  # type: ignore[index]
            assert {"deduction": "[3, 3]", "abduction": "13", "induction": "[3, 3]"}[kind] not in shown

    run(all_of_them())


def test_held_out_tasks_are_solved_by_their_own_solutions() -> None:
    async def all_of_them() -> None:
        for index in range(9):
            row = AbsoluteZeroTask(seed=0).row("test", index)
            task = row.extra["solve"]
            right = {"deduction": ("output", task["outputs"][0]), "abduction": ("input", task["inputs"][0])}
            block = right.get(task["kind"], ("python", task["program"]))
            _, asked, end = await play(row, [tagged(block)])
            assert isinstance(end, End)
            assert (asked[0].role, end.record) == (f"{task['kind']}_solve#0", None)
            assert end.successes == {asked[0].role: True}

    run(all_of_them())


# --- a scripted policy ---------------------------------------------------------------------------------------------------------

PLAN = RolloutPlan(prompts=6, n=1, sampling=SamplingOptions(max_tokens=64, stop_tokens=tuple(TOKENIZER.eos_ids)))


def script(draw: Draw) -> str:
    """Proposes `x+k` for a number of the random key, sometimes nothing; solves what it can read, sometimes wrongly."""
    text = draw.text.rpartition("user\n")[2].partition("<|im_end|>")[0]
    if text.startswith("ind?"):
        return "1;2;3;4"
    if text.endswith(">"):
        return "hm" if draw.number % 5 == 0 else f"x+{draw.number % 7};{draw.number % 9}"
    if draw.number % 3 == 0:
        return "0"
    if text.endswith("f="):
        return f"x+{eval(text.split()[0].split(':')[1]) - 1}"
    program, _, rest = re.split(r"([;=])", text, maxsplit=1)
    number = int(program.partition("+")[2] or 0)
    return str(int(rest[:-1]) + number * (1 if text.endswith("=") else -1))


class Life:
    """One life of a run: stream, runner and source over the files of a folder, with the script in place of a model."""

    def __init__(self, folder: Path, step: int) -> None:
        config = EnvironmentConfig(name="absolute_zero", max_turns=4, options={"attempts": 3})
        _, host = environment_of(config, TOKENIZER)
        source = Source(task="absolute_zero", options={"format": "expression", "inputs": 4, "references": 2})
        self.stream = PromptStream([source], TOKENIZER, Data(train=[source]), 5)
        self.runner = RolloutRunner(
            cast(Any, ScriptedEngine(script)), None, TOKENIZER, 5, 4,
            host=host, renderer=environment_renderer(config, TOKENIZER, Template()),
        )  # fmt: skip
        folder.mkdir(exist_ok=True)
        self.source = SyncSource(self.stream, self.runner, cast(Rewards, Judge()), Journal(folder / "journal"))
        self.stream.open_journal(folder / "tasks.jsonl", step)

    def step(self, number: int) -> tuple[Any, dict[str, float]]:
        rollouts = self.source.next(number, PLAN, lambda text: None)
        self.stream.observe(rollouts.trajectories)
        told = [(t.id, t.completion, t.reward, t.accuracy, t.metadata.get(RECORD)) for t in rollouts.trajectories]
        assert pack(rollouts.usable).sequence["role_ids"].unique().numel() == 6
        return told, self.stream.metrics()


def test_a_scripted_policy_fills_the_buffer_and_a_killed_run_repeats_it(tmp_path: Path) -> None:
    whole = Life(tmp_path / "whole", 0)
    expected = [whole.step(number) for number in (1, 2, 3)]
    sizes = [
        [metrics[f"tasks/{kind}/size"] for kind in ("deduction", "abduction", "induction")] for _, metrics in expected
    ]
    assert sizes == sorted(sizes)
    assert sizes[-1][2] == 6
    assert all(metrics["tasks/induction/valid"] == 1 for _, metrics in expected)
    assert 0 < sum(metrics["tasks/deduction/solved"] for _, metrics in expected) < 3
    whole.runner.close()
    first = Life(tmp_path / "killed", 0)
    states = {0: first.stream.state()}
    for number in (1, 2):  # a checkpoint after step 1; it dies when the tasks of step 2 are on disk
        first.step(number)
        states[number] = first.stream.state()
    first.runner.close()
    second = Life(tmp_path / "killed", 1)
    second.stream.restore(states[1])
    assert [second.step(number) for number in (2, 3)] == expected[1:]
    second.runner.close()


# --- settings ------------------------------------------------------------------------------------------------------------------

RECIPE = Path(__file__).parents[2] / "recipes" / "absolute_zero.yaml"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.max_turns=8", "set it to 9"),
        ("rollout.source=ahead", "rollout.source=sync"),
        ("data.train=[{task: sort_digits}]", "needs rows of the task absolute_zero"),
        ("reward.parts=[exact]", "reward.parts has no effect"),
        (
            "environment={name: single_turn, max_turns: 1, max_tokens: null, options: {}}",
            "need environment.name=absolute_zero",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(TrainConfig, RECIPE, [override])


def test_held_out_tasks_may_be_rows_of_a_file(tmp_path: Path) -> None:
    (task,) = [task for task in AbsoluteZeroTask(0).held_out() if task.inputs == ("[3, 1, 3]",)]
    columns = {"task": "absolute_zero", "format": "blocks", "type": "deduction", "solve": task.to_json()}
    (tmp_path / "mine.jsonl").write_text(json.dumps({"prompt": "shown in samples", **columns}) + "\n")
    config = load(TrainConfig, RECIPE, [f"data.validation=[{{path: '{tmp_path / 'mine.jsonl'}'}}]"]).config
    (row,) = read_rows(config.data.validation[0])
    for written, reward in (("[3, 1]", 1.0), ("[1, 3]", -0.5)):
        _, _, end = run(play(row, [tagged(("output", written))]))
        assert isinstance(end, End)
        assert end.rewards == {"deduction_solve#0": reward}


def made(options: dict[str, Any]) -> AbsoluteZero:
    environment_of(EnvironmentConfig(name="absolute_zero", max_turns=9, options=options), TOKENIZER)
    return AbsoluteZero(**options)


@pytest.mark.parametrize("options", [{"attempts": 0}, {"unsolved": "half"}, {"max_value_chars": 0}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="absolute_zero"):
        made(options)
