"""Agents that call the model themselves: functions and classes in several conventions, and commands."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.environments.agent_command import AgentCommand
from burnish.environments.agent_function import AgentFunction
from burnish.environments.base import AgentTask, End, Episode, EpisodeFailed

AGENTS = """
def plain(row, base_url, api_key, bonus=0.0):
    return {"reward": float(row["answer"] == "4") + bonus, "metrics": {"urls": len(base_url)}, "answer": api_key}

async def with_client(example, client):
    return str(client.base_url) == "http://127.0.0.1:9/s/x/v1/" and type(client).__name__ == "AsyncOpenAI"

class Areal:
    def __init__(self, hint="none"):
        self.hint = hint
    async def run(self, data, base_url=None, api_key=None, http_client=None, **kw):
        return {"chatcmpl-1": 0.5, "chatcmpl-2": 1.0} if self.hint == "two" else float(data["question"] == "2+2")

async def run_agent(base_url, prompt, request_kwargs, metadata, **kw):
    return {"reward": float(base_url.endswith("/s/x") and prompt[-1]["content"] == "2+2")}

def nothing(anything):
    return None

def garbage(row):
    return "yes"

def unknown(row, colour):
    return 1.0
"""
TASK = AgentTask(
    Episode("r#0.0", 7, "2+2", "4", {"question": "2+2"}), base_url="http://127.0.0.1:9/s/x/v1", api_key="sk-key"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "program_agents.py"
    path.write_text(AGENTS)
    return path


def play(file: Path, name: str, **options: Any) -> End:
    async def playing() -> End:
        agent = AgentFunction(f"{file}:{name}", options)
        found = agent.play(TASK)
        end = await found if asyncio.iscoroutine(found) else found
        await agent.close()
        return end

    return asyncio.run(playing())


def test_a_function_gets_what_its_parameters_name(file: Path) -> None:
    end = play(file, "plain", bonus=0.25)
    assert (end.reward, end.metrics, end.text) == (1.25, {"urls": len(TASK.base_url)}, "sk-key")
    assert play(file, "with_client").reward == 1.0
    assert play(file, "nothing") == End()


def test_agents_of_areal_and_miles_run_unchanged(file: Path) -> None:
    assert play(file, "Areal").reward == 1.0
    assert play(file, "Areal", hint="two").call_rewards == {"chatcmpl-1": 0.5, "chatcmpl-2": 1.0}
    assert play(file, "run_agent").reward == 1.0


def test_wrong_agents_are_refused_with_the_reason(file: Path) -> None:
    with pytest.raises(TypeError, match="returned str; expected a number"):
        play(file, "garbage")
    with pytest.raises(UserError, match="parameter 'colour'"):
        play(file, "unknown")


def run_command(code: str, tmp_path: Path, **options: Any) -> End:
    script = tmp_path / "agent.py"
    script.write_text(code)
    agent = AgentCommand([sys.executable, "agent.py"], str(tmp_path), **options)
    return asyncio.run(agent.play(TASK))


def test_a_command_gets_the_row_and_its_address_and_its_last_line_is_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_USER", "x")
    code = """
import json, os, sys
row = json.loads(sys.stdin.readline())
assert row == json.load(open("row.json"))
print("some words")
names = {k: v for k, v in os.environ.items() if k.startswith(("OPENAI", "SECRET", "GIVEN"))}
print(json.dumps({"reward": 2 * float(row["answer"]), "answer": json.dumps(names)}))
"""
    end = run_command(code, tmp_path, variables={"GIVEN": "1"})
    assert end.reward == 8.0
    assert json.loads(str(end.text)) == {
        "OPENAI_BASE_URL": TASK.base_url,
        "OPENAI_API_KEY": TASK.api_key,
        "OPENAI_MODEL": "policy",
        "GIVEN": "1",
    }
    assert run_command("print('all done')", tmp_path) == End(text="all done")


def test_a_command_that_fails_says_how_and_shows_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(EpisodeFailed, match="exited with status 3") as failed:
        run_command("import sys; print('no key', file=sys.stderr); sys.exit(3)", tmp_path)
    assert (failed.value.kind, failed.value.traceback) == ("agent_died", "no key")
    with pytest.raises(EpisodeFailed, match="killed by SIGKILL"):
        run_command("import os; os.kill(os.getpid(), 9)", tmp_path)
    with pytest.raises(EpisodeFailed, match="exited with status 1") as failed:
        run_command("x = bytearray(2 << 30)", tmp_path, memory_gib=0.5)
    assert "MemoryError" in failed.value.traceback
    with pytest.raises(UserError, match="no program 'no-such-program'"):
        AgentCommand(["no-such-program"])


def test_an_interrupted_command_dies_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=new) for new in (False, True)]
with open({str(pids)!r} + ".part", "w") as f:
    f.write(" ".join(str(p) for p in (os.getpid(), *(c.pid for c in children))))
os.rename({str(pids)!r} + ".part", {str(pids)!r})
time.sleep(1000)
"""
    (tmp_path / "agent.py").write_text(code)

    async def scenario() -> None:
        agent = AgentCommand([sys.executable, "agent.py"], str(tmp_path))
        playing = asyncio.create_task(agent.play(TASK))
        while not pids.exists():
            await asyncio.sleep(0.01)
        await agent.interrupt()
        with pytest.raises(EpisodeFailed, match="killed by SIGKILL"):
            await playing

    asyncio.run(scenario())
    for pid in map(int, pids.read_text().split()):
        while is_alive(pid):  # SIGKILL was sent; the kernel may need a moment
            time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
