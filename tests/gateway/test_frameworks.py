"""Agents written with other packages, as their documentation writes them, run unchanged: every token is recorded as it was sampled.

The packages are real, and so are runner, worker processes, endpoint and HTTP; only the engine's answers are scripted. `make test` has the package
`openai` alone; `make test-agents` has all.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.main import main
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.trajectory import EPISODE_METRICS, EVENTS, LAST_WORDS, Trajectory
from tests.gateway.scripted_engine import AGENTS, EXAMPLES, TOKENIZER, Draw, ScriptedEngine, played, recorded, tool_call
from tests.recipe_files import make_files

pytest.importorskip("openai", reason="agents need the package openai")

A, B = 12, 34
ROW = {"prompt": f"What is {A}*{B}?", "answer": str(A * B)}
MULTIPLY = tool_call("multiply", f'{{"a": {A}, "b": {B}}}')
CALCULATOR = tool_call("calculator", f'{{"expression": "{A}*{B}"}}')
CHAT_WAYS = ("plain", "asynchronous", "streaming", "stream_helper", "responses", "responses_by_hand")


def answer_text(draw: Draw) -> str:
    """A last answer that differs between samples. It has pieces that the tokenizer would join."""
    return f"the answer is {A * B} in the end\n\n({draw.number})"


def with_tool(call: str, num_calls: int = 1) -> Any:
    """A script: so many calls of a tool, then an answer. Without a tool in the prompt, an answer at once."""

    def script(draw: Draw) -> str:
        is_done = draw.text.count("<tool_response>") >= num_calls or "Tools:" not in draw.text
        return answer_text(draw) if is_done else f"I take the tool.\n{call}"

    return script


def check_exact(engine: ScriptedEngine, found: dict[str, Trajectory]) -> None:
    """Every trajectory has what the engine sampled for its episode, token for token, behind the same context."""
    assert found
    for name, t in found.items():
        assert t.error is None, t.error
        assert recorded(t) == sorted(engine.drawn[name])
    assert engine.drawn.keys() == found.keys()


def metrics_of(t: Trajectory) -> dict[str, float]:
    return t.metadata[EPISODE_METRICS]


def check_tool_rounds(engine: ScriptedEngine, found: dict[str, Trajectory], num_calls: int = 2) -> None:
    """Each episode is one sequence: a call with the tool, and answers that continue it."""
    check_exact(engine, found)
    for t in found.values():
        assert (t.reward, t.finish, len(t.turns)) == (1.0, "stop", num_calls)
        counts = metrics_of(t)
        assert {name: counts[name] for name in ("calls", "roots", "continued", "forks", "branches", "unmatched")} == {
            "calls": num_calls, "roots": 1, "continued": num_calls - 1, "forks": 0, "branches": 1, "unmatched": 0,
        }  # fmt: skip
        assert len(t.sequences) == 1
        assert not t.metadata.get(EVENTS)


def needs(*packages: str) -> Any:
    """Skip a test unless all packages are there. They are imported by the worker process alone."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}: make test-agents")


# --- openai ------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai_ways() -> tuple[ScriptedEngine, dict[str, Trajectory]]:
    """One episode of each way to use the package `openai`, all at once in one worker."""
    engine = ScriptedEngine(with_tool(MULTIPLY))
    rows = [ROW | {"way": way} for way in (*CHAT_WAYS, "several", "completions")]
    found = played(engine, AGENTS, rows, agent="openai_ways.py:run")
    ways = {f"rows/{index}#0.0": row["way"] for index, row in enumerate(rows)}
    return engine, {ways[name]: t for name, t in sorted(found.items())}


def test_every_way_to_use_the_openai_package_is_recorded_exactly(
    openai_ways: tuple[ScriptedEngine, dict[str, Trajectory]],
) -> None:
    engine, found = openai_ways
    check_exact(engine, {t.id: t for t in found.values()})
    assert {way: t.reward for way, t in found.items()} == dict.fromkeys(found, 1.0)


@pytest.mark.parametrize("way", CHAT_WAYS)
def test_a_tool_round_of_the_openai_package_continues_what_was_sampled(
    openai_ways: tuple[ScriptedEngine, dict[str, Trajectory]], way: str
) -> None:
    engine, found = openai_ways
    t = found[way]
    check_tool_rounds(engine_of(engine, t), {t.id: t})


def engine_of(engine: ScriptedEngine, t: Trajectory) -> ScriptedEngine:
    """The engine as if it had sampled for one episode alone."""
    alone = ScriptedEngine(engine.script)
    alone.drawn = {t.id: engine.drawn[t.id]}
    return alone


def test_of_two_samples_the_one_that_the_agent_goes_on_with_is_continued_and_the_other_is_not_trained(
    openai_ways: tuple[ScriptedEngine, dict[str, Trajectory]],
) -> None:
    _, found = openai_ways
    t = found["several"]
    assert (metrics_of(t)["calls"], metrics_of(t)["continued"], len(t.turns)) == (2, 1, 3)
    assert [t.nodes[span.node].is_trained for span in t.turns] == [False, True, True]
    assert t.nodes[t.turns[2].node].parent in [k for k, node in enumerate(t.nodes) if node.parent == t.turns[1].node]


def test_a_text_completion_goes_on_behind_the_sampled_tokens(
    openai_ways: tuple[ScriptedEngine, dict[str, Trajectory]],
) -> None:
    _, found = openai_ways
    counts = metrics_of(found["completions"])
    assert (counts["calls"], counts["continued"], counts["branches"]) == (2, 1, 1)


# --- other packages ------------------------------------------------------------------------------------------------------------


@needs("agents")
def test_an_agent_of_openai_agents() -> None:
    engine = ScriptedEngine(lambda draw: f"the answer is {A * B}" if "<tool_response>" in draw.text else CALCULATOR)
    check_tool_rounds(engine, played(engine, EXAMPLES, [ROW], n=3, agent="openai_agents_tool.py:run"))


@needs("langgraph", "langchain", "langchain_openai")
def test_an_agent_of_langgraph() -> None:
    engine = ScriptedEngine(lambda draw: f"the answer is {A * B}" if "<tool_response>" in draw.text else MULTIPLY)
    check_tool_rounds(engine, played(engine, EXAMPLES, [ROW], n=3, agent="langgraph_agent.py:run"))


@needs("autogen_agentchat", "autogen_ext")
def test_an_agent_of_autogen() -> None:
    engine = ScriptedEngine(with_tool(MULTIPLY))
    check_tool_rounds(engine, played(engine, AGENTS, [ROW], n=3, agent="autogen_agent.py:run"))


@needs("anthropic")
def test_an_agent_of_anthropic_with_and_without_a_stream() -> None:
    engine = ScriptedEngine(with_tool(MULTIPLY, 2))
    rows = [ROW | {"way": way} for way in ("plain", "stream")]
    check_tool_rounds(engine, played(engine, AGENTS, rows, n=2, agent="anthropic_agent.py:run"), num_calls=3)


@needs("smolagents")
def test_an_agent_of_smolagents_branches_at_every_step_and_the_user_is_told_so() -> None:
    def script(draw: Draw) -> str:
        if draw.text.partition(ROW["prompt"])[2].count("Observation:") < 3:  # the system text has some as examples
            return MULTIPLY
        return tool_call("final_answer", f'{{"answer": "the answer is {A * B}"}}')

    engine = ScriptedEngine(script)
    found = played(engine, AGENTS, [ROW], n=2, agent="smolagents_agent.py:run")
    check_exact(engine, found)
    for t in found.values():
        assert t.reward == 1.0
        assert metrics_of(t)["continued"] == 0
        assert metrics_of(t)["branches"] == len(t.turns) == len(t.sequences) > 3
        (event,) = t.metadata[EVENTS]
        assert event["kind"] == "agent_rewrites_history"
        assert "each step is a branch of its own" in event["message"]


# --- examples/agents ---------------------------------------------------------------------------------------------------------


def test_the_openai_script_is_an_agent_as_a_command() -> None:
    engine = ScriptedEngine(answer_text)
    found = played(engine, EXAMPLES, [ROW], n=2, agent=["python", "openai_script.py"])
    check_exact(engine, found)
    for t in found.values():
        assert (t.reward, t.finish, len(t.turns), len(t.sequences)) == (
            None,
            "stop",
            2,
            1,
        )  # the configured reward scores it
        assert metrics_of(t)["continued"] == 1
        assert t.metadata[LAST_WORDS] == answer_of(t)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_shell_script_is_an_agent() -> None:
    engine = ScriptedEngine(answer_text)
    found = played(engine, EXAMPLES, [ROW], n=2, agent=["sh", "shell_agent.sh"])
    check_exact(engine, found)
    for t in found.values():
        assert (t.reward, t.finish, len(t.turns)) == (None, "stop", 1)
        assert metrics_of(t)["bytes"] > 100


def answer_of(t: Trajectory) -> str:
    """The text of the last answer, without its end token."""
    return TOKENIZER.decode(t.nodes[t.turns[-1].node].tokens.tolist()[:-1])


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_recipe_of_an_example_would_start(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = {"langgraph_agent": ("langgraph", "langchain_openai"), "openai_agents_tool": ("agents",)}
    if missing := [name for name in packages.get(path.stem, ()) if importlib.util.find_spec(name) is None]:
        pytest.skip(f"needs {missing[0]}: make test-agents")
    monkeypatch.chdir(tmp_path)
    make_files(load(TrainConfig, path).config)
    for model in tmp_path.rglob("config.json"):
        save_chat_tokenizer(model.parent)
    status = main(["train", str(path), "--dry-run", "model.device=cuda"])
    out = capsys.readouterr().out
    assert status == 0, out[-2000:]
    assert out.splitlines()[-1] == "dry run: the run would start"


def save_chat_tokenizer(folder: Path) -> None:
    """Give a model of `make_files` a tokenizer with a chat template."""
    for file in folder.glob("tokenizer*"):
        file.unlink()
    TOKENIZER.save(folder)
